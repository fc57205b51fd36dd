"""Provider files and installed providers: all or nothing, errors with file and line before anything runs."""

import os
from importlib.metadata import EntryPoint

import pytest
import torch

import shim
from conformance.meta.scratch import double_op
from shim import plugins
from shim.candidates import bind
from shim.policy import Policy

GOOD = """import shim

@shim.implementation("double", provider="mine")
def double(x, times=1):
    return x + 40
"""


@pytest.fixture
def write(scratch):
    def write(text, name="mine.py"):
        path = scratch / name
        path.write_text(text)
        return path

    return write


def test_provider_file_registers_and_loads_once(write):
    op = double_op()
    path = write(GOOD)
    assert plugins.load_file(path) is plugins.load_file(str(path))
    assert op(torch.ones(1)).item() == 41


@pytest.mark.parametrize("name", ["mine.txt", "mine", "mine.so"])
def test_provider_file_is_python_whatever_its_suffix(write, name):
    op = double_op()
    plugins.load_file(write(GOOD, name))
    assert op(torch.ones(1)).item() == 41


def test_files_that_differ_in_their_suffix_alone_share_no_bytecode(write):
    op = double_op()
    for name, text in (("mine.py", GOOD), ("mine.txt", GOOD.replace('"mine"', '"most"').replace("40", "50"))):
        path = write(text, name)
        os.utime(path, (1e9, 1e9))
        plugins.load_file(path)
    assert op.providers() == ["mine", "most", "native", "reference"]


def test_missing_file_is_named_and_so_is_a_folder(scratch):
    with pytest.raises(shim.RegistrationError, match="provider file .*absent.py does not exist"):
        plugins.load_file(scratch / "absent.py")
    with pytest.raises(shim.RegistrationError, match=f"provider file {scratch} is a folder"):
        plugins.load_file(scratch)


def test_an_unknown_provider_is_told_with_the_files_that_registered_nothing(write, caplog):
    op = double_op()
    idle, good = write("import shim\n", "idle.py"), write(GOOD)
    plugins.load_file(good)
    plugins.load_file(idle)
    assert [one.message for one in caplog.records] == [
        f"provider file {idle} registered nothing: is @shim.implementation(...) missing?"
    ]
    for ask in (lambda: bind(op, "cpu", "idle"), Policy(providers={"double": "idle"}).validate):
        with pytest.raises(shim.UnknownNameError) as error:
            ask()
        assert str(error.value).endswith(f"known: mine, native, reference; {idle} registered nothing")
    plugins.forget(idle)
    with pytest.raises(shim.UnknownNameError, match="reference$"):
        bind(op, "cpu", "idle")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("import shim\nimport no_such_module\n", 2, "ModuleNotFoundError"),
        ("import shim\n\ndef broken(:\n", 3, "SyntaxError"),
        ("import shim\n\ndef f():\n    return 1 / 0\n\nf()\n", 4, "ZeroDivisionError"),
        ("raise SystemExit(3)\n", 1, "SystemExit"),
    ],
)
def test_file_that_does_not_import_is_an_error_with_line(write, text, line, words):
    path = write(text)
    with pytest.raises(shim.RegistrationError) as error:
        plugins.load_file(path)
    assert words in str(error.value)
    assert str(error.value).endswith(f"{path}:{line}")


def test_wrong_signature_is_an_error_with_line(write):
    double_op()
    path = write(GOOD.replace("times=1", "extra"))
    with pytest.raises(shim.RegistrationError) as error:
        plugins.load_file(path)
    assert str(error.value).endswith(f"{path}:3")
    assert "has the signature (x, extra), the op's is (x, times=1)" in str(error.value)


def test_file_that_fails_half_way_leaves_nothing_behind_and_may_be_mended(write):
    op = double_op()
    path = write(GOOD + "\nimport no_such_module\n")
    with pytest.raises(shim.RegistrationError):
        plugins.load_file(path)
    assert op.providers() == ["native", "reference"]
    write(GOOD)
    plugins.load_file(path)
    assert op.providers() == ["mine", "native", "reference"]


def test_files_of_the_environment_are_loaded_in_order(write):
    op = double_op()
    first, second = write(GOOD), write(GOOD.replace("mine", "other"), "other.py")
    plugins.load_all({"OPSHIM_PROVIDER_FILES": os.pathsep.join([str(second), str(first)])})
    assert op.providers() == ["other", "mine", "native", "reference"]


def test_installed_providers_are_loaded_and_their_failure_names_the_entry_point(write, monkeypatch):
    op = double_op()
    write(GOOD, "opshim_test_installed.py")
    monkeypatch.syspath_prepend(write("", "unused.py").parent)
    entries = [EntryPoint("kernels", "opshim_test_installed", plugins.GROUP)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries)
    assert plugins.load_entry_points() == ["kernels"]
    assert "mine" in op.providers()
    entries.append(EntryPoint("broken", "opshim_test_absent", plugins.GROUP))
    with pytest.raises(shim.RegistrationError, match="entry point broken = opshim_test_absent does not import"):
        plugins.load_entry_points()
