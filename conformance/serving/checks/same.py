"""When two greedy answers to the same prompt are the same.

Token by token, up to a tie: where they part, the first answer's own log-probabilities of the two tokens must be within
TIE. A sum in another order (another batch, a cached prefix) moves a logit by a step of its dtype, and bfloat16 steps by
0.125 between 16 and 32; so close, either token is right. After a tie the answers have different pasts and are not
compared; before it, the log-probabilities of every token must agree within TIE as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.serving.checks.registry import Failed
from conformance.serving.client import Choice, brief

TIE = 0.25  # nats


@dataclass
class Comparison:
    """Collects pairs of answers; `told()` is the verdict."""

    tokens: int = 0  # compared
    ties: int = 0
    apart: float = 0.0  # nats, at most, between two log-probabilities of the same token
    differences: list[str] = field(default_factory=list)

    def add(self, name: str, one: Choice, two: Choice) -> None:
        for at, (a, b) in enumerate(zip(one.names, two.names)):
            if a != b:
                gap = abs(one.top[at].get(a, 0.0) - one.top[at].get(b, float("-inf")))
                self.ties += gap <= TIE
                if not gap <= TIE:
                    self.differences.append(f"{name}: token {at} is {a}, then {b}, {gap:.2f} nats apart")
                return
            self.tokens += 1
            apart = abs(one.logprobs[at] - two.logprobs[at])
            self.apart = max(self.apart, apart)
            if not apart <= TIE:
                self.differences.append(f"{name}: log-probability of token {at} is {apart:.2f} nats off")
                return
        for what in ("text", "thoughts", "finish", "tokens"):
            if (a := getattr(one, what)) != (b := getattr(two, what)):
                self.differences.append(f"{name}: {what} {a!r}, then {b!r}")

    def told(self) -> str:
        if self.differences or not self.tokens:
            raise Failed(brief(self.differences) or "no token could be compared")
        return f"{self.tokens} tokens the same, {self.ties} ties, log-probabilities within {self.apart:.2g}"
