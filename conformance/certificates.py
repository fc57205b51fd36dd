"""Certificates, written: a full pass is kept as a proof for this build on this device, a failure as a warning.

A full pass: every case that the tables list for the op at that level was run, some that call the provider passed, and
none failed. What is known of a build stays until something at least as good is known: a failure replaces a pass, a pass
at the same or a higher level replaces a failure. A partial run proves nothing, yet what fails in it has failed.
Where a case itself broke, it was the suite or the machine: that is neither a pass nor a failure.
`shim/certificates.py` has the files' layout and reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conformance import report as reports
from conformance.case import LEVELS
from shim import certificates
from shim.loading import shown


def issue(results: Iterable[dict[str, Any]], folder: Path | None = None) -> list[str]:
    """Writes what the reports prove; one line per report says what came of it. Default folder: where serve looks.
    ReportError where one cannot be written."""
    folder = folder or certificates.folders()[0]
    return [_issue(report, folder) for report in results if report["provider"] != "reference"]


def obstacle(report: dict[str, Any]) -> str:
    """Why the report is no full pass; empty where it is one."""
    summary = report["summary"]
    if convictions(report):
        return f"{convictions(report)} cases failed"
    if summary["failed"]:
        return f"{summary['failed']} cases broke: a fault of the suite or of this machine, which proves nothing"
    if summary["verdict"] == "nothing ran":
        return "nothing ran"
    return unrun(report) or ("" if report["build"] else "its code cannot be identified")


def convictions(report: dict[str, Any]) -> int:
    """How many cases the provider fails. Where a case itself broke, as on a full disk, nothing is known of it."""
    return sum(case["status"] == "fail" and case["reason"] != "broken_case" for case in report["cases"])


def unrun(report: dict[str, Any]) -> str:
    """Words for a report that lacks cases which were to be run: a pass of the others proves nothing; empty for none."""
    run, listed = report["coverage"]["run"], report["coverage"]["listed"]
    return f"only {run} of {listed} cases were run" if run < listed or not listed else ""


def _issue(report: dict[str, Any], folder: Path) -> str:
    provider = report["provider"].removesuffix(":precompiled").removesuffix(":jit")
    what = f"{report['op']} {provider}"
    reason = obstacle(report)
    if not report["build"] or (reason and not convictions(report)):
        return f"{what}: no certificate, as {reason}"
    device = report["environment"]["device"]
    path = certificates.path(folder, device["fingerprint"], report["op"], provider, report["build"]["identity"])
    new = {
        "schema": certificates.SCHEMA, "op": report["op"], "provider": provider,
        "verdict": "fail" if reason else "pass", "device": device, "build": report["build"],
        "reference": report["reference"], "level": report["level"], "suite": report["environment"]["suite"],
        "seed": report["seed"], "date": report["date"],
        "cases": {name: report["summary"][name] for name in ("passed", "failed", "skipped")},
        "report": reports.digest(report),
    }  # fmt: skip
    if _replaces(new, _old(path)):
        reports.need_folder(path.parent)
        reports.replace(path, new)
        return f"{what}: {f'not certified, as {reason}' if reason else 'certified'} ({shown(path)})"
    return f"{what}: the certificate stays as it was ({shown(path)})"


def _old(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def _replaces(new: dict[str, Any], old: Any) -> bool:
    """Whether the new record is worth more than the old one."""
    same = ("schema", "build", "reference", "suite")
    if not isinstance(old, dict) or any(old.get(name) != new[name] for name in same) or new["verdict"] == "fail":
        return True
    return LEVELS.index(new["level"]) >= (LEVELS.index(old["level"]) if old.get("level") in LEVELS else 0)
