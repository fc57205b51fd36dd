"""Kernels that others wrote, as providers: torch, vllm, fla and flashinfer, where they are installed.

Each op's adapter is the way from the op's contract to their calling convention. It copies or converts a layout where
theirs is another, and says so; it repairs no value. They serve only where the user chose them by name, and the suite
tests them like any other: `runner.py conform --provider vllm`.

Registering them imports none of the libraries: that happens when it is asked whether one is available.
"""

from __future__ import annotations

import importlib
from functools import cache

import shim
from shim.providers.adapters import Adapters

MODULES = ("torch_ops", "vllm_cpu", "vllm_cuda", "fla", "flashinfer")


@cache
def offers() -> list[Adapters]:
    """All adapters, by provider and device."""
    return [importlib.import_module(f"shim.providers.{module}").adapters for module in MODULES]


def register() -> None:
    """Registers every adapter whose op is declared; again only what has been forgotten since."""
    known = shim.names()
    for adapters in offers():
        for op in adapters.ops:
            if op in known and not adapters.registered(op):
                adapters.register(op)
