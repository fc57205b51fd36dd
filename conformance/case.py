"""A case: one call of one op whose answer the suite knows how to judge.

A case module (`conformance/cases/<family>.py`) is a list of tables, one per clause of the op's contract:

    CASES = [
        *table("topk_softmax", "odd_experts", sizes=[{"T": 3, "E": e, "topk": 1} for e in (1, 3, 60, 257)]),
        *table("topk_softmax", "nan_row", sizes=[{"T": 4, "E": 60, "topk": 4}], make=nan_row),
        *table("topk_softmax", "topk_above_experts", sizes=[{"T": 4, "E": 2, "topk": 3}], raises="topk"),
    ]

    def nan_row(generator, device, dtype, **sizes):
        arguments = example("topk_softmax", generator, device, dtype, **sizes)
        arguments["gating_output"][1] = float("nan")
        return arguments

Nothing else is said per case: seed, exact answer, error budget and the rules of every op are the suite's (`run.py`).
A property that takes several calls is a case with a `check` of its own: `conformance/properties` makes those.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

import shim

LEVELS = ("quick", "standard", "exhaustive")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPE_NAMES = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def example(op: str, generator: torch.Generator, device, dtype: torch.dtype, **sizes) -> dict[str, Any]:
    """The op's own example arguments, to be changed by a `make` that probes one thing."""
    return shim.get(op).example(generator, device, dtype, **sizes)


@dataclass(frozen=True)
class Case:
    """One call of one op, and how its result is judged.

    kind     what it probes, in snake_case: it names the fault when the case fails
    sizes    keyword arguments of `make`; they are in the case's name
    make     (generator, device, dtype, **sizes) -> arguments by name; None: the op's example
    compare  (Evaluation) -> list[Finding], replaces `compare.by_budget` for outputs that have more than one right value
    raises   the argument that an OpArgumentError must name: every provider must refuse the call, nothing may run
    check    (target, fresh) -> list[Finding], replaces the one call and its judgement; fresh() gives the arguments anew
    device   the only device type that it is for; None: any
    memory   bytes that it takes in all; skipped where fewer are free
    """

    op: str
    kind: str
    sizes: dict[str, Any] = field(hash=False)
    dtype: torch.dtype
    level: str = "quick"
    make: Callable | None = None
    compare: Callable | None = None
    raises: str | None = None
    check: Callable | None = None
    device: str | None = None
    memory: int = 0

    @property
    def id(self) -> str:
        """Unique, readable, and selectable with `pytest -k`."""
        sizes = "_".join(f"{name}{_text(value)}" for name, value in self.sizes.items())
        dtype = DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return "-".join(part for part in (self.op, self.kind, sizes, dtype) if part)

    def seed(self, base: int = 0) -> int:
        """Of this case alone: it does not change when other cases come or go."""
        return zlib.crc32(f"{self.id}/{base}".encode())

    def arguments(self, device: str, seed: int) -> dict[str, Any]:
        """Fresh arguments, equal for equal seeds on any device."""
        generator = torch.Generator().manual_seed(seed)
        if self.make is None:
            return example(self.op, generator, device, self.dtype, **self.sizes)
        return self.make(generator, device, self.dtype, **self.sizes)


def _text(value) -> str:
    if isinstance(value, list | tuple):
        if len(value) > 3 and len(set(value)) == 1:
            return f"{len(value)}x{_text(value[0])}"
        text = "+".join(map(_text, value))
        return text if len(text) <= 40 else f"{text[:24]}~{zlib.crc32(text.encode()):08x}"
    return str(value).removeprefix("torch.")


def table(
    op: str,
    kind: str,
    sizes: Iterable[dict[str, Any]] = ({},),
    dtypes: Iterable[torch.dtype] = FLOATS,
    level: str = "quick",
    make: Callable | None = None,
    compare: Callable | None = None,
    raises: str | None = None,
    memory: int = 0,
) -> list[Case]:
    """Cases of one kind: every size with every dtype."""
    if level not in LEVELS:
        raise ValueError(f"{op}/{kind}: level '{level}' is not one of {', '.join(LEVELS)}")
    dtypes = tuple(dtypes)
    return [
        Case(op, kind, size, dtype, level, make, compare, raises, memory=memory) for size in sizes for dtype in dtypes
    ]


def at_level(cases: Iterable[Case], level: str, device: str = "cpu") -> list[Case]:
    """The cases that a run at `level` on a device includes: its own and every lower level's."""
    highest = LEVELS.index(level)
    return [case for case in cases if LEVELS.index(case.level) <= highest and case.device in (None, device)]
