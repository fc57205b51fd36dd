"""`python -m conformance.sanitize`: what it makes of the tool's words, told by a stand-in that says them."""

import argparse
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Timer, main_thread

import pytest
from click.testing import CliRunner

from conformance import sanitize
from conformance.selection import Selection

WORDS = {
    "clean": "echo '========= ERROR SUMMARY: 0 errors' > $L; echo '7 passed, 2 skipped in 3.00s'",
    "errors": "echo '========= ERROR SUMMARY: 4 errors' > $L; echo '9 passed in 3.00s'",
    "hazards": "echo '========= RACECHECK SUMMARY: 2 hazards displayed (2 errors)' > $L; echo '9 passed in 3.00s'",
    "failing": "echo '========= ERROR SUMMARY: 0 errors' > $L; echo '1 failed, 8 passed in 3.00s'",
    "not all": "echo '========= ERROR SUMMARY: 0 errors' > $L; echo '8 passed in 3.00s'",
    "nothing run": "echo '========= ERROR SUMMARY: 0 errors' > $L; echo 'no tests ran in 3.00s'",
    "broken": "echo '========= COMPUTE-SANITIZER' > $L; echo '9 passed in 3.00s'",
    "late": """printf '========= COMPUTE-SANITIZER
========= Error: No attachable process found. compute-sanitizer timed-out.
========= Default timeout can be adjusted with --launch-timeout. Awaiting target completion.\n' > $L; sleep 60""",
    "killed": """printf '========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 4 bytes
=========     at kernel\n' > $L; printf '..s.F'; sleep 60""",
}
PYTEST = """
import time
print("..s", end="", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("!!! KeyboardInterrupt !!!\\n2 passed, 1 skipped in 3.00s")
"""
WORDS["interrupted"] = f"{sys.executable} -c '{PYTEST}'; {WORDS['clean'].partition(';')[0]}"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """tool(words): from now on the checker is a script that ends with these."""

    def make(words):
        script = tmp_path / "compute-sanitizer"
        options = '[ "$1" = --log-file ] && L=$2; shift 2'
        script.write_text(f"#!/bin/bash\nwhile [[ $1 == --* ]]; do {options}; done\n{words}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sanitize, "checker", lambda: str(script))

    return make


def checked(tmp_path, cases=9, seconds=3.0):
    """The verdict on one part."""
    verdict = sanitize.Verdict("moe_sum", "memcheck", cases)
    part = sanitize.Part("moe_sum", "memcheck", 1, 1, cases)
    verdict.add(part, sanitize.check(part, tmp_path, "quick", "not search", time.monotonic() + seconds))
    return str(verdict)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("clean", "PASS  memcheck   moe_sum                0 found, 9 of 9 cases ended (7 passed, 2 skipped)"),
        ("errors", "FAIL  memcheck   moe_sum                4 found, 9 of 9 cases ended (9 passed)"),
        ("hazards", "FAIL  memcheck   moe_sum                2 found, 9 of 9 cases ended (9 passed)"),
        ("failing", "FAIL  memcheck   moe_sum                0 found, 9 of 9 cases ended (1 failed, 8 passed)"),
        ("not all", "FAIL  memcheck   moe_sum                0 found so far, 8 of 9 cases ended (8 passed)"),
        ("nothing run", "FAIL  memcheck   moe_sum                0 found so far, 0 of 9 cases ended"),
    ],
)
def test_only_a_run_that_ended_and_found_nothing_is_clean(tool, tmp_path, words, told):
    tool(WORDS[words])
    assert checked(tmp_path) == told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("interrupted", "0 found so far, 3 of 9 cases ended (2 passed, 1 skipped)"),
        (
            "killed",
            "1 found so far, 5 of 9 cases ended (1 failed, 3 passed, 1 skipped); processes without the tool's sum: 1",
        ),
        ("late", "0 found so far, 0 of 9 cases ended; processes without the tool's sum: 1"),
        ("broken", "0 found so far, 9 of 9 cases ended (9 passed); processes without the tool's sum: 1"),
    ],
)
def test_what_was_done_counts_when_the_time_is_over(tool, tmp_path, monkeypatch, words, told):
    monkeypatch.setattr(sanitize, "GRACE", 30.0 if words == "interrupted" else 0.2)
    tool(WORDS[words])
    assert checked(tmp_path, seconds=2.0) == f"FAIL  memcheck   moe_sum                {told}"


