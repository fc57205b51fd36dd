"""The chain of one op on one device: its candidates in order, why each was taken or left, and the call itself.

    1. what the user chose for this op          3. native:precompiled        5. reference
    2. other installed and file providers       4. native:jit

A chain is resolved once, at the op's first call, and again after the policy or the registrations change. Where a native
library could not be had and the op had to go without, the chain is resolved again a minute later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict

from shim import certificates, plugins, table
from shim import policy as policies
from shim.candidates import NOT_CHOSEN, NOT_NEEDED, READY, SELECTED, UNAVAILABLE, Candidate, available, from_library
from shim.errors import (
    BuildError,
    OpArgumentError,
    OpExecutionError,
    OpUnavailableError,
    describe,
    is_sticky,
)
from shim.health import (
    CALLS,
    FAILURES,
    IS_CERTIFIED,
    IS_SELECTED,
    OPEN_UNTIL,
    OUTSIDE,
    REFUSALS,
    counters,
    watched,
)
from shim.op import Implementation, Op, get, names
from shim.policy import Policy

log = logging.getLogger("opshim")
RETRY_SECONDS = 60.0
_resolving = threading.RLock()
_warned: set[tuple[str, str, str]] = set()  # (op, device, kind of event)

# A call that nothing stands in the way of. Written out for the op's own parameters, as handing *args and **kwargs on
# from function to function would cost more than all the rest.
_DIRECT = """
def {op}({names}):
    check({names})
    try:
        verdict = {guard}
        if verdict is True:
            result = function({names})
            counters.values[{calls}] += 1
            return result
        refused = [(first, verdict)]
    except Exception as error:
        failed(first, error, ({names},))
        refused = None
    return walk(({names},), 1, refused)  # not above: an error keeps what its frames hold, memory that others may need
