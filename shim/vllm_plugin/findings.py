"""What a preflight is about, and what it finds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path

from shim import device as devices
from shim.vllm_plugin import capacity, checkpoint, nodes, sizes
from shim.vllm_plugin.models import is_quantized
from shim.vllm_plugin.options import DATA, PIPELINE, TENSOR, Options
from shim.vllm_plugin.serve import Model


@dataclass(frozen=True)
class Finding:
    """`done`: what was done about it; `code`: the exit code of `serve` where it stands in the way, else 0; `lines`:
    what belongs below it."""

    name: str
    text: str
    done: str = ""
    code: int = 0
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = f"  {self.name:13}{'STOP: ' if self.code else ''}{self.text}{f'; {self.done}' if self.done else ''}"
        return "\n".join([told, *(f"    {line}" for line in self.lines)])


@dataclass
class Plan:
    """What is about to be served. `mode`: of the policy, `chains`: of the ops
    that the model needs. `max_model_len` is set where the preflight chose another one than was asked for."""

    model: Model
    options: Options
    dtype: str
    device: str
    mode: str
    chains: Sequence
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    max_model_len: int | None = None

    @property
    def architecture(self) -> str:
        return sizes.architecture_of(self.model.config)

    @cached_property
    def sizes(self) -> sizes.Sizes:
        return sizes.read(self.model.config)

    @property
    def quantized(self) -> bool:
        return is_quantized(self.model.config)

    @cached_property
    def stored(self) -> dict[str, checkpoint.Stored] | None:
        """None where there are no headers to read: another format, the hub, or dummy weights."""
        folder = Path(self.model.path)
        return None if self.options.dummy or not any(folder.glob("*.safetensors")) else checkpoint.read(folder)

    @cached_property
    def weights(self) -> int | None:
        """Bytes of the weights on one rank, in the dtype that is served; None where nobody can tell."""
        item, ranks = capacity.SIZES.get(self.dtype, 4), 1
        for names in (TENSOR, PIPELINE):
            ranks *= self.options.whole(1, *names)
        try:
            stored = self.stored
            if stored is None:
                needed = checkpoint.parameters(self.sizes, self.architecture, ())
                return needed and sum(map(prod, needed.values())) * item // ranks
        except (checkpoint.CheckpointError, sizes.ConfigError):
            return None
        scales = {dtype: item / own for dtype, own in checkpoint.FLOATS.items()}
        return int(sum(one.size * scales.get(one.dtype, 1) for one in stored.values())) // ranks

    @property
    def ranks_here(self) -> int:
        """Processes of the engine on this machine; over several machines, of all its data parallel parts."""
        asked = (TENSOR, PIPELINE, nodes.COUNT, DATA)
        tensor, stages, machines, engines = (self.options.whole(1, *names) for names in asked)
        return -(-tensor * stages * (engines if machines > 1 else 1) // machines)

    @cached_property
    def memory(self) -> devices.Memory:
        """Of the device that holds weights and cache."""
        return capacity.gpu_memory() if self.device == "cuda" else devices.host_memory()

    @cached_property
    def room(self) -> tuple[int, str]:
        """Bytes for the cache on one rank, and where the figure comes from."""
        return capacity.room(self.options, self.device, self.memory, self.weights or 0, self.environ)
