"""A stand-in for a vLLM server, whose "model" is arithmetic: right in all that the checks look at, but for one fault.

Run it as `with StandIn(fault) as url`. A token is a number: those of a prompt are its characters, those of an answer
are words.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
import zlib
from types import SimpleNamespace

import uvicorn

from conformance.serving.checks.tools import CALLS, TOOL

CONTEXT, BLOCK, STEP = 640, 64, 0.001  # tokens, tokens, seconds per token
WORDS, FIRST = [f" w{number}" for number in range(90)], 2000


def number(low, high=float("inf")):
    return lambda value: isinstance(value, int | float) and low <= value <= high


FIELDS = {
    "max_tokens": number(1),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "n": number(1),
    "logprobs": number(0),
    "top_logprobs": number(0),
    "presence_penalty": number(-2, 2),
    "seed": number(0),
    "stop": lambda value: isinstance(value, str | list),
    "structured_outputs": lambda value: "choice" in value,
    "response_format": lambda value: False,
    "tools": lambda value: isinstance(value, list),
    "tool_choice": lambda value: value == "auto",
}


class Refused(Exception):
    """A 4xx."""


class StandIn:
    def __init__(self, fault: str | None = None):
        self.fault, self.running, self.made, self.asked, self.cache = fault, 0, 0, 0, set()
        self.kept = None  # the connection that is reset at the next request

    def __enter__(self) -> str:
        self.socket = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(self, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 10
        while not self.server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def __exit__(self, *_):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(timeout=10)
        self.socket.close()

    # ---- HTTP --------------------------------------------------------------------------------------------------------

    async def __call__(self, scope, receive, send):
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if self.lost(receive.__self__.transport, body):  # uvicorn's
            return await left(receive)
        reply = SimpleNamespace(send=send, begun=False)
        try:
            known = {"/v1/models": self.models, "/metrics": self.metrics, "/version": self.version}
            if scope["path"] in known:
                await answer(reply, 200, known[scope["path"]]())
            elif scope["path"] in ("/v1/completions", "/v1/chat/completions"):
                await self.generate(scope["path"].endswith("chat/completions"), body, receive, reply)
            else:
                raise Refused("no such path")
        except Refused as error:
            words = "" if self.fault == "refuses without words" else str(error)
            broken = self.fault == "refuses by 500" or self.kept is receive.__self__.transport
            await answer(reply, 500 if broken else 400, {"error": {"message": words}})

    def lost(self, transport, body):
        """Whether a connection is reset: by a request with n 0, or after it has had its 500, by the next one."""
        wrong = b'"n":0' in body.replace(b" ", b"")
        reset = transport is self.kept or (wrong and self.fault == "resets the connection")
        if wrong and self.fault == "resets the next connection":
            self.kept = transport
        if wrong and self.fault == "never answers":
            return True
        if reset:
            transport.abort()
        return reset

    def models(self):
        return {"data": [{"id": "stand-in", "max_model_len": CONTEXT}]}

    def version(self):
        return {"version": "0"}

    def metrics(self):
        labels = f'{{block_size="{BLOCK}",enable_prefix_caching="True"}}'
        values = {"num_requests_running": self.running, "num_requests_waiting": 0, "generation_tokens_total": self.made}
        lines = [f'vllm:{name}{{engine="0"}} {value}.0' for name, value in values.items()]
        return "\n".join([*lines, f"vllm:cache_config_info{labels} 1.0"])

    # ---- requests ----------------------------------------------------------------------------------------------------

    def read(self, chat, body):
        try:
            said = json.loads(body)
            assert said["model"] == "stand-in"
            if chat:
                texts = [m["content"] for m in said["messages"] if m["role"]]
                prompt = [ord(letter) for text in ["<chat>", *texts] for letter in text]
            else:
                prompt = said["prompt"]
                prompt = [ord(letter) for letter in prompt] if isinstance(prompt, str) else prompt
                assert all(0 <= token < FIRST for token in prompt) and prompt
            for name, right in FIELDS.items():
                if name in said:
                    assert right(said[name]), f"{name} is wrong"
        except (ValueError, TypeError, LookupError, AssertionError, RecursionError) as error:
            if self.fault == "takes what is wrong" and b'"top_p": 2' in body.replace(b":2", b": 2"):
                return {"model": "", "max_tokens": 1}, [1]
            raise Refused(f"malformed: {error!r}") from None
        most = CONTEXT - len(prompt)
        if said["max_tokens"] > most and self.fault != "writes past the context":
            words = "too long" if self.fault == "does not name the limit" else f"the context is {CONTEXT}"
            raise Refused(words)
        if self.fault == "makes less for nobody":
            said["max_tokens"] = min(said["max_tokens"], CONTEXT // 2)
        return said, prompt

    async def generate(self, chat, body, receive, reply):
        said, prompt = self.read(chat, body)
        self.asked += 1
        number = self.asked
        self.running += 1
        gone = asyncio.ensure_future(left(receive))
        work = asyncio.ensure_future(self.write(chat, said, prompt, reply, number))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            made = self.made
            if self.fault in ("makes it all for nobody", "makes less for nobody", "makes it uncounted"):
                await asyncio.wait({work})
            if self.fault == "makes it uncounted" and gone.done():
                self.made = made
            if work.done():
                work.result()
        finally:
            stays = self.fault == "keeps the slot" and gone.done() and not work.done()
            gone.cancel()
            work.cancel()
            self.running -= not stays

    async def write(self, chat, said, prompt, reply, number):
        choices = [self.choice(said, prompt, index) for index in range(said.get("n", 1))]
        usage = self.usage(said, prompt, choices)
        busy = said.get("seed") is not None and self.running > 8
        if busy and self.fault == "drops some under load" and number % 20 == 0:
            choices[0]["units"].pop()
        if self.fault == "others disturb" and self.running > 4:
            choices[0]["units"][3] = (FIRST + 5, WORDS[5])
        if not said.get("stream"):
            for choice in choices:
                await self.step(len(choice["units"]))
            whole = [self.part(chat, said, index, one, one["units"], True, False) for index, one in enumerate(choices)]
            extra = {"prompt_token_ids": prompt}
            whole[0] |= {} if chat else extra
            await answer(reply, 200, {"id": "1", "choices": whole, "usage": usage} | (extra if chat else {}))
            return
        for index, one in enumerate(choices):
            for at, unit in enumerate(one["units"]):
                await self.step(1)
                last = at + 1 == len(one["units"])
                if self.fault == "streams lose a piece" and at == 2:
                    unit = (unit[0], "")
                part = self.part(chat, said, index, one, [unit], last, True, at)
                if not chat:
                    part |= {"prompt_token_ids": prompt if at == 0 else None}
                extra = {"prompt_token_ids": prompt} if chat and at == 0 else {}
                await event(reply, {"id": "1", "choices": [part]} | extra)
        if self.fault == "streams count wrong":
            usage["completion_tokens"] += 1
        if self.fault != "streams do not end" or number % 10:
            await event(reply, {"id": "1", "choices": [], "usage": usage})
            await event(reply, None)
        await reply.send({"type": "http.response.body", "body": b""})

    async def step(self, tokens):
        for _ in range(tokens):
            await asyncio.sleep(STEP)
            self.made += 1

    # ---- the "model" -------------------------------------------------------------------------------------------------

    def choice(self, said, prompt, index):
        """The units of an answer (token and text), its end, and its tool calls."""
        if "tools" in said:
            return self.tool_choice(said["structured_outputs"]["choice"][0])
        seed = said.get("seed") if said.get("temperature", 1) else None
        salt = "" if seed is None else f"{0 if self.fault == 'one seed for all' else seed} {index}"
        if self.fault == "seeds do nothing" and seed is not None:
            salt += str(self.asked)
        if self.fault == "two choices are one":
            salt = salt[:-1]
        units, text = [], ""
        length = said["max_tokens"] - (self.fault == "one token short" and said["max_tokens"] == 64)
        for at in range(length):
            token = zlib.crc32(f"{prompt} {salt} {at}".encode()) % len(WORDS)
            units.append((FIRST + token, WORDS[token]))
            text += WORDS[token]
            found = [(text.index(one), one) for one in stops(said) if one in text]
            if found:
                end, stop = min(found)
                keeps = said.get("include_stop_str_in_output") or self.fault == "keeps the stop string"
                end += len(stop) if keeps else 0
                return {"units": cut(units, end), "finish": "stop", "calls": []}
        finish = "stop" if self.fault == "calls it stop" else "length"
        return {"units": units, "finish": finish, "calls": []}

    def tool_choice(self, text):
        """Text up to the first call, then the calls' arguments in two pieces each."""
        calls = [json.dumps(one) for one in CALLS]
        assert re.findall("<function=(.*)>", text) == [TOOL["name"]] * len(calls)
        units = [(FIRST, text.partition("\n")[0])]
        for index, call in enumerate(calls):
            units += [(FIRST, (index, call[:7])), (FIRST, (index, call[7:]))]
        return {"units": units, "finish": "tool_calls", "calls": calls}

    def usage(self, said, prompt, choices):
        made = sum(len(one["units"]) for one in choices)
        made -= self.fault == "counts one choice" and len(choices) > 1
        given = len(prompt) - (self.fault == "counts chunks wrong" and len(prompt) > 500)
        made -= self.fault == "counts stops wrong" and choices[0]["finish"] == "stop"
        cached = BLOCK * ((len(prompt) - 1) // BLOCK) if str(prompt) in self.cache else 0
        self.cache.add(str(prompt))
        details = {"cached_tokens": {"caches nothing": 0, "caches all": len(prompt)}.get(self.fault, cached)}
        usage = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
        return usage | {"prompt_tokens_details": None if self.fault == "tells no details" else details}

    def part(self, chat, said, index, choice, units, last, stream, at=0):
        """A choice as a whole, or what a chunk of a stream says of it."""
        text = "".join(words for _, words in units if isinstance(words, str))
        part = {"index": index, "finish_reason": choice["finish"] if last else None}
        part |= {"token_ids": [token for token, _ in units], "logprobs": self.logprobs(chat, said, units)}
        if not chat:
            return part | {"text": text}
        calls = [words for _, words in units if not isinstance(words, str)]
        if not stream:
            calls = list(enumerate(choice["calls"]))
        elif self.fault == "streams lose arguments" and at == 2:
            calls = []
        new = not stream or at % 2  # a call's first piece brings its id and name
        told = [
            {"index": index, "id": f"call-{index}" if new else None, "type": "function"}
            | {"function": {"name": TOOL["name"] if new else None, "arguments": arguments}}
            for index, arguments in calls
        ]
        return part | {"delta" if stream else "message": {"role": "assistant", "content": text, "tool_calls": told}}

    def logprobs(self, chat, said, units):
        if not said.get("logprobs") or "tools" in said:
            return None
        value = {"probable beyond 1": 0.5, "not the best": -3.0}.get(self.fault, -0.1)
        names = [f"token_id:{token}" if said.get("return_tokens_as_token_ids") else words for token, words in units]
        tops = [{name: value, f"{name}'": -2.5, f"{name}''": -5.0} for name in names]
        if not chat:
            return {"tokens": names, "token_logprobs": [value] * len(names), "top_logprobs": tops, "text_offset": []}
        return {
            "content": [
                {"token": name, "logprob": value, "top_logprobs": [{"token": a, "logprob": b} for a, b in top.items()]}
                for name, top in zip(names, tops)
            ]
        }


def stops(said):
    given = said.get("stop") or []
    return [given] if isinstance(given, str) else given


def cut(units, end):
    """All units, of whose text only that many letters are shown; those without stay as tokens."""
    shown = []
    for token, words in units:
        shown.append((token, words[: max(end, 0)]))
        end -= len(words)
    return shown


async def left(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(reply, status, said):
    body = said.encode() if isinstance(said, str) else json.dumps(said).encode()
    headers = [(b"content-type", b"text/plain" if isinstance(said, str) else b"application/json")]
    await reply.send({"type": "http.response.start", "status": status, "headers": headers})
    await reply.send({"type": "http.response.body", "body": body})


async def event(reply, said):
    if not reply.begun:
        reply.begun = True
        headers = [(b"content-type", b"text/event-stream")]
        await reply.send({"type": "http.response.start", "status": 200, "headers": headers})
    data = "[DONE]" if said is None else json.dumps(said)
    await reply.send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
