"""Requests that are wrong."""

from __future__ import annotations

from typing import Any

import httpx

from conformance.serving.checks.registry import check, expect
from conformance.serving.client import Server, brief, message_of

PROMPT = "The capital of Italy is"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"messages": [{"role": "user", "content": "Hi"}]}
NO_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def wrong(context: int | None) -> dict[str, tuple[str, Any]]:
    """Name -> path and body, the rest of which is right."""
    fields = {
        "max_tokens -1": {"max_tokens": -1},
        "max_tokens 'many'": {"max_tokens": "many"},
        "temperature -1": {"temperature": -1},
        "top_p 2": {"top_p": 2},
        "n 0": {"n": 0},
        "logprobs -2": {"logprobs": -2},
        "presence_penalty 99": {"presence_penalty": 99},
        "seed 'x'": {"seed": "x"},
        "stop 5": {"stop": 5},
        "model not served": {"model": "not-served"},
        "no prompt": {"prompt": None},
        "prompt of objects": {"prompt": [{"a": 1}]},
        "token outside the vocabulary": {"prompt": [10**9]},
        "token -1": {"prompt": [-1]},
        "an impossible pattern": {"structured_outputs": {"regex": "(("}},
        "a format that does not exist": {"response_format": {"type": "sonnet"}},
    }
    if context:
        fields["prompt beyond the context"] = {"prompt": [1] * (context + 1)}
    chats = {
        "no messages": {"messages": None},
        "messages that are text": {"messages": "Hi"},
        "a message that is a number": {"messages": [5]},
        "a message without a role": {"messages": [{"content": "Hi"}]},
        "a picture that is none": {"messages": [{"role": "user", "content": [NO_PICTURE]}]},
        "tools that are text": USER | {"tools": "hammer"},
        "a choice of a tool that is not there": USER | {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        "top_logprobs -5": USER | {"logprobs": True, "top_logprobs": -5},
    }
    return {
        **{name: (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1} | field) for name, field in fields.items()},
        **{name: (CHAT, {"max_tokens": 1} | field) for name, field in chats.items()},
        "no JSON": (COMPLETIONS, b'{"model": '),
        "nothing": (CHAT, b""),
        "no UTF-8": (COMPLETIONS, b'{"prompt": "\xff\xfe"}'),
        "a list": (COMPLETIONS, b"[1, 2]"),
        "nested without end": (COMPLETIONS, b'{"prompt":' * 10**5),
        "a stream that is wrong": (COMPLETIONS, {"prompt": PROMPT, "stream": True, "n": -1}),
        "a path that does not exist": ("/v1/does-not-exist", {}),
    }


def asked(server: Server, path: str, body: Any) -> httpx.Response:
    """The answer. A connection that is lost may be so by the request before, as uvicorn may reset one that it kept
    alive after a 500 when the next request comes: then that is sent once more."""
    headers = {"content-type": "application/json"}
    try:
        return server.post(path, body, headers=headers)
    except httpx.TimeoutException:
        raise
    except httpx.TransportError:
        server.reconnect()
        return server.post(path, body, headers=headers)


@check("each malformed request is a 4xx with a message, and the server goes on as before")
def malformed_requests(server: Server) -> str:
    before = server.greedy(PROMPT, 8).only
    requests, bad = wrong(server.context), []
    for name, (path, body) in requests.items():
        try:
            answer = asked(server, path, body)
        except httpx.TimeoutException:
            bad.append(f"{name}: no answer within {server.timeout:g} s")
            break  # each of the others may take as long
        except httpx.TransportError as error:
            bad.append(f"{name}: connection lost: {str(error) or type(error).__name__}")
            continue
        message = message_of(answer)
        if not (400 <= answer.status_code < 500 and message):
            bad.append(f"{name}: {answer.status_code} {message or answer.text[:80]!r}")
    expect(not bad, brief(bad))
    after = server.greedy(PROMPT, 8).only
    expect(after.text == before.text, f"before them {before.text!r}, after them {after.text!r}")
    return f"{len(requests)} kinds refused with a message; the answer to a right one is what it was"
