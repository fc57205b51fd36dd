"""`runner.py serve` with the bundled model, in float16 on native ops only: driven by the openai client, and under all of
the checks of `runner.py conform-server`."""

import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from conformance.serving import engines
from conformance.serving.agreement import disagreements
from conformance.serving.checks import CHECKS
from conformance.serving.score import PROMPTS, TEXTS, TOP, positions
from shim.vllm_plugin.request_policy import RULES

NAME = "opshim-tiny"
OPS = {
    "topk_softmax",
    "fused_moe",
    "gdn_gating",
    "gdn_prefill",
    "gdn_decode",
    "reshape_and_cache",
    "paged_attention_v2",
    "paged_prefill",
    "matmul_fp16",
}
# All that the checks can look at, and prompts cut into chunks: none of them is to be skipped.
OPTIONS = ["--policy", "strict", "--dtype", "float16", "--max-model-len", "1024", "--request-policy", ",".join(RULES)]
OPTIONS += ["--enable-prefix-caching", "--max-num-batched-tokens", "256", "--enable-prompt-tokens-details"]
OPTIONS += ["--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"]


@pytest.fixture(scope="module")
def server():
    with engines.serving(*OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def reference(server, tmp_path_factory):
    """The same in float16 under the policy reference; computed while the server starts."""
    return engines.score("reference", "float16", tmp_path_factory.mktemp("scores"))


@pytest.fixture(scope="module")
def client(server, reference):
    return openai.OpenAI(base_url=server.ready(), api_key="none", max_retries=0, timeout=120)


def complete(client, prompt, **options):
    return client.completions.create(model=NAME, prompt=prompt, temperature=0, **{"max_tokens": 16} | options)


def test_the_server_tells_its_chain_before_it_is_ready(server, client):
    told = "".join(server.out)
    assert told.index("topk_softmax   cpu") < told.index("opshim: ready on")
    assert "curl -s http://127.0.0.1" in told


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == [NAME]


def test_a_completion_is_legible_and_counted(client):
    answer = complete(client, "The capital of Italy is")
    assert "Rome" in answer.choices[0].text
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert complete(client, "Once upon a time", max_tokens=1).choices[0].finish_reason == "length"


def test_a_chat_answers(client):
    messages = [{"role": "user", "content": "What is the capital of Italy?"}]
    answer = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=32)
    assert answer.choices[0].finish_reason == "stop"
    assert "Rome" in answer.choices[0].message.content


def test_streaming_gives_the_same_text(client):
    whole = complete(client, "Once upon a time", max_tokens=40).choices[0].text
    pieces = [part.choices[0].text for part in complete(client, "Once upon a time", max_tokens=40, stream=True)]
    assert len(pieces) > 5 and "".join(pieces) == whole
    assert " a " in whole


def test_two_requests_at_once_give_what_each_gives_alone(client):
    alone = [complete(client, prompt, max_tokens=40).choices[0].text for prompt in PROMPTS[:2]]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda prompt: complete(client, prompt, max_tokens=40).choices[0].text, PROMPTS[:2]))
    assert together == alone


def test_logprobs_are_those_of_the_chosen_tokens(client):
    answer = complete(client, "The capital of Italy is", max_tokens=4, logprobs=3).choices[0]
    for token, logprob, top in zip(
        answer.logprobs.tokens, answer.logprobs.token_logprobs, answer.logprobs.top_logprobs
    ):
        assert logprob <= 0 and top[token] == max(top.values()) == pytest.approx(logprob)


def test_native_agrees_with_the_references_over_the_same_texts(client, reference):
    forced = []
    for text in TEXTS:
        options = {"prompt_logprobs": TOP, "return_token_ids": True}
        choice = complete(client, text, max_tokens=1, extra_body=options).choices[0]
        known = [at and {token: one["logprob"] for token, one in at.items()} for at in choice.prompt_logprobs]
        forced.append([_as_json(at) for at in positions(choice.prompt_token_ids, known)])
    assert disagreements(reference["texts"], forced) == []


def _as_json(at):
    return {"token": at["token"], "logprobs": {str(token): value for token, value in at["logprobs"].items()}}


def test_a_wrong_request_is_refused_and_the_server_goes_on(client):
    with pytest.raises(openai.BadRequestError):
        complete(client, "word", max_tokens=-1)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="word")
    assert complete(client, "The capital of Italy is").choices[0].text


def test_the_request_policy_is_in_force(client):
    def ask(**options):
        messages = [{"role": "user", "content": "What is the capital of Italy?"}]
        raw = client.chat.completions.with_raw_response.create(model=NAME, messages=messages, temperature=0, **options)
        return raw.headers.get("x-opshim-request-policy"), raw.parse()

    told, answer = ask(max_tokens=5000)
    room = 1024 - answer.usage.prompt_tokens
    assert told == f"clamp_max_tokens: max_tokens 5000 to {room}" and "Rome" in answer.choices[0].message.content
    assert ask(max_tokens=200)[0] is None
    told, stream = ask(max_tokens=16, stream=True)
    assert told == "no_thinking_when_short: enable_thinking false" and len(list(stream)) > 5
    with pytest.raises(openai.BadRequestError, match="n=5000 is above the .* sequences"):
        ask(max_tokens=200, n=5000)


@pytest.fixture(scope="module")
def verdict(client, tmp_path_factory):
    """Exit code and report of `runner.py conform-server`."""
    out = tmp_path_factory.mktemp("conform-server") / "result.json"
    command = [sys.executable, "runner.py", "conform-server", str(client.base_url), "--json", out]
    done = subprocess.run(command, cwd=engines.ROOT, capture_output=True, text=True, check=False, timeout=400)
    assert out.exists(), done.stdout + done.stderr
    return done, json.loads(out.read_text())


@pytest.mark.parametrize("name", [check.name for check in CHECKS])
def test_the_server_conforms(verdict, name):
    result = next(check for check in verdict[1]["checks"] if check["name"] == name)
    assert result["status"] == "pass", f"expected {result['expected']}; actual: {result['actual']}"


def test_conform_server_says_so(verdict):
    done, told = verdict
    assert (done.returncode, told["verdict"], told["model"]) == (0, "pass", NAME), done.stdout
    assert f"{len(CHECKS)} passed, 0 failed, 0 skipped" in done.stdout


def test_a_signal_ends_the_server_with_a_summary_of_native_calls(server, client):
    assert server.stop(signal.SIGTERM) == 0
    told = "".join(server.out)
    summary = told[told.index("\nop ") :].splitlines()[2:]
    rows = {tuple(line.split()[:2]) for line in summary if not line.startswith("opshim:")}
    assert {op for op, _ in rows} >= OPS
    assert {provider.partition(":")[0] for _, provider in rows} == {"native"}
    assert "stopped by SIGTERM" in told
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", server.port))
