"""What a check of a server is: a function that returns what it saw, or raises Failed or Skipped with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from conformance.serving.client import Server


class Failed(Exception):
    """The server does not do what was expected; the words are what it did."""


class Skipped(Exception):
    """The server lacks what the check is about; the words say what."""


@dataclass(frozen=True)
class Check:
    name: str
    expected: str
    function: Callable[[Server], str]


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    name: str
    expected: str
    actual: str
    status: str  # "pass" | "fail" | "skip"
    seconds: float


CHECKS: list[Check] = []


def check(expected: str) -> Callable:
    """Registers a function as a check, under its name."""

    def register(function: Callable[[Server], str]) -> Callable[[Server], str]:
        CHECKS.append(Check(function.__name__, expected, function))
        return function

    return register


def run(check: Check, server: Server) -> Result:
    """An answer that never came, or an error where an answer was due, is a failure."""
    started = time.monotonic()
    try:
        status, actual = "pass", check.function(server)
    except Failed as error:
        status, actual = "fail", str(error)
    except Skipped as error:
        status, actual = "skip", str(error)
    except Exception as error:  # noqa: BLE001  a server may break a check in any way
        status, actual = "fail", f"{type(error).__name__}: {error}"
    return Result(check.name, check.expected, actual, status, round(time.monotonic() - started, 2))


def expect(condition: object, actual: str) -> None:
    if not condition:
        raise Failed(actual)


def need(condition: object, reason: str) -> None:
    if not condition:
        raise Skipped(reason)
