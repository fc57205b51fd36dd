"""`runner.py status URL`: what the ops of a running server did, as a table, from its /metrics."""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from http.client import HTTPException
from ipaddress import ip_address
from urllib.parse import urlsplit

from shim.errors import OpshimError
from shim.vllm_plugin.supervise import HERE

_LINE = re.compile(r'^opshim_(\w+?)(?:_total)?\{(.*)\} (\S+)$', re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
SHOWN = ("calls", "failures", "refusals", "outside_domain", "non_finite", "breaker_open")


def status(url: str, as_json: bool = False) -> int:
    """Prints the table. 0; 1 where a breaker is open or an answer was not finite; 2 where nobody answers, or no opshim."""
    address = f"{root_of(url)}/metrics"
    try:
        with (HERE.open if is_here(url) else urllib.request.urlopen)(address, timeout=10) as answer:
            rows = read(answer.read().decode())
    except (OSError, ValueError, HTTPException) as error:
        why = repr(error) if isinstance(error, HTTPException) else getattr(error, "reason", error)
        print(f"status: {address}: {why}", file=sys.stderr)
        return 2
    if not rows:
        print(f"status: {address} has no opshim_ metrics, which a server has that runner.py serve started", file=sys.stderr)
        return 2
    print(json.dumps(rows, indent=2) if as_json else table(rows))
    return 1 if any(row["breaker_open"] or row["non_finite"] for row in rows) else 0


def root_of(url: str) -> str:
    """A server's URL without the path of its API; OpshimError for what is none."""
    root = re.sub(r"(/v1)?/*$", "", url)
    try:
        parts = urlsplit(root)
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number
        named = False
    if not named:
        raise OpshimError(f"'{url}' is no URL of a server, such as http://127.0.0.1:8000")
    return root


def is_here(url: str) -> bool:
    """Whether it is of this machine itself, to which no proxy leads."""
    host = urlsplit(url).hostname
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def read(text: str) -> list[dict]:
    """One row per op and candidate, from the text of /metrics."""
    rows: dict[tuple[str, str], dict] = {}
    for name, labels, value in _LINE.findall(text):
        given = dict(_LABEL.findall(labels))
        if "candidate" in given:
            key = given["op"], given["candidate"]
            row = rows.setdefault(key, dict(zip(("op", "candidate"), key)) | dict.fromkeys(SHOWN, 0) | {"selected": 0, "certified": 0})
            row[name] = int(float(value))
    return list(rows.values())


def table(rows: list[dict]) -> str:
    """The rows for people: who serves each op, whether that is certified, and what happened."""
    names = [name for name in SHOWN if name == "calls" or any(row[name] for row in rows)]
    lines = [("op", "provider", "state", *(name.replace("_", " ") for name in names))]
    for row in rows:
        state = "serves, certified" if row["certified"] and row["selected"] else "serves" if row["selected"] else ""
        lines.append((row["op"], row["candidate"], state, *(str(row[name]) for name in names)))
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    shown = ("  ".join(f"{cell:{'<' if at < 3 else '>'}{widths[at]}}" for at, cell in enumerate(line)) for line in lines)
    return "\n".join(line.rstrip() for line in shown)
