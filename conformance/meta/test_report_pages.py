"""Pages and summary: they need nothing but themselves, and say what failed, on which input, beside whom."""

import json
import re
from dataclasses import asdict
from html.parser import HTMLParser

import pytest
import torch
from click.testing import CliRunner

from conformance import report
from conformance.case import Case
from conformance.compare import Finding
from conformance.report import charts, html, markdown, words
from conformance.run import Result
from runner import main

VOID = {"meta", "link", "br", "wbr"}


def result(
    op="moe_sum", provider="native", kind="sizes", size=1, ratio=0.25, fail="", skip="", dtype=torch.float32, **fields
):
    one = Result.of(Case(op, kind, {"T": size}, dtype), provider, "cpu", 0)
    one.judged([Finding("output", fail, ratio, 0.3, 0.1, 50.0, (1, 2), 1.0, 1.3, "element", 0.25, 60.0, (0, 2))])
    one.provider_ms, one.reference_ms = 0.5, 2.0
    if fail:
        one.arguments = {"y": "float32 [2, 3] strides [3, 1] = [<1>, ...]"}
    if skip:
        one.skipped("refused", skip)
        one.provider_ms = one.reference_ms = None
    return asdict(one) | fields


RESULTS = [
    *(result(size=size, ratio=size / 10) for size in range(4)),
    result(kind="strided", skip="needs <contiguous> rows"),
    result(provider="mine", kind="odd_n", size=9, ratio=3.0, fail="error_budget", replay="replays/odd.json"),
    result(provider="mine", kind="odd_n", size=8, ratio=float("inf"), fail="non_finite", dtype=torch.bfloat16),
    result(provider="mine", size=1),
    result(op="topk_softmax", provider="mine", skip="needs float16"),
]


@pytest.fixture
def folder(tmp_path):
    report.write(tmp_path, report.build(RESULTS, "quick", 0))
    html.draw(tmp_path)
    return tmp_path


