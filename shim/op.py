"""What an op is: its reference function, and everything that is registered beside it.

The reference defines the op: name, signature, docstring, behaviour. `@op` turns it into an `Op`, registers it with
`torch.library` as `torch.ops.opshim.<name>`, and the `Op` itself is what callers call:

    @op(mutates=("state",))
    def gdn_decode(q: Tensor, ..., state: Tensor, ...) -> Tensor:
        '''Contract: shapes, dtypes, errors, formula and its source.'''

    @gdn_decode.checks      # raises OpArgumentError; runs before any provider, in every policy
    @gdn_decode.domain      # True, or words: outside it the reference serves, in every policy, what no guard takes
    @gdn_decode.fakes       # output shapes and dtypes for tracing
    @gdn_decode.inputs      # seeded example arguments from sizes; used by conformance and by bench

`gdn_decode.reference(...)` is the plain function; `gdn_decode(...)` goes through the chain.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

import torch
from torch.compiler import is_dynamo_compiling

from shim.errors import OpArgumentError, RegistrationError, UnknownNameError

_registry: dict[str, Op] = {}
_library = torch.library.Library("opshim", "DEF")
_numbers = itertools.count()
_modes = torch._C._len_torch_dispatch_stack
RESERVED = ("native", "reference")  # provider names that the shim itself gives
_SCALARS = {int: "an int", float: "a number", bool: "True or False", type(None): "None"}


def where(function: Callable) -> str:
    """file:line of a function, for error messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


@dataclass(frozen=True)
class Implementation:
    """One provider's function for one op on one device type (None: any).

    It may raise at any time (auto then asks the next candidate), so it must fail before it writes to the arguments that
    the op mutates.
    """

    op: str
    provider: str
    device: str | None
    function: Callable
    supports: Callable | None = None
    library: Any = None  # shim.loading.NativeLibrary when `function` takes its C functions as first argument
    symbols: dict[str, str] = field(default_factory=dict)
    available: Callable | None = None  # () -> True, or words: why it cannot serve on this machine at all
    explicit: bool = False  # serves only where the user chose it by name

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
        self.chains: dict[str | torch.device, Any] = {}  # by device type, and the same chains by tensors' devices
        self.__doc__ = reference.__doc__
        self.library = _library
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
        torch.library.register_fake(f"{self.library.ns}::{self.name}", function, lib=self.library)
        return function

    def inputs(self, function: Callable) -> Callable:
        """Registers the generator of example arguments: (generator, device, dtype, **sizes) -> dict."""
        self.example = function
        return function

    def add(self, implementation: Implementation) -> None:
        """Registers an implementation; it takes effect at the next resolution of the chain."""
        self.implementations.append(implementation)
        self.chains.clear()

    def chain(self, device: str, tells: bool = True):
        """The resolved chain for a device type ("cpu", "cuda"). `tells`: of a fallback, as it is resolved."""
        chain = self.chains.get(device)
        if chain is None:
            from shim.dispatch import Chain  # dispatch needs Op; the chain is built on first use

            chain = self.chains[device] = Chain(self, device, tells=tells)
        return chain

    def providers(self) -> list[str]:
        """Names of all that implement it on some device, the reference included."""
        return list(dict.fromkeys([*(one.provider for one in self.implementations), *RESERVED]))

    def refuse_wrong_scalars(self, args: tuple) -> None:
        """Raises OpArgumentError for the first of a call's positional arguments that is declared int, float or bool and
        is none. An int passes for each of them. Costs too much for every call: it explains one that has failed."""
        hints = get_type_hints(self.reference)
        for name, value in zip(self.signature.parameters, args):
            kinds = get_args(hints[name]) or (hints[name],)
            if _SCALARS.keys() >= set(kinds) and not isinstance(value, (*kinds, int)):
                expected = " or ".join(_SCALARS[kind] for kind in kinds)
                raise OpArgumentError(self.name, name, expected, f"{type(value).__name__} {value!r}")

    @property
    def torch_op(self):
        """The op as torch knows it: torch.ops.opshim.<name>, default overload."""
        return getattr(getattr(torch.ops, self.library.ns), self.name).default

    def __call__(self, *args, **kwargs):
        if is_dynamo_compiling() or _modes():  # traced, faked or functionalised: torch has to see one opaque op
            return self.torch_op(*args, **kwargs)
        try:
            first = args[0] if args else kwargs[self._first]
            chain = self.chains["cpu" if first.is_cpu else first.device]  # a device takes longer to hash
        except (KeyError, AttributeError):
            chain = self._resolve(args, kwargs)
        return chain.call(*args, **kwargs) if kwargs else chain.call(*args)  # an empty dict costs, too

    def _resolve(self, args, kwargs):
        try:
            first = self.signature.bind(*args, **kwargs).args[0]
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}; it takes {_bare(self.signature)}") from None
        if not isinstance(first, torch.Tensor):
            raise OpArgumentError(self.name, self._first, "a tensor", type(first).__name__)
        chain = self.chains[first.device] = self.chain(first.device.type)
        return chain

    def __repr__(self) -> str:
        return f"<Op {self.name}{self.signature}>"