"""


class Chain:
    """The resolved chain of an op on a device type. `call(*args)` is the op. `tells`: of a fallback, at once."""

    def __init__(
        self,
        op: Op,
        device: str,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
        tells: bool = True,
    ):
        self.op, self.device, self.policy, self.clock = op, device, policy or policies.current(), clock
        self.choice = self.policy.providers.get(op.name)
        if self.choice is not None and self.choice not in op.providers():
            raise plugins.unknown(f"provider of {op.name}", self.choice, op.providers())
        self.falls_back = self.policy.mode == "auto"
        with _resolving:
            self.candidates = self._candidates()
            for one in self.candidates:
                one.slot = counters.slot(op.name, one.label)
                one.breaker.clock = clock
                if one.function is not None:
                    one.function = watched(one.function, op.name, one.label, one.slot)
        self.reference = self.candidates[-1]
        self.order = [one for one in self.candidates if one.resolved == READY and one is not self.reference]
        if "reference" in (self.choice, self.choice or self.policy.mode):
            self.order = [self.reference]
        self.selected = self.order[0] if self.order else self.reference if self.falls_back else None
        if self.selected is not None:
            self.selected.resolved = SELECTED
        for one in self.candidates:
            counters.values[one.slot + IS_SELECTED] = one is self.selected
            counters.values[one.slot + IS_CERTIFIED] = one.certificate.valid
        if not self._allows("reference"):
            self.reference.reason = "only for calls outside the op's domain"
        self.retry_at = clock() + RETRY_SECONDS
        self._install()
        if tells:
            _tell_fallbacks([self])

    # ---- resolution -------------------------------------------------------------------------------------------------

    def _allows(self, provider: str) -> bool:
        """Whether policy and choice let this provider serve."""
        if self.choice is not None and (provider == self.choice or not self.falls_back or self.choice == "reference"):
            return provider == self.choice
        return self.policy.mode != "reference" if provider != "reference" else self.policy.mode != "strict"

    def _candidates(self) -> list[Candidate]:
        mine = [one for one in self.op.implementations if one.serves(self.device)]
        mine.sort(key=lambda one: (one.provider != self.choice, one.provider == "native"))
        found = []
        for one in mine:
            found += self._native(one) if one.provider == "native" else [self._other(one)]
        if not any(one.provider == "native" for one in mine):
            found.append(Candidate("native", "native", UNAVAILABLE, f"no native implementation for {self.device}"))
        found.append(Candidate("reference", "reference", READY, function=self.op.reference))
        return found

    def _other(self, one: Implementation) -> Candidate:
        reason = self._left_out(one.provider, one.explicit)
        if reason:
            return Candidate(one.provider, one.provider, NOT_CHOSEN, reason)
        return self._with_certificate(available(one))

    def _native(self, one: Implementation) -> list[Candidate]:
        reason = self._left_out("native", False)
        if reason:
            return [Candidate("native", "native", NOT_CHOSEN, reason)]
        first = from_library("native:precompiled", one, one.library.precompiled(one.symbols))
        first = self._with_certificate(first)
        if first.function:
            return [first, Candidate("native:jit", "native", NOT_NEEDED)]
        return [first, self._compiled(one)]

    def _compiled(self, one: Implementation) -> Candidate:
        identity = one.library.identity()
        if self.policy.require_certified and not isinstance(identity, BuildError):  # nothing is compiled in vain
            build = certificates.native_build(asdict(identity))
            proof = certificates.find(self.op, "native", self.device, build)
            if not proof.valid:
                return Candidate("native:jit", "native", UNAVAILABLE, proof.words)
        return self._with_certificate(from_library("native:jit", one, one.library.compiled(one.symbols)))

    def _with_certificate(self, one: Candidate) -> Candidate:
        """The candidate with what is proven of it; unavailable where the policy wants a proof and there is none."""
        if one.function is None:
            return one
        one.certificate = certificates.find(self.op, one.provider, self.device, one.build)
        if self.policy.require_certified and not one.certificate.valid:
            return Candidate(one.label, one.provider, UNAVAILABLE, one.told, library=one.library)
        return one

    def _left_out(self, provider: str, explicit: bool) -> str:
        if explicit and provider != self.choice:
            return table.UNASKED
        if not self._allows(provider):
            return f"{self.choice} was chosen" if self.choice else f"policy {self.policy.mode}"
        return ""

    @property
    def lacks_native(self) -> bool:
        """The op goes without an implementation that the policy wants, for lack of a library."""
        return bool(self.libraries()) and self.selected in (None, self.reference)

    def libraries(self) -> list:
        """The native libraries that this chain looks into."""
        mine = [one.library for one in self.op.implementations if one.serves(self.device) and self._allows("native")]
        return [library for library in mine if library is not None]

    @property
    def fallback(self) -> str:
        """Who serves in the place of whom the policy wants, and why; "" where it is as wanted."""
        wanted = self.choice or "native"
        got = self.selected and self.selected.provider
        if not self.falls_back or got == wanted or not (self.choice or got == "reference"):
            return ""
        reasons = [f"{one.label}: {one.reason}" for one in self.candidates if one.resolved == UNAVAILABLE]
        return f"served by {got} on {self.device}, as {'; '.join(reasons)}"

    # ---- the call ---------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        """Sets `call`: straight to the first candidate where nothing is wrong with it, else with care."""
        if self.lacks_native:
            self.call = self._call_lacking
        elif self.order and not self.order[0].breaker.failures:  # of the others' failures `_walk` knows
            self.call = self._direct(self.order[0])
        else:
            self.call = self._call_with_care

    def _direct(self, first: Candidate) -> Callable:
        names = ", ".join(self.op.signature.parameters)
        scope = {
            "check": self.op.check,
            "supports": first.supports,
            "function": first.function,
            "first": first,
            "walk": self._walk,
            "failed": self._failed,
            "counters": counters,
        }
        guard = "True" if first.supports is None else f"supports({names})"
        source = _DIRECT.format(op=self.op.name, names=names, guard=guard, calls=first.slot + CALLS)
        exec(source, scope)  # noqa: S102
        call = scope[self.op.name]
        call.__defaults__ = self.op.reference.__defaults__
        return call

    def _call_with_care(self, *args, **kwargs):
        args = self._positional(args, kwargs)
        self.op.check(*args)
        return self._walk(args)

    def _positional(self, args, kwargs) -> tuple:
        try:
            bound = self.op.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.op.name}: {error}") from None
        bound.apply_defaults()
        return bound.args

    def _call_lacking(self, *args, **kwargs):
        if self.clock() >= self.retry_at:
            for library in self.libraries():
                library.reset()
            self.op.chains.clear()
            chain = self.op.chains[self.device] = Chain(self.op, self.device, self.policy, self.clock)
            return chain.call(*args, **kwargs)
        return self._call_with_care(*args, **kwargs)

    def _walk(self, args, start: int = 0, refused: list | None = None):
        """Asks the candidates from `start` on, one after the other, then the reference as far as policy and domain
        let it. `refused`: candidates that were left and the reason."""
        refused = refused or []
        for one in self.order[start:]:
            if one.breaker.is_open():
                refused.append((one, "breaker open after failures in a row"))
                continue
            try:
                verdict = True if one.supports is None else one.supports(*args)
                if verdict is not True:
                    refused.append((one, verdict))
                    continue
                result = one.function(*args)
            except Exception as error:  # noqa: BLE001  whatever a provider raises
                self._failed(one, error, args)
                continue
            counters.values[one.slot + CALLS] += 1
            if one.breaker.failures:
                one.breaker.succeeded()
                counters.values[one.slot + OPEN_UNTIL] = 0
                self._install()
            if one is not self.selected:
                if self.op.in_domain(*args) is True:
                    self._note(refused, one)
                else:
                    counters.values[one.slot + OUTSIDE] += 1
            return result
        return self._last(args, refused)

    def _last(self, args, refused: list):
        outside = self.op.in_domain(*args)
        if outside is True:
            if not self.falls_back:
                reasons = "; ".join(f"{one.label}: {reason}" for one, reason in refused)
                raise OpUnavailableError(
                    f"{self.op.name}: {'every candidate refused the call' if refused else 'no implementation'} on "
                    f"{self.device} under policy {self.policy.mode}{f' ({reasons})' if reasons else ''}\n"
                    f"{table.text([self])}\ncalled with\n{describe(self.op, args)}"
                )
            self._note(refused, self.reference)
        try:
            result = self.op.reference(*args)
        except Exception as error:  # noqa: BLE001
            self._failed(self.reference, error, args)
        counters.values[self.reference.slot + CALLS] += 1
        counters.values[self.reference.slot + OUTSIDE] += outside is not True
        return result

    def _note(self, refused: list, server: Candidate) -> None:
        for one, reason in refused:
            if not one.breaker.is_open():
                counters.values[one.slot + REFUSALS] += 1
                self._warn("refused", f"a call was served by {server.label}, as {one.label} does not take it: {reason}")

    def _failed(self, one: Candidate, error: Exception, args) -> None:
        """Counts a failure; raises where the policy lets nobody else answer. A provider has not failed that raises on a
        wrong argument, or outside the op's domain, where the reference serves."""
        if isinstance(error, OpArgumentError):
            raise error
        sticky = is_sticky(error)
        if not sticky:
            self.op.refuse_wrong_scalars(args)
        if not sticky and one is not self.reference and self.op.in_domain(*args) is not True:
            return
        counters.values[one.slot + FAILURES] += 1
        if sticky or not self.falls_back or one is self.reference:
            raise OpExecutionError(
                f"{self.op.name}: {one.label} failed on {self.device}: {type(error).__name__}: {error}"
                f"{' (the device is lost to this process)' if sticky else ''}\n"
                f"called with\n{describe(self.op, args)}"
            ) from error
        one.breaker.failed()
        counters.values[one.slot + OPEN_UNTIL] = int(time.time() + one.breaker.pause) if one.breaker.is_open() else 0
        written = f", from what the failed call has left of {', '.join(self.op.mutates)}" if self.op.mutates else ""
        self._warn(
            "failed",
            f"{one.label} failed and the next candidate answers{written}; it is tried again, after {one.breaker.limit} "
            f"failures in a row only every {one.breaker.pause:.0f} s: {type(error).__name__}: {error}",
        )
        self._install()

    def _warn(self, kind: str, message: str) -> None:
        if self.is_new(kind):
            log.warning("%s: %s", self.op.name, message)

    def is_new(self, kind: str) -> bool:
        """True once per op, device and kind of event in the life of the process: that often it is warned of."""
        key = (self.op.name, self.device, kind)
        known = key in _warned
        _warned.add(key)
        return not known


