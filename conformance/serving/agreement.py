"""When two runs of a model agree: over the same text, the same best token wherever the reference is sure, and
log-probabilities that differ by rounding only. `python -m conformance.serving.agreement REFERENCE.json OTHER.json` says
whether two results of score.py do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

GAP = 0.05  # nats between the reference's best two tokens from which on they must not be swapped
WITHIN = 0.05  # nats


def disagreements(reference: list[list[dict]], other: list[list[dict]], within: float = WITHIN) -> list[str]:
    """One line per position that breaks the rule; texts as score.py writes them."""
    if [[at["token"] for at in text] for text in reference] != [[at["token"] for at in text] for text in other]:
        return ["the tokens of the texts differ"]
    found = []
    for number, (expected, got) in enumerate(zip(reference, other)):
        for position, (one, two) in enumerate(zip(expected, got)):
            where, token = f"text {number}, position {position}", str(one["token"])
            a, b = one["logprobs"], two["logprobs"]
            first, second = sorted(a, key=a.get, reverse=True)[:2]
            if a[first] - a[second] > GAP and max(b, key=b.get) != first:
                found.append(f"{where}: best token {first}, got {max(b, key=b.get)}")
            if not abs(a[token] - b[token]) <= within:
                found.append(f"{where}: log-probability of token {token} {a[token]:.4f}, got {b[token]:.4f}")
    return found


def furthest(reference: list[list[dict]], other: list[list[dict]]) -> float:
    """Nats between the two on a token of the texts, at most."""
    pairs = (pair for texts in zip(reference, other) for pair in zip(*texts))
    return max(abs(a["logprobs"][str(a["token"])] - b["logprobs"][str(b["token"])]) for a, b in pairs)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m conformance.serving.agreement REFERENCE.json OTHER.json")
    first, second = (json.loads(Path(name).read_text())["texts"] for name in sys.argv[1:])
    found = disagreements(first, second)
    print(*found, f"{sum(map(len, first))} positions, {len(found)} disagreements", sep="\n", end="")
    print("" if len(found) == 1 and "tokens" in found[0] else f", at most {furthest(first, second):.3f} nats apart")
    sys.exit(bool(found))
