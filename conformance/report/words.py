"""How pages, summaries and comparisons put a report into words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import isfinite
from typing import Any

from conformance.compare import BEYOND_WORDS

REASONS = {
    "error_budget": "an element is farther from the exact answer than its budget allows",
    "row_error_budget": "a row as a whole is farther from the exact answer than its budget allows",
    "row_scale": "a row is too large or too small by a factor",
    "missing": "0 where there should be a value",
    "non_finite": "NaN or infinity where there should be none, or none where there should be",
    "unequal": "integers that must be equal are not",
    "wrong_id": "an expert that is not the one of that rank",
    "tie": "of equal experts the lower index must come first",
    "id_out_of_range": "an expert that does not exist",
    "id_repeated": "an expert twice in a row",
    "wrong_count": "another number of outputs than the reference has",
    "wrong_type": "an output is no tensor, or a tensor where there should be none",
    "wrong_layout": "an output whose memory does not hold its elements as they are: sparse, nested or negated",
    "wrong_shape": "an output of another shape",
    "wrong_dtype": "an output of another dtype",
    "wrong_device": "an output on another device",
    "wrong_strides": "an output that is not contiguous, where the reference's is",
    "aliases_input": "an output shares memory with an argument",
    "wrote_inputs": "an argument was changed that must not be",
    "rebound": "an argument is another tensor after the call: in other memory, of another shape",
    "wrote_outside": "memory beside an in-place argument was changed",
    "read_outside": "the result depends on memory beside the tensors",
    "unwritten": "an element of an output was never written",
    "reached": "the result depends on what must not matter",
    "changes": "the same call gives other bits another time",
    "order": "the result depends on an order that must not matter",
    "printed": "every call writes to stdout or stderr",
    "synchronises": "the call waits for the device",
    "raised": "the call raised",
    "not_refused": "a wrong call was not refused",
    "unavailable": "native code that does not load or build",
    "timeout": "the case did not end within its time limit",
    "crashed": "the process died",
    "poisoned_device": "the device was lost to the process",
    "not_run": "too many cases of the op had lost their process, or run to their time limit, before",
    "broken_case": "the case itself broke",
    "refused": "the provider declares that such a call is not for it",
    "not_offered": "the provider has nothing for this op here",
    "no_memory": "this machine has too little memory free",
    "not_installed": "what the case needs is not installed",
}
PASS, FAIL, NOTHING, PARTIAL = "pass", "fail", "nothing", "partial"
MARKS = {PASS: "✓", FAIL: "✗", NOTHING: "–", PARTIAL: "✓"}


def state(report: dict[str, Any]) -> str:
    """The verdict with what a page must tell apart: a pass of some of the listed cases only is partial."""
    verdict = report["summary"]["verdict"]
    if verdict != "pass":
        return FAIL if verdict == "fail" else NOTHING
    return PASS if report["coverage"]["run"] >= report["coverage"]["listed"] > 0 else PARTIAL


def total(report: dict[str, Any]) -> int:
    return sum(report["summary"][what] for what in ("passed", "failed", "skipped"))


def headline(report: dict[str, Any]) -> str:
    """The outcome in a few words, without mark."""
    summary, coverage = report["summary"], report["coverage"]
    what = state(report)
    if what == FAIL:
        return f"{summary['failed']} of {total(report)} failed"
    if what == NOTHING:
        return "nothing ran"
    if what == PARTIAL:
        return f"{summary['passed']} passed, a part of {coverage['listed']}"
    return f"{summary['passed']} passed" + (f", {summary['skipped']} skipped" if summary["skipped"] else "")


def detail(report: dict[str, Any]) -> str:
    """What one wants to know next: the kinds that fail, how close the rest came, how fast it is."""
    if state(report) == FAIL:
        kinds = [kind for kind, counts in report["summary"]["kinds"].items() if counts["failed"]]
        return ", ".join(kinds[:3]) + (f" and {len(kinds) - 3} more kinds" if len(kinds) > 3 else "")
    if state(report) == NOTHING:
        return next((case["message"] for case in report["cases"]), "")
    return " · ".join(part for part in (nearest(report), speed(report)) if part)


def nearest(report: dict[str, Any]) -> str:
    worst = report["summary"]["worst"]
    if not worst:
        return ""
    ratio = float(worst["ratio"])
    return f"error up to {number(ratio)} of budget" if ratio else "exact"


def farthest(report: dict[str, Any]) -> str:
    """Of the failures that a number measures, the worst; empty where none does."""
    ratios = [float(case["ratio"]) for case in report["cases"] if case["status"] == "fail"]
    beyond = [ratio for ratio in ratios if 1 < ratio < float("inf")]
    return f"up to {times(max(beyond))}" if beyond else ""


def speed(report: dict[str, Any]) -> str:
    speedup = report["summary"]["times"]["speedup"]
    return f"{times(speedup)} reference speed" if speedup else ""


def times(ratio: float) -> str:
    return "over 1e6×" if BEYOND_WORDS < ratio < float("inf") else f"{number(ratio)}×"


def number(value: float | str) -> str:
    """Two or three digits, as people write them."""
    value = float(value)
    if value == 0 or not isfinite(value):
        return {0.0: "0", float("inf"): "∞", float("-inf"): "−∞"}.get(value, "NaN")
    if abs(value) >= 1000:
        return f"{value:.3g}" if abs(value) >= 1e6 else f"{value:,.0f}"
    return f"{value:.2g}" if abs(value) < 10 else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def milliseconds(value: float) -> str:
    return f"{number(value)} ms" if value >= 1 else f"{number(1000 * value)} µs"


def sizes(case: dict[str, Any]) -> str:
    """The sizes of a case: "T=5, k=2, N=33"."""
    return ", ".join(f"{name}={value}" for name, value in case["sizes"].items()) or "as the op's example"


def breakable(text: str) -> str:
    """Text as HTML that may break after an underscore, so that a narrow column breaks names at their words."""
    return escape(text).replace("_", "_<wbr>")


def column(report: dict[str, Any]) -> tuple[str, str]:
    """What a report's column is: whose it is, and on what."""
    return report["provider"], report["device"]


