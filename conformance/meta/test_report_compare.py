"""`report --compare`: what became worse is told and is an exit code; noise and gains are not held against anyone."""

import pytest
from click.testing import CliRunner

from conformance import report
from conformance.meta.test_report_pages import result
from conformance.report import diff
from runner import main


def built(*results, level="quick"):
    return report.build(results, level, 0)


def kinds(old, new):
    return [(change.what, change.case) for change in diff.compare(old, new)]


CASE = "moe_sum-sizes-T1-f32"


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ({}, {"fail": "tie", "ratio": 5.0}, "newly failing"),
        ({"skip": "no"}, {"fail": "tie", "ratio": 5.0}, "newly failing"),
        ({}, {"skip": "no"}, "newly skipped"),
        ({"ratio": 0.3}, {"ratio": 0.7}, "closer to budget"),
        ({"fail": "tie"}, {}, "fixed"),
        ({"ratio": 0.01}, {"ratio": 0.4}, None),
        ({"ratio": 0.6}, {"ratio": 0.9}, None),
        ({"fail": "tie"}, {"fail": "tie"}, None),
        ({"skip": "no"}, {"skip": "no"}, None),
    ],
)
def test_a_cases_change_is_named(before, after, what):
    assert kinds(built(result(**before)), built(result(**after))) == ([(what, CASE)] if what else [])


def test_what_is_no_longer_run_or_tested_is_a_regression_within_one_level():
    two = [result(size=1), result(size=2), result(op="topk_softmax")]
    assert kinds(built(*two), built(result(size=2))) == [("no longer run", CASE), ("no longer tested", "")]
    assert kinds(built(*two[:2], level="standard"), built(result(size=2))) == []


def test_a_report_that_is_damaged_is_told_in_one_line(tmp_path):
    file = tmp_path / "damaged.json"
    report.save(file, report.merged([{"op": "moe_sum"}]))
    done = CliRunner().invoke(main, ["report", "--compare", str(file), str(file)])
    assert (done.exit_code, len(done.output.splitlines())) == (2, 1), done.output
    assert "damaged (KeyError: 'provider')" in done.output


def test_a_name_that_is_none_is_told_in_one_line(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    (failing,) = built(result(fail="tie", ratio=5.0))
    failing["cases"][0]["case"] = 1.5
    report.save(old, report.merged(built(result(size=2))))
    report.save(new, report.merged([failing]))
    done = CliRunner().invoke(main, ["report", "--compare", str(old), str(new)])
    assert (done.exit_code, len(done.output.splitlines())) == (2, 1), done.output
    assert "damaged (AttributeError: " in done.output


def test_new_cases_and_reports_count_by_their_outcome():
    old = built(result(size=2))
    assert kinds(old, built(result(size=2), result())) == []
    assert kinds(old, built(result(size=2), result(fail="tie"))) == [("newly failing", CASE)]
    assert kinds(old, built(result(size=2), result(op="topk_softmax"))) == [("newly tested", "")]


def test_slower_is_measured_by_the_median_against_the_references_time():
    def timed(mine, reference, count=6):
        return built(*(result(size=size, provider_ms=mine, reference_ms=reference) for size in range(count)))

    assert kinds(timed(1.0, 2.0), timed(2.0, 2.0)) == [("slower", "")]
    assert kinds(timed(1.0, 2.0), timed(2.0, 4.0)) == []  # the machine is slower, not the provider
    assert kinds(timed(1.0, 2.0, 4), timed(9.0, 2.0, 4)) == []  # too few to tell


def test_the_exit_code_is_1_where_something_regressed_and_both_forms_tell_it(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    report.write(old, built(result()))
    report.write(new, built(result(fail="tie", ratio=float("inf"))))
    done = CliRunner().invoke(main, ["report", "--compare", str(old), str(new)])
    assert done.exit_code == 1
    assert "newly failing: 1" in done.output and CASE in done.output
    page = (new / "compare.html").read_text()
    assert CASE in page and "1 regressed" in page
    assert CliRunner().invoke(main, ["report", "--compare", str(new), str(new)]).exit_code == 0
    assert CliRunner().invoke(main, ["report", "--compare", str(new), str(old)]).exit_code == 0  # fixed


def test_the_index_that_conform_prints_stands_for_its_folder(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    index = str(report.write(old, built(result())))
    other = str(report.write(new, built(result(fail="tie", ratio=float("inf")))))
    done = CliRunner().invoke(main, ["report", "--compare", index, other])
    assert done.exit_code == 1 and "newly failing: 1" in done.output and (new / "compare.html").is_file()
    done = CliRunner().invoke(main, ["report", index])
    assert done.exit_code == 0 and done.output.split() == [str(old / "index.html"), str(old / "summary.md")]


def test_compare_takes_two_folders_and_says_so(tmp_path):
    for arguments in (["--compare", "a"], ["a", "b"], []):
        done = CliRunner().invoke(main, ["report", *arguments])
        assert done.exit_code == 2 and "folder" in done.output
    done = CliRunner().invoke(main, ["report", "--compare", str(tmp_path), str(tmp_path / "gone")])
    assert done.exit_code == 2 and "holds no report" in done.output
