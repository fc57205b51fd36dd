"""`runner.py conform-server`: what a server promises its clients, checked from outside, with an exit code."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from conformance import report
from conformance.serving.checks import CHECKS, Check, Result, run
from conformance.serving.client import Server
from shim.errors import UnknownNameError

PASS, FAIL = 0, 1
WORDS = {"pass": "PASS", "fail": "FAIL", "skip": "skip"}


def conform_server(url: str, names: Sequence[str] = (), json_out: str | None = None) -> int:
    """Runs the checks (those named, or all) in order and prints each as it ends. 0: none failed and one passed, 1: any
    failure. OpshimError for wrong usage, before anything is asked of the server."""
    checks = chosen(names)
    if json_out:
        report.need_file(json_out)
    server, started = Server(url), time.monotonic()
    about = f"vLLM {server.version}" if server.version else "version unknown"
    print(f"{server.model} on {server.root}, {about}, context {server.context or 'unknown'}", flush=True)
    results = []
    for one in checks:
        results.append(run(one, server))
        print(line(results[-1]), flush=True)
    counts = Counter(result.status for result in results)
    passed = counts["pass"] > 0 and not counts["fail"]
    seconds = time.monotonic() - started
    print(f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped in {seconds:.0f} s")
    if json_out:
        about = {"url": server.root, "model": server.model, "version": server.version, "max_model_len": server.context}
        about |= {"verdict": "pass" if passed else "fail", "seconds": round(seconds, 2)}
        about |= {"checks": [asdict(result) for result in results]}
        passed &= report.written("conform-server", json_out, lambda file: report.save(file, about))
    return PASS if passed else FAIL


def chosen(names: Sequence[str]) -> list[Check]:
    known = [check.name for check in CHECKS]
    for name in names:
        if name not in known:
            raise UnknownNameError("check", name, known)
    return [check for check in CHECKS if not names or check.name in names]


def line(result: Result) -> str:
    """One line; of a failure also what was expected."""
    width = max(len(check.name) for check in CHECKS)
    first = f"{WORDS[result.status]}  {result.name:{width}}  {result.seconds:5.1f} s  {_flat(result.actual)}"
    return first if result.status != "fail" else f"{first}\n{'':{width + 17}}expected {result.expected}"


def _flat(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(conform_server(sys.argv[1]))
