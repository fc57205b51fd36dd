"""What happened to each op in this run: counters that survive a killed process, and the circuit breaker.

Counters live in a memory-mapped file per process under OPSHIM_RUN_DIR (in anonymous memory where it is not set), so a
worker that dies by SIGKILL still leaves its numbers. A file is an array of 256-byte records: the first holds MAGIC,
each further one eight uint64 counters (one per entry of EVENTS, then what the chain decided) and the name
"op\\0candidate". In the place of breaker_open stands until when it is, in seconds since 1970: nobody writes then.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from shim import variables
from shim.errors import OpshimError

log = logging.getLogger("opshim")

MAGIC = b"opshim counters 1"
EVENTS = ("calls", "failures", "refusals", "outside_domain", "non_finite", "breaker_open")
CALLS, FAILURES, REFUSALS, OUTSIDE, NON_FINITE, OPEN_UNTIL = range(len(EVENTS))
IS_SELECTED, IS_CERTIFIED = 6, 7  # what the chain decided, beside what happened
_RECORD, _LANES, _NAME, _RECORDS = 256, 32, 64, 4096  # bytes and uint64 lanes per record, offset of the name, capacity


class Row(NamedTuple):
    """Counts of one candidate of one op: calls it answered, calls it raised on, calls that its guard refused though
    they were inside the op's domain, calls outside of it that it answered in the place of the selected one, answers with
    NaN or infinity (where they are watched), and processes in which its breaker is open now."""

    op: str
    candidate: str
    calls: int
    failures: int
    refusals: int
    outside_domain: int
    non_finite: int = 0
    breaker_open: int = 0


class Standing(NamedTuple):
    """In how many processes the chain selected a candidate, and in how many a certificate holds for it."""

    op: str
    candidate: str
    selected: int
    certified: int


class Counters:
    """Counters of this process. `values[slot(op, candidate) + CALLS] += 1` is the whole cost of counting; `values` is
    replaced after a fork (the child counts into a file of its own), so read it anew each time."""

    def __init__(self):
        self._slots: dict[tuple[str, str], int] = {}
        self._refused = ""  # a run folder that could not be written: that is told once, and not tried for each name
        self._open(None)

    def slot(self, op: str, candidate: str) -> int:
        """Index of the candidate's first counter in `values`."""
        wanted = os.environ.get("OPSHIM_RUN_DIR")
        if self.path is None and wanted and wanted != self._refused:
            self.open(wanted)
        index = self._slots.get((op, candidate))
        if index is None:
            if len(self._slots) == _RECORDS - 1:
                raise OpshimError(f"no counter left for {op} {candidate}: {len(self._slots)} names are in use")
            index = self._slots[op, candidate] = (len(self._slots) + 1) * _LANES
            self._name(index, op, candidate)
        return index

    def open(self, run_dir: str | os.PathLike | None) -> None:
        """Counts go to a new file under `run_dir` from now on (None: to memory); counts so far move along."""
        before = self.values
        self._open(run_dir)
        for (op, candidate), index in self._slots.items():
            self._name(index, op, candidate)
            for lane in range(index, index + IS_CERTIFIED + 1):
                self.values[lane] = before[lane]

    def after_fork(self) -> None:
        """In a forked child: the parent's file stays the parent's; the child starts from zero."""
        self._open(self.path and self.path.parent)
        for (op, candidate), index in self._slots.items():
            self._name(index, op, candidate)

    def rows(self) -> list[Row]:
        return _rows(self._memory)

    def _open(self, run_dir) -> None:
        self.path = None
        memory = None
        if run_dir is not None:
            path = Path(run_dir) / f"calls-{os.getpid()}-{time.time_ns()}.bin"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "x+b") as file:
                    file.write(bytes(_RECORD * _RECORDS))  # room of its own: in a hole, a full disk is a SIGBUS later
                    file.flush()
                    memory = mmap.mmap(file.fileno(), 0)
                self.path = path
            except OSError as error:
                self._refused = str(run_dir)
                with suppress(OSError):
                    path.unlink()
                log.warning("calls of process %d are counted in memory only: %s", os.getpid(), error)
        self._memory = memory or mmap.mmap(-1, _RECORD * _RECORDS)
        self._memory[: len(MAGIC)] = MAGIC
        self.values = memoryview(self._memory).cast("Q")

    def _name(self, index: int, op: str, candidate: str) -> None:
        name = f"{op}\0{candidate}".encode()[: _RECORD - _NAME]
        start = index * 8 + _NAME
        self._memory[start : start + len(name)] = name


