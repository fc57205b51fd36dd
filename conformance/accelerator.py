"""What the suite does about a GPU, and what runs on it, around a provider's call."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from conformance.workers import TimeLimit


class Interrupted(KeyboardInterrupt):
    """By a signal during a provider's call: the wish of whoever runs the suite."""


def settle(device: str) -> None:
    """Waits for all that was started, and raises what was wrong with it. A launch that CUDA turned down leaves an error
    that waiting does not tell: the next launch that looks for one would, and be taken for the culprit."""
    if device == "cuda":
        torch.cuda.synchronize()
        _cell().fill_(1)


@contextmanager
def settled(device: str) -> Iterator[None]:
    """Around a provider's call: whatever is wrong with it is raised in here, as an Exception: an exit is none, nor is a
    KeyboardInterrupt that no signal brought, nor pytest's skip. One that raises may leave an error behind all the same:
    that is cleared, as the next launch would tell it, which may be the suite's own."""
    try:
        with _interrupts_told_apart():
            yield
    except (TimeLimit, Interrupted):
        raise
    except BaseException as error:
        with suppress(Exception):
            settle(device)
        if isinstance(error, Exception):
            raise
        told = RuntimeError(f"the call raised {type(error).__name__}: {error}")
        raise told.with_traceback(error.__traceback__) from None
    settle(device)


@contextmanager
def _interrupts_told_apart() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield
        return

    def interrupt(*_):
        raise Interrupted

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@cache
def _cell() -> torch.Tensor:
    return torch.ones(1, device="cuda")


@cache
def first_configurations() -> str:
    """From now on each autotuned kernel of Triton takes the first of its configurations that it keeps for a size and
    that fits the device. Tuning compiles and times them all, for each size, in each worker: minutes, where a case takes
    milliseconds. Says so, or "" without Triton."""
    try:
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.errors import OutOfResources

        installed = version("triton")
    except (ImportError, PackageNotFoundError):
        return ""
    tuned = Autotuner.run

    def run(self, *args, **kwargs):
        every = self.configs
        if len(every) == 1:  # is neither pruned nor timed
            return tuned(self, *args, **kwargs)
        self.nargs = dict(zip(self.arg_names, args))  # which its own pruning goes by
        kept = self.prune_configs(kwargs)
        try:
            for one in kept[:-1]:
                self.configs = [one]
                with suppress(OutOfResources):  # raised before the launch; tuning, too, leaves such a one out
                    return tuned(self, *args, **kwargs)
            self.configs = kept[-1:]
            return tuned(self, *args, **kwargs)
        finally:
            self.configs = every

    Autotuner.run = run
    return f"{installed}, the first configuration of each autotuned kernel"