class Document(HTMLParser):
    """Refuses tags that are not closed in order; collects links and anchors."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.anchors = [], [], set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "a":
            self.links.append(attributes["href"])
        self.anchors.add(attributes.get("id"))

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_pages_need_no_network_and_no_script_and_their_links_lead_somewhere(folder):
    pages = {path.name: path.read_text() for path in folder.glob("*.html")}
    assert set(pages) == {"index.html", "moe_sum.html", "topk_softmax.html"}
    documents = {name: Document(text) for name, text in pages.items()}
    for name, text in pages.items():
        assert not re.search(r"https?:|<script|@import|url\(", text)
        for link in documents[name].links:
            target, _, anchor = link.partition("#")
            assert not anchor or anchor in documents[target or name].anchors


def test_the_index_tells_verdicts_in_words_and_numbers_not_by_colour_alone(folder):
    index = (folder / "index.html").read_text()
    assert "✓ 4 passed, a part of" in index  # of all the cases that the tables list
    assert "✗ 2 of 3 failed" in index and "odd_<wbr>n" in index
    assert "– nothing ran" in index and "needs float16" in index
    assert "4× reference speed" in index


def test_an_ops_page_shows_each_failure_with_reason_input_and_how_to_run_it_again(folder):
    page = (folder / "moe_sum.html").read_text()
    for told in (
        "moe_sum-odd_n-T9-f32",
        words.REASONS["error_budget"],
        "its row errs by 0.25 of its rms, the worst element by 60 ulp, at [0, 2]",
        "float32 [2, 3] strides [3, 1] = [&lt;1&gt;, ...]",
        "python runner.py replay replays/odd.json",
        "test_case[cpu-moe_sum-odd_n-T8-bf16]",
        "needs &lt;contiguous&gt; rows",
        "odd_n: 2 of 2 failed",
        "× mine",
    ):
        assert told in page, told


def test_an_ops_page_tells_the_errors_of_what_passed_from_those_of_what_failed(folder):
    page = (folder / "moe_sum.html").read_text()
    assert "<dt>error / budget of what passed</dt>" in page
    assert "<dt>error / budget of what failed</dt><dd>up to 3×</dd>" in page
    assert "<dt>error / budget</dt>" in page  # of native, where nothing failed


def test_a_full_pass_is_told_from_a_pass_of_some_cases():
    (one,) = report.build(RESULTS[:4], "quick", 0)
    assert words.state(one) == words.PARTIAL
    one["coverage"] = {"listed": 4, "run": 4}
    assert words.state(one) == words.PASS
    assert words.headline(one) == "4 passed"


def test_the_plot_has_a_mark_per_case_on_its_side_of_the_budget():
    mine, native, _ = report.build(RESULTS, "quick", 0)
    assert charts.error_against_budget(mine).count("<title>") == 3
    assert charts.error_against_budget(native).count("<title>") == 4
    places = [charts.place(ratio) for ratio in (0, 1e-9, 0.01, 0.99, 1, 1.01, 10, 1e6, float("inf"))]
    assert places == sorted(places) and places[4] == charts.BUDGET
    assert 0 < places[0] and places[-1] < 100


def test_the_summary_is_a_table_that_no_message_can_break(folder):
    text = (folder / "summary.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert "❌ 2 of 3 failed" in text and "**odd_n** (2)" in text
    assert markdown.cell("a|b\nc <d>") == r"a\|b c \<d\>"


def test_a_later_run_joins_the_folder_and_replaces_its_own_part(folder):
    report.write(folder, report.build([result(op="topk_softmax", provider="mine")], "standard", 0))
    report.write(folder, report.build([result(op="gdn_decode", provider="other")], "quick", 0))
    found = {(one["op"], one["provider"]): one["level"] for one in report.read(folder)}
    assert found == {
        ("gdn_decode", "other"): "quick",
        ("moe_sum", "mine"): "quick",
        ("moe_sum", "native"): "quick",
        ("topk_softmax", "mine"): "standard",
    }


def test_pages_of_a_file_lie_in_a_folder_of_its_name(folder, tmp_path):
    report.save(tmp_path / "result.json", report.merged(report.read(folder)))
    done = CliRunner().invoke(main, ["report", str(tmp_path / "result.json")])
    drawn = tmp_path / "result-report"
    assert done.exit_code == 0 and f"{drawn / 'index.html'}" in done.output
    assert {path.name for path in drawn.iterdir()} == {"index.html", "moe_sum.html", "topk_softmax.html", "summary.md"}


def test_numbers_are_written_for_people():
    shown = [words.number(value) for value in (0, 0.02345, 1.26, 12.34, 123.4, 1234.5, 2.5e7, "inf", "nan")]
    assert shown == ["0", "0.023", "1.3", "12.3", "123", "1,234", "2.5e+07", "∞", "NaN"]
    assert words.times(5.43e40) == "over 1e6×"
    assert words.milliseconds(0.0123) == "12.3 µs"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (None, "does not exist"),
        ({}, "holds no report: no index.json in it"),
        ({"index.json": "{"}, "is no report"),
        ({"index.json": "[]"}, "is no report"),
        ({"index.json": '{"schema": 1, "reports": []}'}, "of schema 1, this version reads 3"),
        ({"index.json": '{"schema": 3, "reports": []}'}, "empty report"),
        ({"index.json": '{"schema": 3, "reports": [{"file": "gone.json"}]}'}, "no gone.json"),
        ({"index.json": '{"schema": 3, "reports": [{"op": "moe_sum"}]}'}, "damaged (KeyError: 'file')"),
        ({"index.json": '{"schema": 3, "reports": 7}'}, "damaged (TypeError: "),
        (
            {"index.json": '{"schema": 3, "reports": [{"file": "a"}]}', "a": '{"schema": 3, "op": "moe_sum"}'},
            "damaged (KeyError: 'provider')",
        ),
    ],
)
def test_a_folder_that_is_no_report_is_refused_in_one_line(tmp_path, files, told):
    folder = tmp_path / "reports"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    done = CliRunner().invoke(main, ["report", str(folder)])
    assert done.exit_code == 2, done.output
    assert told in done.output and len(done.output.splitlines()) == 1


@pytest.mark.parametrize("name", ["provider", "device", "level", "summary", "cases", "environment", "coverage"])
def test_of_a_report_that_is_damaged_nothing_is_drawn(folder, tmp_path, name):
    one, file = report.read(folder)[0], tmp_path / "damaged.json"
    del one[name]
    file.write_text(json.dumps(report.merged([one])))
    done = CliRunner().invoke(main, ["report", str(file)])
    assert (done.exit_code, len(done.output.splitlines())) == (2, 1), done.output
    assert f"{file} is no report of the conformance suite, or damaged (KeyError: '{name}')" in done.output
    assert not (tmp_path / "damaged-report").exists()
