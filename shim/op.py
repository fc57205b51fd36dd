"""What an op is: its reference function, and everything that is registered beside it.

The reference defines the op: name, signature, docstring, behaviour. `@op` turns it into an `Op`, registers it with
`torch.library` as `torch.ops.opshim.<name>`, and the `Op` itself is what callers call:

    @op(mutates=("state",))
    def gdn_decode(q: Tensor, ..., state: Tensor, ...) -> Tensor:
        '''Contract: shapes, dtypes, errors, formula and its source.'''

    @gdn_decode.checks      # raises OpArgumentError; runs before any provider, in every policy
    @gdn_decode.domain      # True, or words: outside it the reference serves the call, in every policy
    @gdn_decode.fakes       # output shapes and dtypes for tracing
    @gdn_decode.inputs      # seeded example arguments from sizes; used by conformance and by bench

`gdn_decode.reference(...)` is the plain function; `gdn_decode(...)` goes through the chain.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shim.errors import RegistrationError, UnknownNameError

_registry: dict[str, Op] = {}
_library = torch.library.Library("opshim", "DEF")


def where(function: Callable) -> str:
    """file:line of a function, for error messages."""
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


@dataclass(frozen=True)
class Implementation:
    """One provider's function for one op on one device type (None: any)."""

    op: str
    provider: str
    device: str | None
    function: Callable
    supports: Callable | None = None
    library: Any = None  # shim.loading.NativeLibrary when `function` takes its C functions as first argument
    symbols: dict[str, str] = field(default_factory=dict)

    def serves(self, device: str) -> bool:
        return self.device is None or self.device == device


class Op:
    """An op: callable like its reference, dispatched through the chain of its device."""

    def __init__(self, reference: Callable, mutates: tuple[str, ...]):
        self.name = reference.__name__
        self.reference = reference
        self.mutates = mutates
        self.signature = inspect.signature(reference)
        self.implementations: list[Implementation] = []
        self.check: Callable = _accept
        self.in_domain: Callable = _accept
        self.example: Callable | None = None  # (generator, device, dtype, **sizes) -> dict of arguments
        self.chains: dict[str, Any] = {}
        self.__doc__ = reference.__doc__
        self._first = next(iter(self.signature.parameters))

    def checks(self, function: Callable) -> Callable:
        """Registers the argument check: same parameters as the op, raises OpArgumentError."""
        self.check = function
        return function

    def domain(self, function: Callable) -> Callable:
        """Registers the domain: same parameters as the op, returns True or a string that says what is outside."""
        self.in_domain = function
        return function

    def fakes(self, function: Callable) -> Callable:
        """Registers the fake implementation: same parameters as the op, allocates outputs, computes nothing."""
        torch.library.register_fake(f"opshim::{self.name}", function, lib=_library)
        return function

    def inputs(self, function: Callable) -> Callable:
        """Registers the generator of example arguments: (generator, device, dtype, **sizes) -> dict."""
        self.example = function
        return function

    def add(self, implementation: Implementation) -> None:
        """Registers an implementation; it takes effect at the next resolution of the chain."""
        self.implementations.append(implementation)
        self.chains.clear()

    def chain(self, device: str):
        """The resolved chain for a device type ("cpu", "cuda")."""
        chain = self.chains.get(device)
        if chain is None:
            from shim.dispatch import Chain  # dispatch needs Op; the chain is built on first use

            chain = self.chains[device] = Chain(self, device)
        return chain

    def __call__(self, *args, **kwargs):
        first = args[0] if args else kwargs[self._first]
        return self.chain(first.device.type).call(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Op {self.name}{self.signature}>"


def _accept(*args, **kwargs):
    return True


def op(*, mutates: tuple[str, ...] = ()) -> Callable[[Callable], Op]:
    """Declares an op from its reference function (see the module's docstring)."""

    def declare(reference: Callable) -> Op:
        name = reference.__name__
        if name in _registry:
            raise RegistrationError(f"op '{name}' declared twice, first at {where(_registry[name].reference)}, again at {where(reference)}")
        new = Op(reference, mutates)
        schema = torch.library.infer_schema(reference, mutates_args=mutates)
        _library.define(name + schema)
        for key in ("CPU", "CUDA"):
            _library.impl(name, new, key)
        _registry[name] = new
        return new

    return declare


def get(name: str) -> Op:
    """The op of that name, or UnknownNameError naming the known ones."""
    try:
        return _registry[name]
    except KeyError:
        raise UnknownNameError("op", name, _registry) from None


def names() -> list[str]:
    """Names of all declared ops, in declaration order."""
    return list(_registry)


def implementation(op: str, *, provider: str, device: str | None = None, supports: Callable | None = None) -> Callable:
    """Registers a provider's function for an op; the signature must be the reference's, else RegistrationError."""

    def register(function: Callable) -> Callable:
        _register(Implementation(op, provider, device, function, supports), skip=0)
        return function

    return register


def native(op: str, *, library, symbols: dict[str, str], supports: Callable | None = None) -> Callable:
    """Registers a native binding: the reference's signature behind a first parameter `c`, the library's C functions.

    symbols: C function name -> argument codes, one letter each: p pointer, i int64_t, d double. All return int, 0 for
    success. The op is unavailable, alone and with that reason, where the library lacks one of them.
    """

    def register(function: Callable) -> Callable:
        _register(Implementation(op, "native", library.device, function, supports, library, symbols), skip=1)
        return function

    return register


def _register(new: Implementation, skip: int) -> None:
    target = get(new.op)
    _match(target, new.function, skip, f"provider '{new.provider}'")
    if new.supports is not None:
        _match(target, new.supports, 0, f"supports of provider '{new.provider}'")
    for old in target.implementations:
        if old.provider == new.provider and old.device == new.device:
            raise RegistrationError(
                f"{new.op}: provider '{new.provider}' for device {new.device or 'any'} registered twice, "
                f"first at {where(old.function)}, again at {where(new.function)}"
            )
    target.add(new)


def _match(target: Op, function: Callable, skip: int, who: str) -> None:
    """Same parameter names, order and defaults as the reference (annotations are free)."""
    given = list(inspect.signature(function).parameters.values())[skip:]
    wanted = list(target.signature.parameters.values())
    if len(given) == 2 and [p.kind for p in given] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        if skip == 0 and "supports" in who:
            return
    if [(p.name, p.default, p.kind) for p in given] != [(p.name, p.default, p.kind) for p in wanted]:
        listed = ", ".join(str(p) for p in given)
        raise RegistrationError(
            f"{target.name}: {who} has the signature ({listed}), the op's is {_bare(target.signature)}; at {where(function)}"
        )


def _bare(signature: inspect.Signature) -> str:
    return "(" + ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in signature.parameters.values()) + ")"
