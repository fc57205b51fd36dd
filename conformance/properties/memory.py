"""Rules 2 to 4: what a call writes, what it reads, and what of that may show in its results."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.case import Case
from conformance.compare import Finding
from conformance.memory import WRONG, Watch
from conformance.properties.guards import Bands, Guarded
from conformance.properties.roles import Arguments, Results, Roles, floats
from conformance.properties.trial import Trial, all_same, case, clones, differences, same

NAN_BYTES, NUMBER_BYTES = 0xFF, 0x5A  # NaN and -1; 200 in float16, 1.5e16 in bfloat16 and float32


def cases(roles: Roles) -> list[Case]:
    def each(kind, check, dtypes=roles.dtypes):
        return [case(roles, kind, check, sizes, dtype) for sizes in roles.sizes for dtype in dtypes]

    made = [*each("canary", canary), *each("unwritten", unwritten), *each("inputs_unchanged", inputs_unchanged)]
    if roles.irrelevant:
        made += each("nan_irrelevant", lambda trial: nan_irrelevant(trial, roles))
    if any(floats(made[0].arguments("cpu", 0))):
        made += each("nan_relevant", lambda trial: nan_relevant(trial, roles))
    return made


def canary(trial: Trial) -> list[Finding]:
    """Nothing beside the tensors is written, and nothing beside them shows in the results."""
    results = []
    for byte in (NAN_BYTES, NUMBER_BYTES):
        bands = Bands(byte)
        arguments = bands.arguments(trial.fresh())
        with Guarded(bands, filling=0):
            results.append(clones(trial.call(arguments)))
        if bands.touched():
            where = " and ".join(dict.fromkeys(bands.touched()))
            return [Finding(where, "wrote_outside", WRONG, text="the memory beside it was written to")]
    return differences(*results, "read_outside", "depends on what lies beside the tensors")


def unwritten(trial: Trial) -> list[Finding]:
    """Every element of the outputs is written: no result depends on what fresh memory holds."""
    results = []
    for byte in (NAN_BYTES, NUMBER_BYTES, 0):
        with Guarded(Bands(byte), filling=byte):
            results.append(clones(trial.call(trial.fresh())))
    text = "depends on what uninitialised memory holds"
    return [one for other in results[1:] for one in differences(other, results[0], "unwritten", text)]


def inputs_unchanged(trial: Trial) -> list[Finding]:
    """The arguments, and the buffers that they are views of, keep their bits but for the in-place ones' elements."""
    arguments = trial.fresh()
    watch = Watch(arguments, trial.target.op.mutates)
    results = trial.call(arguments)
    return watch.findings(tuple(value for name, value in results.items() if name not in trial.target.op.mutates))


def nan_irrelevant(trial: Trial, roles: Roles) -> list[Finding]:
    """NaN and garbage where nothing must matter leave every bit of the results as it is."""
    before, poisoned = trial.fresh(), poison(trial.fresh(), roles)
    clean, actual = trial.call(trial.fresh()), trial.call(poison(trial.fresh(), roles))
    for name in trial.target.op.mutates:  # what nobody had to write holds what it held: NaN here, a number there
        kept = same(clean[name], before[name]) & same(actual[name], poisoned[name])
        actual[name] = torch.where(kept, clean[name], actual[name])
    return differences(actual, clean, "reached", "depends on what must not matter")


def nan_relevant(trial: Trial, roles: Roles) -> list[Finding]:
    """A NaN in any input that matters shows in the results that depend on it (by the reference), and only in those."""
    places = poisoned_places(trial.fresh(), poison(trial.fresh(), roles))
    clean = trial.right.exact
    findings: list[Finding] = []
    for name in floats(trial.fresh()):
        relevant = (~places[name]).nonzero()
        if name in roles.quiet or not len(relevant):
            continue
        at = tuple(relevant[len(relevant) * 5 // 8].tolist())
        probe = Trial(trial.target, lambda name=name, at=at: with_nan(trial.fresh(), name, at), trial.compare)
        if all_same(probe.right.exact, clean):
            raise AssertionError(f"a NaN in {name}{list(at)} does not show in the reference's results")
        found = probe.judged(probe.call(probe.fresh()), text=f"NaN in {name}{list(at)}")
        wrong = [one for one in found if one.kind]
        if wrong:
            return wrong
        findings += found
    return findings


def poison(arguments: Arguments, roles: Roles) -> Arguments:
    return arguments | ((roles.irrelevant and roles.irrelevant(arguments)) or {})


def poisoned_places(clean: Arguments, poisoned: Arguments) -> Results:
    """Per tensor argument, the elements that poisoning changed."""
    return {n: ~same(clean[n], poisoned[n]) for n in clean if isinstance(clean[n], Tensor)}


def with_nan(arguments: Arguments, name: str, at: tuple[int, ...]) -> Arguments:
    arguments[name][at] = torch.nan
    return arguments
