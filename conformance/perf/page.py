"""Tables of GPU benches for a README: `python -m conformance.perf.page FOLDER` reads its *.json and prints Markdown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def page(folder: Path) -> str:
    """One table per op and bench file of the folder; then shim overhead and cold starts where they were measured."""
    files = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    documents = {name: one for name, one in files.items() if "speed" in one or "cold" in one}
    parts = []
    for name, one in documents.items():
        if "ceilings" in one:
            memory, matmul = (one["ceilings"][what] / 1e12 for what in ("memory", "matmul"))
            parts.append(f"`{name}`: {_where(one)}; ceilings {memory:.2f} TB/s and {matmul:.0f} TFLOP/s\n")
    measured: dict[str, dict[str, list[dict[str, Any]]]] = {}  # op -> file -> rows
    for name, one in documents.items():
        for row in one.get("speed", ()):
            measured.setdefault(row["op"], {}).setdefault(name, []).append(row)
    for op, runs in measured.items():
        for name, rows in runs.items():
            parts.append(_speed(f"{op}, {name}" if len(runs) > 1 else op, rows))
    overhead = [row for one in documents.values() for row in one.get("overhead", ()) if "direct_us" in row]
    if overhead:
        parts.append("## What the shim adds\n\n" + _table(
            ("op", "served by", "direct us", "shim adds us"),
            ((row["op"], row["provider"], f"{row['direct_us']:.1f}", f"{row['shim_adds_us']:.1f}") for row in overhead)))
    cold = [row for one in documents.values() for row in one.get("cold", ()) if "seconds" in row]
    if cold:
        parts.append("## Cold start\n\nSeconds from `import torch` done to the first result of an op, in a fresh process.\n\n"
            + _table(("op", "served by", "seconds", "of it CUDA's context"),
            ((row["op"], row["served by"], f"{row['seconds']:.2f}", f"{row['device_seconds']:.2f}") for row in cold)))
    return "\n".join(parts)  # fmt: skip


def _speed(title: str, rows: list[dict[str, Any]]) -> str:
    providers = list(dict.fromkeys(provider for row in rows for provider in row["providers"]))
    head = ("size", "floor us", *(f"{provider} us" for provider in providers), "x floor", "x best other")
    lines = []
    for row in rows:
        times = [row["providers"].get(provider, {}) for provider in providers]
        cells = [f"{one['us']:.2f}{'*' if one['how'] == 'events' else ''}" if one.get("us") else "" for one in times]
        floor, other = row.get("to_floor"), row.get("to_best_other")
        shown = (f"{floor:.1f}" if floor and floor < 1000 else "", f"{other:.2f}" if other else "")
        lines.append((row["size"] + " +" * row.get("cached", False), f"{row['floor_us']:.2f}", *cells, *shown))
    return f"## {title}\n\n{_table(head, lines)}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _where(document: dict[str, Any]) -> str:
    where = document["environment"]
    facts = where["device"]["facts"]
    driver = next((word for word in facts.get("driver", "").split() if word[:1].isdigit()), "unknown")
    versions = ", ".join(f"{name} {version}" for name, version in document.get("versions", {}).items())
    told = f"{document.get('date', '')}, {where['device']['name']}, driver {driver}, torch {where['torch']}"
    return f"{told}{f', {versions}' if versions else ''}"


if __name__ == "__main__":
    print(page(Path(sys.argv[1])))
