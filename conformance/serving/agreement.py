"""When two runs of a model agree: over the same text, the same best token wherever the reference is sure, and
log-probabilities that differ by rounding only."""

from __future__ import annotations

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
