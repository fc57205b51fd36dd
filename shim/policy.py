"""Which implementations may serve: strict, auto or reference, and a provider chosen for single ops.

    strict     native or another real implementation, or an error that says why not
    auto       the first that works, the reference last, with one warning per op that falls back
    reference  the reference everywhere

A choice for one op wins over the mode: under `reference` and `strict` the chosen provider serves alone, under `auto` it
comes first. A call outside the op's domain that no candidate takes goes to the reference in every mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from shim import plugins, variables
from shim.errors import OpshimError, UnknownNameError
from shim.op import get, names

MODES = variables.VALUES["OPSHIM_POLICY"]


@dataclass(frozen=True)
class Policy:
    mode: str = "auto"
    providers: Mapping[str, str] = field(default_factory=dict)  # op -> provider
    require_certified: bool = False  # what has no certificate is unavailable (shim/certificates.py)

    def __post_init__(self):
        if self.mode not in MODES:
            raise UnknownNameError("policy", self.mode, MODES)

    @classmethod
    def parse(
        cls,
        mode: str | None = None,
        choices: Iterable[str] = (),
        environ: Mapping[str, str] = os.environ,
        require_certified: bool = False,
    ) -> Policy:
        """From arguments (`mode`, "op=provider" strings, `require_certified`), and from OPSHIM_POLICY, OPSHIM_PROVIDER
        and OPSHIM_REQUIRE_CERTIFIED (1) for what they leave out. Mode defaults to auto."""
        inherited = [choice for choice in environ.get("OPSHIM_PROVIDER", "").split(",") if choice.strip()]
        providers = dict(map(_choice, [*inherited, *choices]))
        certified = require_certified or variables.is_on("OPSHIM_REQUIRE_CERTIFIED", environ)
        return cls(mode or environ.get("OPSHIM_POLICY") or "auto", providers, certified)

    def environment(self) -> dict[str, str]:
        """The variables from which a child process parses this policy."""
        return {
            "OPSHIM_POLICY": self.mode,
            "OPSHIM_PROVIDER": ",".join(f"{op}={provider}" for op, provider in self.providers.items()),
            "OPSHIM_REQUIRE_CERTIFIED": "1" if self.require_certified else "",
        }

    def validate(self) -> None:
        """UnknownNameError where a choice names an op or a provider that is not registered (call it once all are)."""
        for op, provider in self.providers.items():
            known = get(op).providers()
            if provider not in known:
                raise plugins.unknown(f"provider of {op}", provider, known)


def _choice(text: str) -> tuple[str, str]:
    op, equals, provider = (part.strip() for part in text.partition("="))
    if not (op and equals and provider):
        raise OpshimError(f"a provider is chosen as op=provider, got '{text}'")
    return op, provider


_current: Policy | None = None


def current() -> Policy:
    """The policy in force; read from the environment on first use."""
    global _current
    if _current is None:
        _current = Policy.parse()
    return _current


def set_policy(policy: Policy | None) -> None:
    """Puts a policy in force (None: the environment's); every chain is resolved anew at its next call."""
    global _current
    _current = policy
    for name in names():
        get(name).chains.clear()


@contextmanager
def using(policy: Policy) -> Iterator[Policy]:
    """A policy in force for a `with` block."""
    before = _current
    set_policy(policy)
    try:
        yield policy
    finally:
        set_policy(before)
