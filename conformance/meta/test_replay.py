"""A stored failure runs again, on its own provider or another; a file that cannot be replayed is told why."""

import json
import time
from dataclasses import asdict

import pytest
from click.testing import CliRunner

import runner
import shim
from conformance import SUITE, workers
from conformance.cases import all_cases
from conformance.run import Target
from conformance.search import Problem, replay
from conformance.selection import target_of

PROVIDER = """
import shim
import ops_reference

@shim.implementation("moe_sum", provider="half_more")
def moe_sum(y, topk_ids=None):
    return 1.5 * shim.get("moe_sum").reference(y, topk_ids)
"""


@pytest.fixture
def kept(scratch, monkeypatch):
    """kept(problem=None): the path of a replay file of a failing provider, which has a file of its own."""
    (scratch / "mine.py").write_text(PROVIDER)
    monkeypatch.setattr(replay, "run", replay.Run(scratch / "replay", 3, [str(scratch / "mine.py")]))
    case = next(case for case in all_cases() if case.op == "moe_sum" and case.kind == "odd_n")
    return lambda problem=None: replay.keep(case, Target(shim.get("moe_sum"), "half_more", "cpu"), problem)


@pytest.fixture
def run(scratch):
    return lambda *arguments: CliRunner().invoke(runner.main, ["replay", *map(str, arguments)])


def changed(path, **changes):
    document = json.loads(replay.Path(path).read_text()) | changes
    replay.Path(path).write_text(json.dumps(document))
    return path


def refused(result, *words):
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("problem", [None, Problem("moe_sum", {"T": 2, "topk": 3, "N": 5}, "bf16", 4, {"y": "ties"})])
def test_a_failure_fails_again_and_passes_on_another_provider(kept, run, problem):
    file = kept(problem)
    again, other = run(file), run(file, "--provider", "reference")
    assert (again.exit_code, other.exit_code) == (1, 0), again.output
    assert again.stdout.startswith("FAIL  moe_sum-")
    assert "row_error_budget" in again.stdout or "error_budget" in again.stdout
    assert other.stdout.startswith("PASS  moe_sum-")


def test_a_file_that_is_given_stands_in_for_the_one_that_failed(kept, run, scratch):
    file = kept()
    (scratch / "mended.py").write_text(PROVIDER.replace("1.5 * ", ""))
    (scratch / "mine.py").unlink()
    target_of.cache_clear()
    mended = run(file, "--provider-file", scratch / "mended.py")
    assert (mended.exit_code, mended.stdout[:4]) == (0, "PASS"), mended.output
    refused(run(file), "mine.py does not exist")


def test_a_call_that_hangs_again_is_a_verdict_too(kept, run, scratch, monkeypatch):
    file = kept()
    body = "import time\n" + PROVIDER.replace("return 1.5 *", "time.sleep(60); return")
    (scratch / "mine.py").write_text(body)
    monkeypatch.setitem(workers.SECONDS, "quick", 0.5)
    target_of.cache_clear()
    result = run(file)
    assert result.exit_code == 1
    assert result.stdout.startswith("FAIL  moe_sum-") and "timeout: still running after 0.5 s" in result.stdout


def test_what_is_no_replay_file_is_said_so(kept, run, tmp_path):
    for text in ("{", "[]", "{}", '{"replay": 1}'):
        (tmp_path / "file.json").write_text(text)
        refused(run(tmp_path / "file.json"), "file.json is no replay file")
    refused(run(tmp_path / "none.json"), "none.json cannot be read", "No such file")


@pytest.mark.parametrize(
    "change",
    [
        {"size": 3},
        {"op": "gone"},
        {"sizes": {"T": 2, "topk": 3, "N": 5, "M": 7}},
        {"sizes": {"T": "two"}},
        {"sizes": 7},
        {"dtype": "f12"},
        {"seed": "x"},
        {"values": {"y": "unheard"}},
        {"layouts": {"y": "unheard"}},
        {"sizes": {"T": 10**30, "topk": 3, "N": 5}},
        {"sizes": {"device": "cpu"}},
    ],
    ids=str,
)
def test_a_problem_that_is_none_is_said_so(kept, run, change):
    problem = asdict(Problem("moe_sum", {"T": 2, "topk": 3, "N": 5}, "bf16"))
    refused(run(changed(kept(), problem=problem | change)), "is no replay file", "its problem is none")


def test_a_problem_that_is_too_large_for_this_machine_is_none_the_less(kept, run):
    file = kept(Problem("moe_sum", {"T": 10**15, "topk": 3, "N": 5}, "bf16"))
    result = run(file)
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.startswith("SKIP  moe_sum-") and "no_memory: RuntimeError: " in result.stdout


def test_arguments_are_made_within_the_time_limit(kept, run, monkeypatch):
    made = []

    def slow(self, device):
        made.append(device)
        time.sleep(60)

    file = kept(Problem("moe_sum", {"T": 2, "topk": 3, "N": 5}, "bf16"))
    monkeypatch.setitem(workers.SECONDS, "quick", 0.5)
    monkeypatch.setattr(Problem, "arguments", slow)
    result = run(file)
    assert (result.exit_code, made) == (1, ["cpu"])
    assert "timeout: still running after 0.5 s" in result.stdout


@pytest.mark.parametrize(("name", "value"), [("seed", "x"), ("provider", 3), ("provider_files", 7), ("provider_files", [{}]), ("device", None)])
def test_a_field_of_another_type_is_named(kept, run, name, value):
    refused(run(changed(kept(), **{name: value})), "no replay file", f"its {name} is {value!r}")


def test_another_suite_version_is_said_so(kept, run):
    refused(run(changed(kept(), suite=SUITE + 1)), f"of suite version {SUITE + 1}, this is {SUITE}", "run the suite again")
    refused(run(changed(kept(), suite=SUITE, replay=99)), "of layout version 99")


def test_a_case_a_provider_or_a_device_that_is_not_there_is_named(kept, run):
    refused(run(changed(kept(), case="moe_sum-gone")), "moe_sum-gone")
    refused(run(kept(), "--provider", "nobody"), "unknown provider 'nobody'", "native")
    refused(run(kept(), "--device", "tpu"), "unknown device 'tpu'", "cpu")
    refused(run(kept(), "--device", "all"), "unknown device 'all'", "cpu")
