"""The few pieces of ASGI that a middleware needs which looks at whole requests and lets answers stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def path(scope: Scope) -> str:
    """The path that the app's routes see."""
    return scope.get("path", "").removeprefix(scope.get("root_path", ""))


async def read(receive: Receive) -> bytes | None:
    """A request's whole body; None where the client left before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def given(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives this body, then what comes from the client (that it left)."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


def sized(scope: Scope, length: int) -> Scope:
    """A copy of the scope, which an app may write into, for a body of this length."""
    headers = [(name, str(length).encode() if name == b"content-length" else value) for name, value in scope["headers"]]
    return {**scope, "headers": headers}


def with_headers(start: Message, headers: Mapping[bytes, str]) -> Message:
    """The start of an answer with headers added."""
    added = [(name, value.encode("latin-1", "replace")) for name, value in headers.items()]
    return {**start, "headers": [*start.get("headers", []), *added]}


async def answer(send: Send, status: int, body: bytes, headers: Mapping[bytes, str]) -> None:
    """A whole JSON answer."""
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send(with_headers({"type": "http.response.start", "status": status, "headers": own}, headers))
    await send({"type": "http.response.body", "body": body})


async def ask(app: App, scope: Scope, path: str, body: bytes, receive: Receive) -> tuple[int, bytes]:
    """Status and body of what the app answers to a POST on another path, in the name of the client of `scope`."""
    path = scope.get("root_path", "") + path
    kept = [(name, value) for name, value in scope["headers"] if name in (b"host", b"authorization", b"x-api-key")]
    headers = [*kept, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    changed = {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
    status, parts = 500, []

    async def collect(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app({**scope, **changed}, given(body, receive), collect)
    return status, b"".join(parts)
