"""Building: once for many processes, nothing half-written, only what changed, and the reason where it cannot be."""

import multiprocessing
import os
import platform
import signal
import sys
import time

import pytest

from conformance.meta.scratch import script, tiny_spec
from ops_native import build
from ops_native.build import _version
from ops_native.build import build as build_library
from shim.errors import BuildError
from shim.loading import examine, is_as_built, record

fork = multiprocessing.get_context("fork")


@pytest.fixture
def logged(scratch, monkeypatch):
    """A compiler that logs what it does; gives a function that returns the log: "compile a.cpp", "link"."""
    log = scratch / "log"
    log.touch()
    body = (
        f'case "$*" in *-c\\ *) echo "compile $(echo "$*" | sed "s/.*-c \\([^ ]*\\).*/\\1/")" >> {log};; '
        f'*--version*) ;; *) echo link >> {log};; esac\nexec g++ "$@"'
    )
    monkeypatch.setenv("CXX", str(script(scratch / "cxx", body)))
    return lambda: sorted(log.read_text().split("\n")[:-1])


def test_second_build_does_nothing(scratch, logged):
    spec = tiny_spec(scratch)
    built = build_library(spec, scratch / "lib")
    before = logged()
    assert before == ["compile double_it.cpp", "link"]
    assert examine(built.path, built.identity) is None
    assert build_library(spec, scratch / "lib").seconds == 0.0
    assert logged() == before


def test_a_compile_is_told_before_it_begins_and_nothing_else_is(scratch, caplog, monkeypatch):
    spec, told = tiny_spec(scratch, "one", "two"), []
    run = build._run
    monkeypatch.setattr(build, "_run", lambda *command: told.append(caplog.messages[:]) or run(*command))
    for _ in range(2):
        build_library(spec, scratch / "lib")
    words = f"compiling {scratch / 'lib' / 'libtiny.so'} for {platform.machine()}, 2 of 2 objects"
    assert (told[0], caplog.messages) == ([words], [words])


def test_each_library_is_given_as_it_is_ready(scratch):
    specs = [tiny_spec(scratch / name) for name in ("first", "second")]
    libraries = build.build_all(specs=specs)
    assert next(libraries).path.exists()
    assert not specs[1].package.exists()
    assert next(libraries).path.exists()


def test_only_what_changed_is_compiled_again(scratch, logged):
    spec = tiny_spec(scratch, "one", "two")
    build_library(spec, scratch / "lib")
    before = logged()
    with open(spec.folder / "two.cpp", "a") as file:
        file.write("// edited\n")
    build_library(spec, scratch / "lib")
    assert logged() == sorted([*before, "compile two.cpp", "link"])


def test_edited_header_compiles_anew_what_includes_it_whatever_its_time(scratch, logged):
    spec = tiny_spec(scratch, "one", "two")
    header = spec.folder / "inner.h"
    header.write_text("// old\n")
    (spec.folder / "outer.h").write_text('#include "inner.h"\n')
    one = spec.folder / "one.cpp"
    one.write_text('#include "outer.h"\n' + one.read_text())
    old = build_library(spec, scratch / "lib").identity
    header.write_text("// new\n")
    os.utime(header, (0, 0))
    assert build_library(spec, scratch / "lib").identity != old
    assert logged().count("compile one.cpp") == 2
    assert logged().count("compile two.cpp") == 1


def test_variants_are_linked_in_their_order(scratch, monkeypatch):
    log = scratch / "log"
    body = f'case "$*" in *-shared*) echo "$*" > {log};; esac\nexec g++ "$@"'
    monkeypatch.setenv("CXX", str(script(scratch / "cxx", body)))
    spec = tiny_spec(scratch)
    spec = build.replace(
        spec, variants=(("base", ("-Ddouble_it=f_base",)), ("avx2", ("-Ddouble_it=f_avx2",)), ("a", ("-Ddouble_it=f",)))
    )
    build_library(spec, scratch / "lib")
    objects = [word.split("/")[-1].split("-")[1] for word in log.read_text().split() if "double_it-" in word]
    assert objects == ["base", "avx2", "a"]


