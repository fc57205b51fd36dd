"""The plots of a page, as SVG that needs no script. Places are percentages of the width and everything else is in
pixels, so a plot fits a phone without its dots and labels shrinking.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from math import log10
from typing import Any

from conformance.report.words import grouped, names, number, times

LANE = 30  # height of a lane; a dtype has its own third of it
ROWS = {"f64": 5, "f32": 8, "f16": 15, "bf16": 22}
BUDGET = 64.0  # percent of the width at which error equals budget
BEYOND = 97.0  # of failures without a finite number
LEAST, MOST = 1e-3, 1e4


def place(ratio: float) -> float:
    """Percent of the width for error over budget: exact at the left, then logarithmic, failures right of BUDGET."""
    if ratio <= 0:
        return 3.0
    if ratio <= 1:
        return BUDGET + (BUDGET - 10) * max(log10(ratio), log10(LEAST)) / -log10(LEAST)
    return BUDGET + (BEYOND - 5 - BUDGET) * min(log10(ratio) / log10(MOST), 1) if ratio < float("inf") else BEYOND


def error_against_budget(report: dict[str, Any]) -> str:
    """A lane per kind, a dot per case: how much of its error budget it used. Failing kinds first."""
    kinds = report["summary"]["kinds"]
    cases = grouped(report["cases"], "kind")
    worst = (report["summary"]["worst"] or {}).get("case")
    lanes = [
        _axis(
            ("exact", 3.0),
            ("0.01", place(0.01)),
            ("0.1", place(0.1)),
            ("budget", BUDGET),
            ("100×", place(100)),
            ("∞", BEYOND),
        )
    ]
    for kind in sorted(kinds, key=lambda kind: (not kinds[kind]["failed"], kind)):
        counts = kinds[kind]
        told = [f'<b class="{status}">{mark} {counts[what]}</b>' for what, status, mark in _COUNTS if counts[what]]
        ran = [case for case in cases[kind] if case["status"] != "skip"]
        marks = "".join(
            _mark(case, case["case"] == worst) for case in sorted(ran, key=lambda case: case["status"], reverse=True)
        )
        lanes.append(_lane(kind, _error_grid() + marks, " ".join(told)))
    return _figure(
        lanes,
        f"{report['op']} on {report['provider']}: error over budget of each case, by kind",
        "Each mark is a case: how far its worst result is from the exact answer, as a share of what is allowed "
        "(logarithmic). <b class='pass'>●</b> passed, <b class='fail'>✕</b> failed, ◯ the pass that came closest. In "
        "each lane float32 is above, float16 in the middle, bfloat16 below. At ∞: failures that no number measures.",
    )  # fmt: skip


_COUNTS = (("failed", "fail", "✗"), ("passed", "pass", "✓"), ("skipped", "skip", "–"))


def _mark(case: dict[str, Any], worst: bool) -> str:
    ratio, failed = float(case["ratio"]), case["status"] == "fail"
    x = place(ratio) if not failed or ratio > 1 else BEYOND
    y = ROWS.get(case["dtype"], 15)
    title = f"<title>{escape(case['case'])}: {escape(case['reason'] or 'passed')}, {_share(ratio)}</title>"
    if failed:
        return f'<svg x="{x:.1f}%" y="{y}" class="fail"><path d="M-3.5-3.5l7 7m0-7l-7 7"/>{title}</svg>'
    dot = f'<circle cx="{x:.1f}%" cy="{y}" r="3" class="pass">{title}</circle>'
    if not worst or not ratio:
        return dot
    label = f'<text x="{x:.1f}%" y="{y}" dx="9" dy="4" class="label">{number(ratio)}</text>'
    return f'{dot}<circle cx="{x:.1f}%" cy="{y}" r="6" class="worst"/>{label}'


def _share(ratio: float) -> str:
    return f"{times(ratio)} its budget" if ratio > 1 else f"{number(ratio)} of its budget"


def _error_grid() -> str:
    lines = "".join(f'<line x1="{place(at):.1f}%" x2="{place(at):.1f}%" y2="{LANE}"/>' for at in (0.01, 0.1, 100))
    return (
        f'<rect x="{BUDGET}%" width="{100 - BUDGET}%" height="{LANE}" class="over"/>{lines}'
        f'<line x1="{BUDGET}%" x2="{BUDGET}%" y2="{LANE}" class="limit"/>'
    )


def speed(reports: list[dict[str, Any]]) -> str:
    """A lane per provider, a dot per case: how many times the reference's speed it has."""
    lanes = [_axis(*((f"{at:g}×", _speed_place(at)) for at in (0.1, 1, 10, 100)))]
    for report, label in zip(reports, names(reports)):
        timed = list(_timed(report))
        if not timed:
            continue
        dots = "".join(
            f'<circle cx="{_speed_place(ratio):.1f}%" cy="{ROWS.get(case["dtype"], 15)}" r="3" class="time">'
            f"<title>{escape(case['case'])}: {times(ratio)} the reference's speed</title></circle>"
            for case, ratio in timed
        )
        middle = _speed_place(report["summary"]["times"]["speedup"])
        dots += f'<line x1="{middle:.1f}%" x2="{middle:.1f}%" y1="2" y2="{LANE - 2}" class="median"/>'
        lanes.append(_lane(label, _speed_grid() + dots, f"<b>{times(report['summary']['times']['speedup'])}</b>"))
    return _figure(
        lanes,
        "Speed relative to the reference, by provider",
        "Each dot is a case, the bar their median: its one call against the reference's one call (logarithmic; right "
        "of 1× is faster). Small cases measure overhead; <code>runner.py bench</code> measures layers.",
    )


def _timed(report: dict[str, Any]) -> Iterable[tuple[dict[str, Any], float]]:
    for case in report["cases"]:
        if case["provider_ms"] and case["reference_ms"]:
            yield case, case["reference_ms"] / case["provider_ms"]


def _speed_place(ratio: float) -> float:
    return 8 + 84 * min(max((log10(ratio) + 1.3) / 3.6, 0), 1)


def _speed_grid() -> str:
    lines = "".join(
        f'<line x1="{_speed_place(at):.1f}%" x2="{_speed_place(at):.1f}%" y2="{LANE}"/>' for at in (0.1, 10, 100)
    )
    one = f"{_speed_place(1):.1f}%"
    return f'{lines}<line x1="{one}" x2="{one}" y2="{LANE}" class="limit"/>'


def _lane(label: str, inside: str, counts: str) -> str:
    plot = f'<svg class="plot" width="100%" height="{LANE}" aria-hidden="true">{inside}</svg>'
    return (
        f'<div class="lane"><span class="kind">{escape(label)}</span>{plot}<span class="counts">{counts}</span></div>'
    )


def _axis(*ticks: tuple[str, float]) -> str:
    texts = "".join(f'<text x="{x:.1f}%" y="13">{text}</text>' for text, x in ticks)
    plot = f'<svg class="plot" width="100%" height="18" aria-hidden="true">{texts}</svg>'
    return f'<div class="lane axis"><span class="kind"></span>{plot}</div>'


def _figure(lanes: list[str], label: str, caption: str) -> str:
    return f'<figure aria-label="{escape(label)}">{"".join(lanes)}<figcaption>{caption}</figcaption></figure>'
