"""opshim's runtime: ops, their providers, and the chain that decides which one runs."""

from shim.errors import (
    OpArgumentError,
    OpExecutionError,
    OpshimError,
    OpUnavailableError,
    RegistrationError,
    UnknownNameError,
)
from shim.op import Implementation, Op, get, implementation, names, native, op

__all__ = [
    "Implementation",
    "Op",
    "OpArgumentError",
    "OpExecutionError",
    "OpUnavailableError",
    "OpshimError",
    "RegistrationError",
    "UnknownNameError",
    "get",
    "implementation",
    "names",
    "native",
    "op",
]
