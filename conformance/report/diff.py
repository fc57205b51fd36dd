"""What became worse between two reports: `runner.py report --compare OLD NEW`.

    newly failing      passed or was skipped, fails now (or did not exist, and fails)
    newly skipped      passed, is skipped now
    no longer run      passed, is in no table or run any more; where both runs are of one level
    no longer tested   a whole op of a provider
    closer to budget   both pass, the error now is more than twice the share of its budget that it was, and over half
    slower             the median over the cases of time / reference's time grew by half (of at least 5 cases)

The reference was timed in both runs, beside the provider: its time takes the machine's mood out of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from conformance import report as reports_of
from conformance.report import words

Report = dict[str, Any]
REGRESSIONS = ("newly failing", "newly skipped", "no longer run", "no longer tested", "closer to budget", "slower")
GAINS = ("fixed", "newly tested")
SHOWN = 10  # of a kind; the page folds the rest
NEARER, NEAR = 2.0, 0.5
SLOWER, TIMED = 1.5, 5


class Change(NamedTuple):
    """One difference. `what` is one of REGRESSIONS or GAINS; `case` is empty where it is about a whole report."""

    op: str
    provider: str
    device: str
    what: str
    case: str
    told: str


def show(old: str | Path, new: str | Path) -> int:
    """Prints the differences and draws them as compare.html in NEW. 1 where something regressed, else 0."""
    with reports_of.whole(old, new):
        changes = compare(reports_of.read(Path(old)), reports_of.read(Path(new)))
        told, drawn = text(changes), page(changes, str(old), str(new))
    print(told)
    place = reports_of.pages(Path(new))
    reports_of.save_text(place / "compare.html", drawn)
    print(place / "compare.html")
    return int(any(change.what in REGRESSIONS for change in changes))


def compare(old: Sequence[Report], new: Sequence[Report]) -> list[Change]:
    """Every change, in the order of REGRESSIONS and GAINS."""
    before, after = ({(r["op"], *words.column(r)): r for r in reports} for reports in (old, new))
    changes = []
    for key in sorted(before.keys() | after.keys()):
        if key not in after:
            changes.append(Change(*key, "no longer tested", "", f"was: {words.headline(before[key])}"))
        elif key not in before:
            failing = words.state(after[key]) == words.FAIL
            changes.append(Change(*key, "newly failing" if failing else "newly tested", "", words.headline(after[key])))
        else:
            changes += [Change(*key, *change) for change in _changes(before[key], after[key])]
    return sorted(changes, key=lambda change: (REGRESSIONS + GAINS).index(change.what))


def _changes(old: Report, new: Report) -> Iterator[tuple[str, str, str]]:
    before, after = ({case["case"]: case for case in report["cases"]} for report in (old, new))
    for name, was in before.items():
        now = after.get(name)
        if now is not None:
            yield from _change(name, was, now)
        elif was["status"] == "pass" and old["level"] == new["level"]:
            yield "no longer run", name, "passed"
    for name, now in after.items():
        if name not in before and now["status"] == "fail":
            yield "newly failing", name, f"new case: {now['reason']}: {now['message']}"
    slower = _slowdown(before, after)
    if slower > SLOWER:
        yield "slower", "", f"{words.times(slower)} the time it took, against the reference's (median over the cases)"


def _change(name: str, was: dict, now: dict) -> Iterator[tuple[str, str, str]]:
    if now["status"] == "fail" and was["status"] != "fail":
        yield "newly failing", name, f"{now['reason']}: {now['message']}"
    elif now["status"] == "skip" and was["status"] == "pass":
        yield "newly skipped", name, f"{now['reason']}: {now['message']}"
    elif now["status"] == "pass" and was["status"] == "fail":
        yield "fixed", name, f"was {was['reason']}"
    elif now["status"] == was["status"] == "pass":
        ratio, before = float(now["ratio"]), float(was["ratio"])
        if ratio > NEAR and ratio > NEARER * before:
            yield "closer to budget", name, f"{words.number(before)} of its budget before, {words.number(ratio)} now"


def _slowdown(before: dict[str, dict], after: dict[str, dict]) -> float:
    """How many times longer the provider takes, measured in the reference's time of the same run."""

    def relative(case: dict) -> float | None:
        return case["provider_ms"] / case["reference_ms"] if case["provider_ms"] and case["reference_ms"] else None

    both = [(relative(before[name]), relative(after[name])) for name in before.keys() & after.keys()]
    ratios = [now / was for was, now in both if was and now]
    return median(ratios) if len(ratios) >= TIMED else 1.0


def text(changes: Sequence[Change]) -> str:
    """The differences for a terminal, the worst first."""
    lines = []
    for what, of_kind in _by_kind(changes):
        lines.append(f"{what}: {len(of_kind)}")
        lines += [f"  {_where(change)}  {change.told}" for change in of_kind[:SHOWN]]
        if of_kind[SHOWN:]:
            lines.append(f"  and {len(of_kind) - SHOWN} more")
    return "\n".join(lines) or "nothing regressed, nothing else changed"


def _where(change: Change) -> str:
    return f"{change.case or change.op}  {change.provider}  {change.device}"


def _by_kind(changes: Sequence[Change]) -> Iterator[tuple[str, list[Change]]]:
    for what in REGRESSIONS + GAINS:
        of_kind = [change for change in changes if change.what == what]
        if of_kind:
            yield what, of_kind


def page(changes: Sequence[Change], old: str, new: str) -> str:
    """The differences as a document."""
    from conformance.report.html import page

    worse = sum(change.what in REGRESSIONS for change in changes)
    state, mark = ("fail", "✗") if worse else ("pass", "✓")
    sections = ""
    for what, of_kind in _by_kind(changes):
        tone, sign = ("fail", "✗") if what in REGRESSIONS else ("pass", "✓")
        rest = _listed(of_kind[SHOWN:])
        more = f"<details><summary>{len(of_kind) - SHOWN} more</summary>{rest}</details>" if of_kind[SHOWN:] else ""
        badge = f'<span class="badge {tone}">{sign} {len(of_kind)}</span>'
        sections += f"<h2>{what} {badge}</h2>{_listed(of_kind[:SHOWN])}{more}"
    body = f"""<header>
<nav><a href="index.html">All ops</a></nav>
<h1>What changed</h1>
<p><span class="badge {state}">{mark} {f"{worse} regressed" if worse else "nothing regressed"}</span></p>
<dl class="facts"><dt>old</dt><dd><code>{escape(old)}</code></dd><dt>new</dt><dd><code>{escape(new)}</code></dd></dl>
</header>
<main>{sections}</main>"""
    return page("What changed · conformance", body)


def _listed(changes: Sequence[Change]) -> str:
    items = "".join(
        f"<li><code>{escape(change.case or change.op)}</code> "
        f"<small>{escape(change.provider)} · {escape(change.device)}</small><p>{escape(change.told)}</p></li>"
        for change in changes
    )
    return f'<ul class="changes">{items}</ul>'