def columns(reports: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """Every provider and device: native first, then by name."""
    return sorted(
        {column(report) for report in reports}, key=lambda one: (one[1], not one[0].startswith("native"), one)
    )


def names(reports: Sequence[dict[str, Any]]) -> list[str]:
    """What to call each report's column: the provider, and the device where there are several."""
    several = len({report["device"] for report in reports}) > 1
    return [" · ".join(column(report)) if several else report["provider"] for report in reports]


def ops(reports: Iterable[dict[str, Any]]) -> list[str]:
    return sorted({report["op"] for report in reports})


def tally(reports: Iterable[dict[str, Any]]) -> str:
    """How a provider's ops came out: "3 pass, 1 fails"."""
    states = [state(report) for report in reports]
    counts = [(states.count(one), one) for one in (PASS, PARTIAL, FAIL, NOTHING)]
    told = {
        PASS: lambda n: f"{n} pass{'es' * (n == 1)}",
        PARTIAL: lambda n: f"{n} pass{'es' * (n == 1)} in part",
        FAIL: lambda n: f"{n} fail{'s' * (n == 1)}",
        NOTHING: lambda n: f"{n} did not run",
    }
    return ", ".join(told[one](n) for n, one in counts if n)


def date(report: dict[str, Any]) -> str:
    return report["date"][:16].replace("T", " ")


def grouped(cases: Iterable[dict[str, Any]], key: str) -> dict[str, list[dict[str, Any]]]:
    """Cases by one of their fields, in order of appearance."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        groups.setdefault(case[key], []).append(case)
    return groups