def test_many_processes_build_once(scratch, logged):
    spec = tiny_spec(scratch)
    children = [fork.Process(target=build_library, args=(spec, scratch / "lib")) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert logged() == ["compile double_it.cpp", "link"]


def test_killed_build_leaves_nothing_half_written(scratch, monkeypatch):
    spec, target = tiny_spec(scratch), scratch / "lib"
    started = scratch / "started"
    body = f'case "$*" in *-shared*) for last; do :; done; echo half > "$last"; touch {started}; sleep 60;; esac\nexec g++ "$@"'
    monkeypatch.setenv("CXX", str(script(scratch / "cxx", body)))

    def work():
        os.setsid()
        build_library(spec, target)

    child = fork.Process(target=work)
    child.start()
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGKILL)
    child.join()
    assert not (target / "libtiny.so").exists()
    assert list(target.glob("*.build")) or list(target.glob(".*.build"))
    monkeypatch.delenv("CXX")
    built = build_library(spec, target)
    assert examine(built.path, built.identity) is None
    assert sorted(path.name for path in target.iterdir()) == [".tiny.lock", "libtiny.so", "libtiny.so.sha256"]


def test_a_library_that_is_not_as_it_was_built_is_built_again(scratch):
    spec = tiny_spec(scratch)
    path = build_library(spec, scratch / "lib").path
    assert is_as_built(path) and not build_library(spec, scratch / "lib").seconds
    path.write_bytes(path.read_bytes() + b" edited")
    assert not is_as_built(path)
    assert build_library(spec, scratch / "lib").seconds and is_as_built(path)
    record(path).unlink()
    assert is_as_built(path), "nothing is known of it"


def test_failing_compile_shows_the_compilers_message(scratch):
    spec = tiny_spec(scratch)
    source = spec.folder / "double_it.cpp"
    source.write_text("int f() {\n  return undeclared_thing;\n}\n")
    with pytest.raises(BuildError) as error:
        build_library(spec, scratch / "lib")
    assert f"{source}:2:" in str(error.value)
    assert "undeclared_thing" in str(error.value)
    assert error.value.lasting
    assert [path.name for path in (scratch / "lib").iterdir()] == [".tiny.lock"]


def test_failed_build_leaves_the_library_that_was_there(scratch):
    spec = tiny_spec(scratch, "one", "two")
    built = build_library(spec, scratch / "lib")
    before = built.path.read_bytes()
    (spec.folder / "two.cpp").write_text("int two(\n")
    with pytest.raises(BuildError, match="two.cpp"):
        list(build.build_all(scratch / "lib", [spec]))
    assert built.path.read_bytes() == before
    built.path.unlink()
    with pytest.raises(BuildError, match="two.cpp"):
        list(build.build_all(scratch / "lib", [spec]))
    assert not built.path.exists(), "a library that lacks a symbol"


def test_compiler_killed_by_the_system_is_worth_another_try(scratch, monkeypatch):
    body = 'case "$*" in *-c*) echo "g++: fatal error: Killed signal terminated program cc1plus"; exit 1;; esac; exec g++ "$@"'
    monkeypatch.setenv("CXX", str(script(scratch / "cxx", body)))
    with pytest.raises(BuildError, match="Killed") as error:
        build_library(tiny_spec(scratch), scratch / "lib")
    assert not error.value.lasting


def test_no_compiler_is_said(scratch, monkeypatch):
    spec = tiny_spec(scratch)
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with pytest.raises(BuildError, match="no compiler: CXX names no-such-compiler, which is not on the PATH"):
        build_library(spec, scratch / "lib")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(scratch))
    with pytest.raises(BuildError, match="none of g.., c.., clang.. is on the PATH, CXX is not set"):
        build_library(spec, scratch / "lib")
    assert spec.identity().compiler is None