def _rows(data) -> list[Row]:
    return [Row(*key, *lanes[: len(EVENTS)]) for key, lanes in _counts(data) if any(lanes[: len(EVENTS)])]


def _counts(data) -> Iterator[tuple[tuple[str, str], list[int]]]:
    """The records, with whether the breaker is open now in the place of its end."""
    for key, lanes in _records(data):
        lanes[OPEN_UNTIL] = int(lanes[OPEN_UNTIL] > time.time())
        yield key, lanes


def _records(data) -> Iterator[tuple[tuple[str, str], list[int]]]:
    """((op, candidate), its eight counters) of each record."""
    view = memoryview(data)
    for start in range(_RECORD, len(view), _RECORD):
        name = bytes(view[start + _NAME : start + _RECORD]).rstrip(b"\0").decode(errors="replace")
        if not name:
            break
        op, _, candidate = name.partition("\0")
        yield (op, candidate), view[start : start + _NAME].cast("Q").tolist()


counters = Counters()
os.register_at_fork(after_in_child=counters.after_fork)


def summary(run_dir: str | os.PathLike | None = None) -> list[Row]:
    """Counts per op and candidate, summed over all processes that counted under `run_dir` (None: of this process),
    without those that are zero; in order of first appearance per op."""
    if run_dir is None:
        return counters.rows()
    return [Row(*key, *lanes[: len(EVENTS)]) for key, lanes in _totals(run_dir) if any(lanes[: len(EVENTS)])]


def standings(run_dir: str | os.PathLike) -> list[Standing]:
    """What the chains of all processes under `run_dir` selected."""
    return [Standing(*key, *lanes[IS_SELECTED:]) for key, lanes in _totals(run_dir) if lanes[IS_SELECTED]]


def packed(run_dir: str | os.PathLike) -> bytes:
    """The records of all processes under `run_dir` as the bytes of one such file, for the folder of another machine."""
    records = (record for data in _files(run_dir) for record in _records(data))
    lines = [struct.pack("8Q", *lanes) + "\0".join(key).encode() for key, lanes in records]
    return b"".join(one.ljust(_RECORD, b"\0") for one in (MAGIC, *lines))


def _files(run_dir: str | os.PathLike) -> Iterator[bytes]:
    """What each process under `run_dir` wrote, but one that was killed while it created its file."""
    contents = (path.read_bytes() for path in sorted(Path(run_dir).glob("calls-*.bin")))
    return (data for data in contents if data.startswith(MAGIC))


def _totals(run_dir: str | os.PathLike) -> list[tuple[tuple[str, str], list[int]]]:
    """The records of all processes, added up; in order of first appearance per op."""
    totals: dict[tuple[str, str], list[int]] = {}
    for key, lanes in (record for data in _files(run_dir) for record in _counts(data)):
        sums = totals.setdefault(key, [0] * len(lanes))
        sums[:] = map(sum, zip(sums, lanes))
    order = list(dict.fromkeys(op for op, _ in totals))
    return sorted(totals.items(), key=lambda item: order.index(item[0][0]))


def watched(function: Callable, op: str, label: str, slot: int) -> Callable:
    """The function, with answers that hold NaN or infinity counted and the first one warned about; as it is unless
    OPSHIM_WATCH_NON_FINITE=1. Watching waits for the device; what is captured into a CUDA graph is not watched."""
    if not variables.is_on("OPSHIM_WATCH_NON_FINITE"):
        return function

    @functools.wraps(function)
    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        if not all(map(_finite, result if isinstance(result, tuple) else (result,))):
            if not counters.values[slot + NON_FINITE]:
                log.warning("%s: %s answered with NaN or infinity; further such answers are only counted", op, label)
            counters.values[slot + NON_FINITE] += 1
        return result

    return call


def _finite(output) -> bool:
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return True
    if output.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return bool(output.isfinite().all())


class Breaker:
    """Leaves a candidate out for `pause` seconds after `limit` failures in a row; then it is tried again, and one more
    failure opens the breaker anew."""

    def __init__(self, clock=time.monotonic, limit: int = 2, pause: float = 60.0):
        self.clock, self.limit, self.pause = clock, limit, pause
        self.failures = 0
        self.open_until = float("-inf")

    def is_open(self) -> bool:
        return self.failures >= self.limit and self.clock() < self.open_until

    def failed(self) -> None:
        self.failures += 1
        if self.failures >= self.limit:
            self.open_until = self.clock() + self.pause

    def succeeded(self) -> None:
        self.failures = 0
