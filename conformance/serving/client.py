"""A server under test: through the openai client, and through httpx where that client would not let a request out."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx
import openai

from shim.errors import OpshimError
from shim.vllm_plugin.status import is_here, root_of

TIMEOUT = 120.0  # seconds for one answer
TOP = 5  # log-probabilities per token, where two answers are compared
TEXT = (
    "Once upon a time there was a small boat that sailed from one island to the next, carrying letters, bread and news."
    " Its captain counted the waves, one, two, three, and wrote down what each harbour was called: north, south, east."
    " When the wind was gone, the crew told stories about rivers and mountains until the evening came, and then slept."
)


class ServerError(OpshimError):
    """Why a server cannot be tested at all, in one line."""


@dataclass
class Choice:
    """One answer. `names` are its tokens as the log-probabilities name them; it came in so many `pieces`."""

    text: str = ""
    thoughts: str = ""  # what a reasoning parser set apart
    finish: str | None = None
    stop_reason: Any = None
    tokens: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    pieces: int = 0

    def add(self, part: Any) -> None:
        """What a chunk says, or a whole answer."""
        message = getattr(part, "delta", None) or getattr(part, "message", None)
        text = (message.content if message else part.text) or ""
        thoughts = getattr(message, "reasoning", None) or getattr(message, "reasoning_content", None) or ""
        calls = (message.tool_calls if message else None) or []
        self.text += text
        self.thoughts += thoughts
        self.pieces += bool(text or thoughts or calls)
        self.finish = part.finish_reason or self.finish
        self.stop_reason = getattr(part, "stop_reason", None) or self.stop_reason
        self.tokens += getattr(part, "token_ids", None) or []
        for call in calls:
            self._add_call(call)
        if part.logprobs:
            (self._add_chat_logprobs if message else self._add_logprobs)(part.logprobs)

    @property
    def said(self) -> str:
        return self.thoughts + self.text

    def _add_call(self, part: Any) -> None:
        index = getattr(part, "index", None)
        if index is None or index >= len(self.calls):
            self.calls.append({"id": None, "name": "", "arguments": "", "pieces": 0})
        call = self.calls[-1 if index is None else index]
        call["id"] = part.id or call["id"]
        call["name"] += part.function.name or ""
        call["arguments"] += part.function.arguments or ""
        call["pieces"] += bool(part.function.arguments)

    def _add_logprobs(self, said: Any) -> None:
        self.names += said.tokens or []
        self.logprobs += said.token_logprobs or []
        self.top += [dict(top or {}) for top in said.top_logprobs or []]

    def _add_chat_logprobs(self, said: Any) -> None:
        for one in said.content or []:
            self.names.append(one.token)
            self.logprobs.append(one.logprob)
            self.top.append({other.token: other.logprob for other in one.top_logprobs})


@dataclass
class Reply:
    """What came back for one request. `prompt` is None where the server does not return token ids."""

    choices: list[Choice]
    usage: Any
    prompt: list[int] | None

    @property
    def only(self) -> Choice:
        return self.choices[0]


class Server:
    """The server at a URL; ServerError where there is none that answers as OpenAI's API does."""

    def __init__(self, url: str, timeout: float = TIMEOUT):
        self.root = root_of(url)
        self.key = os.environ.get("OPENAI_API_KEY") or "none"
        self.timeout = timeout
        self.mounts = {self.root: None} if is_here(self.root) else {}  # past any proxy
        self.http = self._client()
        options = {"base_url": f"{self.root}/v1", "api_key": self.key, "max_retries": 0, "timeout": timeout}
        self.openai = openai.OpenAI(**options, http_client=openai.DefaultHttpxClient(mounts=self.mounts))
        model = self._models()[0]
        self.model, self.context = model["id"], model.get("max_model_len")
        self.version = self._version()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.root, headers=self.headers, timeout=self.timeout, mounts=self.mounts)

    def _models(self) -> list[dict[str, Any]]:
        try:
            answer = self.http.get("/v1/models", timeout=10)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"no server answers at {self.root}: {str(error) or type(error).__name__}") from None
        if answer.status_code in (401, 403):
            raise ServerError(f"the server at {self.root} wants a key: set OPENAI_API_KEY")
        try:
            models = answer.json()["data"]
            models[0]["id"]
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self.root}/v1/models lists no model (status {answer.status_code})") from None
        return models

    def _version(self) -> str | None:
        try:
            return self.http.get("/version").json()["version"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None

    # ---- requests ----------------------------------------------------------------------------------------------------

    def complete(self, prompt: str | Sequence[int], stream: bool = False, **options: Any) -> Reply:
        return self._ask(self.openai.completions.create, {"prompt": prompt}, stream, options)

    def chat(self, content: str, stream: bool = False, **options: Any) -> Reply:
        """Without thinking, where the model's template knows how."""
        messages = [{"role": "user", "content": content}]
        options = {"chat_template_kwargs": {"enable_thinking": False}, **options}
        return self._ask(self.openai.chat.completions.create, {"messages": messages}, stream, options)

    def _ask(self, create: Callable, prompt: Mapping[str, Any], stream: bool, options: Mapping[str, Any]) -> Reply:
        if stream:
            options = {"stream_options": {"include_usage": True}, **options}
        said = create(model=self.model, **prompt, stream=stream, extra_body={"return_token_ids": True, **options})
        choices: dict[int, Choice] = {}
        usage = tokens = None
        for chunk in said if stream else [said]:
            usage = chunk.usage or usage
            tokens = getattr(chunk, "prompt_token_ids", None) or tokens
            for part in chunk.choices:
                choices.setdefault(part.index, Choice()).add(part)
                tokens = getattr(part, "prompt_token_ids", None) or tokens
        return Reply([choices[index] for index in sorted(choices)], usage, tokens)

    def greedy(self, prompt: str | Sequence[int], max_tokens: int, stream: bool = False, **options: Any) -> Reply:
        """The most probable tokens, with what is needed to compare them with another such answer."""
        wanted = {"temperature": 0, "logprobs": TOP, "return_tokens_as_token_ids": True, "ignore_eos": True}
        return self.complete(prompt, stream, max_tokens=max_tokens, **wanted, **options)

    def post(self, path: str, body: Mapping[str, Any] | bytes, **options: Any) -> httpx.Response:
        """Any body at all, however wrong."""
        content = {"content": body} if isinstance(body, bytes) else {"json": {"model": self.model, **body}}
        return self.http.post(path, **content, **options)

    def reconnect(self) -> None:
        """The next answer to `post` comes over a connection of its own."""
        self.http.close()
        self.http = self._client()

    # ---- what the checks need to know --------------------------------------------------------------------------------

    @cached_property
    def no_chat(self) -> str:
        """Why this server does not chat; empty where it does."""
        answer = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
        return "" if answer.status_code == 200 else message_of(answer) or f"status {answer.status_code}"

    @cached_property
    def ways(self) -> dict[str, Callable[..., Reply]]:
        """The two ways to ask, or the one that this server has."""
        return {"completions": self.complete} | ({} if self.no_chat else {"chats": self.chat})

    @cached_property
    def ordinary(self) -> list[int]:
        """Tokens that ordinary prompts consist of; empty where the server does not return token ids."""
        return sorted(set(self.complete(TEXT, max_tokens=1).prompt or []))

    def metric(self, name: str, **labels: str) -> float | None:
        """A value of /metrics, summed over engines; None where the server has no such metric."""
        answer = self.http.get("/metrics")
        if answer.status_code != 200:
            return None
        lines = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", answer.text, re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        values = [float(value) for given, value in lines if all(one in given for one in wanted)]
        return sum(values) if values else None

    def label(self, name: str, label: str) -> str | None:
        """A label of a metric."""
        found = re.search(rf'^{re.escape(name)}\{{.*\b{label}="([^"]*)"', self.http.get("/metrics").text, re.MULTILINE)
        return found and found[1]

    def busy(self) -> float | None:
        """Requests that run or wait; None where the server does not tell."""
        counts = [self.metric(f"vllm:num_requests_{state}") for state in ("running", "waiting")]
        return None if None in counts else sum(counts)

    def idle(self, seconds: float = 15.0) -> float | None:
        """Seconds until nothing runs and nothing waits; None where that does not come."""
        started = time.monotonic()
        while self.busy():
            if time.monotonic() - started > seconds:
                return None
            time.sleep(0.05)
        return time.monotonic() - started


def message_of(answer: httpx.Response) -> str:
    """The words of a refusal; empty where it has none."""
    try:
        said = answer.json()
        return str(said["error"]["message"] if "error" in said else said.get("detail") or said.get("message") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""


def brief(parts: Iterable[object]) -> str:
    """A list for a report: its first few parts."""
    shown = [str(part) for part in parts]
    return "; ".join(shown[:3]) + (f"; and {len(shown) - 3} more" if len(shown) > 3 else "")
