"""The request policy's middleware around a stand-in for vLLM's app: what each rule changes, and nothing else."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from shim.errors import UnknownNameError
from shim.vllm_plugin import request_policy
from shim.vllm_plugin.json_edit import member, with_member
from shim.vllm_plugin.request_policy import RULES, RequestPolicy

CONTEXT, AT_ONCE = 100, 8
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HEADER = "x-opshim-request-policy"


class App:
    """Remembers the bodies it got; refuses what passes the context as vLLM does; counts a token per letter, and 4 for
    a chat, 8 more where it thinks."""

    def __init__(self):
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=AT_ONCE), model_config=SimpleNamespace(max_model_len=CONTEXT)
        )
        self.state = SimpleNamespace(vllm_config=config)
        self.got, self.asked, self.pulled = [], [], []

    async def __call__(self, scope, receive, send):
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        lengths = [int(value) for name, value in scope["headers"] if name == b"content-length"]
        assert lengths in ([], [len(body)])
        if scope["path"] == "/tokenize":
            self.asked.append(json.loads(body))
            return await self.answer(send, 200, {"count": self.count(self.asked[-1])})
        self.got.append(body)
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            return await self.answer(send, 400, {"error": {"message": "no JSON"}})
        if not isinstance(said, dict) or said.get("temperature", 0) < 0:
            return await self.answer(send, 400, {"error": {"message": "wrong"}})
        most = said.get("max_completion_tokens") or said.get("max_tokens") or 1
        most = int(most) if str(most).isdigit() else most
        if not isinstance(most, int) or (isinstance(said.get("prompt", ""), str) and self.count(said) + most > CONTEXT):
            return await self.answer(send, 400, {"error": {"message": "too long"}})
        if said.get("stream"):
            return await self.stream(send)
        return await self.answer(send, 200, {"ok": True})

    @staticmethod
    def count(said):
        if "messages" not in said:
            return len(said.get("prompt", ""))
        thinks = (said.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        return 4 + 8 * thinks + sum(len(str(one["content"])) for one in said["messages"])

    @staticmethod
    async def answer(send, status, said):
        start = {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        await send(start)
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})

    async def stream(self, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(3):
            self.pulled.append(number)
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def app():
    return App()


def post(app, body, rules=tuple(RULES), path=COMPLETIONS, method="POST", chunks=1, seen=None):
    """Status, headers and body that a client gets; `seen` is called with each message."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    cuts = [body[len(body) * at // chunks : len(body) * (at + 1) // chunks] for at in range(chunks)]
    messages = [{"type": "http.request", "body": cut, "more_body": True} for cut in cuts]
    messages[-1]["more_body"] = False
    sent = []

    async def receive():
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if seen:
            seen(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": headers, "app": app}
    asyncio.run(RequestPolicy(app, rules)(scope, receive, send))
    if not sent:
        return None
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent)


def chat(content="Hi", **fields):
    return {"messages": [{"role": "user", "content": content}], **fields}


# ---- what passes ----------------------------------------------------------------------------------------------------

ODD = b'{ "prompt":"\xc3\xa9\\u00e9", "max_tokens":\t5,"top_p":1.0e-0, "x":[1e400, 12345678901234567890123], "x":2}'


@pytest.mark.parametrize(
    "body",
    [
        ODD,
        b"",
        b"{",
        b"[1]",
        b'"n"',
        b'{"prompt": "\xff"}',
        b'{"n":' * 10**5,
        b'{"max_tokens": "many", "n": "all", "prompt": "a"}',
        b'{"max_tokens": true, "n": null, "prompt": "a"}',
    ],
)
@pytest.mark.parametrize(("path", "rules"), [(COMPLETIONS, RULES), (CHAT, ["clamp_max_tokens", "refuse_large_n"])])
def test_a_request_that_no_rule_changes_passes_byte_for_byte(app, body, path, rules):
    _, headers, _ = post(app, body, rules, path, chunks=3)
    assert app.got == [body]
    assert HEADER not in headers


def test_no_rule_is_on_unless_it_is_named(app):
    body = json.dumps(chat(max_tokens=5, n=99)).encode()
    status, headers, _ = post(app, body, rules=(), path=CHAT)
    assert (status, app.got, HEADER in headers) == (200, [body], False)


