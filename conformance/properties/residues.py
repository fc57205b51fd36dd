"""Sizes over every residue of tiles, chunks and vectors: many tiny problems in one case, or one ragged batch of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from conformance.case import Case
from conformance.compare import Finding
from conformance.properties.roles import Roles
from conformance.properties.trial import Trial, case
from conformance.run import Ended

SEED = 7


def cases(roles: Roles) -> list[Case]:
    return [
        sweep(roles, sizes, dtype, level)
        for level, sizes in (("quick", roles.residues), ("exhaustive", roles.all_residues))
        for dtype in roles.dtypes
        if sizes
    ]


def sweep(roles: Roles, sizes: Sequence[dict], dtype: torch.dtype, level: str) -> Case:
    """One case over all these sizes; its own arguments are those of the first."""

    def problem(device, one):
        return roles.make()(torch.Generator().manual_seed(SEED), device, dtype, **one)

    def check(trial):
        def at(one):
            return Trial(trial.target, lambda: problem(trial.target.device, one), trial.compare)

        return every_residue((words(one), at(one)) for one in sizes)

    def make(generator, device, dtype):
        return problem(device, sizes[0])

    return case(roles, "every_residue", check, {}, dtype, {"sweep": level}, make, level=level)


def every_residue(trials: Iterable[tuple[str, Trial]]) -> list[Finding]:
    """Right at every size, or refused; ends at the first that is wrong, and names it."""
    worst: dict[str, Finding] = {}
    refusals = []
    for text, trial in trials:
        try:
            results = trial.call(trial.fresh())
        except Ended as end:
            if end.status == "fail":
                raise Ended("fail", end.reason, f"{text}: {end.message}") from end
            refusals.append(f"{text}: {end.message}")
            continue
        for finding in trial.judged(results, text=text):
            if finding.kind:
                return [finding]
            if finding.output not in worst or finding.ratio > worst[finding.output].ratio:
                worst[finding.output] = finding
    if refusals and not worst:
        raise Ended("skip", "refused", refusals[0])
    return list(worst.values()) + [Finding("refused", text=refusal) for refusal in refusals]


def words(sizes: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())
