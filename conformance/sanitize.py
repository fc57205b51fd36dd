"""The CUDA ops under NVIDIA's compute-sanitizer: the suite's cases, with every load and store of our kernels looked at.

    python -m conformance.sanitize                       memcheck and racecheck, level quick, every op
    python -m conformance.sanitize --tool memcheck --op moe_sum --seconds 600 --out OUT
    python -m conformance.sanitize --tool memcheck --op moe_sum --out OUT --resume    the rest, if time was up

The tool slows a process down by an order of magnitude, so an op's cases are spread over processes, several at a time, and
what judges them runs on the CPU. An op is clean under a tool when all its cases have ended; when the time is over, what
has been found until then is told. matmul_fp16 does without cuBLASLt, at whose kernels racecheck breaks off. Under
memcheck each tensor has an allocation of its own, so that one beyond its end is beyond the allocation, too; what captures
a graph cannot do without torch's cache, and is left to racecheck. A tool that finds nothing may be looking at nothing: so
first it is given a kernel that reads beyond its input, and has to find that.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import click

from conformance.conform import end_session
from ops_native.build import cuda_spec
from shim import signals

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck")
DEVICE = "cuda"
CASES = 80  # of one process, at most: its start takes as long as some cases
GRACE = 10.0  # seconds for a process whose time is over to write its sums
OURS = "kns=_GLOBAL__N_"  # kernels are in anonymous namespaces
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
# The first line on a finding; what the tool says of itself, or of an interrupted or a late program, is none.
OWN = r"COMPUTE-SANITIZER|.*SUMMARY|.*(?:process didn't|Target app|No attachable process|Default timeout)"
RECORD = re.compile(rf"^========= (?!{OWN})\S", re.MULTILINE)
COUNTS = re.compile(r"^\d+ \w+(?:, \d+ \w+)* in [\d.]+s", re.MULTILINE)  # pytest's last line
PROGRESS = re.compile(r"^([.sFE]+)(?: +\[ *\d+%\])?$", re.MULTILINE)
_sessions: set[int] = set()  # of the programs that run under a tool now
LETTERS = {".": "passed", "s": "skipped", "F": "failed"}


@dataclass(frozen=True)
class Part:
    """What one process runs: the which-th part of an op's cases under one tool, or so many cases that are left of it."""

    op: str
    tool: str
    which: int
    parts: int
    cases: int
    done: int = 0  # before these, by an earlier run

    def log(self, out: Path) -> Path:
        """The tool's; beside it, as .txt, what pytest said."""
        return out / f"{self.op}.{self.tool}.{self.which}+{self.done}.log"


