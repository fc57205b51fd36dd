"""A run's reports as text for the author of a kernel: what failed, on which input, and how close the rest came."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from textwrap import indent
from typing import Any

from conformance.compare import of_budget, short
from shim.loading import shown

SHOWN = 3  # failures told in full, per kind


def text(reports: list[dict[str, Any]]) -> str:
    """One paragraph per report; of a full pass one line."""
    lines = []
    width = max((len(report["op"]) for report in reports), default=0)
    for report in reports:
        summary = report["summary"]
        counts = ", ".join(f"{summary[what]} {what}" for what in ("passed", "failed", "skipped") if summary[what])
        run, listed = report["coverage"]["run"], report["coverage"]["listed"]
        counts += f" (of {listed} cases)" if run < listed else ""
        if summary["verdict"] == "nothing ran" and summary["passed"]:
            counts += "; what passed are wrong calls, which no provider sees"
        where = f"{report['op']:{width}}  {report['provider']}  {report['device']}"
        lines.append(f"{summary['verdict'].upper():4}  {where}  {counts}{_worst(report['cases'])}")
        if summary["verdict"] != "pass":
            lines += _kinds(summary["kinds"])
        lines += _failures(report["cases"])
        lines += _skips(report["cases"])
    return "\n".join(lines)


def _worst(cases: list[dict[str, Any]]) -> str:
    """The largest error over its budget, of all cases that have one as a number."""
    ratios = [float(case["ratio"]) for case in cases if case["status"] != "skip"]
    finite = [ratio for ratio in ratios if isfinite(ratio)]
    which = "worst" if len(finite) == len(ratios) else "worst finite"
    return f"; {which} error {of_budget(max(finite))}" if any(finite) else ""


def _kinds(kinds: dict[str, dict[str, Any]]) -> list[str]:
    width = max(map(len, kinds))
    lines = [f"      {'kind':{width}}  passed  failed  skipped  worst error/budget"]
    for kind, counts in kinds.items():
        row = f"{counts['passed']:6}  {counts['failed']:6}  {counts['skipped']:7}  {short(float(counts['worst']))}"
        lines.append(f"      {kind:{width}}  {row}")
    return lines


def _failures(cases: list[dict[str, Any]]) -> list[str]:
    lines = []
    failed = [case for case in cases if case["status"] == "fail"]
    for kind in dict.fromkeys(case["kind"] for case in failed):
        same = [case for case in failed if case["kind"] == kind]
        for case in same[:SHOWN]:
            lines.append(f"  {case['case']}  (seed {case['seed']})")
            lines.append(indent(f"{case['reason']}: {case['message']}", 6 * " "))
            lines += [f"        {name}: {value}" for name, value in case["arguments"].items()]
            if case["replay"]:
                lines.append(f"      replay: python runner.py replay {shown(Path(case['replay']))}")
        if len(same) > SHOWN:
            lines.append(f"  ... and {len(same) - SHOWN} more of kind {kind}")
    return lines


def _skips(cases: list[dict[str, Any]]) -> list[str]:
    reasons: dict[str, int] = {}
    for case in cases:
        if case["status"] == "skip":
            reason = f"{case['reason']}: {case['message']}"
            reasons[reason] = reasons.get(reason, 0) + 1
    return [f"      {count} skipped, {reason}" for reason, count in reasons.items()]
