"""What the properties have to be told of an op: beside its cases, a case module lists the `Roles` of its ops.

    ROLES = [
        Roles(
            "moe_sum",
            sizes=({"T": 9, "topk": 4, "N": 40, "with_ids": True},),
            irrelevant=nan_where_dropped,
            residues=[{"T": 3, "N": n} for n in range(1, 67)],
            busy={"T": 2000},
            routes=(Route("permutation", "tokens", tokens_in_another_order), ...),
        ),
    ]

Everything that holds for any op (guard bands, NaN, layouts, repeats, graphs) then follows from its sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.case import FLOATS, example

Arguments = dict[str, Any]
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Route:
    """Another way to the results of one call: in another order, in parts, row by row, by a formula.

    kind     the property: permutation, composition, batch_invariance, identities, long_horizon
    way      (call, arguments) -> results by name, as those of the whole call on these arguments. call(arguments) runs
             the op, on these very arguments; call.of(op) is another op of the same provider, else the reference's
    whole    what the results have to be, as `way`; None: one call of the op
    prepare  (arguments) -> those it replaces, or None: what the example needs so that the route exists
    sizes    of the example; None: the first of the roles
    """

    kind: str
    name: str
    way: Callable[..., Results]
    whole: Callable[..., Results] | None = None
    prepare: Callable[[Arguments], Arguments | None] | None = None
    sizes: dict[str, Any] | None = None
    dtypes: Sequence[torch.dtype] | None = None
    level: str = "quick"


@dataclass(frozen=True)
class Roles:
    """An op as the properties see it.

    sizes       examples on which the properties are tried
    prepare     (arguments) -> those it replaces, or None: puts into the example what it lacks (padding, dropped slots)
    irrelevant  (arguments) -> those it replaces, or None: writes NaN or garbage wherever it must not matter
    quiet       arguments in which a NaN need not show
    residues    sizes over every residue of tiles, chunks and vectors, each a tiny problem; all_residues: on level
                exhaustive in their place
    busy        sizes at which the work is shared by threads
    large       sizes at which the output has more than 2^31 elements in rows, and (arguments, rows) -> those of a call
                that gives these rows alone
    compare     as of a `Case`
    """

    op: str
    sizes: Sequence[dict[str, Any]]
    busy: dict[str, Any]
    residues: Sequence[dict[str, Any]]
    all_residues: Sequence[dict[str, Any]] = ()
    large: tuple[dict[str, Any], Callable[[Arguments, Tensor], Arguments]] | None = None
    routes: Sequence[Route] = ()
    dtypes: Sequence[torch.dtype] = FLOATS
    prepare: Callable[[Arguments], Arguments | None] | None = None
    irrelevant: Callable[[Arguments], Arguments | None] | None = None
    quiet: Sequence[str] = ()
    compare: Callable | None = None

    def make(self, *changes: Callable | None) -> Callable[..., Arguments]:
        """A case's `make`: the op's example, prepared and then changed."""

        def make(generator, device, dtype, **sizes):
            arguments = example(self.op, generator, device, dtype, **sizes)
            for change in (self.prepare, *changes):
                arguments |= (change and change(arguments)) or {}
            return arguments

        return make


def floats(arguments: Arguments) -> list[str]:
    """Names of the floating-point tensors among the arguments."""
    return [name for name, value in arguments.items() if isinstance(value, Tensor) and value.is_floating_point()]


def take(arguments: Arguments, order, *names: str) -> Arguments:
    """The arguments, with rows picked from those named (where they are given)."""
    return arguments | {name: arguments[name][order] for name in names if arguments[name] is not None}


def joined(results: Sequence[Results]) -> Results:
    """Results of several calls, one after the other in the first dimension."""
    return {name: torch.cat([one[name] for one in results]) for name in results[0]}


def back(results: Results, order: Tensor, *names: str) -> Results:
    """Undoes `take`: rows of the results named return from the places that `order` gave them."""
    return results | {name: results[name][order.argsort()] for name in names}


def shuffled(count: int, like: Tensor) -> Tensor:
    """A fixed order of `count` things other than theirs, on the device of `like`."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count)).to(like.device)
    return order if count < 2 or (order != torch.arange(count, device=like.device)).any() else order.flip(0)


def rows_shuffled(*names: str) -> Callable[..., Results]:
    """The way in which the rows of these arguments, and with them those of all outputs, come in another order."""

    def way(call, arguments):
        order = shuffled(len(arguments[names[0]]), arguments[names[0]])
        results = call(take(arguments, order, *names))
        return back(results, order, *(name for name in results if name.startswith("output")))

    return way


def rows_alone(*names: str) -> Callable[..., Results]:
    """The way in which every row of these arguments is a call of its own."""

    def way(call, arguments):
        rows = range(len(arguments[names[0]]))
        return joined([call(take(arguments, slice(t, t + 1), *names)) for t in rows])

    return way
