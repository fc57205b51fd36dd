"""The parts of an op's page that are text and tables: failures, skips, times, environments."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median
from typing import Any

from conformance.report import charts, words
from conformance.report.words import grouped

Report = dict[str, Any]
SHOWN = 2  # failures of a kind that stand open


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), name: str = "") -> str:
    """Cells are HTML; columns in `numbers` are set right. It scrolls by itself where it is too wide."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{' class=number' * (at in numbers)}>{cell}</{tag}>" for at, cell in enumerate(cells))

    top = f"<thead><tr>{line(head, 'th')}</tr></thead>"
    body = "".join(f"<tr>{line(cells, 'td')}</tr>" for cells in rows)
    return f'<div class="scroll"><table class="{name}">{top}<tbody>{body}</tbody></table></div>'


def failures(report: Report) -> str:
    """Kind by kind: which sizes and dtypes fail, then each failure with its input in words."""
    failed = grouped((case for case in report["cases"] if case["status"] == "fail"), "kind")
    if not failed:
        return ""
    every = grouped(report["cases"], "kind")
    return "<h3>Failures</h3>" + "".join(
        _failing_kind(kind, cases, every[kind], report) for kind, cases in failed.items()
    )


def _failing_kind(kind: str, failed: Sequence[dict], every: Sequence[dict], report: Report) -> str:
    told = [_failure(case, report) for case in failed]
    more = ""
    if told[SHOWN:]:
        rest = "".join(told[SHOWN:])
        more = f"<details><summary>{len(told) - SHOWN} more of kind {escape(kind)}</summary>{rest}</details>"
    return f"<h4>{escape(kind)}: {len(failed)} of {len(every)} failed</h4>{_grid(every)}{''.join(told[:SHOWN])}{more}"


def _grid(cases: Sequence[dict]) -> str:
    """Sizes x dtypes of a kind, where there is more than one."""
    if len(cases) < 2:
        return ""
    dtypes = list(dict.fromkeys(case["dtype"] for case in cases))
    rows: dict[str, dict[str, dict]] = {}
    for case in cases:
        rows.setdefault(words.sizes(case), {})[case["dtype"]] = case
    cells = [[escape(size), *(_outcome(row.get(dtype)) for dtype in dtypes)] for size, row in rows.items()]
    grid = table(["sizes", *map(escape, dtypes)], cells, name="grid")
    return grid if len(rows) <= 8 else f"<details><summary>all {len(rows)} sizes</summary>{grid}</details>"


def _outcome(case: dict | None) -> str:
    if case is None or case["status"] == "skip":
        return '<span class="skip">–</span>'
    ratio = float(case["ratio"])
    if case["status"] == "pass":
        return f'<span class="pass">✓ {words.number(ratio) if ratio else "exact"}</span>'
    return f'<b class="fail">✗ {words.times(ratio) if 1 < ratio < float("inf") else escape(case["reason"])}</b>'


def _failure(case: dict, report: Report) -> str:
    inputs = "".join(
        f'<dt class="mono">{escape(name)}</dt><dd class="mono">{escape(told)}</dd>'
        for name, told in case["arguments"].items()
    )
    meaning = words.REASONS.get(case["reason"], "")
    return f"""<article class="failure"><h4><code>{escape(case["case"])}</code></h4>
<p><b class="fail">{escape(case["reason"])}</b>{f": {meaning}" if meaning else ""}</p>
<p class="mono">{escape(case["message"])}</p>
<dl>{inputs}</dl>
<p><small>run it again: <code>{escape(_again(case, report))}</code></small></p></article>
"""


def _again(case: dict, report: Report) -> str:
    if case.get("replay"):
        return f"python runner.py replay {case['replay']}"
    file = f" --provider-file {report['build']['file']}" if "file" in report["build"] else ""
    seed = f" --seed {report['seed']}" if report["seed"] else ""
    which = f"'conformance/test_cases.py::test_case[{report['device']}-{case['case']}]'"
    options = " ".join(f"--{name} {report[name]}" for name in ("device", "level", "provider"))
    return f"pytest {which} {options}{file}{seed}"


def skips(report: Report) -> str:
    """What was not run, by reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for case in report["cases"]:
        if case["status"] == "skip":
            reasons.setdefault((case["reason"], case["message"]), []).append(case["kind"])
    if not reasons:
        return ""
    rows = [
        [
            str(len(kinds)),
            f"{escape(message)}<br><small>{escape(words.REASONS.get(reason, reason))}</small>",
            escape(", ".join(dict.fromkeys(kinds))),
        ]
        for (reason, message), kinds in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    return f"<h3>Skipped</h3>{table(['cases', 'reason', 'kinds'], rows, numbers=[0])}"


def measured(reports: Sequence[Report]) -> str:
    """Times of the cases: against the reference, and of each provider against each other on the cases both ran."""
    timed = [report for report in reports if report["summary"]["times"]["cases"]]
    if not timed:
        return '<p class="soft">No case ran on both a provider and the reference.</p>'
    names = words.names(timed)
    mine = [{case["case"]: case["provider_ms"] for case in report["cases"] if case["provider_ms"]} for report in timed]
    rows = []
    for at, report in enumerate(timed):
        times = report["summary"]["times"]
        against = [_against(mine[at], other) if other is not mine[at] else "" for other in mine]
        cells = [str(times["cases"]), words.milliseconds(median(mine[at].values())), words.times(times["speedup"])]
        rows.append([words.breakable(names[at]), *cells, *(against if len(timed) > 1 else [])])
    others = [f"× {words.breakable(name)}" for name in names] if len(timed) > 1 else []
    head = ["provider", "cases", "median call", "× reference", *others]
    return charts.speed(timed) + table(head, rows, numbers=range(1, len(head)))


def _against(mine: dict[str, float], other: dict[str, float]) -> str:
    both = [other[case] / mine[case] for case in mine if case in other]
    return words.times(median(both)) if both else '<span class="soft">no case in common</span>'


def environments(reports: Sequence[Report]) -> str:
    """Each distinct environment, and which providers ran in it."""
    distinct: dict[str, tuple[dict, list[str]]] = {}
    for report in reports:
        environment = report["environment"]
        _, who = distinct.setdefault(repr(environment), (environment, []))
        who.append(report["provider"])
    return "".join(
        _environment(environment, sorted(set(who)), len(distinct) > 1) for environment, who in distinct.values()
    )


def _environment(environment: dict, who: Sequence[str], several: bool) -> str:
    device = environment["device"]
    facts = {"providers": ", ".join(who)} if several else {}
    facts |= {"device": f"{device['name']} ({device['type']})", "fingerprint": device["fingerprint"]}
    facts |= {name.replace("_", " "): str(value) for name, value in device["facts"].items()}
    facts |= {name: str(environment[name]) for name in ("opshim", "suite", "torch", "python", "system", "threads")}
    facts |= {name: environment[name] for name in ("judge", "triton") if environment.get(name)}
    return f'<dl class="facts">{"".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())}</dl>'
