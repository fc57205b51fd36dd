"""The CUDA ops under NVIDIA's compute-sanitizer: the suite's cases, with every load and store of our kernels looked at.

    python -m conformance.sanitize                       memcheck and racecheck, level quick, every op
    python -m conformance.sanitize --tool memcheck --op moe_sum --out OUT

One process per op and tool, several at a time, as the tool slows a process down by an order of magnitude. Under memcheck
each tensor has an allocation of its own, so that one beyond its end is beyond the allocation, too; what captures a graph
cannot do without torch's cache, and is left to racecheck. A tool that finds nothing may be looking at nothing: so first
it is given a kernel that reads beyond its input, and has to find that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

from conformance.conform import end_session

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck")
OURS = "kns=_GLOBAL__N_"  # kernels are in anonymous namespaces
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
COUNTS = re.compile(r"(\d+) (passed|failed|skipped)")


@dataclass(frozen=True)
class Verdict:
    """On an op's cases under one tool. found: errors, or hazards; None: the tool did not come to its end."""

    op: str
    tool: str
    found: int | None
    counts: dict[str, int]

    @property
    def clean(self) -> bool:
        return self.found == 0 and self.counts.get("passed", 0) > 0 and not self.counts.get("failed")

    def __str__(self) -> str:
        words = "did not end" if self.found is None else f"{self.found} found"
        cases = ", ".join(f"{count} {what}" for what, count in self.counts.items()) or "no case ended"
        return f"{'PASS' if self.clean else 'FAIL'}  {self.tool:10} {self.op:22} {words:12} {cases}"


def checker() -> str:
    beside = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    found = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(map(str, beside))
    )
    if not found:
        raise click.ClickException("compute-sanitizer is neither on the PATH nor in CUDA_HOME/bin: it comes with CUDA")
    return found


def watched(tool: str, log: Path, command: list[str], seconds: float) -> tuple[int | None, str]:
    """(how much the tool found, what the program said)."""
    memory = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
    given = [checker(), "--tool", tool, "--kernel-name", OURS, "--print-limit", "50", "--log-file", str(log)]
    child = subprocess.Popen(
        [*given, sys.executable, *command],
        cwd=ROOT,
        env=os.environ | memory | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        end_session(child.pid)  # the tool, and the program under it
        return None, child.communicate()[0]
    sums = SUMMARY.findall(log.read_text() if log.exists() else "")
    return (sum(int(errors or hazards) for errors, hazards in sums) if sums else None), said


def check(op: str, tool: str, out: Path, level: str, expression: str, seconds: float) -> Verdict:
    if tool == "memcheck":
        expression = f"({expression}) and not graph_replay"
    cases = ["-m", "pytest", "conformance/test_cases.py", "--device", "cuda", "--level", level, "--op", op]
    quiet = ["-k", expression, "-p", "no:xdist", "-p", "no:cacheprovider", "-q", "--no-header", "--no-summary"]
    found, said = watched(tool, out / f"{op}.{tool}.log", [*cases, *quiet, "--case-timeout", str(seconds)], seconds)
    (out / f"{op}.{tool}.txt").write_text(said)
    return Verdict(op, tool, found, {what: int(count) for count, what in COUNTS.findall(said)})


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
@click.option("--jobs", default=8, show_default=True, help="Processes at a time.")
@click.option("--seconds", default=600.0, show_default=True, help="For each process.")
@click.option("--out", default="reports/sanitize", show_default=True, type=click.Path(path_type=Path))
def main(ops, tools, level, expression, jobs, seconds, out) -> None:
    import opshim  # noqa: F401 - registers every op
    import shim

    out.mkdir(parents=True, exist_ok=True)
    found, said = watched("memcheck", out.resolve() / "control.log", ["-m", "conformance.sanitize", "misread"], seconds)
    if not found:
        raise click.ClickException(f"memcheck did not find a read beyond a tensor that was put there:\n{said[-2000:]}")
    print(f"memcheck finds what was put there for it ({found} errors)", flush=True)
    wanted = [(op, tool) for tool in tools or TOOLS for op in ops or shim.names()]
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(check, *one, out.resolve(), level, expression, seconds) for one in wanted]
        verdicts = []
        for one in running:
            verdicts.append(one.result())
            print(verdicts[-1], flush=True)
    sys.exit(not all(one.clean for one in verdicts))


if __name__ == "__main__":
    misread() if sys.argv[1:] == ["misread"] else main()
