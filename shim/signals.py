"""The signals that end a command, but for those that are ignored on purpose: under nohup, or in what a script starts
with &."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal that came; like Ctrl-C no Exception, which would be taken for a fault of what is going on."""

    def __init__(self, number: signal.Signals):
        super().__init__(number.name)
        self.signal = number


def stop(number: signal.Signals) -> None:
    raise Stopped(number)


@contextmanager
def heard(handler: Callable[[signal.Signals], None] = stop) -> Iterator[None]:
    """Has `handler` called with each signal that comes during a `with` block. It may be inside another one."""
    before = {number: signal.getsignal(number) for number in STOPS}
    try:
        for number, one in before.items():
            ignored = one in (signal.SIG_IGN, _deaf)
            signal.signal(number, _deaf if ignored else lambda which, _: handler(signal.Signals(which)))
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


def _deaf(number, frame) -> None:
    """Ignores as SIG_IGN does, which a child would inherit."""
