"""The request policy of `runner.py serve --request-policy RULES`: an ASGI middleware of vLLM's server.

Each rule is off unless it is named. A request that no rule changes passes byte for byte, and of one that is changed all
but the changed member. Answers pass as they come, streams too. What was changed is told in the answer's header.

clamp_max_tokens acts on vLLM's own 400 only: a request that fits costs nothing, and whatever vLLM takes or cuts itself
(0.32 cuts what passes the context together with the prompt) stays its own. The prompt is then counted by the server's
own /tokenize, asked inside the process: the same template and tokenizer, and a public contract in all of 0.24 to 0.33.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shim.errors import UnknownNameError
from shim.vllm_plugin import asgi
from shim.vllm_plugin.json_edit import member, with_member

RULES = {
    "clamp_max_tokens": "instead of a 400, max_tokens becomes the room left in the context",
    "no_thinking_when_short": "enable_thinking is false where max_tokens is at most 128, unless it or reasoning_effort is given",
    "refuse_large_n": "n above max_num_seqs is a 400",
}
VARIABLE = "OPSHIM_REQUEST_POLICY"  # how the rules reach vLLM's processes
PATH = "shim.vllm_plugin.request_policy.RequestPolicy"  # for vLLM's --middleware
HEADER = b"x-opshim-request-policy"
SHORT = 128  # tokens
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
COUNTED = {  # the members of a request that its prompt depends on, under the names that /tokenize knows too
    COMPLETIONS: ("model", "add_special_tokens"),
    CHAT: (
        *("model", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "add_special_tokens", "media_io_kwargs", "mm_processor_kwargs"),
    ),
}


def parse(text: str) -> tuple[str, ...]:
    """Rules from "rule,rule"; UnknownNameError for one that does not exist."""
    rules = [rule.strip() for rule in text.split(",")]
    for rule in rules:
        if rule not in RULES:
            raise UnknownNameError("rule of the request policy", rule, RULES)
    return tuple(dict.fromkeys(rules))


@dataclass
class Request:
    """A request to generate: its text, what it says, and what rules have changed."""

    path: str
    text: str
    says: dict[str, Any]
    told: dict[str, str] = field(default_factory=dict)  # rule -> what it changed

    @classmethod
    def read(cls, path: str, body: bytes) -> Request | None:
        """None where the body is no JSON object: what to say about it is the server's."""
        try:
            text = body.decode("utf-8")
            says = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return cls(path, text, says) if isinstance(says, dict) else None

    def change(self, rule: str, name: str, value: str, told: str) -> None:
        self.text = with_member(self.text, name, value)
        self.says = json.loads(self.text)
        self.told[rule] = told

    def whole(self, name: str) -> int | None:
        """A member that is a whole number, as vLLM reads it: 9, 9.0 and "9" are one."""
        from pydantic import TypeAdapter, ValidationError  # vLLM's, in whose server this runs

        try:
            return TypeAdapter(int).validate_python(self.says.get(name))
        except ValidationError:
            return None

    @property
    def limit(self) -> str:
        """The member that limits the answer's length: of the two in a chat, vLLM takes the newer one if it is given."""
        newer = self.path == CHAT and self.says.get("max_completion_tokens") is not None
        return "max_completion_tokens" if newer else "max_tokens"


