"""The environment variables of opshim: all their names, and the values of those that take one of a few.

Every command and every process of vLLM checks them before anything else, as what reads one may be far away: in a worker
that has just loaded its weights, or in C++, where an unknown value would be taken in silence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from difflib import get_close_matches

from shim.device import ISAS
from shim.errors import UnknownNameError

PREFIX = "OPSHIM_"
SWITCH = ("0", "1")
VALUES = {
    "OPSHIM_POLICY": ("strict", "auto", "reference"),
    "OPSHIM_REQUIRE_CERTIFIED": SWITCH,
    "OPSHIM_CPU_ISA": ISAS,  # of which a machine may have less: device.py
    "OPSHIM_CPU_AMX": SWITCH,
    "OPSHIM_CUBLASLT": SWITCH,
    "OPSHIM_WATCH_NON_FINITE": SWITCH,
    "OPSHIM_MOE": ("auto", "fused", "staged"),
    "OPSHIM_ALLOW_ANY_VLLM": SWITCH,
}
LISTS = ("OPSHIM_PROVIDER", "OPSHIM_PROVIDER_FILES")
FOLDERS = ("OPSHIM_CERTIFICATES", "OPSHIM_LIBRARY_PATH", "OPSHIM_CACHE")
NAMES = (*VALUES, *LISTS, *FOLDERS)
INTERNAL = ("OPSHIM_REQUEST_POLICY", "OPSHIM_RUN_DIR", "OPSHIM_LIFELINE")  # from `serve` to its child


def value(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Of one of VALUES, empty where it is not set; UnknownNameError for what it does not take."""
    given = environ.get(name, "")
    if given and given not in VALUES[name]:
        raise UnknownNameError(name, given, VALUES[name])
    return given


def is_on(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    return value(name, environ) == "1"


def check(environ: Mapping[str, str] = os.environ) -> None:
    """UnknownNameError for the first that has a value which it does not take."""
    for name in VALUES:
        value(name, environ)


def drop_internal(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Takes what only `serve` sets, for its child, out of the environment of a command; the names of what was there."""
    return [name for name in INTERNAL if environ.pop(name, None) is not None]


def unknown(environ: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """Those that nothing reads, each with the name that may have been meant, or an empty one."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in NAMES:
            yield name, next(iter(get_close_matches(name, NAMES, 1, 0.8)), "")
