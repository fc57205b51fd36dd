"""A call says nothing: a line per call fills a server's log, and is how some libraries fail (at a dtype, say)."""

from __future__ import annotations

import ctypes
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from conformance.case import Case
from conformance.compare import Finding
from conformance.memory import WRONG
from conformance.properties.roles import Roles
from conformance.properties.trial import Trial, case

SHOWN = 80  # characters of a line


def cases(roles: Roles) -> list[Case]:
    return [case(roles, "quiet", quiet, roles.sizes[0], dtype) for dtype in roles.dtypes]


def quiet(trial: Trial) -> list[Finding]:
    """The second of two equal calls writes nothing to stdout or stderr. What is told once, the first may tell; Python's
    warnings, which the user can turn off, do not count."""
    trial.call(trial.fresh())
    arguments = trial.fresh()
    with listening() as lines, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial.call(arguments)
    if not lines:
        return []
    text = f"the second of two equal calls wrote {len(lines)} lines to stdout or stderr, the first:"
    text += f" {lines[0][:SHOWN]!r}"
    return [Finding("call", "printed", WRONG, text=text)]


@contextmanager
def listening() -> Iterator[list[str]]:
    """Gives the lines that are written to stdout and stderr inside, once it has ended: by print, by C, by a child."""
    lines: list[str] = []
    streams = [stream for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) if stream]
    with tempfile.TemporaryFile(buffering=0) as file:
        _flush(streams)
        kept = {number: os.dup(number) for number in _descriptors(streams)}
        try:
            for number in kept:
                os.dup2(file.fileno(), number)
            ours = io.TextIOWrapper(file, errors="replace", write_through=True)
            with redirect_stdout(ours), redirect_stderr(ours):  # those that have no descriptor
                yield lines
        finally:
            _flush(streams)
            for number, copy in kept.items():
                os.dup2(copy, number, inheritable=number < 3)
                os.close(copy)
        file.seek(0)
        lines += file.read().decode(errors="replace").splitlines()


def _descriptors(streams: list) -> set[int]:
    """1 and 2, and where pytest has led Python's streams: who has kept one writes there."""
    numbers = {1, 2}
    for stream in streams:
        try:
            numbers.add(stream.fileno())
        except (OSError, ValueError, AttributeError):  # in memory, closed, or not a file at all
            continue
    return numbers


def _flush(streams: list) -> None:
    for stream in streams:
        stream.flush()
    ctypes.CDLL(None).fflush(None)
