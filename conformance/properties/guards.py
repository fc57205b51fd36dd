"""Guard bands: memory that no call may write, and on which no result may depend, around every tensor of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

BAND = 512  # bytes on either side; a multiple of every alignment that kernels look for
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
FILLED = {"zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full", "ones", "ones_like", "new_ones"}


class Bands:
    """Moves storages between bands of a byte, and says afterwards which bands were written to."""

    def __init__(self, byte: int):
        self.byte = byte
        self.buffers: list[tuple[str, Tensor]] = []

    def around(self, name: str, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy of the storage between two bands."""
        size = storage.nbytes()
        old = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        new = torch.full((size + 2 * BAND,), self.byte, dtype=torch.uint8, device=storage.device)
        new[BAND : BAND + size] = old
        self.buffers.append((name, new))
        return new.untyped_storage()

    def arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments in guarded memory, with their strides; views of one buffer stay views of one buffer."""
        storages: dict[int, torch.UntypedStorage] = {}
        moved = {}
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                old = value.untyped_storage()
                if old.data_ptr() not in storages:
                    storages[old.data_ptr()] = self.around(name, old)
                moved[name] = within(storages[old.data_ptr()], value)
        return arguments | moved

    def touched(self) -> list[str]:
        """Names of what lies beside a band that changed."""
        return [name for name, b in self.buffers if bool((b[:BAND] != self.byte).any() | (b[-BAND:] != self.byte).any())]


class Guarded(TorchFunctionMode):
    """Tensors that Python code allocates inside lie between bands; what torch leaves uninitialised holds our byte."""

    def __init__(self, bands: Bands, filling: int):
        super().__init__()
        self.bands, self.filling = bands, filling

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in EMPTY | FILLED or not isinstance(out, Tensor) or not out.numel() or out.device.type == "meta":
            return out
        if name in EMPTY:
            torch.empty(0, dtype=torch.uint8, device=out.device).set_(out.untyped_storage()).fill_(self.filling)
        return within(self.bands.around(f"new {list(out.shape)}", out.untyped_storage()), out)


def within(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """The tensor in a guarded copy of its storage."""
    offset = tensor.storage_offset() + BAND // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, offset, tensor.shape, tensor.stride())