@dataclass(frozen=True)
class Outcome:
    """Of a process. found: errors, or hazards; summed: whether the tool came to its sum of them."""

    found: int
    summed: bool
    said: str

    def counts(self) -> Counter[str]:
        """How many cases passed, failed, and were skipped: by pytest's sum, or what it printed on its way there."""
        sums = COUNTS.findall(self.said)
        if sums:
            return Counter({what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped)", sums[-1])})
        return Counter(LETTERS[one] for line in PROGRESS.findall(self.said) for one in line if one in LETTERS)

    @property
    def broken(self) -> bool:
        """Whether pytest had an error of its own: then the counts do not tell which cases have ended."""
        sums = COUNTS.findall(self.said)
        return " error" in sums[-1] if sums else any("E" in line for line in PROGRESS.findall(self.said))


@dataclass
class Verdict:
    """On an op's cases under one tool, added up over the processes that have run them."""

    op: str
    tool: str
    cases: int
    found: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    unsummed: int = 0  # processes in which the tool did not come to its sum
    unbegun: int = 0  # cases for which there was no time

    def add(self, part: Part, outcome: Outcome | None) -> None:
        """None: there was no time for this part."""
        if outcome is None:
            self.unbegun += part.cases
        else:
            self.found += outcome.found
            self.counts += outcome.counts()
            self.unsummed += not outcome.summed

    @property
    def whole(self) -> bool:
        return self.counts.total() == self.cases and not self.unsummed

    @property
    def clean(self) -> bool:
        return self.whole and self.found == 0 and self.counts["passed"] > 0 and not self.counts["failed"]

    def __str__(self) -> str:
        word = "PASS" if self.clean else "FAIL" if self.cases else "NONE"
        return f"{word}  {self.tool:10} {self.op:22} {self._told()}"

    def _told(self) -> str:
        if self.unbegun == self.cases:
            return f"not run: no time for its {self.cases} cases" if self.cases else "no case selected"
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        told = f"{self.found} found{'' if self.whole else ' so far'}, {self.counts.total()} of {self.cases} cases ended"
        told += f" ({counts})" if counts else ""
        told += f", {self.unbegun} not begun" if self.unbegun else ""
        return told + (f"; processes without the tool's sum: {self.unsummed}" if self.unsummed else "")


def checker() -> str:
    name, beside = "compute-sanitizer", Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    found = shutil.which(name) or shutil.which(name, path=beside)
    if not found:
        raise click.ClickException("compute-sanitizer is neither on the PATH nor in CUDA_HOME/bin: it comes with CUDA")
    return found


def watched(tool: str, log: Path, command: list[str], seconds: float) -> Outcome:
    """The program under the tool; when its time is over it is interrupted, and then killed with what it has started."""
    variables = {"OMP_NUM_THREADS": "1", "OPSHIM_CUBLASLT": "0"}
    variables |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
    given = [checker(), "--tool", tool, "--kernel-name", OURS, "--print-limit", "50", "--log-file", str(log)]
    log.unlink(missing_ok=True)
    options = {"cwd": ROOT, "env": os.environ | variables, "start_new_session": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    child = subprocess.Popen([*given, sys.executable, *command], **options, **pipes)
    _sessions.add(child.pid)
    try:
        for limit, then in ((seconds, interrupt), (GRACE, end_session), (None, None)):
            try:
                said, _ = child.communicate(timeout=limit)
                break
            except subprocess.TimeoutExpired:
                then(child.pid)
    finally:
        _sessions.discard(child.pid)
        end_session(child.pid)
        child.wait()
    return outcome_of(log.read_text(errors="replace") if log.exists() else "", said)


def outcome_of(logged: str, said: str) -> Outcome:
    sums = SUMMARY.findall(logged)
    found = sum(int(errors or hazards) for errors, hazards in sums) if sums else len(RECORD.findall(logged))
    return Outcome(found, bool(sums), said)


def interrupt(session: int) -> None:
    """Python in it, not the tool: that sums up when the program under it has ended."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone, or another user's
            if os.getsid(int(folder.name)) == session and os.path.samefile(folder / "exe", sys.executable):
                os.kill(int(folder.name), signal.SIGINT)


def finished(running: set[Future]) -> Iterator[Future]:
    """Each as it ends. After Ctrl-C or SIGTERM what has begun sums up, the rest is cancelled: --resume goes on."""
    while running:
        try:
            done, running = wait(running, return_when=FIRST_COMPLETED)
        except KeyboardInterrupt:
            for one in running:
                one.cancel()
            for session in tuple(_sessions):
                interrupt(session)
        else:
            yield from done


def suite(level: str, expression: str) -> list[str]:
    cases = ["-m", "pytest", "conformance/test_cases.py", "--device", DEVICE, "--level", level, "-k", expression]
    return [*cases, "--judge-on", "cpu", "-p", "no:xdist", "-p", "no:cacheprovider", "-q", "--no-header", "--no-summary"]


def selected(ops: list[str], level: str, expression: str) -> list[str]:
    """The cases that these options select, by their ids."""
    command = [sys.executable, *suite(level, expression), "--collect-only", *[f"--op={op}" for op in ops]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):  # 5: none
        raise click.ClickException(f"no case was collected:\n{(done.stderr or done.stdout).strip()[-2000:]}")
    return re.findall(rf"^\S+::test_case\[{DEVICE}-(.+)\]$", done.stdout, re.MULTILINE)


def check(part: Part, out: Path, level: str, expression: str, end: float) -> Outcome | None:
    """end: when it is interrupted, by time.monotonic(). None: there is no time left to begin."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        return None
    chosen = f"({expression}) and not graph_replay" if part.tool == "memcheck" else expression
    mine = [f"--op={part.op}", f"--part={part.which}/{part.parts}+{part.done}", f"--case-timeout={seconds}"]
    log = part.log(out)
    said = log.with_suffix(".txt")
    said.unlink(missing_ok=True)  # should this be killed, --resume would take it for what was said beside the new log
    outcome = watched(part.tool, log, [*suite(level, chosen), *mine], seconds)
    said.write_text(outcome.said)
    return outcome


def earlier(part: Part, out: Path) -> tuple[list[tuple[Part, Outcome]], Part]:
    """What earlier runs left of it in `out`, piece by piece, and what is still to be run. A piece counts as far as its
    cases had ended when its time was over, if the tool came to a sum and pytest to no error."""
    pieces = []
    while (log := part.log(out)).exists() and (said := log.with_suffix(".txt")).exists():
        outcome = outcome_of(log.read_text(errors="replace"), said.read_text())
        ended = outcome.counts().total()
        if not (outcome.summed and ended) or outcome.broken:
            break
        pieces.append((replace(part, cases=ended), outcome))
        part = replace(part, cases=part.cases - ended, done=part.done + ended)
    return pieces, part


def begin(out: Path, cases: list[str], parts: list[Part], resume: bool) -> None:
    """`out` for a run of these cases: without their logs, or with those of an earlier run on the same kernels."""
    ids = hashlib.sha256("\n".join(cases).encode()).hexdigest()[:16]
    about = {"cases": ids, "in a process": CASES, "sources": cuda_spec(tuple).identity().source}
    told = out / "run.json"
    if resume:
        before = json.loads(told.read_text()) if told.exists() else {}
        if other := [what for what in about if before.get(what) != about[what]]:
            why = f"it was of other {' and '.join(other)}" if before else "there is none"
            raise click.ClickException(f"--resume goes on with the run in {out}, and {why}")
        return
    # of a tool that is not asked for, too: it may be when this run is resumed, and run.json speaks for all that is here
    for op, tool in product({part.op for part in parts}, TOOLS):
        for left in out.glob(f"{op}.{tool}.*+*.*"):
            left.unlink()
    told.write_text(json.dumps(about, indent=1) + "\n")


def split(verdict: Verdict) -> list[Part]:
    """The work that a verdict, still empty, is to be on."""
    count = -(-verdict.cases // CASES)
    sizes = (len(range(which, verdict.cases, count)) for which in range(count))
    return [Part(verdict.op, verdict.tool, which, count, size) for which, size in enumerate(sizes, start=1)]


def misread() -> None:
    """A kernel of ours reads beyond its input, at the hand of a caller who says that there are more tokens."""
    import torch

    from ops_native.libraries import CUDA, pointers, where

    y, out = torch.zeros(4, 2, 64, device="cuda"), torch.zeros(8192, 64, device="cuda")
    symbols = {"opshim_moe_sum": "ppp" + 6 * "i" + CUDA.tail}
    found = CUDA.precompiled(symbols)
    functions = found.functions or CUDA.compiled(symbols).functions
    try:
        functions.opshim_moe_sum(*pointers(y, None, out), 0, 8192, 2, 64, 128 * 1024, 64, *where(y))
        torch.cuda.synchronize()
    except RuntimeError:
        pass  # as it may be without the tool, too


@click.command()
@click.option("--op", "ops", multiple=True, help="Only this op (repeatable; default: all).")
@click.option("--tool", "tools", multiple=True, type=click.Choice(TOOLS), help="Only this one (default: both).")
@click.option("--level", default="quick", show_default=True)
@click.option("-k", "expression", default="not search", show_default=True, help="Which cases, as pytest's -k.")
@click.option("--jobs", default=8, show_default=True, type=click.IntRange(1), help="Processes at a time.")
@click.option("--seconds", default=1800.0, show_default=True, type=click.FloatRange(30), help="For the whole run.")
@click.option("--out", default="reports/sanitize", show_default=True, type=click.Path(path_type=Path))
@click.option("--resume", is_flag=True, help="Go on with the run in --out: cases that ended there are not run again.")
def main(ops, tools, level, expression, jobs, seconds, out, resume) -> None:
    import opshim  # noqa: F401 - registers every op
    import shim

    end = time.monotonic() + seconds - GRACE
    click.get_current_context().with_resource(signals.heard())
    if wrong := set(ops) - set(shim.names()):
        raise click.BadParameter(f"{', '.join(wrong)} is no op; there are {', '.join(shim.names())}")
    ops, out = ops or shim.names(), out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    cases, verdicts = selected(ops, level, expression), {}
    for tool in tools or TOOLS:
        counts = Counter(case.partition("-")[0] for case in cases if tool != "memcheck" or "graph_replay" not in case)
        verdicts |= {(op, tool): Verdict(op, tool, counts[op]) for op in ops}
    # First a part of each op, those of many parts before others, as they go on longest.
    parts = sorted((one for verdict in verdicts.values() for one in split(verdict)), key=lambda p: (p.which, -p.parts))
    if not parts:
        raise click.ClickException(f"no case selected: -k '{expression}' at level {level}")
    begin(out, cases, parts, resume)
    found = [earlier(part, out) for part in parts]
    known = [piece for pieces, _ in found for piece in pieces]
    left = [part for _, part in found if part.cases]
    misreading = ["-m", "conformance.sanitize", "misread"]
    click.get_current_context().with_resource(signals.heard(deaf=signals.here_only))  # what is watched hears `interrupt`
    control = watched("memcheck", out / "control.log", misreading, end - time.monotonic())
    if not (control.summed and control.found):
        raise click.ClickException(f"memcheck did not find a read beyond a tensor, put there:\n{control.said[-2000:]}")
    print(f"memcheck finds what was put there for it ({control.found} errors)", flush=True)
    print(f"{sum(p.cases for p in left)} cases in {len(left)} process(es), {jobs} at a time", flush=True)
    waiting = Counter((part.op, part.tool) for part in (*left, *(part for part, _ in known)))

    def add(part: Part, outcome: Outcome | None) -> None:
        of = part.op, part.tool
        verdicts[of].add(part, outcome)
        waiting[of] -= 1
        if not waiting[of]:
            print(verdicts[of], flush=True)

    for part, outcome in known:
        add(part, outcome)
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(check, part, out, level, expression, end): part for part in left}
        for one in finished(set(running)):
            add(running[one], None if one.cancelled() else one.result())
    print(*(f"{verdict}\n" for verdict in verdicts.values() if not verdict.cases), sep="", end="")
    sys.exit(not all(verdict.clean for verdict in verdicts.values()))


if __name__ == "__main__":
    misread() if sys.argv[1:] == ["misread"] else main()
