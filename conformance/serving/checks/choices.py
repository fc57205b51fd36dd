"""Which tokens are chosen, and how probable they were."""

from __future__ import annotations

import math

from conformance.serving.checks.registry import check, expect
from conformance.serving.client import Choice, Server

PROMPT = "Once upon a time"


@check("n 2: two different answers, each to its full length, and usage counts both")
def two_choices(server: Server) -> str:
    options = {"n": 2, "temperature": 1.0, "seed": 7, "max_tokens": 24, "ignore_eos": True}
    for way, ask in server.ways.items():
        replies = [ask(PROMPT, stream, **options) for stream in (False, True)]
        for reply in replies:
            expect(len(reply.choices) == 2, f"{way}: {len(reply.choices)} choices")
            tokens, finishes = reply.usage.completion_tokens, [one.finish for one in reply.choices]
            expect(tokens == 48, f"{way}: usage says {tokens} tokens, not 2 times 24")
            expect(finishes == ["length"] * 2, f"{way}: finish_reason {finishes}")
            expect(reply.choices[0].said != reply.choices[1].said, f"{way}: twice {reply.choices[0].said!r}")
        whole, streamed = ([one.said for one in reply.choices] for reply in replies)
        expect(whole == streamed, f"{way}: {whole}, streamed {streamed}")
    return f"two of 24 tokens in {' and '.join(server.ways)}, the same ones streamed"


@check("the same seed gives the same text, and other seeds other texts")
def seeds(server: Server) -> str:
    options = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    for way, ask in server.ways.items():
        texts = set()
        for seed in range(4):
            first, second = (ask(PROMPT, seed=seed, **options).only.said for _ in range(2))
            expect(first == second, f"{way}, seed {seed}: {first!r}, then {second!r}")
            texts.add(first)
        expect(len(texts) > 1, f"{way}: seeds 0 to 3 all give {first!r}")
    return f"4 seeds, each twice the same text, in {' and '.join(server.ways)}; {len(texts)} different texts"


@check("one log-probability per token; greedy chose the best of the top ones; they are probabilities")
def logprobs(server: Server) -> str:
    said = {"completions": server.complete(PROMPT, temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)}
    if not server.no_chat:
        options = {"logprobs": True, "top_logprobs": 3, "ignore_eos": True}
        said["chats"] = server.chat(PROMPT, temperature=0, max_tokens=12, **options)
    for way, reply in said.items():
        choice = reply.only
        expect(len(choice.logprobs) == len(choice.top) == 12, f"{way}: {len(choice.logprobs)} for 12 tokens")
        for at in range(12):
            _probable(choice, at, way)
        unjoined = choice.thoughts or any(name.startswith(("bytes:", "<")) for name in choice.names)
        expect(unjoined or "".join(choice.names) == choice.text, f"{way}: {choice.names} for {choice.text!r}")
    return f"12 tokens each in {' and '.join(said)}; the best of the top 3 every time"


def _probable(choice: Choice, at: int, way: str) -> None:
    name, value, top = choice.names[at], choice.logprobs[at], choice.top[at]
    where = f"{way}, token {at} {name!r} at {value}, top {top}"
    expect(value <= 0 and name in top and len(top) >= 2, where)
    expect(math.isclose(top[name], value, abs_tol=1e-4), where)
    expect(max(top.values()) <= value + 1e-4, where)
    expect(sum(map(math.exp, top.values())) <= 1 + 1e-3, where)
