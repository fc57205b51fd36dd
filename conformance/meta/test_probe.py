"""`probe` names what is missing or changed, and ends with 1 only then."""

import json
import subprocess
import sys

import pytest

from shim import probe


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "MANIFEST", tmp_path / "lib" / "manifest.json")
    return probe.MANIFEST


def test_nothing_is_told_but_the_table():
    done = subprocess.run([sys.executable, "runner.py", "probe", "--static"], cwd=probe.ROOT, capture_output=True, text=True, check=False)
    assert all(line[:6] in ("PASS  ", "FAIL  ", "SKIP  ") for line in done.stdout.splitlines())
    assert "Triton not available" not in done.stderr


def findings(capsys) -> dict[str, dict]:
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)}


def test_a_tree_as_recorded_passes(manifest, capsys):
    assert probe.probe(static=True, as_json=True, record=True) == 0
    found = findings(capsys)
    assert found["files"]["state"] == "PASS"
    assert found["libopshim_cpu.so symbols"]["state"] == "PASS"


def test_a_file_that_is_missing_or_was_changed_is_named(manifest, capsys):
    probe.probe(static=True, as_json=True, record=True)
    recorded = json.loads(manifest.read_text()) | {"shim/lost.py": "0", "shim/op.py": "0"}
    manifest.write_text(json.dumps(recorded))
    capsys.readouterr()
    assert probe.probe(static=True) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAIL  files") and "missing: shim/lost.py" in line for line in lines)
    assert any(line.startswith("FAIL  files") and "not as recorded: shim/op.py" in line for line in lines)


def test_a_library_from_other_sources_is_a_failure_with_the_next_step(manifest, capsys, monkeypatch):
    monkeypatch.setattr("shim.loading.examine", lambda path, identity: "built from other sources")
    assert probe.probe(static=True, as_json=True) == 1
    found = findings(capsys)["libopshim_cpu.so"]
    assert found["state"] == "FAIL"
    assert "built from other sources" in found["finding"]
    assert found["next_step"] == "python runner.py build"
