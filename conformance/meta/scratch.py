"""Throwaway ops and libraries for the tests of the shim. Use the fixture `scratch`, which forgets them afterwards."""

from __future__ import annotations

import stat
from pathlib import Path

import torch

import shim
from ops_native.build import Spec
from shim.loading import NativeLibrary

SOURCE = """
#include <cstdint>
extern "C" __attribute__((visibility("default"))) int {name}(const float* x, float* y, int64_t n) {{
  for (int64_t i = 0; i < n; ++i) y[i] = 2 * x[i];
  return n == 13 ? 3 : 0;
}}
"""


def tiny_spec(folder: Path, *functions: str) -> Spec:
    """A library that compiles in a moment, with its sources (a file per function) in `folder`."""
    sources = folder / "sources"
    sources.mkdir(parents=True, exist_ok=True)
    for name in functions or ("double_it",):
        (sources / f"{name}.cpp").write_text(SOURCE.format(name=name))
    return Spec(
        name="tiny",
        folder=sources,
        sources="*.cpp",
        headers="*.h",
        compilers=("g++", "c++", "clang++"),
        variable="CXX",
        flags=("-fPIC", "-fvisibility=hidden"),
        link_flags=("-shared",),
        variants=(("base", ()),),
        package=folder / "package",
    )


def tiny_library(folder: Path, *functions: str) -> NativeLibrary:
    return NativeLibrary("cpu", tiny_spec(folder, *functions))


def double_op(name: str = "double") -> shim.Op:
    """An op that doubles float32 (its domain) or float64; float16 is a wrong argument."""

    def reference(x: torch.Tensor, times: int = 1) -> torch.Tensor:
        return x * 2**times

    reference.__name__ = name
    op = shim.op()(reference)

    @op.checks
    def check(x, times=1):
        if x.dtype == torch.float16:
            raise shim.OpArgumentError(name, "x", "float32", "float16")

    @op.domain
    def domain(x, times=1):
        return True if x.dtype == torch.float32 else "needs float32"

    return op


def provider(op: shim.Op, name: str, result=7.0, supports=None, **options) -> list:
    """Registers a provider that answers with `result`, or raises it where it is (or makes) an exception; returns the
    list of its calls."""
    calls = []

    def function(x, times=1):
        calls.append(x)
        answer = result(len(calls)) if callable(result) else result
        if isinstance(answer, Exception):
            raise answer
        return torch.full_like(x, answer)

    shim.implementation(op.name, provider=name, supports=supports, **options)(function)
    return calls


def double_native(op: shim.Op, library: NativeLibrary, symbol: str = "double_it", supports=None) -> None:
    """Binds a function of a tiny library as the op's native implementation."""

    @shim.native(op.name, library=library, symbols={symbol: "ppi"}, supports=supports)
    def function(c, x, times=1):
        y = torch.empty_like(x)
        getattr(c, symbol)(x.data_ptr(), y.data_ptr(), x.numel())
        return y


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def script(path: Path, body: str) -> Path:
    """An executable shell script, such as a compiler that misbehaves."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
