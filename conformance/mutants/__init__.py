"""Wrong implementations: the suite must convict each of them, by a case whose kind names the fault.

The files in `wrong/` are provider files, so a mutant is tested as anybody's kernel is:

    python runner.py conform --provider-file conformance/mutants/wrong/topk_softmax.py --provider bias_does_not_choose

A mutant is a function of the call. Most ask the reference for something else than they were asked for:

    @mutant("topk_softmax", "bias")
    def bias_does_not_choose(call):
        '''The correction bias is ignored.'''
        return call(correction_bias=None)

`right/` is the counterpart: for each op an implementation by another route, which the suite must acquit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ops_reference  # noqa: F401 - declares every op
import shim
from conformance.run import Target
from shim.op import temporary
from shim.plugins import forget, load_file

WRONG, RIGHT = (sorted((Path(__file__).parent / folder).glob("*.py")) for folder in ("wrong", "right"))


class Call:
    """A call of an op: its arguments as attributes. Called, it asks the reference, with the arguments changed so."""

    def __init__(self, op: shim.Op, arguments: dict[str, Any]):
        self._op, self._arguments = op, arguments
        self.__dict__.update(arguments)

    def __call__(self, **changes):
        return self._op.reference(**self._arguments | changes)


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation of one op.

    kinds  of the cases that may convict it, each a name of its fault
    level  the lowest level that has such a case
    """

    op: str
    name: str
    kinds: tuple[str, ...]
    level: str
    fault: str
    function: Callable

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}"

    @property
    def target(self) -> Target:
        """What a case runs on; no registration is needed for it."""
        return Target(shim.get(self.op), self.name, "cpu", self.function)


def mutant(op: str, *kinds: str, level: str = "quick") -> Callable[[Callable[[Call], Any]], Callable[[Call], Any]]:
    """Registers a function of the `Call` as provider of `op`, under its own name; may be stacked, for several ops."""

    def register(wrong: Callable[[Call], Any]) -> Callable[[Call], Any]:
        target = shim.get(op)

        def function(*args, **kwargs):
            bound = target.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return wrong(Call(target, bound.arguments))

        function.__name__ = wrong.__name__
        function.__doc__ = wrong.__doc__
        function.__signature__ = target.signature
        function.mutant = Mutant(op, wrong.__name__, kinds, level, " ".join(wrong.__doc__.split()), function)
        shim.implementation(op, provider=wrong.__name__, explicit=True)(function)
        return wrong

    return register


@cache
def all_mutants() -> tuple[Mutant, ...]:
    """Every mutant, read from the provider files; none stays registered."""
    return tuple(one.function.mutant for one in _registered(WRONG) if hasattr(one.function, "mutant"))


@cache
def equivalents() -> dict[str, Target]:
    """The right implementation by another route, of each op; none stays registered."""
    found = [one for one in _registered(RIGHT) if one.provider == "another_route"]
    return {one.op: Target(shim.get(one.op), one.provider, "cpu", one.function, one.supports) for one in found}


def _registered(files: list[Path]) -> list:
    with temporary():
        for file in files:
            load_file(file)
        found = [one for name in shim.names() for one in shim.get(name).implementations]
    for file in files:
        forget(file)
    return found
