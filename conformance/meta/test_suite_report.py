"""Results of all workers end in one report per op, provider and device; `conform` turns it into an exit code."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from conformance import conform as conforming
from conformance import report
from conformance.case import Case
from conformance.cases import all_cases
from conformance.compare import Finding
from conformance.conform import conform
from conformance.perf import bench
from conformance.report.text import text
from conformance.run import Result
from shim import device


def result(op, kind, size, status="pass", device="cpu"):
    one = Result.of(Case(op, kind, {"T": size}, torch.float32), "mine", device, 0)
    if status == "fail":
        one.judged([Finding("output", "error_budget", 3.0, 0.3, 0.1, 50.0, (1, 2), 1.0, 1.3, "element", 0.25, 60.0, (0, 2))])
        one.arguments = {"x": "float32 [2, 3]"}
    if status == "skip":
        one.skipped("refused", "needs float16")
    if status == "pass":
        one.judged([Finding("output", ratio=0.25)])
    return asdict(one)


ONE = [result("moe_sum", "sizes", 1), result("topk_softmax", "ties", 1, "skip")]
OTHER = [result("moe_sum", "empty", 0, "fail"), result("moe_sum", "sizes", 2)]


def test_a_report_tells_how_triton_was_used_and_a_bench_leaves_its_tuner_alone(monkeypatch):
    monkeypatch.setattr(report.devices, "describe", lambda name: report.devices.Device(name, "a GPU", {"isa": "sm90"}))
    monkeypatch.setattr(report, "first_configurations", lambda: "3, the first")
    (one,) = report.build([result("moe_sum", "sizes", 1, device="cuda")], "quick", 0)
    assert (one["environment"]["judge"], one["environment"]["triton"]) == ("cuda", "3, the first")
    monkeypatch.setattr(report, "first_configurations", lambda: pytest.fail("the tuner was switched off"))
    assert "triton" not in bench.about("cuda")["environment"]


def test_the_workers_results_are_merged_whatever_their_order():
    one, other = (report.build(results, "quick", 0) for results in (ONE + OTHER, OTHER + ONE))
    assert [(r["op"], [case["case"] for case in r["cases"]]) for r in one] == [
        ("moe_sum", ["moe_sum-empty-T0-f32", "moe_sum-sizes-T1-f32", "moe_sum-sizes-T2-f32"]),
        ("topk_softmax", ["topk_softmax-ties-T1-f32"]),
    ]
    assert [r["summary"] for r in one] == [r["summary"] for r in other]


def test_the_verdict_is_a_pass_only_where_something_ran_and_all_of_it_passed():
    failed, nothing = report.build(ONE + OTHER, "quick", 0)
    (passed,) = report.build(ONE[:1], "quick", 0)
    assert [r["summary"]["verdict"] for r in (passed, failed, nothing)] == ["pass", "fail", "nothing ran"]
    assert failed["summary"]["kinds"]["sizes"]["passed"] == 2
    assert passed["summary"]["worst"] == {"case": "moe_sum-sizes-T1-f32", "ratio": 0.25}


def test_wrong_calls_alone_which_no_provider_ever_sees_prove_nothing():
    wrong = next(case for case in all_cases() if case.op == "moe_sum" and case.raises)
    refused = asdict(Result.of(wrong, "mine", "cpu", 0))
    (nothing,) = report.build([refused, result("moe_sum", "sizes", 1, "skip")], "quick", 0)
    (passed,) = report.build([refused, result("moe_sum", "sizes", 1)], "quick", 0)
    assert [r["summary"]["verdict"] for r in (nothing, passed)] == ["nothing ran", "pass"]
    assert "1 passed, 1 skipped (of" in text([nothing]) and "which no provider sees" in text([nothing])
    assert "which no provider sees" not in text([passed])


def test_a_report_survives_the_disk_with_infinities_as_text(tmp_path):
    reports = report.build(ONE + OTHER, "quick", 0)
    reports[0]["cases"][0]["ratio"] = float("inf")
    report.write(tmp_path, reports)
    again = report.read(tmp_path)
    assert again[0]["cases"][0]["ratio"] == "inf"
    assert again[1] == report.finite(reports[1])
    assert (tmp_path / "moe_sum.mine.cpu.json").is_file()


def test_runs_that_write_into_one_folder_at_a_time_all_end_in_its_index(tmp_path):
    reports = report.build(ONE, "quick", 0)

    def write(number):
        for one in reports:
            report.write(tmp_path, [one | {"provider": f"p{number}"}])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(16)))
    assert len(report.read(tmp_path)) == 16 * len(reports)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}


def test_the_text_tells_a_kernels_author_what_failed_on_which_input():
    told = text(report.build(ONE + OTHER, "quick", 0))
    error = ("error_budget", "[1, 2]", "50 ulp", "0.25 of its rms", "60 ulp, at [0, 2]")
    for words in ("moe_sum-empty-T0-f32", *error, "x: float32 [2, 3]", "needs float16"):
        assert words in told


def failing(*ratios):
    """The text of a report with a pass at a quarter of its budget, and failures at these shares of it."""
    cases = [result("moe_sum", "sizes", 0)]
    for at, ratio in enumerate(ratios):
        one = result("moe_sum", "odd_n", at, "fail")
        one |= {"ratio": ratio, "message": "wrong\nthe smallest of 8", "replay": "kept/odd.json"}
        cases.append(one)
    return text(report.build(cases, "quick", 0))


def test_the_worst_error_is_the_worst_of_all_cases_as_far_as_a_number_says_it():
    assert "; worst error 0.25 of its budget" in failing()
    assert re.search(r"1 passed, 1 failed \(of \d+ cases\); worst error 3 x its budget", failing(3.0))
    assert "; worst finite error 3 x its budget" in failing(3.0, float("inf"))
    told = failing(5.43e40)
    assert "; worst error over 1e6 x its budget" in told and "e+40" not in told


def test_a_failure_is_told_with_how_to_run_it_again_all_of_it_indented():
    lines = failing(3.0).splitlines()
    assert "      the smallest of 8" in lines
    assert "      replay: python runner.py replay kept/odd.json" in lines


@pytest.mark.parametrize("lost", ["json_out", "report_dir", "certificates_dir"])
def test_what_cannot_be_written_after_a_run_is_told_beside_the_results(lost, monkeypatch, tmp_path, capsys):
    def run(command):
        """The run itself, of one op; meanwhile a disk becomes full."""
        (folder,) = (word.partition("=")[2] for word in command if word.startswith("--report-dir="))
        (one,) = report.build([result("moe_sum", "sizes", 1) | {"build": {"identity": "0"}}], "quick", 0)
        report.write(Path(folder), [one | {"coverage": {"listed": 1, "run": 1}}])
        to[lost].symlink_to("/dev/full")
        return 0, "", False

    monkeypatch.setattr(conforming, "_run", run)
    places = {name: tmp_path / name for name in ("json_out", "report_dir", "certificates_dir")}
    fingerprint = device.describe("cpu").fingerprint
    for place in (places["report_dir"], places["certificates_dir"] / fingerprint):
        place.mkdir(parents=True)
    draft = f".{{}}.{os.getpid()}"
    to = places | {"report_dir": places["report_dir"] / draft.format("moe_sum.mine.cpu.json")}
    to["certificates_dir"] = places["certificates_dir"] / fingerprint / draft.format("moe_sum.mine.0.json")
    assert conform(["moe_sum"], **places) == 1
    said = capsys.readouterr()
    assert said.out.startswith("PASS  moe_sum  mine  cpu  1 passed")
    assert re.fullmatch(r"conform: \S+ cannot be written: No space left on device\n", said.err), said.err
    assert not to[lost].is_symlink() or lost == "json_out"
    others = [place for name, place in places.items() if name != lost]
    assert all(place.is_file() or [*place.rglob("*.json")] for place in others), "what could be written is written"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ops": ["moesum"]}, "moe_sum"),
        ({"provider": "nobody"}, "reference"),
        ({"level": "slow"}, "exhaustive"),
        ({"provider_files": ["/nowhere.py"]}, "does not exist"),
        ({"json_out": "/nonexist/x.json"}, "x.json cannot be written: folder /nonexist does not exist"),
        ({"json_out": "/"}, "/ cannot be written: it is a folder"),
        ({"report_dir": "/dev/null/reports"}, "folder /dev/null/reports cannot be made"),
        ({"certificates_dir": "/dev/null"}, "folder /dev/null cannot be made"),
    ],
)
def test_wrong_usage_exits_2_and_says_what_is_known(wrong, words, capsys):
    assert conform(**wrong) == 2
    assert words in capsys.readouterr().err
