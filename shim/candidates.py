"""One implementation of an op on one device, as a chain lists it and as it can be called without one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from shim import certificates, plugins
from shim.certificates import NOT_ASKED, Certificate
from shim.errors import OpUnavailableError
from shim.health import Breaker
from shim.loading import Found, Loaded
from shim.op import Implementation, Op, get

SELECTED, READY, UNAVAILABLE = "selected", "ready", "unavailable"
NOT_NEEDED, NOT_CHOSEN, BREAKER_OPEN = "not needed", "not chosen", "breaker open"


@dataclass(eq=False)
class Candidate:
    """One implementation in a chain. `function` has the op's signature and is None unless it can be called."""

    label: str  # "native:precompiled", "native:jit", "reference", or the provider's name
    provider: str
    resolved: str  # the state it got when the chain was resolved
    reason: str = ""
    function: Callable | None = None
    supports: Callable | None = None
    library: Loaded | None = None
    certificate: Certificate = NOT_ASKED
    breaker: Breaker = field(default_factory=Breaker)
    slot: int = 0

    @property
    def state(self) -> str:
        return BREAKER_OPEN if self.breaker.is_open() else self.resolved

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    @property
    def told(self) -> str:
        """The reason for its state, and what is proven of it."""
        return ", ".join(words for words in (self.reason, self.certificate.words) if words)

    @property
    def build(self) -> dict[str, str]:
        """What identifies its code (shim/certificates.py)."""
        if self.library:
            return certificates.native_build(self.library.info)
        return certificates.python_build(self.function) if self.function else {}

    def as_dict(self) -> dict:
        build = self.library.info if self.library else None
        proof = {"certified": self.certificate.valid, "certificate": self.certificate.words}
        return {"candidate": self.label, "state": self.state, "reason": self.reason, "build": build, **proof}


def available(one: Implementation) -> Candidate:
    """A provider's implementation, or why it cannot serve on this machine."""
    try:
        verdict = True if one.available is None else one.available()
    except Exception as error:  # noqa: BLE001  whatever a provider raises
        verdict = f"whether it is available cannot be told: {type(error).__name__}: {error}"
    if verdict is not True:
        return Candidate(one.provider, one.provider, UNAVAILABLE, str(verdict))
    return Candidate(one.provider, one.provider, READY, "", one.function, one.supports)


def from_library(label: str, one: Implementation, found: Found) -> Candidate:
    """A native binding with the C functions found for it, or why there are none."""
    if found.functions is None:
        return Candidate(label, "native", UNAVAILABLE, found.reason, library=found.library)
    function = functools.partial(one.function, found.functions)
    return Candidate(label, "native", READY, found.reason, function, one.supports, found.library)


def bind(op: str | Op, device: str, provider: str) -> Candidate:
    """One provider's implementation, ready to be called without check, guard or policy (conformance, bench).

    provider: "native" (precompiled, else compiled here), "native:precompiled", "native:jit", "reference" or a name.
    UnknownNameError for a name that nobody registered, OpUnavailableError with the reason where it cannot be had.
    """
    op = get(op) if isinstance(op, str) else op
    base, _, stage = provider.partition(":")
    name = base if base == "native" else provider
    if name not in op.providers():
        raise plugins.unknown(f"provider of {op.name}", provider, op.providers())
    if name == "reference":
        return Candidate("reference", "reference", READY, function=op.reference)
    mine = [one for one in op.implementations if one.provider == name and one.serves(device)]
    reasons = [] if mine else [f"none for device {device}"]
    for one in mine:
        for candidate in _stages(one, stage) if name == "native" else [available(one)]:
            if candidate.function:
                return candidate
            reasons.append(f"{candidate.label}: {candidate.reason}")
    raise OpUnavailableError(f"{op.name}: provider {provider} is unavailable on {device}: {'; '.join(reasons)}")


def _stages(one: Implementation, stage: str):
    if stage != "jit":
        yield from_library("native:precompiled", one, one.library.precompiled(one.symbols))
    if stage != "precompiled":
        yield from_library("native:jit", one, one.library.compiled(one.symbols))
