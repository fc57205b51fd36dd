"""`runner.py bench --cold`: seconds from the start of a process to the first result of an op, beyond importing torch.

Each op runs in a process of its own, at its tiny size, on the provider that serves it: importing opshim, finding and
loading the library (compiling it where there is none), and on a GPU the context are all in it. torch alone, measured the
same way (a first kernel of its own on the GPU), stands beside it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600

CHILD = """
import json, sys, time
import torch
imported = time.perf_counter()
name, device = sys.argv[1:]
if device == "cuda":
    torch.zeros(1, device=device).add_(1).item()
ready = time.perf_counter()
label = "torch"
if name:
    import opshim, shim
    from conformance.case import Case
    from conformance.perf.sizes import LAYER, TINY
    given = Case(name, "tiny", TINY[name], LAYER[name][0]).arguments(device, 0)
    shim.get(name)(**given)
    label = shim.get(name).chain(device).selected.label
if device == "cuda":
    torch.cuda.synchronize()
print(json.dumps({"seconds": time.perf_counter() - imported, "device_seconds": ready - imported, "served by": label}))
"""


def cold(names: Sequence[str], device: str) -> list[dict[str, Any]]:
    """Prints and returns a row per op; of one whose process fails, with the reason in the place of numbers."""
    rows = []
    print(f"{'op':22}{'served by':22}{'first result s':>16}{'of it the device s':>20}")
    for name in names:
        row = {"op": name, **_measured(name, device)}
        if "reason" in row:
            print(f"{name:22}failed: {row['reason']}", flush=True)
        else:
            print(f"{name:22}{row['served by']:22}{row['seconds']:16.2f}{row['device_seconds']:20.2f}", flush=True)
        rows.append(row)
    return rows


def _measured(name: str, device: str) -> dict[str, Any]:
    """What the process tells, or the reason why it has no result."""
    command = [sys.executable, "-c", CHILD, name, device]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"reason": f"no result after {LIMIT_SECONDS} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    lines = [f"the process ended with code {done.returncode}", *done.stderr.strip().splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]  # whose message may go on below
    return {"reason": (errors or lines)[-1]}