def test_a_tool_that_misses_what_was_put_there_is_not_believed(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize, "selected", lambda *given: ["moe_sum-sizes-T4-f32"])
    tool(WORDS["clean"])
    done = CliRunner().invoke(sanitize.main, ["--op", "moe_sum", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "did not find a read beyond a tensor, put there" in done.output


@pytest.fixture
def told(tool, tmp_path, monkeypatch):
    """told(ids, *options): (exit code, lines) of a run on these cases, of which each process finds all to be well."""

    def run(ids, *options):
        control = "[[ $* == *misread* ]] && { echo 'ERROR SUMMARY: 1 error' > $L; exit; }"
        asked = f"echo $* | grep -o -e '--part=.*+[0-9]*' >> {tmp_path}/asked"
        tool(f"{control}\n{asked}; echo 'ERROR SUMMARY: 0 errors' > $L; echo $PASSED passed in 3.00s")
        monkeypatch.setattr(sanitize, "selected", lambda *given: ids)
        done = CliRunner().invoke(sanitize.main, ["--tool", "memcheck", "--out", str(tmp_path), *options])
        return done.exit_code, [line for line in done.output.splitlines() if not line.startswith("memcheck finds")]

    return run


def test_the_parts_of_an_op_are_added_up(told, monkeypatch):
    monkeypatch.setattr(sanitize, "CASES", 30)
    monkeypatch.setenv("PASSED", "30")
    ids = [f"moe_sum-sizes-T{tokens}-f32" for tokens in range(90)] + ["moe_sum-graph_replay-f32"]
    assert told(ids, "--op", "moe_sum") == (
        0,
        [
            "90 cases in 3 process(es), 8 at a time",
            "PASS  memcheck   moe_sum                0 found, 90 of 90 cases ended (90 passed)",
        ],
    )


def test_a_run_whose_time_was_up_is_resumed(told, tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize, "CASES", 30)
    monkeypatch.setenv("PASSED", "30")
    ids = [f"moe_sum-sizes-T{tokens}-f32" for tokens in range(90)]
    none = f"Error: --resume goes on with the run in {tmp_path}, and there is none"
    assert told(ids, "--op", "moe_sum", "--resume") == (1, [none])
    assert told(ids, "--op", "moe_sum")[0] == 0
    whole = "PASS  memcheck   moe_sum                0 found, 90 of 90 cases ended "
    (tmp_path / "moe_sum.memcheck.2+0.log").write_text("========= COMPUTE-SANITIZER\n")  # no sum: all over again
    again = ["30 cases in 1 process(es), 8 at a time", whole + "(90 passed)"]
    assert told(ids, "--op", "moe_sum", "--resume") == (0, again)
    (tmp_path / "moe_sum.memcheck.3+0.txt").write_text(".............s..........")  # 24 of 30, and interrupted
    monkeypatch.setenv("PASSED", "6")
    rest = (0, ["6 cases in 1 process(es), 8 at a time", whole + "(89 passed, 1 skipped)"])
    (tmp_path / "asked").unlink()
    assert told(ids, "--op", "moe_sum", "--resume") == rest
    assert (tmp_path / "asked").read_text() == "--part=3/3+24\n"
    assert told(ids, "--op", "moe_sum", "--resume")[1] == ["0 cases in 0 process(es), 8 at a time", *rest[1][1:]]
    other = f"Error: --resume goes on with the run in {tmp_path}, and it was of other cases"
    assert told(ids[:60], "--op", "moe_sum", "--resume") == (1, [other])


@pytest.mark.parametrize("said", ["29 passed, 1 error in 3.00s", "." * 10 + "E" + "." * 19])
def test_a_piece_with_an_error_of_pytest_is_run_again_from_its_start(told, tmp_path, monkeypatch, said):
    monkeypatch.setenv("PASSED", "30")
    ids = [f"moe_sum-sizes-T{tokens}-f32" for tokens in range(30)]
    told(ids, "--op", "moe_sum")
    (tmp_path / "moe_sum.memcheck.1+0.txt").write_text(said)
    monkeypatch.setenv("PASSED", "1")
    code, lines = told(ids, "--op", "moe_sum", "--resume")
    assert (code, lines[0]) == (1, "30 cases in 1 process(es), 8 at a time")


def test_a_failure_before_the_time_was_up_is_one_after_resuming(told, tmp_path, monkeypatch):
    monkeypatch.setenv("PASSED", "30")
    ids = [f"moe_sum-sizes-T{tokens}-f32" for tokens in range(30)]
    told(ids, "--op", "moe_sum")
    (tmp_path / "moe_sum.memcheck.1+0.txt").write_text("1 failed, 23 passed in 3.00s")
    monkeypatch.setenv("PASSED", "6")
    line = "FAIL  memcheck   moe_sum                0 found, 30 of 30 cases ended (1 failed, 29 passed)"
    assert told(ids, "--op", "moe_sum", "--resume") == (1, ["6 cases in 1 process(es), 8 at a time", line])


def test_what_a_tool_said_of_earlier_kernels_does_not_outlive_a_run_without_it(told, tmp_path, monkeypatch):
    monkeypatch.setenv("PASSED", "1")
    (tmp_path / "moe_sum.racecheck.1+0.log").write_text("RACECHECK SUMMARY: 0 hazards\n")
    (tmp_path / "moe_sum.racecheck.1+0.txt").write_text("1 passed in 3.00s")
    one = ["moe_sum-sizes-T4-f32"]
    told(one, "--op", "moe_sum")
    lines = told(one, "--op", "moe_sum", "--tool", "racecheck", "--resume")[1]
    assert lines[0] == "1 cases in 1 process(es), 8 at a time"


def test_a_run_that_is_killed_leaves_no_words_of_the_one_before(tmp_path, monkeypatch):
    said = tmp_path / "moe_sum.memcheck.1+0.txt"
    said.write_text("." * 9)

    def killed(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(sanitize, "watched", killed)
    with pytest.raises(KeyboardInterrupt):
        checked(tmp_path)
    assert not said.exists()


def test_ctrl_c_ends_what_runs_with_its_sums_and_begins_nothing_more(tool, tmp_path):
    tool(WORDS["interrupted"])
    began = time.monotonic()
    parts = [sanitize.Part("moe_sum", "memcheck", which, 3, 9) for which in (1, 2, 3)]
    with ThreadPoolExecutor(1) as pool:
        running = {pool.submit(sanitize.check, part, tmp_path, "quick", "f32", began + 60) for part in parts}
        Timer(2.0, signal.pthread_kill, [main_thread().ident, signal.SIGINT]).start()
        outcomes = [None if one.cancelled() else one.result() for one in sanitize.finished(running)]
    assert time.monotonic() - began < 30
    assert [one.counts().total() for one in outcomes if one] == [3]
    assert outcomes.count(None) == 2


STOPPED = """
from conformance import sanitize
sanitize.selected = lambda *given: [f"moe_sum-sizes-T{n}-f32" for n in range(9)]
sanitize.main()
"""


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("hangs", "told"), [("control", "Aborted!"), ("cases", "3 of 9 cases ended")])
def test_a_signal_ends_what_runs_as_ctrl_c_does(tool, tmp_path, hangs, told, which):
    begun = f"echo $$ > {tmp_path}/begun; {WORDS['interrupted']}"
    control = begun if hangs == "control" else WORDS["errors"]
    tool(f'if [[ "$*" == *misread* ]]; then {control}; else {begun}; fi')
    given = ["--op", "moe_sum", "--tool", "memcheck", "--out", str(tmp_path / "out"), "--seconds", "120"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ignored = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]  # as in what a script has started with &
    run = subprocess.Popen([*ignored, sys.executable, "-c", STOPPED, *given], env=environment, **pipes)
    while run.poll() is None and not (tmp_path / "begun").exists():
        time.sleep(0.1)
    time.sleep(1.0)  # the tool's Python has begun, too
    run.send_signal(which)
    said, _ = run.communicate(timeout=20)  # it runs on for a minute, should it not hear
    assert (run.returncode, told in said) == (1, True), said
    assert not living((tmp_path / "begun").read_text().strip())


def living(session):
    """The processes of it, but for those of which only the exit code is left."""
    stats = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            stats.append(file.read_text().rpartition(") ")[2].split())
    return [state for state, _, _, their, *_ in stats if their == session and state != "Z"]


def test_an_op_without_a_selected_case_is_told_and_not_clean(told, monkeypatch):
    monkeypatch.setenv("PASSED", "1")
    code, lines = told(["moe_sum-sizes-T4-bf16"], "--op", "moe_sum", "--op", "moe_align_block_size")
    assert (code, lines[-1]) == (1, "NONE  memcheck   moe_align_block_size   no case selected")
    assert told([], "--op", "moe_sum", "-k", "odd")[0] == 1


def test_what_has_not_begun_in_time_is_not_run(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize, "CASES", 30)
    assert checked(tmp_path, seconds=0) == "FAIL  memcheck   moe_sum                not run: no time for its 9 cases"
    verdict = sanitize.Verdict("moe_sum", "memcheck", 90)
    for part, words in zip(sanitize.split(verdict), ("30 passed in 3.00s", "30 passed in 3.00s", None), strict=True):
        verdict.add(part, words and sanitize.Outcome(0, True, words))
    assert str(verdict).endswith("0 found so far, 60 of 90 cases ended (60 passed), 30 not begun")


def test_a_part_is_every_nth_of_what_is_selected(monkeypatch):
    cases = [case.id for _, case in Selection.make(["moe_sum"]).cases()]
    chosen = [case for case in cases if "odd_n" in case and "f32" in case]
    suite = sanitize.suite
    monkeypatch.setattr(sanitize, "DEVICE", "cpu")
    for part, mine in (("2/3", chosen[1::3]), ("2/3+1", chosen[1::3][1:]), ("1/1+4", chosen[4:])):
        monkeypatch.setattr(sanitize, "suite", lambda *given, part=part: [*suite(*given), "--part", part])
        assert sanitize.selected(["moe_sum"], "quick", "odd_n and f32") == mine != []


@pytest.mark.parametrize("words", ["", "2", "0/5", "6/5", "1/0", "-1/5", "a/b", "1/2/3", "2/5+", "2/5-1"])
def test_what_is_no_part_is_wrong_usage(words, pytestconfig):
    suite = pytestconfig.pluginmanager.get_plugin(str(Path(sanitize.ROOT) / "conftest.py"))
    assert suite.part("2/5") == (2, 5, 0)
    with pytest.raises(argparse.ArgumentTypeError, match="is no part: the second of five is 2/5"):
        suite.part(words)
