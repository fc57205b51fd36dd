"""Native libraries: whatever is wrong with one is said in words per op, and only that op goes on to the next place."""

import re
import shutil
import struct
from pathlib import Path

import pytest
import torch

import shim
from conformance.meta.scratch import Clock, double_native, double_op, provider, script, tiny_library, tiny_spec
from ops_native import build
from shim import loading
from shim.candidates import bind
from shim.dispatch import Chain
from shim.loading import NativeLibrary
from shim.policy import Policy, using

X = torch.ones(3)
SYMBOLS = {"double_it": "ppi"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A precompiled tiny library, to be copied."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPSHIM_CACHE", str(folder / "cache"))
        return build.build(tiny_spec(folder), folder / "lib").path


@pytest.fixture
def library(scratch):
    return tiny_library(scratch)


@pytest.fixture
def installed(library, compiled):
    """The same library with the compiled file in its package; gives the file."""
    library.spec.package.mkdir()
    return Path(shutil.copy(compiled, library.spec.package))


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def patch_bytes(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def test_precompiled_library_serves_and_jit_is_not_needed(library, installed):
    op = double_op()
    double_native(op, library)
    chain = Chain(op, "cpu")
    assert [(one.label, one.state) for one in chain.candidates] == [
        ("native:precompiled", "selected"),
        ("native:jit", "not needed"),
        ("reference", "ready"),
    ]
    assert chain.call(X).tolist() == [2.0] * 3
    assert chain.selected.library.info["compiler"]


def test_nonzero_status_raises_with_function_and_word(library, installed):
    found = library.precompiled(SYMBOLS)
    buffer = torch.zeros(13)
    with pytest.raises(RuntimeError, match=r"double_it returned status 3 \(bad argument\)"):
        found.functions.double_it(buffer.data_ptr(), buffer.data_ptr(), 13)


def test_status_words_are_those_of_the_header():
    header = (build.NATIVE / "cpu" / "opshim.h").read_text()
    codes = re.search(r"enum Status : int \{(.*?)\}", header).group(1)
    assert {int(code) for code in re.findall(r"= (\d+)", codes)} - {0} == set(loading.STATUS)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "no libtiny.so on the search path"),
        (lambda path: cut(path, path.stat().st_size // 2), r"truncated \(\d+ of \d+ bytes\)"),
        (lambda path: cut(path, path.stat().st_size - 8), r"truncated \(\d+ of \d+ bytes\)"),
        (lambda path: cut(path, 40), r"truncated \(40 bytes\)"),
        (lambda path: cut(path, 0), "cannot be read|empty"),
        (lambda path: path.write_text("version https://git-lfs"), r"no ELF library \(23 bytes\)"),
        (lambda path: patch_bytes(path, 18, struct.pack("<H", 183)), "built for aarch64, this machine is x86_64"),
        (lambda path: patch_bytes(path, 4, b"\1"), r"built for x86_64 \(32 bit\)"),
        (lambda path: patch_bytes(path, path.read_bytes().find(loading.MARK), b"XX"), "holds no build identity"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read: .*Is a directory"),
    ],
    ids=["missing", "half", "tail", "header", "empty", "text", "arch", "bits", "unmarked", "folder"],
)
def test_spoilt_file_is_a_reason_and_never_loaded(library, installed, no_compiler, spoil, words):
    spoil(installed)
    op = double_op()
    double_native(op, library)
    with using(Policy("strict")), pytest.raises(shim.OpUnavailableError, match=words):
        op(X)


def test_auto_goes_on_with_one_warning_that_has_the_reason(library, installed, no_compiler, caplog):
    cut(installed, 1000)
    op = double_op()
    double_native(op, library)
    assert [op(X)[0].item() for _ in range(3)] == [2.0] * 3
    assert len(caplog.records) == 1
    assert "truncated (1000 of " in caplog.text
    assert "no-such-compiler" in caplog.text


def test_library_of_other_sources_is_never_used(library, installed):
    source = library.spec.folder / "double_it.cpp"
    source.write_text(source.read_text().replace("2 * x[i]", "5 * x[i]"))
    op = double_op()
    double_native(op, library)
    chain = Chain(op, "cpu")
    assert re.search(r"built from other sources \(\w{8}, this tree is \w{8}\)", chain.candidates[0].reason)
    assert chain.selected.label == "native:jit"
    assert chain.call(X)[0].item() == 5.0


def test_library_of_other_flags_is_never_used(scratch, library, installed):
    other = NativeLibrary("cpu", build.replace(library.spec, flags=(*library.spec.flags, "-O1")))
    assert "built from other compiler flags" in other.precompiled(SYMBOLS).reason


def test_edited_kernel_is_served_anew_after_reset(library):
    assert library.compiled(SYMBOLS).functions
    source = library.spec.folder / "double_it.cpp"
    source.write_text(source.read_text().replace("2 * x[i]", "5 * x[i]"))
    library.reset()
    assert library.precompiled(SYMBOLS).reason == "no libtiny.so on the search path"
    y = torch.empty(3)
    library.compiled(SYMBOLS).functions.double_it(X.data_ptr(), y.data_ptr(), 3)
    assert y.tolist() == [5.0] * 3


def test_file_replaced_under_a_running_process_is_told_apart(library, installed):
    assert library.precompiled(SYMBOLS).functions
    source = library.spec.folder / "double_it.cpp"
    source.write_text(source.read_text().replace("2 * x[i]", "5 * x[i]"))
    build.build(library.spec, library.spec.package)
    library.reset()
    assert "was replaced after this process had loaded its older version" in library.precompiled(SYMBOLS).reason


def test_missing_symbol_sends_that_op_alone_to_the_next_candidate(library, installed, no_compiler):
    whole, lacking = double_op("whole"), double_op("lacking")
    double_native(whole, library)
    double_native(lacking, library, "absent")
    assert Chain(whole, "cpu").selected.label == "native:precompiled"
    chain = Chain(lacking, "cpu")
    assert chain.selected.label == "reference"
    assert "libtiny.so has no symbol absent" in chain.candidates[0].reason
    assert "undefined symbol: absent" in chain.candidates[0].reason


def test_symbol_missing_in_one_place_is_found_in_the_next(scratch, library, installed, monkeypatch):
    """A user's folder holds a library of the right identity that lacks the symbol (it was tampered with)."""
    folder = scratch / "mine"
    folder.mkdir()
    shutil.copy(installed, folder)
    content = (folder / installed.name).read_bytes()
    (folder / installed.name).write_bytes(content.replace(b"double_it", b"double_at"))
    monkeypatch.setenv("OPSHIM_LIBRARY_PATH", str(folder))
    found = library.precompiled(SYMBOLS)
    assert found.functions
    assert found.library.path == installed


def test_a_folder_may_be_given_relative_to_where_one_is(scratch, library, installed, monkeypatch):
    monkeypatch.chdir(installed.parent)
    monkeypatch.setenv("OPSHIM_LIBRARY_PATH", ".")
    found = library.precompiled(SYMBOLS)
    assert (library.paths()[0], found.library and found.library.path) == (installed, installed), found.reason


def test_search_path_is_users_folders_then_package_then_cache(scratch, library, installed, monkeypatch):
    mine = scratch / "mine"
    mine.mkdir()
    shutil.copy(installed, mine)
    monkeypatch.setenv("OPSHIM_LIBRARY_PATH", f"{scratch / 'absent'}:{mine}")
    assert library.precompiled(SYMBOLS).library.path == mine / "libtiny.so"
    places = [(path.parent, words) for path, words in library.findings()]
    assert places[:3] == [
        (scratch / "absent", "not there"),
        (mine, "loaded"),
        (library.spec.package, "not needed"),
    ]
    assert places[3][0].is_relative_to(scratch / "cache")


def test_what_was_compiled_once_is_found_by_the_next_process(scratch, library):
    assert library.compiled(SYMBOLS).functions
    again = tiny_library(scratch)
    assert again.precompiled(SYMBOLS).library.path == library.cache() / "libtiny.so"


def test_spoilt_file_in_the_cache_is_compiled_again(scratch, library, compiled):
    library.cache().mkdir(parents=True)
    cached = Path(shutil.copy(compiled, library.cache()))
    cut(cached, 1000)
    assert "truncated" in library.precompiled(SYMBOLS).reason
    assert library.compiled(SYMBOLS).functions


def test_transient_failure_is_tried_again_a_minute_later(scratch, library, monkeypatch, compiled):
    op = double_op()
    double_native(op, library)
    monkeypatch.setenv("CXX", "no-such-compiler")
    clock = Clock()
    chain = op.chains["cpu"] = Chain(op, "cpu", clock=clock)
    chain.call(X)
    library.spec.package.mkdir()
    shutil.copy(compiled, library.spec.package)
    clock.now += 59
    op(X)
    assert op.chain("cpu").selected.label == "reference"
    clock.now += 1
    op(X)
    assert op.chain("cpu").selected.label == "native:precompiled"


def test_failed_compile_of_the_same_sources_is_not_repeated(scratch, library, monkeypatch):
    log = scratch / "log"
    body = f'case "$*" in *-c*) echo x >> {log}; echo "a.cpp:1: error: bad"; exit 1;; esac; exec g++ "$@"'
    monkeypatch.setenv("CXX", str(script(scratch / "cxx", body)))
    assert "a.cpp:1: error: bad" in library.compiled(SYMBOLS).reason
    tries = log.read_text()
    library.reset()
    assert "a.cpp:1: error: bad" in library.compiled(SYMBOLS).reason
    assert log.read_text() == tries


def test_source_that_does_not_compile_costs_only_its_own_op(scratch):
    library = tiny_library(scratch, "double_it", "broken")
    (library.spec.folder / "broken.cpp").write_text("int broken(\n")
    whole, broken = double_op("whole"), double_op("broken")
    double_native(whole, library)
    double_native(broken, library, "broken")
    assert Chain(whole, "cpu").selected.label == "native:jit"
    assert re.search(r"sources/broken.cpp:\d+:\d+: error", Chain(broken, "cpu").candidates[1].reason)
    library.reset()  # as in the next process, which finds the library of the others in the cache
    assert Chain(whole, "cpu").selected.label == "native:precompiled"
    assert re.search(r"sources/broken.cpp:\d+:\d+: error", Chain(broken, "cpu").candidates[1].reason)


def test_nothing_is_compiled_unless_native_may_serve(scratch, library, monkeypatch):
    monkeypatch.setattr(build, "build", lambda *args: pytest.fail("compiled"))
    op = double_op()
    provider(op, "p")
    double_native(op, library)
    for policy in (Policy("reference"), Policy("strict", {"double": "p"}), Policy("auto", {"double": "reference"})):
        assert [one.state for one in Chain(op, "cpu", policy).candidates if one.provider == "native"] == ["not chosen"]


def test_suffix_names_the_instruction_set(scratch):
    library = NativeLibrary("cpu", tiny_spec(scratch, "double_it_base"), suffix=lambda: "_base")
    found = library.compiled(SYMBOLS)
    assert found.reason.endswith("libtiny.so (base)")
    assert "no symbol absent_base" in library.compiled({"absent": "p"}).reason


def test_bound_op_keeps_its_functions_alive(library, installed):
    op = double_op()
    double_native(op, library)
    candidate = bind(op, "cpu", "native")
    library.reset()
    assert candidate(X).tolist() == [2.0] * 3
