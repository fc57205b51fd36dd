"""What a run covers: ops, provider, devices, level; names are checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch

import ops_native  # noqa: F401 - registers every native binding
import ops_reference  # noqa: F401 - declares every op
import shim
from conformance.case import LEVELS, Case, at_level
from conformance.cases import all_cases
from conformance.run import Target
from shim import device as devices
from shim import plugins

DEVICES = (*devices.DEVICES, "all")
PROOF = {"empty": "case 'empty'", "canary": "roles", "search": "search plan"}  # a kind of case -> what makes it


class SelectionError(shim.OpshimError):
    """A run was asked for that cannot be: an empty selection, a device that is not there."""


@dataclass(frozen=True)
class Selection:
    """One run's scope. `make` is the way to get one; the fields are checked there."""

    ops: tuple[str, ...]
    provider: str
    devices: tuple[str, ...]
    level: str
    seed: int = 0

    @classmethod
    def make(
        cls,
        ops: Iterable[str] = (),
        provider: str = "native",
        provider_files: Iterable[str] = (),
        device: str = "cpu",
        level: str = "quick",
        seed: int = 0,
    ) -> Selection:
        """No ops: every op that the provider implements. UnknownNameError, RegistrationError (of a provider file) or
        SelectionError for what cannot be run."""
        plugins.load_entry_points()
        for path in provider_files:
            plugins.load_file(path)
        for name in ops:
            shim.get(name)
        known = dict.fromkeys(p for op in shim.names() for p in shim.get(op).providers())
        if provider.removesuffix(":precompiled").removesuffix(":jit") not in known:
            raise plugins.unknown("provider", provider, known)
        for what, name, names in (("level", level, LEVELS), ("device", device, DEVICES)):
            if name not in names:
                raise shim.UnknownNameError(what, name, names)
        if device == "cuda" and not torch.cuda.is_available():
            raise SelectionError("device cuda: torch sees no CUDA device on this machine")
        devices = ("cpu", *["cuda"] * torch.cuda.is_available()) if device == "all" else (device,)
        offered = tuple(op for op in shim.names() if provider.partition(":")[0] in shim.get(op).providers())
        return cls(tuple(dict.fromkeys(ops)) or offered, provider, devices, level, seed)

    def cases(self) -> list[tuple[str, Case]]:
        """(device, case) of the run, in the order of the tables. SelectionError where there is none."""
        mine = [case for case in all_cases() if case.op in self.ops]
        kinds = {(case.op, case.kind) for case in mine}
        for op in self.ops:
            lacking = [what for kind, what in PROOF.items() if (op, kind) not in kinds]
            if lacking:
                raise SelectionError(f"op {op} has no {', no '.join(lacking)}: CONTRIBUTING.md says where they go")
        cases = [(device, case) for device in self.devices for case in at_level(mine, self.level, device)]
        if not cases:
            raise SelectionError(f"no case is selected: {', '.join(self.ops)} at level {self.level}")
        return cases


@cache
def target_of(op: str, provider: str, device: str) -> Target:
    """The provider's function, found (and, for native code, built) once per process."""
    return Target.find(op, provider, device)
