"""What the hooks share: what happens to a miss, and whether the ops behind a layer can serve."""

from __future__ import annotations

import logging

import shim
from shim import policy, table
from shim.errors import OpUnavailableError
from shim.vllm_plugin.versions import HookError

log = logging.getLogger("opshim")


def miss(what: str, reason: str) -> None:
    """A hook or a layer that opshim cannot serve, though it should: an error under strict, else a warning."""
    message = f"vLLM's own code serves {what}, not opshim: {reason}"
    if policy.current().mode == "strict":
        raise HookError(message)
    log.warning(message)


def require(names: tuple[str, ...], device: str) -> None:
    """OpUnavailableError with the chain table if the policy lets nobody serve one of the ops."""
    chains = [shim.get(name).chain(device) for name in names]
    missing = [chain.op.name for chain in chains if chain.selected is None]
    if missing:
        raise OpUnavailableError(
            f"{', '.join(missing)}: no implementation on {device} under policy {policy.current().mode}\n"
            f"{table.text(chains)}"
        )


def falls_back(name: str, device: str) -> bool:
    """Whether the reference has to serve an op that the policy wants served by something faster."""
    return shim.get(name).chain(device).lacks_native
