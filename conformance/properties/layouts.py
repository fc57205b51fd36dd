"""Rule 6, and the offsets of rule 5: the same values in memory laid out otherwise. Right, or refused."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from conformance.case import Case
from conformance.compare import Finding
from conformance.memory import Watch
from conformance.properties.roles import Roles, floats
from conformance.properties.trial import Trial, case
from conformance.run import Ended

FAR = 2**31  # elements from the first row to the last


def cases(roles: Roles) -> list[Case]:
    def each(kind, by, layout):
        def check(trial):
            return tried(trial, layout)

        return [case(roles, kind, check, roles.sizes[0], dtype, {"by": by}) for dtype in roles.dtypes]

    return [
        *(one for layout in (rows, elements, transposed) for one in each("strided", layout.__name__, layout)),
        *(one for n in (1, 3) for one in each("misaligned", n, lambda tensor, n=n: shifted(tensor, n))),
        *(case(roles, "large_offsets", large_offsets, roles.sizes[0], dtype, level="exhaustive") for dtype in roles.dtypes),
    ]


def tried(trial: Trial, layout: Callable[[Tensor], Tensor | None]) -> list[Finding]:
    """Every tensor in that layout, one at a time and then all: right or refused. Skipped where all are refused."""
    names = [name for name, value in trial.fresh().items() if isinstance(value, Tensor) and layout(value) is not None]
    findings, refusals = [], []
    for chosen in [[name] for name in names] + [names] * (len(names) > 1):
        arguments = trial.fresh()
        arguments |= {name: layout(arguments[name]) for name in chosen}
        text = f"layout of {', '.join(chosen)}"
        watch = Watch(arguments, trial.target.op.mutates)
        try:
            results = trial.call(arguments)
        except Ended as end:
            if end.status == "fail":
                raise Ended("fail", end.reason, f"{text}: {end.message}") from end
            refusals.append(f"{text}: {end.message}")
            continue
        findings += [*watch.findings(None), *trial.judged(results, text=text)]
        if any(finding.kind for finding in findings):
            return [finding for finding in findings if finding.kind]
    if refusals and not findings:
        raise Ended("skip", "refused", "; ".join(dict.fromkeys(refusals)))
    return findings + [Finding("refused", text=words) for words in refusals]


def rows(tensor: Tensor) -> Tensor:
    """Rows (a vector's elements) apart, garbage between them."""
    if tensor.dim() < 2:
        return elements(tensor)
    inner = tensor[:1].numel() if len(tensor) else 0
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


def large_offsets(trial: Trial) -> list[Finding]:
    """The rows of a tensor so far apart that the last begins beyond 2^31 elements; one tensor at a time."""
    findings: list[Finding] = []
    for name in floats(trial.fresh()):
        arguments = trial.fresh()
        if not rows_apart(arguments[name]):
            continue
        need_memory(trial.target.device, (FAR + arguments[name].numel()) * arguments[name].element_size())
        arguments[name] = far_apart(arguments[name])
        findings += trial.judged(trial.call(arguments), text=f"rows of {name} far apart")
    if not findings:
        raise Ended("skip", "not_applicable", "no floating-point argument has rows")
    return findings


def rows_apart(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and len(tensor) > 1


def far_apart(tensor: Tensor) -> Tensor:
    """On a CPU only the pages that rows lie in become memory."""
    stride = -(-FAR // (len(tensor) - 1))
    buffer = torch.empty(stride * (len(tensor) - 1) + tensor[:1].numel(), dtype=tensor.dtype, device=tensor.device)
    inner = torch.empty(tensor.shape[1:], device="meta").stride()
    return buffer.as_strided(tensor.shape, (stride, *inner)).copy_(tensor)


def need_memory(device: str, size: int) -> None:
    """Ends the case as skipped where the device has less memory left."""
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < size:
        raise Ended("skip", "no_memory", f"needs {size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
