"""Clients that leave, and many at once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice

import httpx

from conformance.serving.checks.registry import check, expect, need
from conformance.serving.client import Server, brief, message_of

MANY, AT_ONCE = 200, 32
NO_METRICS = "/metrics does not tell vllm:num_requests_running"
MADE = "vllm:generation_tokens_total"
ATTEMPTS, LATE_ATTEMPTS, MOST_ATTEMPTS = 3, 5, 15
LATEST = 15.0  # seconds until a request is counted
SHORTEST = 0.1  # seconds of an answer that can be left before its end


@contextmanager
def _first_of_all() -> Iterator[None]:
    """Where it is allowed, this thread comes before others: beside vLLM's, which yield in loops, one that sleeps may be
    left out until their answer is done (seen on Linux 6.18)."""
    how, given = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, how, given)


@check("a client that leaves frees its slot: vllm:num_requests_running falls to 0 before the answer's end")
@_first_of_all()
def aborted_stream_frees_its_slot(server: Server) -> str:
    need(server.busy() is not None, NO_METRICS)
    need(server.metric(MADE) is not None, f"/metrics does not tell {MADE}")
    need(server.idle() is not None, "the server has other requests, and does not get idle in 15 s")
    tokens = min(server.context or 2048, 8192) - 32
    body = {"model": server.model, "prompt": "Once", "max_tokens": tokens, "ignore_eos": True}
    made, seconds = _whole_answer(server, body)
    need(seconds > SHORTEST, f"a whole answer of {made:.0f} tokens takes {1e3 * seconds:.0f} ms: too fast to leave")
    took, first = [], 0.0
    for stream in (True, False):
        in_time = 0  # attempts in which the client left before the middle: on a busy machine it may be late, too,
        late = 0  # and then time does not tell, but tokens that were not made do
        for _ in range(MOST_ATTEMPTS):
            before, begun = server.metric(MADE), time.monotonic()
            first = _leave(server, body | {"stream": stream}, min(max(0.5, first), seconds / 4))
            counted, idle = _counted(server, before), server.idle()
            expect(idle is not None, f"{server.busy():.0f} still run or wait 15 s after the client left")
            more, after = server.metric(MADE) - before, time.monotonic() - begun
            ended, in_the_first_half = counted and more < made, first < seconds / 2
            late += ended and not in_the_first_half
            if (ended and after < 0.8 * seconds) or late == LATE_ATTEMPTS:
                break
            in_time += in_the_first_half
            if in_time == ATTEMPTS:
                expect(counted, f"the request was not counted within {LATEST:.0f} s, {ATTEMPTS} times")
                last = f"{more:.0f} of {made:.0f} tokens, free after {after:.1f} s of {seconds:.1f}"
                expect(False, f"the answer goes on for a client that has left, {ATTEMPTS} times; at last {last}")
        else:
            need(False, f"the client did not get to leave in time, {MOST_ATTEMPTS} times: this machine is too busy")
        took.append(idle)
    return f"free {took[0]:.1f} s after a stream was left, {took[1]:.1f} s after a whole answer was"


def _whole_answer(server: Server, body: dict) -> tuple[float, float]:
    """Tokens and seconds of the answer for a client that stays; infinite where idle() would not wait for it."""
    begun = time.monotonic()
    try:
        answer = server.http.post("/v1/completions", json=body, timeout=httpx.Timeout(server.timeout, read=20.0))
    except httpx.ReadTimeout:
        expect(server.idle() is not None, f"{server.busy():.0f} still run or wait 15 s after the client left")
        return float("inf"), float("inf")
    expect(answer.status_code == 200, f"status {answer.status_code}: {message_of(answer)}")
    return answer.json()["usage"]["completion_tokens"], time.monotonic() - begun


def _counted(server: Server, before: float) -> bool:
    """Whether the server comes to count the request: vLLM does a moment after its first tokens are out."""
    until = time.monotonic() + LATEST
    while not (server.busy() or (server.metric(MADE) or 0) > before):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _leave(server: Server, body: dict, patience: float) -> float:
    """Leaves a stream after a few chunks, a whole answer after so many seconds; how long that took."""
    begun = time.monotonic()
    if body["stream"]:
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            next(islice(answer.iter_lines(), 4, None), None)
    else:
        with suppress(httpx.ReadTimeout):
            server.http.post("/v1/completions", json=body, timeout=httpx.Timeout(server.timeout, read=patience))
    return time.monotonic() - begun


@check("200 requests of random lengths, a quarter cancelled: the others are answered in full, none stays")
def many_requests_lose_none(server: Server) -> str:
    need(server.ordinary, "the server does not return token ids (return_token_ids)")
    ends, seconds = asyncio.run(_many(server))
    counts = Counter(end for end, _ in ends)
    lost = [words for end, words in ends if end == "lost"]
    expect(not lost, f"{len(lost)} of {MANY} lost: {brief(lost)}")
    expect(counts["answered"] + counts["cancelled"] == MANY, str(counts))
    expect(server.idle() is not None, f"{server.busy() or 0:.0f} requests still run or wait 15 s after the last answer")
    return f"{counts['answered']} answered in full, {counts['cancelled']} cancelled, 0 lost, in {seconds:.1f} s; then idle"


async def _many(server: Server) -> tuple[list[tuple[str, str]], float]:
    started, slots = time.monotonic(), asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=AT_ONCE)
    options = {"base_url": server.root, "headers": server.headers, "timeout": server.timeout, "mounts": server.mounts}
    async with httpx.AsyncClient(**options, limits=limits) as client:
        ends = await asyncio.gather(*(_one(server, client, slots, number) for number in range(MANY)))
    return ends, time.monotonic() - started


async def _one(server: Server, client: httpx.AsyncClient, slots: asyncio.Semaphore, number: int) -> tuple[str, str]:
    """How one request ended: "answered", "cancelled" (by us), or "lost" with words."""
    chance = random.Random(number)
    prompt, tokens = chance.choices(server.ordinary, k=chance.randint(1, 96)), chance.randint(1, 32)
    body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": number}
    leaves, streams = chance.random() < 0.25, chance.random() < 0.5
    async with slots:
        try:
            if streams:
                made, reason, usage = await _streamed(client, body, chance.randint(0, tokens) if leaves else None)
            else:
                async with asyncio.timeout(chance.uniform(0, 0.3) if leaves else None):
                    made, reason, usage = await _whole(client, body)
        except TimeoutError:
            return "cancelled", ""
        except (httpx.HTTPError, ValueError, LookupError) as error:
            return "lost", f"request {number}: {type(error).__name__}: {error}"
    counted = (usage["prompt_tokens"], usage["completion_tokens"])
    if (made, reason, counted) != (tokens, "length", (len(prompt), tokens)):
        return "lost", f"request {number}: {made} of {tokens} tokens, finish_reason {reason!r}, usage {counted}"
    return "answered", ""


async def _whole(client: httpx.AsyncClient, body: dict) -> tuple[int, str, dict]:
    answer = await client.post("/v1/completions", json=body | {"return_token_ids": True})
    said = answer.raise_for_status().json()
    return len(said["choices"][0]["token_ids"]), said["choices"][0]["finish_reason"], said["usage"]


async def _streamed(client: httpx.AsyncClient, body: dict, leave_at: int | None) -> tuple[int, str, dict]:
    """`leave_at`: the number of tokens after which the client leaves, by a TimeoutError."""
    body = body | {"return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
    made, reason, usage, done = 0, None, None, False
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if leave_at is not None and made >= leave_at:
                raise TimeoutError
            done = done or line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            said = json.loads(line[6:])
            usage = said.get("usage") or usage
            for choice in said["choices"]:
                made, reason = made + len(choice.get("token_ids") or []), choice["finish_reason"] or reason
    if not done or usage is None:
        raise ValueError("the stream ended without " + ("usage" if done else "[DONE]"))
    return made, reason, usage
