"""Runs a server as a child: its log passed on, signals forwarded, told when it is ready, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Protocol

from shim import signals
from shim.vllm_plugin.launch import LIFELINE

GRACE = 15.0  # seconds from the first signal to SIGKILL, for a server
GRACE_OF_START = 5.0  # before it is ready, or in trouble: vLLM may be deaf to signals then, and has no request to end
_CAUSE = re.compile(
    r"^(?!.*\b(?:DEBUG|INFO|WARNING)\b).*?"
    r"(?P<words>opshim: .*|\b[\w.]*(?:Error|Exception|Interrupt)\b: .*|error: .*)$"
)
RECENT = 30.0  # seconds before its end in which one that was ready has logged the cause
_LOST = re.compile(r"\b(?P<words>(?:worker|engine ?core)\b[\w -]* (?:died|exited) unexpectedly)", re.IGNORECASE)
_INVALID = re.compile(r"ValidationError: \d+ validation errors? for \w+$")  # the field and the words are in the next two
# A traceback's last line where the exception has no message, as an assertion's; what failed stands above it.
_BARE = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:ERROR [\d-]+ [\d:]+ \[\S+\] )?(?P<words>[\w.]*(?:Error|Exception))$")
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:ERROR [\d-]+ [\d:]+ \[\S+\])?")  # of a process of vLLM
_ENGINE = re.compile(r"\((?:EngineCore|Worker)\w* pid=")
_LISTENS = "0A"  # in /proc/net/tcp
HERE = urllib.request.build_opener(  # asks this machine itself: past any proxy, whatever its certificate says
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
)


@dataclass
class End:
    """How the child ended: its exit code, the signal that this process was stopped by (None: it ended by itself), the
    line of its log that looks most like the cause, the trouble that this process stopped it for, and whether it had been
    ready."""

    code: int
    signal: signal.Signals | None
    cause: str
    trouble: str = ""
    was_ready: bool = False


class Watched(Protocol):
    """What a child is for. `trouble`: why it has to be stopped, "" as long as it need not be; `grace`: seconds from the
    first signal to SIGKILL, once it is ready."""

    trouble: str
    grace: float

    def is_ready(self, group: int) -> bool:
        """Whether it does what it is for; `group`: of its processes."""


@dataclass
class Server:
    """One that answers at the URL `health`, on `port`, once it is ready."""

    health: str
    port: int
    trouble: str = ""
    grace: float = GRACE

    def is_ready(self, group: int) -> bool:
        answers = self._answers()
        if answers and not is_served_by(group, self.port):
            self.trouble = f"another process has taken its port and answers at {self.health.removesuffix('/health')}"
        return answers and not self.trouble

    def _answers(self) -> bool:
        try:
            with HERE.open(self.health, timeout=1) as answer:
                return answer.status == 200
        except (OSError, HTTPException):  # the second: something else listens there, which does not speak HTTP
            return False


@dataclass
class Cause:
    """A line of the log that may say why it ends."""

    words: str
    rank: int  # 0 the engine's own, 1 that it is lost, 2 any other, and a refused request is one of these
    at: float
    owed: int  # the lines after it that still belong to it


@dataclass
class Supervisor:
    """`run(...)` returns when the child and all of its process group are gone."""

    watched: Watched
    on_ready: Callable[[float], None]  # called once with the seconds it took
    on_stop: Callable[[signal.Signals, float], None]  # called before, with the signal and the seconds the child has to end
    stop: threading.Event = field(default_factory=threading.Event)
    signals: list[signal.Signals] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    above: str = ""  # the line before
    trouble: str = ""
    ready: bool = False

    def run(self, command: Sequence[str], environment: dict[str, str]) -> End:
        """Starts a command that ends with its OPSHIM_LIFELINE (launch.py), and stays until it has ended or a signal
        ended it."""
        with signals.heard(self._stopped, deaf=signals.here_only):
            lifeline, held = os.pipe()
            try:
                child = subprocess.Popen(
                    command,
                    env=environment | {LIFELINE: str(lifeline)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(lifeline,),
                    start_new_session=True,
                )
                os.close(lifeline)
                log = threading.Thread(target=self._pass_on, args=(child.stdout,), daemon=True)
                log.start()
                self._watch(child)
                ended = time.monotonic()
                _clear(child.pid)
                log.join(timeout=5)
            finally:
                os.close(held)
        first = self.signals[0] if self.signals else None
        return End(child.returncode, first, self._cause(ended), self.trouble, self.ready)

    def _stopped(self, number: signal.Signals) -> None:
        self.signals.append(number)
        self.stop.set()

    def _watch(self, child: subprocess.Popen) -> None:
        started, deadline = time.monotonic(), None
        while child.poll() is None:
            if self.signals and deadline is None:
                grace = self.watched.grace if self.ready else GRACE_OF_START
                deadline = time.monotonic() + grace
                self.on_stop(self.signals[0], grace)
                child.send_signal(signal.SIGTERM)
            if deadline and (time.monotonic() > deadline or len(self.signals) > 1):
                _signal_group(child.pid, signal.SIGKILL)
            if not self.ready and not deadline and self.watched.is_ready(child.pid):
                self.ready = True
                self.on_ready(time.monotonic() - started)
            if not deadline and (trouble := self.watched.trouble):
                self.trouble, deadline = trouble, time.monotonic() + GRACE_OF_START
                child.send_signal(signal.SIGTERM)
            if deadline:
                time.sleep(0.1)
            else:
                self.stop.wait(1.0 if self.ready else 0.25)

    def _pass_on(self, pipe) -> None:
        """The child's log goes to stderr as it comes, progress bars included."""
        line = b""
        while chunk := os.read(pipe.fileno(), 65536):
            try:
                sys.stderr.buffer.write(chunk)
                sys.stderr.buffer.flush()
            except OSError:
                pass  # nobody reads it any more: the server goes on
            *lines, line = (line + chunk).replace(b"\r", b"\n").split(b"\n")
            for text in lines:
                self._note(text.decode(errors="replace"))
        if line:  # the last one, cut short
            self._note(line.decode(errors="replace"))

    def _note(self, line: str) -> None:
        now, words, bare = time.monotonic(), cause_in(line), _BARE.match(line)
        words = f"{bare['words']}: {self.above}" if bare and not words else words
        self.above = _PREFIX.sub("", line).strip()
        while self.ready and self.causes and self.causes[0].at < now - RECENT:
            del self.causes[0]
        if words:
            rank = 0 if _ENGINE.match(line) else 1 if _LOST.search(line) else 2
            self.causes.append(Cause(words, rank, now, 2 if _INVALID.search(words) else 0))
        elif self.causes and self.causes[-1].owed:
            self.causes[-1].owed -= 1
            self.causes[-1].words += f": {_PREFIX.sub('', line).partition(' [type=')[0].strip()}"

    def _cause(self, ended: float) -> str:
        """Of a start the first one, which the others follow from; later what the engine said, or who lost it."""
        late = [one for one in self.causes if not self.ready or one.at > ended - RECENT]
        return min(late, key=lambda one: self.ready and one.rank).words if late else ""