def _accept(*args, **kwargs):
    return True


def op(*, mutates: tuple[str, ...] = ()) -> Callable[[Callable], Op]:
    """Declares an op from its reference function (see the module's docstring)."""

    def declare(reference: Callable) -> Op:
        name = reference.__name__
        if name in _registry:
            first = where(_registry[name].reference)
            raise RegistrationError(f"op '{name}' declared twice, first at {first}, again at {where(reference)}")
        new = Op(reference, mutates)
        odd = [one.name for one in new.signature.parameters.values() if one.kind is not one.POSITIONAL_OR_KEYWORD]
        if odd:
            raise RegistrationError(f"op '{name}': {odd} must be plain parameters; at {where(reference)}")
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


def implementation(
    op: str,
    *,
    provider: str,
    device: str | None = None,
    supports: Callable | None = None,
    available: Callable | None = None,
    explicit: bool = False,
) -> Callable:
    """Registers a provider's function for an op; the signature must be the reference's, else RegistrationError.

    supports: the op's parameters (or *args, **kwargs) -> True, or words that say why this call is not for it.
    available: () -> True, or words that say why it cannot serve on this machine.
    explicit: serves only where the user chose this provider by name.
    """

    def register(function: Callable) -> Callable:
        if provider.split(":")[0] in RESERVED:
            raise RegistrationError(f"{op}: the provider name '{provider}' is the shim's own; at {where(function)}")
        new = Implementation(op, provider, device, function, supports, available=available, explicit=explicit)
        _register(new, skip=0)
        return function

    return register


def native(op: str, *, library, symbols: dict[str, str], supports: Callable | None = None) -> Callable:
    """Registers a native binding: the reference's signature behind a first parameter `c`, the library's C functions.

    library: the NativeLibrary, or a tuple of them (one per device type) where one binding serves several.
    symbols: C function name -> argument codes, one letter each: p pointer, i int64_t, d double; the library's own last
    arguments (`NativeLibrary.tail`) are left out. All return int, 0 for success. The op is unavailable, alone and with
    that reason, where the library lacks one of them.
    """

    def register(function: Callable) -> Callable:
        for one in library if isinstance(library, tuple) else (library,):
            codes = {name: code + one.tail for name, code in symbols.items()}
            _register(Implementation(op, "native", one.device, function, supports, one, codes), skip=1)
        return function

    return register


def registrations() -> dict[Op, list[Implementation]]:
    """Who implements what now; `restore` goes back to it."""
    return {op: list(op.implementations) for op in _registry.values()}


def restore(kept: dict[Op, list[Implementation]]) -> None:
    """Forgets every op and implementation that was registered since `registrations()`."""
    _registry.clear()
    for op, implementations in kept.items():
        _registry[op.name] = op
        if op.implementations != implementations:
            op.implementations[:] = implementations
            op.chains.clear()


@contextmanager
def temporary() -> Iterator[None]:
    """Ops and implementations registered inside the `with` block are forgotten at its end (tests, mutants)."""
    global _library
    kept, library = registrations(), _library
    _library = torch.library.Library(f"opshim_temporary_{next(_numbers)}", "DEF")
    try:
        yield
    finally:
        _library._destroy()
        _library = library
        restore(kept)


def _register(new: Implementation, skip: int) -> None:
    if new.op not in _registry:
        raise RegistrationError(f"{UnknownNameError('op', new.op, _registry)}; at {where(new.function)}")
    target = _registry[new.op]
    who = f"provider '{new.provider}'"
    _match(target, new.function, skip, who)
    if new.supports is not None and not _takes_anything(new.supports):
        _match(target, new.supports, 0, f"supports of {who}")
    for old in target.implementations:
        if old.provider == new.provider and old.device == new.device:
            raise RegistrationError(
                f"{new.op}: {who} for device {new.device or 'any'} registered twice, "
                f"first at {where(old.function)}, again at {where(new.function)}"
            )
    target.add(new)


def _match(target: Op, function: Callable, skip: int, who: str) -> None:
    """Same parameter names, order and defaults as the reference (annotations are free)."""
    try:
        given = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError) as error:
        raise RegistrationError(f"{target.name}: {who} is no function with a signature ({error})") from error
    wanted = target.signature.parameters.values()
    if [(p.name, p.default, p.kind) for p in given] != [(p.name, p.default, p.kind) for p in wanted]:
        raise RegistrationError(
            f"{target.name}: {who} has the signature {_bare(inspect.Signature(given))}, "
            f"the op's is {_bare(target.signature)}; at {where(function)}"
        )


def _takes_anything(function: Callable) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    return kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


def _bare(signature: inspect.Signature) -> str:
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return f"({', '.join(map(str, parameters))})"
