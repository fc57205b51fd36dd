"""`runner.py conform`: the suite on one provider, in parallel, with an exit code to build on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

import shim
from conformance import certificates, report
from conformance.report.text import text
from conformance.selection import Selection
from shim import signals
from shim.loading import user_cache

ROOT = Path(__file__).resolve().parents[1]
PASS, FAIL, USAGE = 0, 1, 2
NEWS = 30.0  # seconds between two words on how far a run is
PATIENCE = 60.0  # seconds that an interrupted run has for its report


def conform(
    ops: Sequence[str] = (),
    provider: str = "native",
    provider_files: Sequence[str] = (),
    device: str = "cpu",
    level: str = "quick",
    json_out: str | None = None,
    seed: int = 0,
    report_dir: str | None = None,
    certificates_dir: str | Path | None = None,
) -> int:
    """Tests the provider and prints what a kernel's author needs. 0: full pass, 1: any failure, 2: wrong usage.

    No ops: every op that the provider implements; one that it does not offer here is then no failure. json_out: all
    reports in one file (schema: conformance/report). report_dir: a folder that they join, for `runner.py report`.
    certificates_dir: where what is proven is written. A run that is interrupted (SIGINT, SIGTERM) reports what it has.
    """
    files = [str(Path(file).resolve()) for file in provider_files]
    try:
        selection = Selection.make(ops, provider, files, device, level, seed)
        selection.cases()
        if json_out:
            report.need_file(json_out)
        for folder in filter(None, (report_dir, certificates_dir)):
            report.need_folder(folder)
    except shim.OpshimError as error:
        print(f"conform: {error}", file=sys.stderr)
        return USAGE
    with tempfile.TemporaryDirectory(prefix="opshim-conform-") as folder:
        options = {"provider": provider, "device": device, "level": level, "seed": seed, "report-dir": folder}
        options["replay-dir"] = Path(report_dir or user_cache()).resolve() / "replay"
        given = [f"--{name}={value}" for name, value in options.items()]
        given += [f"--op={op}" for op in selection.ops] + [f"--provider-file={file}" for file in files]
        pytest = [sys.executable, "-m", "pytest", "conformance/test_cases.py", "-n", "auto", *given]
        quiet = ["--rootdir", str(ROOT), "-q", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
        code, said, stopped = _run([*pytest, *quiet])
        if not (Path(folder) / "index.json").exists():
            print(said, "conform: the run ended before its report", sep="\n", file=sys.stderr)
            return FAIL
        reports = report.read(Path(folder))
    print(text(reports))
    written = [  # each of them, whatever became of the others
        report.written("conform", json_out, lambda file: report.save(file, report.merged(reports))),
        report.written("conform", report_dir, lambda folder: print(f"report: {report.write(folder, reports)}")),
        report.written("conform", certificates_dir, lambda to: print(*certificates.issue(reports, to), sep="\n")),
    ]
    verdicts = {one["summary"]["verdict"] for one in reports}
    granted = {"pass"} if ops else {"pass", "nothing ran"}  # of all ops, a provider may well offer only some
    lost = [f"{one['op']}: {why}" for one in reports if (why := certificates.unrun(one))]
    if lost:
        why = "stopped before the end:" if stopped else "results were lost:"
        print(f"conform: {why}", *lost, *() if stopped else (said[-2000:],), sep="\n", file=sys.stderr)
    return PASS if code == 0 and "pass" in verdicts <= granted and not lost and all(written) else FAIL


def _run(command: Sequence[str]) -> tuple[int, str, bool]:
    """(its code, what it says, errors too, whether a signal stopped it). How far it is, it tells now and then."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    said: list[str] = []
    stopped, child = False, None
    with signals.heard(deaf=signals.here_only):
        try:
            # In a session of its own: signals reach it from here only.
            child = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
            listener = Thread(target=_listen, args=(child.stdout, said), daemon=True)
            listener.start()
            child.wait()
        except KeyboardInterrupt:
            stopped = True
            print("conform: interrupted; what has been run is reported", file=sys.stderr, flush=True)
            if child:
                child.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                    child.wait(PATIENCE)
        finally:
            if child:
                end_session(child.pid)
    if child is None:
        return FAIL, "", stopped
    listener.join(PATIENCE)
    return child.wait(), "".join(said), stopped


def _listen(stdout, said: list[str]) -> None:
    told = time.monotonic()
    for line in stdout:
        said.append(line)
        done = re.search(r"\[ *(\d+)%\]$", line.rstrip())
        if done and time.monotonic() - told > NEWS:
            told = time.monotonic()
            print(f"conform: {done[1]} %", file=sys.stderr, flush=True)


def end_session(session: int) -> None:
    """Ends whoever is left of its processes: workers in native code, say, and what a provider has started."""
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        pass
