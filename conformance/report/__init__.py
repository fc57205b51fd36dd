"""Reports: what a run found, as JSON for programs and as text for people.

One file per op, provider and device, `<op>.<provider>.<device>.json`, and `index.json` beside them. A folder holds the
runs of many providers: a later run joins it, and replaces the report of its own op, provider and device. Schema 3:

    report   schema, op, about (the first line of its contract), provider, device, level, seed, build, reference, date,
             environment, coverage, summary, cases
    build    identity, and what it was made from: {source, flags, compiler, arch} or {file, version}; {} where unknown
    reference  identity of the file that defines the op
    environment  suite, opshim, torch, python, system, threads, device (shim.device: type, name, facts, fingerprint);
             of a report also judge (the device of references and comparison) and triton (where it may run: version, how
             its tuner is used)
    coverage {listed, run}: cases that the tables have for the op at the level, and how many of them were run
    summary  passed, failed, skipped, verdict ("pass": all that ran passed, a call of the provider among it; "fail";
             "nothing ran"),
             worst {case, ratio} of the passed cases, kinds {kind: {passed, failed, skipped, worst}},
             errors {median, p90, p99} of error over budget in the passed cases,
             times {cases, provider_ms, reference_ms, speedup (median)} of the cases that ran on both
    case     case (its name), kind, sizes, dtype, level, seed, status ("pass", "fail", "skip"), reason, message, ratio,
             findings [...], arguments {name: text} of a failure, provider_ms, reference_ms, seconds (that the whole case took),
             replay (file, "" without)
    reason   of a failure: error_budget, row_error_budget, missing, non_finite, unequal, or a comparison's own;
             wrong_count, wrong_type, wrong_layout, wrong_shape, wrong_dtype, wrong_device, wrong_strides,
             aliases_input, wrote_inputs, rebound, wrote_outside, read_outside, unwritten, reached, changes, order,
             printed, synchronises (properties), raised, not_refused, unavailable, timeout, crashed, poisoned_device, not_run, broken_case.
             Of a skip: refused, not_offered, no_memory, not_installed
    finding  output, kind ("" when right), ratio (error over budget), error, budget, ulp, at [...], actual, exact, text,
             row_error, worst_ulp, worst_at [...] (compare.Finding)
    index    schema, date, environment, reports [{op, provider, device, level, date, file, summary}]

`merged` is one document: the index with whole reports in `reports`. Numbers that JSON lacks are "inf", "-inf", "nan".
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shim
from conformance import SUITE, run
from conformance.accelerator import first_configurations
from shim import certificates
from shim import device as devices

SCHEMA = 3
_OF_REPORT = ("op", "provider", "device", "build")
_OF_INDEX = ("op", "provider", "device", "level", "date", "summary")


class ReportError(shim.OpshimError):
    """A folder that holds no report, or one that this version does not read; a place where none can be written."""


def build(results: Iterable[dict[str, Any]], level: str, seed: int) -> list[dict[str, Any]]:
    """One report per op, provider and device, from the results of all workers, whatever their order."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for result in sorted(results, key=lambda result: result["case"]):
        groups.setdefault((result["op"], result["provider"], result["device"]), []).append(result)
    reports = []
    for (op, provider, device), cases in groups.items():
        reports.append(
            {
                "schema": SCHEMA, "op": op, **_of_op(op), "provider": provider, "device": device, "level": level,
                "seed": seed, "build": next((case["build"] for case in cases if case["build"]), {}),
                "date": _now(), "environment": environment(device) | _judgement(device),
                "coverage": _coverage(op, level, device, cases),
                "summary": summary(cases, _refused_by_all(op)),
                "cases": [{k: v for k, v in case.items() if k not in _OF_REPORT} for case in cases],
            }
        )  # fmt: skip
    return reports


def summary(cases: list[dict[str, Any]], uncalled: Container[str] = ()) -> dict[str, Any]:
    """Counts over all cases and per kind, the verdict, and the passed case that came closest to its budget.

    uncalled: the cases that no provider is called in: what passes there proves nothing of it.
    """
    kinds = {kind: _counts([case for case in cases if case["kind"] == kind]) for kind in _kinds(cases)}
    counts = _counts(cases)
    called = any(case["status"] == "pass" and case["case"] not in uncalled for case in cases)
    verdict = "fail" if counts["failed"] else "pass" if called else "nothing ran"
    worst = max((case for case in cases if case["status"] == "pass"), key=lambda case: case["ratio"], default=None)
    return {
        **counts,
        "verdict": verdict,
        "worst": worst and {"case": worst["case"], "ratio": worst["ratio"]},
        "kinds": kinds,
        "errors": _errors(cases),
        "times": _times(cases),
    }


def environment(device: str = "cpu") -> dict[str, Any]:
    """Where a run took place."""
    try:
        opshim = version("opshim")
    except PackageNotFoundError:
        opshim = "not installed"
    return {
        "suite": SUITE,
        "opshim": opshim,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "threads": torch.get_num_threads(),
        "device": devices.describe(device).as_dict(),
    }


def _judgement(device: str) -> dict[str, str]:
    """How the suite went about it; a bench's environment has none of this, as it lets Triton tune."""
    triton = first_configurations() if device == "cuda" else ""
    return {"judge": run.judge_device or device, "triton": triton}


def write(folder: Path, reports: list[dict[str, Any]]) -> Path:
    """Writes the reports and their index, which keeps what other runs wrote there, also those that write at the same
    time; returns the index's path. An index of another schema is started anew."""
    need_folder(folder)
    with _locked(folder):
        try:
            entries = {entry["file"]: entry for entry in _load(folder / "index.json")["reports"]}
        except ReportError:
            entries = {}
        for report in reports:
            name = f"{report['op']}.{report['provider'].replace(':', '-')}.{report['device']}.json"
            replace(folder / name, report)
            entries[name] = {key: report[key] for key in _OF_INDEX} | {"file": name}
        replace(folder / "index.json", _document([entries[name] for name in sorted(entries)]))
    return folder / "index.json"


