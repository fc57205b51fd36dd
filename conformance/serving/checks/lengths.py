"""How long an answer gets."""

from __future__ import annotations

from itertools import pairwise

from conformance.serving.checks.registry import check, expect, need
from conformance.serving.client import Reply, Server, message_of

PROMPT = "Once upon a time"
UNSAID = "\u2603\u2603"
HEADER = "x-opshim-request-policy"


@check("finish_reason 'length' and 1 token at max_tokens 1")
def finish_reason_at_1_token(server: Server) -> str:
    return _ends_by_length(server, 1)


@check("finish_reason 'length' and 64 tokens at max_tokens 64")
def finish_reason_at_64_tokens(server: Server) -> str:
    return _ends_by_length(server, 64)


def _ends_by_length(server: Server, tokens: int) -> str:
    for way, ask in server.ways.items():
        reply = ask(PROMPT, temperature=0, max_tokens=tokens, ignore_eos=True)
        expect(reply.only.finish == "length", f"{way}: finish_reason {reply.only.finish!r}")
        expect(_tokens(reply) == tokens, f"{way}: {_tokens(reply)} tokens")
    without = f" (no chats: {server.no_chat})" if server.no_chat else ""
    return f"'length' at {tokens} in {' and '.join(server.ways)}{without}"


def _tokens(reply: Reply) -> int:
    return reply.usage.completion_tokens


@check("max_tokens beyond the context: a 4xx that says so, or an answer that ends where the context does")
def max_tokens_beyond_the_context(server: Server) -> str:
    need(server.context, "/v1/models does not tell max_model_len")
    need(server.ordinary, "the server does not return token ids (return_token_ids)")
    room, length = 8, server.context - 8
    prompt = [server.ordinary[at % len(server.ordinary)] for at in range(length)]
    told = []
    for over in (room + 2, server.context + 1):
        body = {"prompt": prompt, "max_tokens": over, "temperature": 0, "ignore_eos": True}
        answer = server.post("/v1/completions", body)
        if answer.status_code == 200:
            said = answer.json()
            used, finish = said["usage"]["completion_tokens"], said["choices"][0]["finish_reason"]
            expect(0 < used <= room, f"max_tokens {over} with room for {room}: {used} tokens")
            expect(finish == "length", f"max_tokens {over} with room for {room}: finish_reason {finish!r}")
            by = answer.headers.get(HEADER) or "cut by the server"
            told.append(f"{over} with room for {room}: {used} tokens ({by})")
        else:
            status, words = answer.status_code, message_of(answer)
            expect(400 <= status < 500, f"max_tokens {over}: status {status}: {words}")
            expect(str(server.context) in words, f"max_tokens {over}: the refusal does not name the limit: {words!r}")
            told.append(f"{over}: {status} '{words.split('. ')[0]}'")
    return "; ".join(told)


@check("a stop string ends the text before it with finish_reason 'stop', in streams and across tokens too")
def stop_strings(server: Server) -> str:
    options = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
    free = server.complete(PROMPT, logprobs=1, **options).only
    expect(len(free.text) > 8, f"32 tokens are the text {free.text!r}")
    half = len(free.text) // 2
    within = free.text[half : half + 4]
    seams = [a[-1:] + b[:1] for a, b in pairwise(free.names)]
    across = next((seam for seam in reversed(seams) if len(seam) == 2 and seam in free.text), within)
    for stops in ([within], [across], [within, across], [UNSAID]):
        end = min((free.text.index(stop) for stop in stops if stop in free.text), default=None)
        for stream in (False, True):
            got = server.complete(PROMPT, stream, stop=stops, **options).only
            where = f"stop {stops}{' streamed' if stream else ''}"
            expect(got.text == free.text[:end], f"{where}: text {got.text!r} of {free.text!r}")
            expect(got.finish == ("length" if end is None else "stop"), f"{where}: finish_reason {got.finish!r}")
    kept = server.complete(PROMPT, stop=[within], include_stop_str_in_output=True, **options).only
    expect(kept.text == free.text[: free.text.index(within) + len(within)], f"with the stop string: {kept.text!r}")
    return f"ended at {within!r} and at {across!r}, streamed and not; one never said ended nothing"
