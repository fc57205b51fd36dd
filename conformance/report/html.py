"""A folder of reports as pages that need nothing but themselves: `index.html`, and a page per op.

The index is a matrix of ops and providers. An op's page shows, per provider, how much of its error budget each case
used, every failure with its input in words, and what was skipped and why; then the times, and where it all ran.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from conformance import report as reports_of
from conformance.report import charts, markdown, words
from conformance.report.tables import environments, failures, measured, skips

Report = dict[str, Any]


def show(folder: str | Path) -> int:
    """Draws the pages and summary of a folder (or of a file that `conform --json` wrote) and prints where they are;
    ReportError where there is no report."""
    for path in draw(Path(folder)):
        print(path)
    return 0


def draw(folder: Path) -> list[Path]:
    """Writes index.html, a page per op, and summary.md; returns the index and the summary."""
    with reports_of.whole(folder):
        reports = reports_of.read(folder)
        if not reports:
            raise reports_of.ReportError(f"{folder} holds an empty report")
        texts = {f"{op}.html": op_page(op, reports) for op in words.ops(reports)}
        texts |= {"index.html": index(reports), "summary.md": markdown.summary(reports)}
    place = reports_of.pages(folder)
    for name, text in texts.items():
        reports_of.save_text(place / name, text)
    return [place / "index.html", place / "summary.md"]


def page(title: str, body: str) -> str:
    """A whole document."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{_style()}</style>
</head>
<body>
{body}
</body>
</html>
"""


@cache
def _style() -> str:
    return (Path(__file__).parent / "style.css").read_text()


# ---- the index ------------------------------------------------------------------------------------------------------


def index(reports: Sequence[Report]) -> str:
    """Ops x providers, with numbers."""
    columns = words.columns(reports)
    of = {(report["op"], words.column(report)): report for report in reports}
    head = "".join(_head(column, [of[key] for key in of if key[1] == column], columns) for column in columns)
    rows = ""
    for op in words.ops(reports):
        cells = "".join(_cell(of.get((op, column)), column, columns) for column in columns)
        rows += f'<tr><th scope="row"><a href="{op}.html">{op}</a></th>{cells}</tr>\n'
    body = f"""<header>
<h1>Conformance</h1>
<p class="soft">Does each implementation equal the reference that defines the op? Errors are measured against float64
and compared with a budget that plain PyTorch sets.</p>
</header>
<main>
<div class="scroll"><table class="matrix" style="--columns: {len(columns)}">
<thead><tr><th></th>{head}</tr></thead>
<tbody>
{rows}</tbody>
</table></div>
<p><small><b class="pass">✓</b> every case passed or was refused with a reason · <b class="partial">✓</b> dashed:
passed, but not all cases of the level were run · <b class="fail">✗</b> at least one failed ·
<b class="nothing">–</b> nothing ran · a dot: no report.
Speed is the median over the cases, one call each.</small></p>
<h2>Where it ran</h2>
{environments(reports)}
</main>"""
    return page("Conformance", body)


def _name(column: tuple[str, str], columns: Sequence[tuple[str, str]]) -> str:
    provider, device = column
    return provider if len({device for _, device in columns}) == 1 else f"{provider} · {device}"


def _head(column: tuple[str, str], mine: Sequence[Report], columns: Sequence[tuple[str, str]]) -> str:
    levels = " and ".join(sorted({report["level"] for report in mine}))
    name = words.breakable(_name(column, columns))
    return f'<th scope="col">{name}<small>{words.tally(mine)}</small><small>level {escape(levels)}</small></th>'


def _cell(report: Report | None, column: tuple[str, str], columns: Sequence[tuple[str, str]]) -> str:
    if report is None:
        return '<td class="absent">·</td>'
    state, name, detail = words.state(report), _name(column, columns), words.detail(report)
    return (
        f'<td class="{state}"><a href="{report["op"]}.html#{_anchor(report)}"><i>{words.breakable(name)}</i>'
        f"<b>{words.MARKS[state]} {words.headline(report)}</b><small>{words.breakable(detail)}</small></a></td>"
    )


def _anchor(report: Report) -> str:
    return escape(f"{report['provider'].replace(':', '-')}-{report['device']}")


# ---- an op ----------------------------------------------------------------------------------------------------------


def op_page(op: str, reports: Sequence[Report]) -> str:
    """Everything that the reports say about one op."""
    every = words.ops(reports)
    columns = words.columns(reports)
    mine = sorted((r for r in reports if r["op"] == op), key=lambda report: columns.index(words.column(report)))
    at = every.index(op)
    before = f'<a href="{every[at - 1]}.html" rel="prev">← {every[at - 1]}</a>' if at else ""
    after = f'<a href="{every[at + 1]}.html" rel="next">{every[at + 1]} →</a>' if at + 1 < len(every) else ""
    outcomes = " ".join(
        f'<a class="badge {words.state(r)}" href="#{_anchor(r)}">{words.MARKS[words.state(r)]} '
        f"{escape(_name(words.column(r), columns))}</a>"
        for r in mine
    )
    sections = "".join(_section(report, columns) for report in mine)
    body = f"""<header>
<nav><a href="index.html">All ops</a>{before}{after}</nav>
<h1>{op}</h1>
<p>{escape(mine[0]["about"])}</p>
<p>{outcomes}</p>
</header>
<main>
{sections}
<h2 id="time">Time</h2>
{measured(mine)}
<h2 id="environment">Where it ran</h2>
{environments(mine)}
</main>"""
    return page(f"{op} · conformance", body)


def _section(report: Report, columns: Sequence[tuple[str, str]]) -> str:
    state = words.state(report)
    badge = f'<span class="badge {state}">{words.MARKS[state]} {words.headline(report)}</span>'
    ran = any(case["status"] != "skip" for case in report["cases"])
    plot = f"<h3>Error against budget</h3>{charts.error_against_budget(report)}" if ran else ""
    name = escape(_name(words.column(report), columns))
    parts = f"{_facts(report)}{plot}{failures(report)}{skips(report)}"
    return f'<section id="{_anchor(report)}"><h2>{name} {badge}</h2>{parts}</section>'


def _facts(report: Report) -> str:
    """The numbers of a report, as a list of terms."""
    summary, coverage, errors = report["summary"], report["coverage"], report["summary"]["errors"]
    facts = {
        "cases": f"{coverage['run']} of the {coverage['listed']} that level {report['level']} lists; "
        f"{summary['passed']} passed, {summary['failed']} failed, {summary['skipped']} skipped",
    }
    worst, passed = summary["worst"], " of what passed" * bool(summary["failed"])
    if worst and float(worst["ratio"]):
        shares = ", ".join(f"{name} {words.number(errors[name])}" for name in ("median", "p90", "p99"))
        facts[f"error / budget{passed}"] = (
            f"{shares}, most {words.number(worst['ratio'])} in <code>{escape(worst['case'])}</code>"
        )
    elif worst:
        facts[f"error / budget{passed}"] = "0: every passed case is exact"
    if words.farthest(report):
        facts["error / budget of what failed"] = words.farthest(report)
    if report["build"]:
        made = ", ".join(
            f"{name} {escape(str(value)[:48])}" for name, value in report["build"].items() if name != "identity"
        )
        facts["build"] = f"<code>{escape(report['build']['identity'])}</code> <span class='soft'>({made})</span>"
    facts["run"] = f"{escape(words.date(report))} UTC, seed {json.dumps(report['seed'])}"
    return f'<dl class="facts">{"".join(f"<dt>{term}</dt><dd>{told}</dd>" for term, told in facts.items())}</dl>'