@pytest.mark.parametrize(("path", "method"), [("/v1/embeddings", "POST"), ("/tokenize", "POST"), (CHAT, "OPTIONS")])
def test_other_paths_and_methods_pass(app, path, method):
    post(app, chat(n=99, max_tokens=5), path=path, method=method)
    assert json.loads(app.got[0] if app.got else json.dumps(app.asked[0])) == chat(n=99, max_tokens=5)


def test_a_changed_request_keeps_every_other_byte_with_its_picture(app):
    picture = b'{"type": "image_url", "image_url": {"url": "data:image/png;base64,' + b"iVBORw0KGgo/+" * 5000 + b'="}}'
    before = b'{"messages" : [{"role":"user","content":[' + picture + b']}], "top_p":0.90, "max_tokens": 20'
    post(app, before + b', "seed":7 }', rules=["no_thinking_when_short"], path=CHAT)
    assert app.got == [before + b', "seed":7, "chat_template_kwargs": {"enable_thinking": false} }']


def test_a_stream_passes_piece_by_piece(app):
    at, request = [], {"prompt": "a", "stream": True, "max_tokens": 500}
    status, headers, body = post(app, request, seen=lambda message: at.append(len(app.pulled)))
    assert (status, body) == (200, b"012")
    assert at[:4] == [0, 1, 2, 3]  # each piece was out before the app made the next
    assert headers[HEADER] == "clamp_max_tokens: max_tokens 500 to 99"


def test_a_client_that_leaves_before_its_request_is_whole_reaches_nobody(app):
    async def receive():
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "app": app}
    asyncio.run(RequestPolicy(app, RULES)(scope, receive, None))
    assert app.got == []


# ---- clamp_max_tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "room"),
    [("a" * 40, 60), ("a" * 99, 1), (["a", "aaaaa"], 95), ([5] * 30, 70), ([[5] * 30, [5]], 70)],
)
def test_max_tokens_becomes_the_room_that_is_left_and_at_least_1(app, prompt, room):
    app.count = lambda said: len(said["prompt"]) if isinstance(said["prompt"], str) else 0
    refuse_all_once(app)
    _, headers, _ = post(app, {"prompt": prompt, "max_tokens": 5000})
    assert json.loads(app.got[1]) == {"prompt": prompt, "max_tokens": room}
    assert headers[HEADER] == f"clamp_max_tokens: max_tokens 5000 to {room}"


def refuse_all_once(app):
    """Whatever the first request is."""
    stream, app.first = app.answer, True

    async def answer(send, status, said):
        status = 400 if app.first and "count" not in said else status
        app.first = False
        await stream(send, status, said)

    app.answer = answer


def test_what_fits_is_not_even_counted(app):
    body = {"prompt": "a" * 40, "max_tokens": 60}
    status, headers, _ = post(app, body)
    assert (status, HEADER in headers, app.asked) == (200, False, [])


def test_a_chat_is_counted_with_all_that_its_template_is_given(app):
    fields = {"model": "m", "tools": [{"type": "function"}], "reasoning_effort": "low", "add_generation_prompt": True}
    body = chat("a" * 10, max_tokens=5000, **fields, chat_template_kwargs={"x": 1})
    status, headers, _ = post(app, body, rules=["clamp_max_tokens"], path=CHAT)
    asked = chat("a" * 10, **fields, chat_template_kwargs={"reasoning_effort": "low", "enable_thinking": True, "x": 1})
    asked.pop("reasoning_effort")
    assert app.asked == [asked]
    assert (status, headers[HEADER]) == (200, "clamp_max_tokens: max_tokens 5000 to 78")


def test_the_newer_name_of_max_tokens_is_the_one_that_counts(app):
    post(app, chat(max_completion_tokens=5000, max_tokens=7), rules=["clamp_max_tokens"], path=CHAT)
    assert json.loads(app.got[1]) == chat(max_completion_tokens=86, max_tokens=7)


def test_an_answer_that_becomes_short_is_not_spent_on_thinking(app):
    _, headers, _ = post(app, chat(max_tokens=5000), path=CHAT)
    assert json.loads(app.got[1]) == chat(max_tokens=94, chat_template_kwargs={"enable_thinking": False})
    assert headers[HEADER] == "clamp_max_tokens: max_tokens 5000 to 94; no_thinking_when_short: enable_thinking false"


def test_another_refusal_stays_the_servers_own(app):
    status, headers, body = post(app, {"prompt": "a", "max_tokens": 9, "temperature": -1})
    assert (status, json.loads(body)["error"]["message"], HEADER in headers) == (400, "wrong", False)
    assert len(app.got) == 1


