"""Reports: what a run found, as JSON for programs and as text for people.

One file per op, provider and device, `<op>.<provider>.<device>.json`, and `index.json` beside them. Schema 1:

    report   schema, op, provider, device, level, seed, build, date, environment, summary, cases
    build    identity of the native library, "" where there is none
    environment  opshim, torch, python, device (shim.device: type, name, facts, fingerprint)
    summary  passed, failed, skipped, verdict ("pass": all that ran passed and something ran; "fail"; "nothing ran"),
             worst {case, ratio} of the passed cases, kinds {kind: {passed, failed, skipped, worst}}
    case     case (its name), kind, sizes, dtype, level, seed, status ("pass", "fail", "skip"), reason, message, ratio,
             findings [...], arguments {name: text} of a failure, provider_ms, reference_ms
    reason   of a failure: error_budget, row_error_budget, missing, non_finite, unequal, or a comparison's own;
             wrong_count, wrong_type, wrong_shape, wrong_dtype, wrong_device, aliases_input, wrote_inputs,
             wrote_outside, raised, not_refused, unavailable, crashed, broken_case. Of a skip: refused, not_offered
    finding  output, kind ("" when right), ratio (error over budget), error, budget, ulp, at [...], actual, exact, text
    index    schema, date, environment, reports [{op, provider, device, level, file, summary}]

`merged` is one document: the index with whole reports in `reports`. Numbers that JSON lacks are "inf", "-inf", "nan".
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from shim import device as devices

SCHEMA = 1
_OF_REPORT = ("op", "provider", "device", "build")


def build(results: Iterable[dict[str, Any]], level: str, seed: int) -> list[dict[str, Any]]:
    """One report per op, provider and device, from the results of all workers, whatever their order."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for result in sorted(results, key=lambda result: result["case"]):
        groups.setdefault((result["op"], result["provider"], result["device"]), []).append(result)
    reports = []
    for (op, provider, device), cases in groups.items():
        reports.append(
            {
                "schema": SCHEMA, "op": op, "provider": provider, "device": device, "level": level, "seed": seed,
                "build": next((case["build"] for case in cases if case["build"]), ""),
                "date": datetime.now(UTC).isoformat(timespec="seconds"), "environment": environment(device),
                "summary": summary(cases),
                "cases": [{k: v for k, v in case.items() if k not in _OF_REPORT} for case in cases],
            }
        )  # fmt: skip
    return reports


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all cases and per kind, the verdict, and the passed case that came closest to its budget."""
    kinds = {kind: _counts([case for case in cases if case["kind"] == kind]) for kind in _kinds(cases)}
    counts = _counts(cases)
    verdict = "fail" if counts["failed"] else "pass" if counts["passed"] else "nothing ran"
    worst = max((case for case in cases if case["status"] == "pass"), key=lambda case: case["ratio"], default=None)
    return {
        **counts,
        "verdict": verdict,
        "worst": worst and {"case": worst["case"], "ratio": worst["ratio"]},
        "kinds": kinds,
    }


def environment(device: str = "cpu") -> dict[str, Any]:
    """Where a run took place."""
    try:
        opshim = version("opshim")
    except PackageNotFoundError:
        opshim = "not installed"
    here = devices.describe(device).as_dict()
    return {"opshim": opshim, "torch": torch.__version__, "python": platform.python_version(), "device": here}


def write(folder: Path, reports: list[dict[str, Any]]) -> Path:
    """Writes the reports and their index; returns the index's path."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for report in reports:
        name = f"{report['op']}.{report['provider'].replace(':', '-')}.{report['device']}.json"
        save(folder / name, report)
        entries.append({key: report[key] for key in ("op", "provider", "device", "level", "summary")} | {"file": name})
    save(folder / "index.json", _document(entries))
    return folder / "index.json"


def read(folder: Path) -> list[dict[str, Any]]:
    """The reports that `write` left in a folder."""
    index = json.loads((folder / "index.json").read_text())
    return [json.loads((folder / entry["file"]).read_text()) for entry in index["reports"]]


def merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """All reports of a run as one document."""
    return _document(reports)


def save(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(finite(document), indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The value with infinities and NaN as text."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _document(entries: list[dict[str, Any]]) -> dict[str, Any]:
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"schema": SCHEMA, "date": date, "environment": environment(), "reports": entries}


def _kinds(cases: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(case["kind"] for case in cases))


def _counts(cases: list[dict[str, Any]]) -> dict[str, Any]:
    status = [case["status"] for case in cases]
    worst = max((case["ratio"] for case in cases if case["status"] != "skip"), default=0.0)
    return {
        "passed": status.count("pass"),
        "failed": status.count("fail"),
        "skipped": status.count("skip"),
        "worst": worst,
    }