def read(place: Path) -> list[dict[str, Any]]:
    """The reports that `write` left in a folder, or those in a file of its own; ReportError where there are none."""
    place = _folder_of(place)
    if place.is_file():
        document = _load(place)
        return document.get("reports", [document])
    return [_load(place / entry["file"]) for entry in _load(place / "index.json")["reports"]]


def _folder_of(place: Path) -> Path:
    """The folder of an index that `write` left, whose path `conform` prints; any other place itself."""
    if place.name != "index.json" or not place.is_file():
        return place
    return place.parent if all("file" in entry for entry in _load(place).get("reports", [{}])) else place


@contextmanager
def whole(*places: str | Path) -> Iterator[None]:
    """ReportError where something is lacking in the reports of these places that whoever reads them needs."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        where, what = " or ".join(map(str, places)), f"{type(error).__name__}: {error}"
        raise ReportError(f"{where} is no report of the conformance suite, or damaged ({what})") from error


def pages(place: Path) -> Path:
    """The folder for what is drawn of a folder of reports: itself; of a file: one beside it, <its name>-report."""
    place = _folder_of(place)
    folder = place.with_name(f"{place.stem}-report") if place.is_file() else place
    need_folder(folder)
    return folder


def need_folder(folder: str | Path) -> None:
    """Makes the folder; ReportError where nothing can be written into it. Said before a run, not after it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"folder {folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ReportError(f"folder {folder} is not to be written to")


def need_file(file: str | Path) -> None:
    """The same for a file, whose folder must be there."""
    folder = Path(file).absolute().parent
    if not folder.is_dir():
        raise ReportError(f"{file} cannot be written: folder {folder} does not exist")
    if Path(file).is_dir() or not os.access(folder, os.W_OK):
        raise ReportError(f"{file} cannot be written: it is a folder, or in one that is not to be written to")


def digest(report: dict[str, Any]) -> str:
    """SHA-256 of a report's content."""
    return sha256(json.dumps(finite(report), sort_keys=True).encode()).hexdigest()


def merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """All reports of a run as one document."""
    return _document(reports)


def save(path: Path, document: dict[str, Any]) -> None:
    save_text(path, _text(document))


def save_text(path: Path, text: str) -> None:
    with _writing(path):
        path.write_text(text)


def replace(path: Path, document: dict[str, Any]) -> None:
    """As `save`, but who reads meanwhile sees the whole old file or the whole new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with _writing(path):
        try:
            draft.write_text(_text(document))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)  # where it was cut short


def written(command: str, place: str | Path | None, write: Callable[[Path], Any]) -> bool:
    """Whether a command could write at the place that was asked for, if one was. What it found out has been printed
    before, and so is why it is not written."""
    try:
        if place:
            write(Path(place))
    except shim.OpshimError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return False
    return True


def _text(document: dict[str, Any]) -> str:
    return json.dumps(finite(document), indent=1, allow_nan=False) + "\n"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """ReportError where the file cannot be written, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}") from None


def finite(value: Any) -> Any:
    """The value with infinities and NaN as text."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Other runs that write into the folder wait."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _load(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        schema = document["schema"]
    except FileNotFoundError:
        folder = path.parent
        what = f"holds no report: no {path.name} in it" if folder.is_dir() else "does not exist"
        raise ReportError(f"folder {folder} {what}") from None
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ReportError(f"{path} is no report of the conformance suite") from None
    if schema != SCHEMA:
        raise ReportError(f"{path} is of schema {schema}, this version reads {SCHEMA}: run the suite again")
    return document


def _document(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"schema": SCHEMA, "date": _now(), "environment": environment(), "reports": entries}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _of_op(name: str) -> dict[str, str]:
    if name not in shim.names():
        return {"about": "", "reference": ""}
    reference = shim.get(name).reference
    about = (reference.__doc__ or "").strip().partition("\n")[0]
    return {"about": about, "reference": certificates.python_build(reference).get("identity", "")}


def _refused_by_all(op: str) -> set[str]:
    """The cases of wrong calls, which the op refuses before any provider sees them."""
    from conformance.cases import all_cases  # as in _coverage

    return {case.id for case in all_cases() if case.op == op and case.raises}


def _coverage(op: str, level: str, device: str, cases: list[dict[str, Any]]) -> dict[str, int]:
    from conformance.case import at_level
    from conformance.cases import all_cases  # all tables: only a run needs them, reading its report does not

    listed = {case.id for case in at_level(all_cases(), level, device) if case.op == op}
    return {"listed": len(listed), "run": len(listed & {case["case"] for case in cases})}


def _errors(cases: list[dict[str, Any]]) -> dict[str, float]:
    ratios = sorted(case["ratio"] for case in cases if case["status"] == "pass")
    return {
        name: ratios[min(int(share * len(ratios)), len(ratios) - 1)] if ratios else 0.0
        for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99))
    }


def _times(cases: list[dict[str, Any]]) -> dict[str, Any]:
    timed = [(case["provider_ms"], case["reference_ms"]) for case in cases]
    timed = [(mine, reference) for mine, reference in timed if mine and reference]
    return {
        "cases": len(timed),
        "provider_ms": sum(mine for mine, _ in timed),
        "reference_ms": sum(reference for _, reference in timed),
        "speedup": median(reference / mine for mine, reference in timed) if timed else None,
    }


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
