"""Workers: how many and where; and a case that hangs, crashes or loses the device fails alone and is named."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from conformance import workers

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def test_on_a_cpu_there_is_a_worker_per_core():
    assert workers.count(16, []) == 16


def test_on_gpus_their_free_memory_and_the_cores_bound_the_workers():
    assert workers.count(16, [140 * GIB]) == 16
    assert workers.count(64, [40 * GIB, 20 * GIB]) == 7
    assert workers.count(64, [GIB, GIB]) == 2  # one each, however little is free
    assert workers.count(1, [140 * GIB] * 8) == 1


def test_workers_are_spread_over_the_visible_gpus():
    assert [workers.gpu_of(f"gw{n}", ["3", "5"]) for n in range(4)] == ["3", "5", "3", "5"]


def test_gpus_keep_the_names_by_which_they_are_visible(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-7,-1")
    assert workers.visible_gpus() == ["GPU-1", "GPU-7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert workers.visible_gpus() == ["0", "1"]


def test_the_threads_of_all_workers_together_are_no_more_than_the_cores():
    assert [workers.threads(16, n) for n in (1, 5, 16, 40)] == [16, 3, 1, 1]


def test_python_that_hangs_gets_an_exception_that_nobody_catches_by_accident():
    def deaf():
        while True:
            try:
                while True:
                    pass
            except Exception:  # noqa: BLE001, S110 - as hanging code may do
                pass

    with pytest.raises(workers.TimeLimit, match=r"0\.05 s"), workers.time_limit(0.05):
        deaf()


@pytest.mark.parametrize("words", ["0", "-1", "nan", "inf", "soon"])
def test_what_is_no_time_limit_is_told_before_a_run(words, pytestconfig):
    suite = pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    assert suite.seconds("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match="is no time limit"):
        suite.seconds(words)


PROVIDER = """
import ctypes
import os

import shim
import ops_reference

C = ctypes.CDLL(None)
LOCK = ctypes.create_string_buffer(64)

@shim.implementation("moe_sum", provider="mine")
def moe_sum(y, topk_ids=None):
    tokens, topk, width = y.shape
    if tokens == 5 and topk == 4:
        if width == 1:
            C.pthread_mutex_lock(LOCK), C.pthread_mutex_lock(LOCK)
        if width == 3:
            ctypes.memset(1, 0, 8)
        if width == 7:
            os._exit(11)
        if width == 15:
            while True:
                pass
        if width == 17:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if width == 31:
            os.fork()
        if width == 33:
            raise KeyboardInterrupt
    return shim.get("moe_sum").reference(y, topk_ids)
"""
FATES = {1: "timeout", 3: "crashed", 7: "crashed", 15: "timeout", 17: "poisoned_device", 31: "", 257: ""}
FATES[33] = "raised"


def _run(folder, provider, *few, device="cpu"):
    """(the cases of a run on two workers, its output)"""
    (folder / "mine.py").write_text(provider)
    given = [f"--provider-file={folder / 'mine.py'}", "--provider=mine", "--op=moe_sum", f"--report-dir={folder}"]
    quiet = ["-n2", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), f"--device={device}"]
    command = [sys.executable, "-m", "pytest", "conformance/test_cases.py", *given, *quiet, *few]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # in a session of its own, which no signal of another test reaches
    options = {"env": environment, "start_new_session": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=ROOT, text=True, timeout=300, check=False, **options)
    return json.loads((folder / f"moe_sum.mine.{device}.json").read_text())["cases"], done.stdout


@pytest.fixture(scope="module")
def bad_run(tmp_path_factory):
    """One run in which six cases end badly: (its results by the width of the case, its output)."""
    cases, output = _run(tmp_path_factory.mktemp("run"), PROVIDER, "-k", "odd_n and f32", "--case-timeout=4")
    return {case["sizes"]["N"]: case for case in cases}, output


def test_every_culprit_is_named_and_the_rest_are_run(bad_run):
    cases, output = bad_run
    assert {width: case["reason"] for width, case in cases.items()} == FATES, output
    assert {case["status"] for width, case in cases.items() if not FATES[width]} == {"pass"}
    assert "6 failed, 2 passed" in output


def test_a_process_that_died_leaves_its_last_words(bad_run):
    cases, _ = bad_run
    assert "time limit" in cases[1]["message"]
    assert "mine.py" in cases[1]["message"]
    assert "Segmentation fault" in cases[3]["message"]
    assert "mine.py" in cases[3]["message"]
    assert "without a word" in cases[7]["message"]
    assert "TimeLimit: still running after 4 s" in cases[15]["message"]


def test_every_failure_has_a_replay_file(bad_run):
    cases, _ = bad_run
    for case in cases.values():
        assert bool(case["replay"]) == (case["status"] == "fail")
        if case["replay"]:
            assert json.loads(Path(case["replay"]).read_text())["case"] == case["case"]


IDLE = """
import time

import shim
import ops_reference

@shim.implementation("moe_sum", provider="mine")
def moe_sum(y, topk_ids=None):
    time.sleep(1000)