def _tell_fallbacks(chains: Iterable[Chain]) -> None:
    """One warning for all ops that fall back for the same reason."""
    told: dict[str, list[str]] = {}
    for chain in chains:
        if chain.fallback and chain.is_new("unavailable"):
            told.setdefault(chain.fallback, []).append(chain.op.name)
    for fallback, ops in told.items():
        log.warning("%s: %s", ", ".join(ops), fallback)


def resolve(only: Iterable[str] | None = None, device: str = "cpu", policy: Policy | None = None) -> list[Chain]:
    """The chains of some ops (default: all): the live ones of the policy in force, fresh ones for another policy."""
    wanted = [get(name) for name in (names() if only is None else only)]
    chains = [op.chain(device, tells=False) if policy is None else Chain(op, device, policy, tells=False) for op in wanted]
    _tell_fallbacks(chains)
    return chains


def unserved(chains: Iterable[Chain]) -> str:
    """Which ops the policy leaves without an implementation, and why, in one line; "" where there are none."""
    lacking = [chain for chain in chains if chain.selected is None]
    if not lacking:
        return ""
    causes = dict.fromkeys(  # the last one's: code compiled here comes after what was compiled before
        next((one.reason for one in reversed(chain.candidates) if one.state == UNAVAILABLE), "nobody offers one")
        for chain in lacking
    )
    hint = f": {'; '.join(causes)}"
    if lacking[0].policy.require_certified:
        hint = " that is certified ('runner.py conform' certifies)"
    listed = ", ".join(chain.op.name for chain in lacking)
    return f"policy {lacking[0].policy.mode} leaves {listed} without an implementation{hint}"


def require(only: Iterable[str] | None = None, device: str = "cpu", policy: Policy | None = None) -> list[Chain]:
    """Like `resolve`; OpUnavailableError with the chain table where the policy leaves one of the ops unserved."""
    chains = resolve(only, device, policy)
    if reason := unserved(chains):
        raise OpUnavailableError(f"{reason}\n{table.text([chain for chain in chains if chain.selected is None])}")
    return chains