def cause_in(line: str) -> str | None:
    """What a line of vLLM's log says of why it ends, if anything."""
    lost, found = _LOST.search(line), _CAUSE.match(line)
    words = lost["words"] if lost else found and found["words"]
    # what points to a cause above it is the first to be found where there is none
    return f"{words}: killed, or out of memory?" if lost or (words and "root cause" in words) else words


def is_served_by(group: int, port: int) -> bool:
    """Whether a process of that group listens on the port; True where the system does not tell."""
    tables = [path for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()]
    rows = [line.split() for path in tables for line in path.read_text().splitlines()[1:]]
    listening = [row for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port]
    sockets = {f"socket:[{row[9]}]" for row in listening}
    mine = (process for process in Path("/proc").glob("[0-9]*") if _group(process) == group)
    return not tables or any(_holds(process, sockets) for process in mine)


def _group(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[2])
    except (OSError, IndexError):  # it is gone
        return -1


def _holds(process: Path, sockets: set[str]) -> bool:
    try:
        return any(os.readlink(one) in sockets for one in (process / "fd").iterdir())
    except OSError:  # a file was closed meanwhile, or the process is gone
        return False


def _signal_group(group: int, number: int) -> bool:
    """Whether there was anyone left to signal."""
    try:
        os.killpg(group, number)
        return True
    except ProcessLookupError:
        return False


def _clear(group: int) -> None:
    """Waits for what the child left running, then ends it."""
    deadline = time.monotonic() + 5
    while _signal_group(group, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    if _signal_group(group, signal.SIGKILL):
        deadline = time.monotonic() + 5
        while _signal_group(group, 0) and time.monotonic() < deadline:
            time.sleep(0.05)
