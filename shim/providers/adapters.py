"""How a module of adapters says which ops it serves, which it cannot, and what it needs for that."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import shim

HALVES = (torch.float16, torch.bfloat16)


class Adapters:
    """One provider's adapters on one device type (None: any). `missing` says why it cannot be used here, or "".

        adapters = Adapters("vllm", "cpu", missing)

        @adapters("moe_sum", needs=lambda: "..." or "")
        def moe_sum(y, topk_ids=None): ...

        adapters.lacks(grouped_gemm="has no such op on CPUs")
    """

    def __init__(self, provider: str, device: str | None = None, missing: Callable[[], str] = lambda: ""):
        self.provider, self.device, self.missing = provider, device, missing
        self.ops: dict[str, dict] = {}

    def __call__(self, op: str, *, supports: Callable | None = None, needs: Callable[[], str] = lambda: "") -> Callable:
        """Adds the adapter of an op. needs: () -> what this op alone lacks here, or ""."""

        def add(function: Callable) -> Callable:
            self.ops[op] = {"function": function, "supports": supports, "available": self._available(needs)}
            return function

        return add

    def lacks(self, **reasons: str) -> None:
        """Ops for which the library has nothing, and why: they are listed, and never available."""
        for op, reason in reasons.items():
            self.ops[op] = {"function": None, "supports": None, "available": self._available(lambda said=reason: said)}

    def registered(self, op: str) -> bool:
        mine = (self.provider, self.device)
        return any((one.provider, one.device) == mine for one in shim.get(op).implementations)

    def register(self, op: str) -> None:
        fields = dict(self.ops[op])
        function = fields.pop("function") or shim.get(op).reference  # it is never called where nothing is offered
        shim.implementation(op, provider=self.provider, device=self.device, explicit=True, **fields)(function)

    def _available(self, needs: Callable[[], str]) -> Callable:
        return cache(lambda: self.missing() or needs() or True)


def build(*packages: str) -> str:
    """Name and version of the first of the packages that is installed, "" without: what a certificate is bound to."""
    for package in packages:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return ""


def absent(package: str) -> str:
    """Why the package cannot be imported, or ""."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    try:
        importlib.import_module(package)
    except Exception as error:  # noqa: BLE001 - libraries of kernels fail in many ways where there is no GPU
        return f"{package} does not import: {type(error).__name__}: {error}"
    return ""


def no_gpu() -> str:
    return "" if torch.cuda.is_available() else "torch sees no GPU"


def any_of(*refusals: tuple[bool, str]) -> bool | str:
    """What a `supports` answers: the words of the first condition that holds, else True."""
    return next((words for refused, words in refusals if refused), True)


def is_usual(scale: float | None, size: int) -> bool:
    """Whether the scale is the one that kernels without such a parameter have built in."""
    return scale is None or abs(scale * size**0.5 - 1) < 1e-12


def once_per_batch(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A function that reads a tensor on the host, as servers do once per batch for all layers: its result is kept until
    the tensor is written to. Nothing can be read while a graph is captured."""
    known = WeakTensorKeyDictionary()

    def call(tensor: Tensor) -> Any:
        now = 0 if tensor.is_inference() else tensor._version  # a server makes new ones for each batch
        version, result = known.get(tensor, (None, None))
        if version != now:
            if is_captured(tensor):
                raise RuntimeError("the batch is looked at on the host, before a graph is captured")
            result = function(tensor)
            known[tensor] = now, result
        return result

    call.knows = lambda tensor: tensor in known and known[tensor][0] == tensor._version
    return call


def is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def looked(look: Callable[[Tensor], Any], tensor: Tensor, unseen: Any) -> Any:
    """What an adapter, and no kernel of its library, wants to know of a batch; `unseen` of a server's, which are trusted,
    and of calls that may not wait for the device, unless it is known from before."""
    if tensor.is_inference():
        return unseen
    may_wait = not tensor.is_cuda or not (is_captured(tensor) or torch.cuda.get_sync_debug_mode())
    return look(tensor) if may_wait or look.knows(tensor) else unseen


@once_per_batch
def _has_negatives(indices: Tensor) -> bool:
    return bool((indices < 0).any())


def has_negatives(indices: Tensor) -> bool:
    """Whether an index is negative."""
    return looked(_has_negatives, indices, False)


def may_be_negative(indices: Tensor) -> bool:
    """Whether an index is, or may be for all that is known when the call must not wait."""
    return looked(_has_negatives, indices, not indices.is_inference())


@once_per_batch
def _ends(bounds: Tensor) -> tuple[int, int]:
    return int(bounds[0]), int(bounds[-1])


def covers(cu_seqlens: Tensor, tokens: int) -> bool:
    """Whether each of the tokens is of a sequence."""
    return len(cu_seqlens) > 1 and looked(_ends, cu_seqlens, (0, tokens)) == (0, tokens)


def starting_states(state: Tensor, slots: Tensor, has_initial_state: Tensor) -> Tensor:
    """[N,HV,V,K] float32: a copy of the states that sequences start from; zero for those without, or without a slot."""
    starts = has_initial_state & (slots >= 0)
    return state[slots.clamp(min=0)].float().masked_fill(~starts[:, None, None, None], 0)


def keep_states(state: Tensor, slots: Tensor, final: Tensor) -> None:
    """Puts the final states [N,HV,V,K] into the pool; one without a slot is dropped."""
    state[slots[slots >= 0]] = final[slots >= 0].to(state.dtype)


def real_rows(state_indices: Tensor, null_index: int) -> tuple[Tensor, Tensor]:
    """Of a decode batch: the rows that are no padding, and their slots in the state pool."""
    rows = ((state_indices >= 0) & (state_indices != null_index)).nonzero()[:, 0]
    return rows, state_indices[rows].long()
