"""The same answer, however it is asked for: as a stream, and among others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from conformance.serving.checks.registry import check, expect
from conformance.serving.checks.same import Comparison
from conformance.serving.client import TEXT, TOP, Server

PROMPTS = ("Once upon a time", "The capital of Italy is", "def ", "One, two, three,", TEXT)
SAID = {"return_tokens_as_token_ids": True, "ignore_eos": True}


@check("a stream brings the tokens, text, finish_reason and usage of the whole answer, piece by piece")
def streaming_equals_whole(server: Server) -> str:
    compared, pieces = Comparison(), []
    for prompt in PROMPTS[:3]:
        whole, streamed = (server.greedy(prompt, 32, stream) for stream in (False, True))
        compared.add(repr(prompt), whole.only, streamed.only)
        _same_usage(prompt, whole, streamed)
        pieces.append(streamed.only.pieces)
    if not server.no_chat:
        options = {"logprobs": True, "top_logprobs": TOP, **SAID}
        whole, streamed = (server.chat("Hello!", s, temperature=0, max_tokens=32, **options) for s in (False, True))
        compared.add("chat", whole.only, streamed.only)
        _same_usage("chat", whole, streamed)
        pieces.append(streamed.only.pieces)
    told = compared.told()
    expect(min(pieces) > 1, f"streams of 32 tokens came in {pieces} pieces")
    return f"{told}; in {min(pieces)} to {max(pieces)} pieces per 32 tokens"


def _same_usage(name, whole, streamed) -> None:
    counts = [(one.usage.prompt_tokens, one.usage.completion_tokens) for one in (whole, streamed)]
    expect(counts[0] == counts[1], f"{name}: usage {counts[0]}, streamed {counts[1]} (prompt and completion tokens)")


@check("a seeded stream brings the text of the whole seeded answer")
def sampled_stream_equals_whole(server: Server) -> str:
    options = {"temperature": 1.0, "seed": 11, "max_tokens": 32, "ignore_eos": True}
    for way, ask in server.ways.items():
        whole, streamed = (ask(PROMPTS[0], stream, **options).only.said for stream in (False, True))
        expect(whole == streamed, f"{way}: {whole!r}, streamed {streamed!r}")
    return f"32 tokens in {' and '.join(server.ways)}"


@check("10 requests at once give what each gives alone; near ties (0.25 nats) may go either way")
def concurrent_equals_sequential(server: Server) -> str:
    alone = {prompt: server.greedy(prompt, 24).only for prompt in PROMPTS}
    asked = [(prompt, stream) for prompt in PROMPTS for stream in (False, True)]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda one: server.greedy(one[0], 24, one[1]).only, asked))
    compared = Comparison()
    for (prompt, _), choice in zip(asked, together):
        compared.add(repr(prompt[:24]), alone[prompt], choice)
    return compared.told()