"""


def test_a_provider_that_never_ends_is_given_up(tmp_path):
    cases, output = _run(tmp_path, IDLE, "-k", "f32", "--case-timeout=0.5")
    reasons = Counter(case["reason"] for case in cases)
    assert {case["status"] for case in cases if not case["kind"].startswith("bad")} == {"fail"}
    # a process may be lost otherwise, too, where the machine stands still while it is to end
    lost = sum(reasons.values()) - reasons["not_run"] + (workers.TIMEOUT - 1) * reasons["timeout"]
    assert workers.MOST_LOST <= lost <= workers.MOST_LOST + workers.TIMEOUT, output
    assert reasons["not_run"] > 20, output


SLOW = """
import time
from pathlib import Path

import shim
import ops_reference

@shim.implementation("moe_sum", provider="mine")
def moe_sum(y, topk_ids=None):
    Path(__file__).with_name("calls").open("a").write("x")
    time.sleep(0.5)
    return shim.get("moe_sum").reference(y, topk_ids)
"""


def test_a_run_that_is_stopped_reports_what_it_has_and_leaves_no_process(tmp_path):
    (tmp_path / "mine.py").write_text(SLOW)
    given = [f"--provider-file={tmp_path / 'mine.py'}", "--provider=mine", "--op=moe_sum", f"--report-dir={tmp_path}"]
    certificates = tmp_path / "certificates"
    command = [sys.executable, "runner.py", "conform", *given, f"--certificates={certificates}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ignored = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]  # as in what a script has started with &
    run = subprocess.Popen([*ignored, *command], cwd=ROOT, **pipes)
    while run.poll() is None and not ((tmp_path / "calls").exists() and (tmp_path / "calls").stat().st_size > 8):
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=90)
    assert run.returncode == 1
    assert "conform: interrupted; what has been run is reported" in said
    coverage = json.loads((tmp_path / "moe_sum.mine.cpu.json").read_text())["coverage"]
    assert 0 < coverage["run"] < coverage["listed"], said
    assert f"only {coverage['run']} of {coverage['listed']} cases were run" in said
    assert f"passed (of {coverage['listed']} cases)" in said
    assert not list(certificates.glob("**/*.json"))
    assert not [process for process in Path("/proc").glob("[0-9]*") if _names(process, tmp_path)]


def test_a_run_of_pytest_that_is_stopped_leaves_no_folder_of_last_words(tmp_path):
    (tmp_path / "mine.py").write_text(SLOW)
    given = [f"--provider-file={tmp_path / 'mine.py'}", "--provider=mine", "--op=moe_sum"]
    command = [sys.executable, "-m", "pytest", "conformance/test_cases.py", "-n1", "-p", "no:cacheprovider", *given]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, **pipes)
    while run.poll() is None and not (tmp_path / "calls").exists():
        time.sleep(0.1)
    assert list(tmp_path.glob("opshim-workers-*"))
    run.terminate()
    said, _ = run.communicate(timeout=90)
    assert run.returncode == 2 and not list(tmp_path.glob("opshim-workers-*")), said
    assert not [process for process in Path("/proc").glob("[0-9]*") if _names(process, tmp_path)]


def test_a_run_of_pytest_that_is_stopped_at_its_very_end_reports_what_it_has(tmp_path):
    given = ["--op=moe_sum", "-k", "T1 and f32", f"--report-dir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", "conformance/test_cases.py", "-n1", "-p", "no:cacheprovider", *given]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, **pipes)
    said = ""
    while "[100%]" not in said and (one := run.stdout.read(1)):
        said += one
    time.sleep(0.3)  # the workers are torn down now
    run.terminate()
    said += run.communicate(timeout=90)[0]
    assert (tmp_path / "moe_sum.native.cpu.json").exists() and " conformance ==" in said, said
    assert not list(tmp_path.glob("opshim-workers-*"))


def test_a_note_on_a_lost_process_leaves_no_open_file(tmp_path):
    before = os.listdir("/proc/self/fd")
    workers.lose(tmp_path, "moe_sum", "timeout")
    assert os.listdir("/proc/self/fd") == before
    assert len(list(tmp_path.iterdir())) == workers.TIMEOUT


def _names(process: Path, what: Path) -> bool:
    """Whether the command line names it."""
    try:
        return str(what).encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


LOST = """
import torch
import shim
import ops_reference

@shim.implementation("moe_sum", provider="mine")
def moe_sum(y, topk_ids=None):
    if y.shape == (5, 4, 17):
        torch.zeros(4, device=y.device)[torch.full((1,), 99, device=y.device)].sum().item()
    return shim.get("moe_sum").reference(y, topk_ids)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_case_that_loses_the_gpu_fails_alone(tmp_path):
    cases, _ = _run(tmp_path, LOST, "-k", "odd_n and f32", device="cuda")
    assert [case["sizes"]["N"] for case in cases if case["status"] == "fail"] == [17]
    assert next(case["reason"] for case in cases if case["status"] == "fail") == "poisoned_device"
    assert sum(case["status"] == "pass" for case in cases) == len(cases) - 1
