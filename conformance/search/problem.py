"""A problem: one call of one op, as data: small enough to print, to store, and to be made smaller.

    Problem("topk_softmax", {"T": 1, "E": 3, "topk": 1}, "f16", seed=7, values={"gating_output": "ties"})

It is the op's example at these sizes, with some arguments' values, and then their layouts, replaced as named.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from conformance.case import DTYPE_NAMES, Case, example
from conformance.compare import compare_topk
from conformance.properties import layouts
from conformance.run import Result, run

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
COMPARISONS = {"topk_softmax": compare_topk}


def somewhere(t: Tensor, share: float, generator: Generator) -> Tensor:
    """A mask of about that share of the elements, the first always among them."""
    mask = torch.rand(t.shape, generator=generator) < share
    mask.view(-1)[:1] = True
    return mask.to(t.device)


def one_element(value: float) -> Callable[[Tensor, Generator], Tensor]:
    def change(t, generator):
        changed = t.flatten()
        changed[int(torch.randint(t.numel(), (), generator=generator))] = value
        return changed.view(t.shape)

    return change


def wide(t: Tensor, generator: Generator) -> Tensor:
    """Magnitudes over seven decimal orders."""
    return t * torch.exp2(24 * torch.rand(t.shape, generator=generator) - 12).to(t)


def extreme(t: Tensor, generator: Generator) -> Tensor:
    """A quarter of the elements as large as they may be without an overflow of their difference."""
    return torch.where(somewhere(t, 0.25, generator), t.sign() * torch.finfo(t.dtype).max / 4, t)


VALUES: dict[str, Callable[[Tensor, Generator], Tensor]] = {  # (tensor, generator) -> what it holds instead
    "zero": lambda t, generator: torch.zeros_like(t),
    "constant": lambda t, generator: t.flatten()[:1].expand(t.shape),
    "sorted": lambda t, generator: t.sort(-1).values,
    "descending": lambda t, generator: t.sort(-1, descending=True).values,
    "ties": lambda t, generator: (2 * t).round() / 2,
    "positive": lambda t, generator: t.abs(),
    "large": lambda t, generator: t * 256,
    "wide": wide,
    "denormal": lambda t, generator: (t.double() * torch.finfo(t.dtype).tiny / 4).to(t.dtype),
    "extreme": extreme,
    "minus_inf": lambda t, generator: t.masked_fill(somewhere(t, 0.3, generator), -torch.inf),
    "one_inf": one_element(torch.inf),
    "one_nan": one_element(torch.nan),
    "some_negative": lambda t, generator: t.masked_fill(somewhere(t, 0.3, generator), -1),
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "rows_apart": layouts.rows,
    "elements_apart": layouts.elements,
    "transposed": layouts.transposed,
    "misaligned": lambda tensor: layouts.shifted(tensor, 1),
}


@dataclass(frozen=True)
class Problem:
    """sizes: of the op's example ("act" stands for the dtype); values, layouts: argument -> key of VALUES, LAYOUTS."""

    op: str
    sizes: dict[str, Any]
    dtype: str
    seed: int = 0
    values: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)

    def arguments(self, device: str) -> dict[str, Any]:
        dtype = DTYPES[self.dtype]
        sizes = {name: dtype if size == "act" else size for name, size in self.sizes.items()}
        arguments = example(self.op, Generator().manual_seed(self.seed), device, dtype, **sizes)
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.numel()}
        for name in self.values.keys() & tensors.keys():
            generator = Generator().manual_seed(self.seed + zlib.crc32(name.encode()))
            tensors[name].copy_(VALUES[self.values[name]](tensors[name].clone(), generator))
        for name in self.layouts.keys() & tensors.keys():
            laid_out = LAYOUTS[self.layouts[name]](tensors[name])
            arguments[name] = tensors[name] if laid_out is None else laid_out
        return arguments

    def case(self) -> Case:
        """The problem as a case of its own, whose seed is the problem's."""

        def make(generator, device, dtype, **sizes):
            return self.arguments(device)

        return Case(self.op, "search", self.sizes, DTYPES[self.dtype], make=make, compare=COMPARISONS.get(self.op))

    def tried(self, provider: str = "native", device: str = "cpu", provider_files: Sequence[str] = ()) -> Result:
        """The suite's verdict on that provider."""
        from conformance.selection import Selection, target_of  # which knows every case, the searches included

        Selection.make([self.op], provider, provider_files, device)
        return run(self.case(), target_of(self.op, provider, device))

    def call(self, provider: str, device: str, provider_files: Sequence[str] = ()) -> str:
        """Python that tries it, ready to run from the top folder."""
        files = f", {list(provider_files)}" if provider_files else ""
        trial = f"{self}.tried({provider!r}, {device!r}{files})"
        return f"from conformance.search import Problem\nprint({trial})"
