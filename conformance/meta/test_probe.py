"""`probe` names what is missing or changed, and ends with 1 only then."""

import json
import re
import subprocess
import sys

import pytest

from shim import probe
from shim.errors import OpshimError


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    """One that is current, whatever the committed one is."""
    monkeypatch.setattr(probe, "MANIFEST", tmp_path / "manifest.sha256")
    probe.probe(record=True)
    return probe.MANIFEST


def test_the_manifest_is_current():
    if not (probe.ROOT / ".git").exists():
        pytest.skip("only a clone can tell which files there are to be")
    stale = sorted({name for name, _ in probe.files().items() ^ probe.recorded().items()})
    assert not stale, f"renew it and commit it: {probe.RECORD}; it is not of {', '.join(stale[:3])}"


def test_what_the_commands_need_is_recorded_and_neither_tests_nor_what_is_built(manifest):
    names = probe.recorded().keys()
    assert {"runner.py", "conftest.py", "opshim.py", "models/opshim-tiny/config.json", "shim/op.py"} <= names
    assert not [name for name in names if re.match("ops_native/lib/|conformance/meta/|.*__pycache__", name)]


def test_a_file_that_is_missing_is_not_left_out_of_the_record(monkeypatch):
    listed = subprocess.CompletedProcess([], 0, "runner.py\0shim/lost.py\0", "")
    monkeypatch.setattr(probe.subprocess, "run", lambda *_, **__: listed)
    with pytest.raises(OpshimError, match="shim/lost.py is missing: 'git checkout shim/lost.py', or"):
        probe.files()
    listed.stdout, listed.stderr = "", "fatal: not a git repository"
    with pytest.raises(OpshimError, match="only a clone can be recorded, .*: fatal: not a git repository"):
        probe.files()


def test_nothing_is_told_but_the_table():
    done = subprocess.run([sys.executable, "runner.py", "probe", "--static"], cwd=probe.ROOT, capture_output=True, text=True, check=False)
    assert all(line[:6] in ("PASS  ", "FAIL  ", "SKIP  ") for line in done.stdout.splitlines())
    assert "Triton not available" not in done.stderr


def findings(capsys) -> dict[str, dict]:
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)}


def test_a_tree_as_recorded_passes(manifest, capsys):
    capsys.readouterr()
    assert probe.probe(static=True, as_json=True) == 0
    found = findings(capsys)
    assert found["files"]["state"] == "PASS"
    assert found["libopshim_cpu.so symbols"]["state"] == "PASS"


def test_a_file_that_is_missing_or_was_changed_is_named(manifest, capsys):
    manifest.write_text(manifest.read_text() + "0  shim/lost.py\n0  shim/op.py\n")
    capsys.readouterr()
    assert probe.probe(static=True) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAIL  files") and "missing: shim/lost.py" in line for line in lines)
    assert any(line.startswith("FAIL  files") and "not as recorded: shim/op.py" in line for line in lines)
    assert any(line.endswith(f"if you edited it: {probe.RECORD}") for line in lines)
    manifest.unlink()
    assert [(one.state, one.next_step) for one in probe._manifest(True)] == [("FAIL", "copy the whole tree again")]


def test_a_library_from_other_sources_is_a_failure_with_the_next_step(manifest, capsys, monkeypatch):
    monkeypatch.setattr("shim.loading.examine", lambda path, identity: "built from other sources")
    capsys.readouterr()
    assert probe.probe(static=True, as_json=True) == 1
    found = findings(capsys)["libopshim_cpu.so"]
    assert found["state"] == "FAIL"
    assert "built from other sources" in found["finding"]
    assert found["next_step"] == "python runner.py build"


def test_a_library_that_was_altered_since_its_build_is_a_failure(manifest, capsys, monkeypatch):
    monkeypatch.setattr("shim.loading.is_as_built", lambda path: False)
    capsys.readouterr()
    assert probe.probe(static=True, as_json=True) == 1
    assert findings(capsys)["libopshim_cpu.so"]["finding"].endswith("libopshim_cpu.so: is not as it was built")
