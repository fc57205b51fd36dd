"""Usage says what was really read and written."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from conformance.serving.checks.registry import check, expect, need
from conformance.serving.checks.same import Comparison
from conformance.serving.client import Reply, Server

PROMPT, UNSAID = "The capital of Italy is", "\u2603\u2603"
NO_IDS = "the server does not return token ids (return_token_ids)"
LONG = 2000  # tokens of a long prompt, where the context has room


@check("usage counts the prompt's tokens and the tokens returned, streamed and not, where a stop ends them too")
def usage_counts_tokens(server: Server) -> str:
    need(server.ordinary, NO_IDS)
    counts = []
    for way, ask in server.ways.items():
        free = ask(PROMPT, temperature=0, max_tokens=17, ignore_eos=True).only.text
        stop = [free[len(free) // 2 :][:3] or UNSAID]
        for options in ({"max_tokens": 17, "ignore_eos": True}, {"max_tokens": 48, "stop": stop}, {"max_tokens": 48}):
            for stream in (False, True):
                reply = ask(PROMPT, stream, temperature=0, **options)
                _counted(f"{way} {options}{' streamed' if stream else ''}", reply)
                counts.append(reply.usage.completion_tokens)
    return f"{len(counts)} answers of {min(counts)} to {max(counts)} tokens"


def _counted(name: str, reply: Reply) -> None:
    usage, given, returned = reply.usage, len(reply.prompt or []), sum(len(one.tokens) for one in reply.choices)
    expect(usage, f"{name}: no usage")
    expect(usage.prompt_tokens == given, f"{name}: usage says {usage.prompt_tokens} tokens of prompt, it has {given}")
    expect(usage.completion_tokens == returned, f"{name}: usage says {usage.completion_tokens} tokens, {returned} came")
    expect(usage.total_tokens == given + returned, f"{name}: total_tokens {usage.total_tokens}, not {given + returned}")


@check("usage counts the same for long prompts that share the server's steps, whose prefill is cut into chunks")
def usage_under_chunked_prefill(server: Server) -> str:
    prompts = [_long_prompt(server, seed) for seed in range(3)]
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        short = pool.submit(server.complete, "Once", True, max_tokens=32, temperature=0, ignore_eos=True)
        replies = list(pool.map(lambda prompt: server.complete(prompt, True, max_tokens=8, ignore_eos=True), prompts))
        replies.append(short.result())
    for reply, prompt in zip(replies, prompts):
        _counted(f"prompt of {len(prompt)} tokens", reply)
        expect(reply.prompt == prompt, f"a prompt of {len(prompt)} tokens came back as another one")
    _counted("short prompt beside them", replies[-1])
    return f"3 prompts of {len(prompts[0])} tokens at once, beside a stream (cut where --max-num-batched-tokens is less)"


@check("a prompt asked again: cached_tokens tells what the cache gave; counts and answer are the same")
def usage_on_a_prefix_cache_hit(server: Server) -> str:
    caching = server.label("vllm:cache_config_info", "enable_prefix_caching")
    need(caching != "False", "prefix caching is off (--enable-prefix-caching)")
    block = int(server.label("vllm:cache_config_info", "block_size") or 0)
    prompt = _long_prompt(server, random.randrange(2**32))
    need(len(prompt) > block, f"a prompt of {len(prompt)} tokens fills no block of the cache ({block} tokens)")
    first, again, streamed = (server.greedy(prompt, 8, stream) for stream in (False, False, True))
    cached = [_cached(reply) for reply in (first, again, streamed)]
    need(cached[1] is not None, "the server does not report prompt_tokens_details (--enable-prompt-tokens-details)")
    need(cached[1] or caching, "the server does not tell whether it caches prefixes, and nothing was cached")
    compared = Comparison()
    for name, reply in {"first": first, "again": again, "streamed": streamed}.items():
        _counted(name, reply)
        compared.add(name, first.only, reply.only)
    expect(not cached[0], f"a new prompt has {cached[0]} cached tokens")
    expect(0 < cached[1] < len(prompt), f"of {len(prompt)} tokens asked again {cached[1]} are cached")
    expect(cached[1] == cached[2], f"{cached[1]} cached tokens, streamed {cached[2]}")
    return f"{cached[1]} of {len(prompt)} tokens cached; {compared.told()}"


def _cached(reply: Reply) -> int | None:
    details = reply.usage.prompt_tokens_details
    return details.cached_tokens if details else None


def _long_prompt(server: Server, seed: int) -> list[int]:
    need(server.context, "/v1/models does not tell max_model_len")
    need(server.ordinary, NO_IDS)
    return random.Random(seed).choices(server.ordinary, k=min(LONG, server.context - 32))
