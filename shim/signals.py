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
def heard(
    handler: Callable[[signal.Signals], None] = stop, deaf: Callable | signal.Handlers = signal.SIG_IGN
) -> Iterator[None]:
    """Has `handler` called with each signal that comes during a `with` block. It may be inside another one. What is
    ignored stays so, by `deaf`: in the children that begin meanwhile, too, unless it is `here_only`."""
    before = {number: signal.getsignal(number) for number in STOPS}
    try:
        for number, one in before.items():
            ignored = one in (signal.SIG_IGN, here_only)
            signal.signal(number, deaf if ignored else lambda which, _: handler(signal.Signals(which)))
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


def here_only(number, frame) -> None:
    """Ignores as SIG_IGN does, which a child would inherit: one in a session of its own, which is to hear ours."""
