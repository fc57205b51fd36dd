"""What the suite does about a GPU, and what runs on it, around a provider's call."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch


def settle(device: str) -> None:
    """Waits for all that was started, and raises what was wrong with it. A launch that CUDA turned down leaves an error
    that waiting does not tell: the next launch that looks for one would, and be taken for the culprit."""
    if device == "cuda":
        torch.cuda.synchronize()
        _cell().fill_(1)


@cache
def _cell() -> torch.Tensor:
    return torch.ones(1, device="cuda")


@cache
def first_configurations() -> str:
    """From now on each autotuned kernel of Triton takes the first of its configurations that it keeps for a size. Tuning
    compiles and times them all, for each size, in each worker: minutes, where a case takes milliseconds. Says so, or ""
    without Triton."""
    try:
        from triton.runtime.autotuner import Autotuner

        installed = version("triton")
    except (ImportError, PackageNotFoundError):
        return ""
    tuned = Autotuner.run

    def run(self, *args, **kwargs):
        every = self.configs
        self.nargs = dict(zip(self.arg_names, args))  # which its own pruning goes by
        self.configs = self.prune_configs(kwargs)[:1]
        try:
            return tuned(self, *args, **kwargs)
        finally:
            self.configs = every

    Autotuner.run = run
    return f"{installed}, the first configuration of each autotuned kernel"
