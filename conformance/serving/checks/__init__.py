"""The checks of a server, in the order in which they run: what is simple first, what is hard on a server last."""

from conformance.serving.checks import lengths, choices, streams, usage, tools, refusals, load  # noqa: F401, I001
from conformance.serving.checks.registry import CHECKS, Check, Result, run

__all__ = ["CHECKS", "Check", "Result", "run"]
