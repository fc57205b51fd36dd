"""Mutants before the suite: which case convicts them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from conformance.case import Case, at_level
from conformance.cases import all_cases
from conformance.mutants import Mutant
from conformance.run import Result, run


def cases_of(op: str, level: str = "quick") -> list[Case]:
    """The op's cases that run a provider, the smallest first."""
    cases = [case for case in at_level(all_cases(), level) if case.op == op and not case.raises]
    return sorted(cases, key=lambda case: prod(map(_extent, case.sizes.values())))


def convictions(mutant: Mutant, cases: list[Case]) -> Iterator[Result]:
    """Of those cases the ones that convict it, found one by one."""
    for case in cases:
        result = run(case, mutant.target)
        if result.status == "fail":
            yield result


def named(mutant: Mutant) -> list[Case]:
    """Cases whose kind is a name of the mutant's fault."""
    return [case for case in cases_of(mutant.op, mutant.level) if case.kind in mutant.kinds]


def _extent(size) -> int:
    if isinstance(size, list | tuple):
        return sum(map(_extent, size)) or 1
    return max(1, size) if isinstance(size, int) else 1
