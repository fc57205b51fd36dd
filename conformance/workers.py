"""Workers of a parallel run: how many, each on which GPU, and what ends a case that does not end by itself."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

MEMORY = 8 * 2**30  # bytes of a GPU that one worker may need: its context, the cases' tensors, the exact answers
SECONDS = {"quick": 120.0, "standard": 300.0, "exhaustive": 600.0}  # a case's time limit, by level
GRACE = 5.0  # seconds from the error that a case is to end by to the end of its process
MOST_LOST = 20  # of an op's cases, those that cost a process; one that runs to its time limit counts as TIMEOUT of them
TIMEOUT = 5


def cores() -> int:
    return len(os.sched_getaffinity(0))


def free_memory() -> list[int]:
    """Bytes free on each visible GPU."""
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]


def count(cores: int, free: Sequence[int]) -> int:
    """Workers for these cores and, where the run is on GPUs, this much free memory on each: at least one per GPU that
    the cores can feed."""
    if not free:
        return max(1, cores)
    return max(1, min(cores, max(len(free), sum(memory // MEMORY for memory in free))))


def threads(cores: int, workers: int) -> int:
    """torch's threads in each worker: together no more than there are cores."""
    return max(1, cores // max(1, workers))


def gpu_of(worker: str, visible: Sequence[str]) -> str:
    """The GPU of worker "gw<n>", one of the visible ones in turn."""
    return visible[int(worker.removeprefix("gw")) % len(visible)]


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named else [str(gpu) for gpu in range(count)]


class TimeLimit(BaseException):
    """Raised in a case that has run too long. No Exception, as it must pass through whatever catches those."""


@contextmanager
def time_limit(seconds: float, grace: float = GRACE, file=None) -> Iterator[None]:
    """Raises TimeLimit in the main thread after so many seconds. Code that is deaf to it, as native code is, ends with
    the process, `grace` seconds later: the stacks are written to `file` (stderr) by a thread that needs no GIL."""

    def late(*_):
        raise TimeLimit(f"still running after {seconds:g} s")

    global _deadline
    _deadline, before = time.monotonic() + seconds, signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + grace, exit=True, file=file or sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        _deadline = None


_deadline: float | None = None  # of the case at hand


def _limit_child() -> None:
    """A process that a case forks has no timer of its own, and may well hang: threads it may wait for are not there.
    It ends with the case's time, and so does what it forks."""
    if _deadline:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(0.01, _deadline - time.monotonic()))


os.register_at_fork(after_in_child=_limit_child)


class LastWords:
    """A worker's file for what faulthandler has to say when the process dies: of a crash or of a time limit."""

    def __init__(self, folder: Path, worker: str):
        self.folder = folder
        self.file = (folder / worker).open("w")
        faulthandler.enable(self.file)

    def clear(self) -> None:
        os.ftruncate(self.file.fileno(), 0)
        os.lseek(self.file.fileno(), 0, os.SEEK_SET)


def lose(folder: Path, op: str, reason: str) -> None:
    """Notes that a case of the op has cost a process, where all workers see it."""
    for _ in range(TIMEOUT if reason == "timeout" else 1):
        os.close(tempfile.mkstemp(prefix=f"lost-{op}-", dir=folder)[0])


def has_lost_too_many(folder: Path, op: str) -> bool:
    """Whether the op's other cases are not worth the time: a new process for each, or each one's time limit."""
    return len(list(folder.glob(f"lost-{op}-*"))) >= MOST_LOST


def fate(folder: Path, worker: str) -> tuple[str, str]:
    """(reason, message) of the case during which a worker died."""
    try:
        words = (folder / worker).read_text()
    except OSError:
        words = ""
    if not words:
        return "crashed", "the process ended without a word: by exit, or killed"
    first, where = words.partition("\n")[0], _innermost(words)
    if first.startswith("Timeout"):
        return "timeout", f"native code still running at the time limit, called{where}"
    return "crashed", f"{first.removeprefix('Fatal Python error: ')}{where}"


def _innermost(words: str) -> str:
    """The frame in which the main thread was: of the current thread where one is named, of the last one else."""
    blocks = [block for block in words.split("\n\n") if "File " in block]
    blocks = [block for block in blocks if block.startswith("Current thread")] or blocks[-1:]
    frames = [line.strip() for block in blocks for line in block.splitlines() if line.strip().startswith("File ")]
    return f" at {frames[0]}" if frames else ""
