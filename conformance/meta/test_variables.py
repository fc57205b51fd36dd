"""The environment variables: values that none takes are refused by every command, and every name is known."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import runner
from conformance.serving.engines import free_port
from shim import variables
from shim.errors import UnknownNameError

ROOT = Path(__file__).resolve().parents[2]
READ = re.compile(r'\b(?:getenv\(|environ\b[\w.]*[(\[]|is_on\(|value\()"(OPSHIM_\w+)"|= "(OPSHIM_\w+)"')


@pytest.mark.parametrize("name", variables.VALUES)
@pytest.mark.parametrize("command", [["serve", "--dry-run", "--port", str(free_port())], ["ops"], ["conform"], ["report"]])
def test_a_value_that_a_variable_does_not_take_ends_every_command_at_once(scratch, monkeypatch, name, command):
    monkeypatch.setenv(name, "both")
    result = CliRunner().invoke(runner.main, command)
    assert (result.exit_code, result.stdout) == (2, "")
    known = ", ".join(sorted(variables.VALUES[name]))
    assert result.stderr == f"opshim: unknown {name} 'both'; known: {known}\n"


def test_help_is_there_whatever_is_set(scratch, monkeypatch):
    monkeypatch.setenv("OPSHIM_MOE", "both")
    assert CliRunner().invoke(runner.main, ["serve", "--help"]).exit_code == 0


def test_a_process_of_vllm_that_runner_py_did_not_start_ends_in_one_line(scratch, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setenv("OPSHIM_MOE", "both")
    command = [sys.executable, "-c", "import opshim; opshim.register()"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "opshim: unknown OPSHIM_MOE 'both'; known: auto, fused, staged"


def test_an_empty_value_is_none():
    assert not variables.value("OPSHIM_MOE", {"OPSHIM_MOE": ""}) and not variables.is_on("OPSHIM_CPU_AMX", {})
    assert variables.is_on("OPSHIM_WATCH_NON_FINITE", {"OPSHIM_WATCH_NON_FINITE": "1"})
    with pytest.raises(UnknownNameError, match="OPSHIM_CUBLASLT 'off'; known: 0, 1"):
        variables.check({"OPSHIM_CUBLASLT": "off"})


def test_a_name_that_nothing_reads_is_told_with_the_one_that_was_meant(look):
    given = {"OPSHIM_POLCY": "auto", "OPSHIM_XYZ": "1", "OPSHIM_MOE": "staged"}
    _, told = look(environ=given)
    assert [f"{one.text}; {one.done}" for one in told["environment"]] == [
        "OPSHIM_POLCY is no variable of opshim; is OPSHIM_POLICY meant?",
        "OPSHIM_XYZ is no variable of opshim; not read",
        "OPSHIM_MOE=staged; ",
    ]


def test_what_only_serve_sets_is_told_and_not_read(scratch, monkeypatch):
    monkeypatch.setenv("OPSHIM_RUN_DIR", str(scratch / "run"))
    result = CliRunner().invoke(runner.main, ["ops"])
    assert result.exit_code == 0 and not (scratch / "run").exists()
    assert result.stderr.splitlines()[0] == "opshim: OPSHIM_RUN_DIR is set by serve only; not read"


def test_every_variable_that_is_read_is_known_and_in_the_readme():
    sources = [path for folder in ("shim", "ops_native") for path in (ROOT / folder).rglob("*")]
    texts = [path.read_text() for path in sources if path.suffix in (".py", ".h", ".cuh", ".cpp", ".cu")]
    read = {name for text in texts for found in READ.findall(text) for name in found if name}
    assert {"OPSHIM_CPU_AMX", "OPSHIM_MOE", "OPSHIM_CACHE"} < read <= {*variables.NAMES, *variables.INTERNAL}
    rows = re.findall(r"^\| `(OPSHIM_\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(rows) == set(variables.NAMES)