class RequestPolicy:
    """The middleware; vLLM makes one per API server."""

    def __init__(self, app: asgi.App, rules: Iterable[str] | None = None):
        self.app = app
        self.rules = frozenset(parse(os.environ[VARIABLE]) if rules is None else rules)

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        path = asgi.path(scope)
        if scope["type"] != "http" or scope["method"] != "POST" or path not in (COMPLETIONS, CHAT):
            return await self.app(scope, receive, send)
        body = await asgi.read(receive)
        if body is None:
            return None  # the client is gone
        request = Request.read(path, body)
        if request is None:
            return await self.app(scope, asgi.given(body, receive), send)
        if told := self._too_many(scope, request):
            return await asgi.answer(send, 400, _error(told), _header({"refuse_large_n": told}))
        self._shorten(request)
        may_clamp = "clamp_max_tokens" in self.rules and (request.whole(request.limit) or 0) > 1
        refusal = await self._pass_on(scope, request, receive, send, hold=400 if may_clamp else None)
        if refusal and await self._clamp(scope, request, receive):
            refused_again = await self._pass_on(scope, request, receive, send, hold=400)
            refusal = refusal if refused_again else []  # the first one answers what the client sent
        for message in refusal:
            await send(message)

    async def _pass_on(self, scope, request: Request, receive, send, hold: int | None = None) -> list[asgi.Message]:
        """The server answers the request; an answer of status `hold` is returned instead of sent."""
        held: list[asgi.Message] = []

        async def told(message: asgi.Message) -> None:
            if message["type"] == "http.response.start":
                message = asgi.with_headers(message, _header(request.told) if request.told else {})
                hold_it = message["status"] == hold
            else:
                hold_it = bool(held)
            await (_append(held, message) if hold_it else send(message))

        body = request.text.encode()
        await self.app(asgi.sized(scope, len(body)), asgi.given(body, receive), told)
        return held

    # ---- the rules ---------------------------------------------------------------------------------------------------

    def _too_many(self, scope: asgi.Scope, request: Request) -> str:
        """Why a request is refused; empty where it is not."""
        if "refuse_large_n" not in self.rules:
            return ""
        n, most = request.whole("n") or 1, scope["app"].state.vllm_config.scheduler_config.max_num_seqs
        return f"n={n} is above the {most} sequences that this server runs at once (max_num_seqs)" if n > most else ""

    def _shorten(self, request: Request) -> bool:
        """Whether thinking was disabled."""
        tokens, chosen = request.whole(request.limit), request.says.get("chat_template_kwargs") or {}
        effort = request.says.get("reasoning_effort")  # vLLM makes enable_thinking of it
        if "no_thinking_when_short" not in self.rules or request.path != CHAT or tokens is None or tokens > SHORT:
            return False
        if not isinstance(chosen, dict) or "enable_thinking" in chosen or effort is not None:
            return False
        given = member(request.text, "chat_template_kwargs") if chosen else "{}"
        kwargs = with_member(given, "enable_thinking", "false")
        request.change("no_thinking_when_short", "chat_template_kwargs", kwargs, "enable_thinking false")
        return True

    async def _clamp(self, scope: asgi.Scope, request: Request, receive: asgi.Receive) -> bool:
        """Whether max_tokens was too large, and is changed now."""
        name, given = request.limit, request.whole(request.limit)
        room = await self._room(scope, request, receive)
        if room is None or given <= room:
            return False
        request.change("clamp_max_tokens", name, str(room), f"{name} {given} to {room}")
        if self._shorten(request):  # an answer that became short; without thinking its prompt is another one
            room = await self._room(scope, request, receive) or room
            request.change("clamp_max_tokens", name, str(room), f"{name} {given} to {room}")
        return True

    async def _room(self, scope: asgi.Scope, request: Request, receive: asgi.Receive) -> int | None:
        """Tokens that the prompt leaves in the context, at least 1; None where the prompt cannot be counted."""
        counts = []
        for question in _questions(request):
            if isinstance(question, int):
                counts.append(question)
                continue
            status, answer = await asgi.ask(self.app, scope, "/tokenize", json.dumps(question).encode(), receive)
            if status != 200:
                return None
            counts.append(json.loads(answer)["count"])
        if not counts:
            return None
        kept = request.whole("truncate_prompt_tokens") or 0
        count = min(max(counts), kept) if kept > 0 else max(counts)
        return max(1, scope["app"].state.vllm_config.model_config.max_model_len - count)


async def _append(held: list, message: asgi.Message) -> None:
    held.append(message)


def _questions(request: Request) -> list[int | dict[str, Any]]:
    """For each prompt of the request its number of tokens, or what to ask /tokenize."""
    says = request.says
    known = {name: says[name] for name in COUNTED[request.path] if says.get(name) is not None}
    if request.path == CHAT:
        return [known | {"chat_template_kwargs": _template_kwargs(says)}]
    prompts = says.get("prompt")
    if isinstance(prompts, str) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    if not isinstance(prompts, list) or not all(isinstance(prompt, str | list) for prompt in prompts):
        return []
    return [known | {"prompt": prompt} if isinstance(prompt, str) else len(prompt) for prompt in prompts]


def _template_kwargs(says: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat's template is given: vLLM adds two members of the request, which /tokenize does not know."""
    kwargs = {name: says[name] for name in ("documents", "reasoning_effort") if says.get(name) is not None}
    if "reasoning_effort" in kwargs:
        kwargs["enable_thinking"] = kwargs["reasoning_effort"] != "none"
    chosen = says.get("chat_template_kwargs")
    return kwargs | (chosen if isinstance(chosen, dict) else {})


def _header(told: Mapping[str, str]) -> dict[bytes, str]:
    return {HEADER: "; ".join(f"{rule}: {what}" for rule, what in told.items())}


def _error(message: str) -> bytes:
    """As vLLM, and OpenAI, write it."""
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "param": "n", "code": 400}}).encode()
