"""Failures as files, and `runner.py replay`. Every failed case has one; a JSON object:

    replay   version of this layout
    suite    of the suite that wrote it: another suite's cases may be others
    op, case, provider, device, seed (base of the run), provider_files
    problem  of a search, the smallest that failed (fields of `Problem`), or the one whose call never ended; else null
    reason, message, call   of a failure; call: Python that tries the problem
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import shim
from conformance import SUITE, workers
from conformance.case import Case
from conformance.run import Result, Target, told
from conformance.run import run as run_case
from conformance.search.problem import Problem
from shim.device import DEVICES

LAYOUT = 1
PASS, FAIL, USAGE = 0, 1, 2


class ReplayError(shim.OpshimError):
    """A file that is no replay file, or that this suite cannot replay."""


@dataclass
class Run:
    """What this process's run tells its replay files; folder None: none are written."""

    folder: Path | None = None
    seed: int = 0
    provider_files: Sequence[str] = ()


run = Run()


def place(case: Case, target: Target) -> Path:
    return run.folder / f"{case.id}.{target.provider.replace(':', '-')}.{target.device}.json"


def keep(case: Case, target: Target, problem: Problem | None = None, result: Result | None = None) -> str:
    """Writes the case's replay file; gives its path, or "" where the run keeps none. OSError where it cannot be
    written: then there is none, rather than one cut short."""
    if run.folder is None:
        return ""
    files = list(run.provider_files)
    document = {
        "replay": LAYOUT, "suite": SUITE, "op": case.op, "case": case.id, "provider": target.provider,
        "device": target.device, "seed": run.seed, "provider_files": files,
        "problem": asdict(problem) if problem else None,
        "reason": result.reason if result else "", "message": result.message if result else "",
        "call": problem.call(target.provider, target.device, files) if problem else "",
    }  # fmt: skip
    path = place(case, target)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.write_text(json.dumps(document, indent=1) + "\n")
    except OSError:
        forget(case, target)
        raise
    return str(path)


def forget(case: Case, target: Target) -> None:
    """Removes what was kept of a case that passed after all."""
    if run.folder is not None:
        with suppress(OSError):
            place(case, target).unlink()


def read(path: Path) -> dict[str, Any]:
    """What `keep` wrote; ReplayError for anything else."""
    try:
        document = json.loads(path.read_text())
        layout, suite = document["replay"], document["suite"]
    except OSError as error:
        raise ReplayError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ReplayError(f"{path} is no replay file of the conformance suite") from None
    for what, written, here in (("layout", layout, LAYOUT), ("suite", suite, SUITE)):
        if written != here:
            raise ReplayError(f"{path} is of {what} version {written}, this is {here}: run the suite again")
    missing = {"op", "case", "provider", "device", "seed", "provider_files", "problem"} - document.keys()
    if missing:
        raise ReplayError(f"{path} is no replay file of the conformance suite: no {', '.join(sorted(missing))} in it")
    kinds = {"op": str, "case": str, "provider": str, "device": str, "seed": int, "provider_files": list}
    for name, kind in kinds.items():
        value = document[name]
        if not isinstance(value, kind) or (kind is list and not all(isinstance(one, str) for one in value)):
            raise ReplayError(f"{path} is no replay file of the conformance suite: its {name} is {value!r}")
    return document


def case_of(document: dict[str, Any], path: Path) -> Case:
    """The case to run: the problem that a search ended with, or one of the tables."""
    from conformance.cases import all_cases  # the searches are among them

    if document["problem"]:
        with _problem_in(path):
            problem = Problem(**document["problem"])
            case = problem.case()
            shim.get(case.op)
            case.seed()

        def make(generator, device, dtype, /, **sizes):  # only here, as it may take long
            with _problem_in(path):
                return problem.arguments(device)

        return replace(case, make=make)
    for case in all_cases():
        if case.id == document["case"]:
            return case
    raise ReplayError(f"{path} names a case that this suite does not have: {document['case']}")


@contextmanager
def _problem_in(path: Path) -> Iterator[None]:
    """ReplayError for whatever comes of sizes, values or layouts that are none; not where memory is all that lacks."""
    try:
        yield
    except Exception as error:
        if _lacks_memory(error):
            raise
        why = f"its problem is none ({type(error).__name__}: {error})".partition("\n")[0]
        raise ReplayError(f"{path} is no replay file of the conformance suite: {why}") from None


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)


def _verdict(case: Case, target: Target, seed: int) -> Result:
    """Also where time or memory does not suffice."""
    result = Result.of(case, target.provider, target.device, seed)
    try:
        with workers.time_limit(workers.SECONDS["quick"]):
            return run_case(case, target, seed)
    except workers.TimeLimit as error:
        return result.failed("timeout", str(error))
    except Exception as error:
        if _lacks_memory(error):
            return result.skipped("no_memory", told(error))
        raise


def replay(file: str, provider: str | None = None, provider_files: Sequence[str] = (), device: str | None = None) -> int:
    """Runs a stored failure again, on its own provider and device or on others, and prints the verdict.

    0: it passes, 1: it fails or nothing was run, 2: wrong usage.
    """
    from conformance.selection import Selection, target_of

    try:
        document = read(Path(file))
        case = case_of(document, Path(file))
        own = document["provider_files"] if provider in (None, document["provider"]) else ()
        files = list(provider_files or own)  # given ones in the place of those that it failed with: mended, or moved
        provider, device = provider or document["provider"], device or document["device"]
        if device not in DEVICES:  # one, where a run may be on all
            raise shim.UnknownNameError("device", device, DEVICES)
        Selection.make([case.op], provider, files, device)
        run.seed, run.provider_files = document["seed"], files
        result = _verdict(case, target_of(case.op, provider, device), document["seed"])
    except shim.OpshimError as error:
        print(f"replay: {error}", file=sys.stderr)
        return USAGE
    print(result)
    return PASS if result.status == "pass" else FAIL
