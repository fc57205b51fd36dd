"""Rule 6, and the offsets of rule 5: the same values in memory laid out otherwise. Right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from conformance.case import Case
from conformance.compare import Finding
from conformance.memory import Watch
from conformance.properties.roles import Arguments, Roles
from conformance.properties.trial import Trial, case
from conformance.run import Ended, lacks_memory

FAR = 2**31  # elements from the first row to the last
FILLS = 17 * 2**30  # bytes for an output of so many elements of 2 bytes, computed in float32


def cases(roles: Roles) -> list[Case]:
    def each(kind, layout, label, **how):
        def check(trial):
            return large_offsets(trial) if layout is far_apart else one_by_one_and_all(trial, layout)

        return [case(roles, kind, check, roles.sizes[0], dtype, label, **how) for dtype in roles.dtypes]

    return [
        *(one for layout in (rows, elements, transposed) for one in each("strided", layout, {"by": layout.__name__})),
        *(one for by in (1, 3) for one in each("misaligned", lambda tensor, by=by: shifted(tensor, by), {"by": by})),
        *each("large_offsets", far_apart, {"far": "rows"}, level="exhaustive", memory=FAR * 4),
        *(large_outputs(roles) if roles.large else ()),
    ]


def large_outputs(roles: Roles) -> list[Case]:
    sizes, alone = roles.large
    check = partial(large_output, alone=alone)
    halves = [dtype for dtype in roles.dtypes if dtype.itemsize == 2]
    return [case(roles, "large_offsets", check, sizes, dtype, level="exhaustive", memory=FILLS) for dtype in halves]


def one_by_one_and_all(trial: Trial, layout: Callable[[Tensor], Tensor | None]) -> list[Finding]:
    """Each tensor in that layout, and then all of them."""
    names = [name for name, value in trial.fresh().items() if isinstance(value, Tensor) and layout(value) is not None]
    return tried(trial, layout, [[name] for name in names] + [names] * (len(names) > 1))


def large_offsets(trial: Trial) -> list[Finding]:
    """The rows of each tensor in turn so far apart that the last begins beyond 2^31 elements."""
    names = [name for name, value in trial.fresh().items() if isinstance(value, Tensor) and rows_apart(value)]
    return tried(trial, far_apart, [[name] for name in names], watched=False)


def tried(trial: Trial, layout: Callable, choices: list[list[str]], watched: bool = True) -> list[Finding]:
    """The arguments chosen in that layout: right or refused. Skipped where all are refused."""
    findings, refusals = [], []
    for chosen in choices:
        arguments = trial.fresh()
        arguments |= {name: layout(arguments[name]) for name in chosen}
        text = f"layout of {', '.join(chosen)}"
        watch = Watch(arguments if watched else {}, trial.target.op.mutates)
        try:
            results = trial.call(arguments)
        except Ended as end:
            if end.status == "fail":
                raise Ended("fail", end.reason, f"{text}: {end.message}") from end
            refusals.append(f"{text}: {end.message}")
            continue
        found = [*watch.findings(None), *trial.judged(results, text=text)]
        if any(finding.kind for finding in found):
            return [finding for finding in found if finding.kind]
        findings += found
    if refusals and not findings:
        raise Ended("skip", "refused", refusals[0])
    return findings + [Finding("refused", text=words) for words in refusals]


def rows(tensor: Tensor) -> Tensor | None:
    """Rows apart, garbage between them."""
    if tensor.dim() < 2:
        return None
    inner = tensor[:1].numel()
    wide = garbage(tensor, (len(tensor), inner + 24))
    return wide[:, 8 : 8 + inner].unflatten(1, tensor.shape[1:]).copy_(tensor)


def elements(tensor: Tensor) -> Tensor:
    """Every element apart from the next."""
    return garbage(tensor, (*tensor.shape, 2))[..., 0].copy_(tensor)


def transposed(tensor: Tensor) -> Tensor | None:
    """The last two dimensions in the other order."""
    return None if tensor.dim() < 2 else garbage(tensor, tensor.mT.shape).mT.copy_(tensor)


def shifted(tensor: Tensor, by: int) -> Tensor:
    """At an address aligned to nothing but the element."""
    return garbage(tensor, (tensor.numel() + by,))[by:].view(tensor.shape).copy_(tensor)


def garbage(like: Tensor, shape) -> Tensor:
    value = torch.nan if like.is_floating_point() else True if like.dtype is torch.bool else torch.iinfo(like.dtype).max
    return like.new_full(tuple(shape), value)


# ---- more than 2^31 elements -----------------------------------------------------------------------------------------


def large_output(trial: Trial, alone: Callable[[Arguments, Tensor], Arguments]) -> list[Finding]:
    """The first and last rows are those that a call of them alone gives: of the others no exact answer is needed."""
    output = trial.call(trial.fresh())["output"]
    rows = torch.arange(len(output), device=output.device)[[*range(8), *range(-8, 0)]]
    assert len(output) * output.stride(0) > FAR
    output = output[rows]

    def part(call, arguments):
        return call(alone(arguments, rows))

    return trial.judged({"output": output}, trial.answers(part, part), text="of the first and the last 8 rows")


def rows_apart(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and len(tensor) > 1


def far_apart(tensor: Tensor) -> Tensor:
    """In fresh memory, of which a CPU only provides the pages that rows lie in."""
    lacking = lacks_memory(tensor.device.type, (FAR + tensor.numel()) * tensor.element_size())
    if lacking:
        raise Ended("skip", "no_memory", lacking)
    stride = -(-FAR // (len(tensor) - 1))
    buffer = torch.empty(stride * (len(tensor) - 1) + tensor[:1].numel(), dtype=tensor.dtype, device=tensor.device)
    inner = torch.empty(tensor.shape[1:], device="meta").stride()
    return buffer.as_strided(tensor.shape, (stride, *inner)).copy_(tensor)