def test_a_prompt_that_cannot_be_counted_is_refused_as_before(app):
    refuse_all_once(app)
    status, headers, _ = post(app, {"prompt_embeds": "...", "max_tokens": 5000})
    assert (status, HEADER in headers, len(app.got)) == (400, False, 1)


def test_a_prompt_that_leaves_no_room_is_refused_as_before(app):
    status, headers, _ = post(app, {"prompt": "a" * (CONTEXT + 1), "max_tokens": 5})
    assert (status, HEADER in headers, len(app.got)) == (400, False, 2)


@pytest.mark.parametrize(("given", "told"), [(5000.0, 5000), ("5000", 5000)])
def test_a_number_is_read_as_vllm_reads_it(app, given, told):
    refuse_all_once(app)
    _, headers, _ = post(app, {"prompt": "a", "max_tokens": given})
    assert headers[HEADER] == f"clamp_max_tokens: max_tokens {told} to 99"
    assert post(app, {"prompt": "a", "n": given})[0] == 400
    post(app, chat(max_tokens=type(given)(100)), rules=["no_thinking_when_short"], path=CHAT)
    assert json.loads(app.got[-1])["chat_template_kwargs"] == {"enable_thinking": False}


# ---- no_thinking_when_short, refuse_large_n -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"max_tokens": 80}, False),
        ({"max_tokens": 128}, False),
        ({"max_tokens": 129}, True),
        ({}, True),
        ({"max_tokens": 5, "max_completion_tokens": 500}, True),
        ({"max_completion_tokens": 5}, False),
        ({"max_tokens": 5, "chat_template_kwargs": None}, False),
        ({"max_tokens": 5, "chat_template_kwargs": {"x": "y"}}, False),
        ({"max_tokens": 5, "chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"max_tokens": 5, "reasoning_effort": "high"}, True),
        ({"max_tokens": 5, "reasoning_effort": "none"}, True),  # vLLM makes enable_thinking false of it
        ({"max_tokens": 5, "reasoning_effort": None}, False),
    ],
)
def test_short_answers_are_not_spent_on_thinking_unless_the_client_says_so(app, fields, thinks):
    _, headers, _ = post(app, chat(**fields), rules=["no_thinking_when_short"], path=CHAT)
    kwargs = json.loads(app.got[0]).get("chat_template_kwargs") or {}
    given = fields.get("chat_template_kwargs") or {}
    assert kwargs == given | ({} if thinks else {"enable_thinking": False})
    assert headers.get(HEADER) == (None if thinks else "no_thinking_when_short: enable_thinking false")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_n_above_max_num_seqs_is_a_400_in_openais_format(app, path):
    status, headers, body = post(app, {"prompt": "a", "n": AT_ONCE + 1}, path=path)
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"], error["param"]) == (400, 400, "BadRequestError", "n")
    assert "n=9" in error["message"] and "8 sequences" in error["message"]
    assert headers[HEADER].startswith("refuse_large_n: n=9") and app.got == []
    assert post(app, {"prompt": "a", "n": AT_ONCE}, path=COMPLETIONS)[0] == 200


# ---- rules, and the JSON beneath ------------------------------------------------------------------------------------


def test_rules_are_parsed_and_an_unknown_one_names_the_known():
    twice = "refuse_large_n, clamp_max_tokens,refuse_large_n"
    assert request_policy.parse(twice) == ("refuse_large_n", "clamp_max_tokens")
    for text in ("clamp", "", "refuse_large_n,"):
        with pytest.raises(UnknownNameError, match="known: clamp_max_tokens, no_thinking_when_short, refuse_large_n"):
            request_policy.parse(text)


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("{}", '{"a": 0}'),
        (' {\n} ', ' {"a": 0\n} '),
        ('{"b":[{"a":1}]}', '{"b":[{"a":1}], "a": 0}'),
        ('{"a":"}", "b":1}', '{"a":0, "b":1}'),
        ('{"b": "\\"a\\":1" ,"a" : {"a":[1, 2]} }', '{"b": "\\"a\\":1" ,"a" : 0 }'),
        ('{"\\u0061":1.50}', '{"\\u0061":0}'),
        ('{"a":1,"a":2}', '{"a":1,"a":0}'),
    ],
)
def test_one_member_is_replaced_and_no_byte_beside_it(text, changed):
    assert with_member(text, "a", "0") == changed
    assert json.loads(changed)["a"] == 0
    assert member(changed, "a") == "0" and member(changed, "c") is None
