"""What the hooks share: what happens to a miss, whether the ops behind a layer can serve, and who serves them here."""

from __future__ import annotations

import logging

import torch

import shim
from shim import dispatch, policy
from shim.vllm_plugin.versions import HookError

log = logging.getLogger("opshim")
_told: set[tuple[str, ...]] = set()


def miss(what: str, reason: str) -> None:
    """A hook or a layer that opshim cannot serve, though it should: an error under strict, else a warning."""
    message = f"vLLM's own code serves {what}, not opshim: {reason}"
    if policy.current().mode == "strict":
        raise HookError(message)
    log.warning(message)


def require(names: tuple[str, ...], device: str) -> None:
    """As dispatch.require, and it is logged, once, who serves the ops on this rank: ranks may differ, and only they
    know."""
    served = tuple(f"{chain.op.name} {chain.selected.label}" for chain in dispatch.require(names, device))
    if served not in _told:
        _told.add(served)
        log.info("rank %d: %s", rank(), ", ".join(served))


def rank() -> int:
    """Of this process among all workers; 0 where it is alone."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def falls_back(name: str, device: str) -> bool:
    """Whether the reference has to serve an op that the policy wants served by something faster."""
    return shim.get(name).chain(device).lacks_native