def test_no_ninja_is_said(scratch, monkeypatch):
    import shutil

    monkeypatch.setenv("CXX", shutil.which("g++"))
    monkeypatch.setenv("PATH", str(scratch))
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(BuildError, match="no ninja"):
        build_library(tiny_spec(scratch), scratch / "lib")


def test_missing_sources_are_said(scratch):
    spec = tiny_spec(scratch)
    (spec.folder / "double_it.cpp").unlink()
    with pytest.raises(BuildError, match=r"no sources \*.cpp in .*sources"):
        build_library(spec, scratch / "lib")


def test_folder_that_cannot_be_written_is_said(scratch):
    (scratch / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot build libtiny.so in .*file/lib: .*Not a directory"):
        build_library(tiny_spec(scratch), scratch / "file" / "lib")


def test_read_only_package_is_built_into_the_user_cache(scratch):
    (scratch / "file").write_text("")
    spec = build.replace(tiny_spec(scratch), package=scratch / "file" / "lib")
    (built,) = build.build_all(specs=[spec])
    assert built.path == scratch / "cache" / f"tiny-{built.identity.key}" / "libtiny.so"
    assert built.note == f"{spec.package} cannot be written"


def test_a_folder_that_was_asked_for_is_never_replaced_by_the_user_cache(scratch):
    (scratch / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot build libtiny.so in .*file/lib: .*Not a directory"):
        list(build.build_all(scratch / "file" / "lib", specs=[tiny_spec(scratch)]))
    assert not list((scratch / "cache").glob("tiny-*"))


def test_build_without_a_user_cache_goes_on(scratch, monkeypatch):
    (scratch / "file").write_text("")
    monkeypatch.setenv("OPSHIM_CACHE", str(scratch / "file" / "cache"))
    built = build_library(tiny_spec(scratch), scratch / "lib")
    assert examine(built.path, built.identity) is None


def test_objects_of_long_ago_are_removed(scratch):
    spec = tiny_spec(scratch)
    build_library(spec, scratch / "lib")
    (old,) = (scratch / "cache" / "objects").glob("double_it-*.o")
    os.utime(old, (0, 0))
    with open(spec.folder / "double_it.cpp", "a") as file:
        file.write("// edited\n")
    build_library(spec, scratch / "lib")
    assert not old.exists()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("objects/moe-avx2-0123456789abcdef.o", True),
        ("objects/moe-avx2-0123456789abcdef.o.log", True),
        ("opshim_cpu-0123456789abcdef/libopshim_cpu.so", True),
        ("opshim_cpu-0123456789abcdef/libopshim_cpu.so.sha256", True),
        ("objects/pack-1.o", False),
        ("flashinfer/sampling.so", False),
        ("torch_extensions-1/libopshim_cpu.so", False),
    ],
)
def test_in_a_cache_that_other_programs_share_only_our_own_files_are_removed(scratch, name, ours):
    file = scratch / "cache" / name
    file.parent.mkdir(parents=True)
    file.touch()
    os.utime(file, (0, 0))
    build_library(tiny_spec(scratch), scratch / "lib")
    assert file.exists() is not ours


def test_a_compiler_is_known_by_its_version_not_by_its_name(tmp_path):
    tool = tmp_path / "tool"
    for says, known in (
        ("tool: NVIDIA (R) Cuda compiler driver\nCopyright\nCuda compilation tools, release 13.0, V13.0.88\n", "release 13.0"),
        ("tool 12.2.0\nCopyright 2022\n", "tool 12.2.0"),
        ("a tool without a number\n", "a tool without a number"),
    ):
        tool.write_text(f"#!/bin/sh\ncat <<EOF\n{says}EOF\n")
        tool.chmod(0o755)
        _version.cache_clear()
        assert known in _version((str(tool),))
