"""A folder of reports as Markdown for a pull request: the matrix, then what fails, in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.report import words
from conformance.report.words import grouped

SHOWN = 20  # kinds that fail, told one by one
MARKS = {words.PASS: "✅", words.FAIL: "❌", words.NOTHING: "⚪", words.PARTIAL: "☑️"}


def summary(reports: Sequence[dict[str, Any]]) -> str:
    """The whole text."""
    columns = words.columns(reports)
    of = {(report["op"], words.column(report)): report for report in reports}
    lines = ["## Conformance", ""]
    for column in columns:
        mine = [report for report in reports if words.column(report) == column]
        device = mine[0]["environment"]["device"]
        lines.append(
            f"- **{cell(column[0])}** on {cell(device['name'])} (`{device['fingerprint']}`, level {mine[0]['level']}): "
            f"{words.tally(mine)}"
        )
    lines += [
        "",
        f"| op | {' | '.join(cell(' · '.join(column)) for column in columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for op in words.ops(reports):
        lines.append(f"| `{op}` | {' | '.join(_outcome(of.get((op, column))) for column in columns)} |")
    failed = [(report, kind, cases) for report in reports for kind, cases in _failed(report).items()]
    if failed:
        lines += ["", "### Failures", ""]
    for report, kind, cases in failed[:SHOWN]:
        first = cases[0]
        why = cell(first["message"].partition("\n")[0])  # of a search, the call follows
        of_what = f"`{report['op']}` {cell(report['provider'])} **{kind}** ({len(cases)})"
        lines.append(f"- {of_what}: {first['reason']} in `{first['case']}`: {why}")
    if failed[SHOWN:]:
        lines.append(f"- and {len(failed) - SHOWN} more kinds")
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Text that neither ends a cell nor a line, and is no markup."""
    text = " ".join(text.split())
    for sign in "\\`*_<>|[]":
        text = text.replace(sign, f"\\{sign}")
    return text


def _failed(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return grouped((case for case in report["cases"] if case["status"] == "fail"), "kind")


def _outcome(report: dict[str, Any] | None) -> str:
    if report is None:
        return ""
    return f"{MARKS[words.state(report)]} {words.headline(report)}<br><sub>{cell(words.detail(report))}</sub>"
