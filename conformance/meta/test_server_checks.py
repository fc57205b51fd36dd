"""The checks of a server pass a right one, and each of them fails a server that has the fault it is about."""

import json

import httpx
import pytest
from click.testing import CliRunner

import runner
from conformance.meta.stand_in_server import StandIn
from conformance.serving.checks import CHECKS, refusals, run
from conformance.serving.client import Server, ServerError

FAULTS = {
    "calls it stop": "finish_reason_at_1_token",
    "one token short": "finish_reason_at_64_tokens",
    "writes past the context": "max_tokens_beyond_the_context",
    "does not name the limit": "max_tokens_beyond_the_context",
    "keeps the stop string": "stop_strings",
    "two choices are one": "two_choices",
    "counts one choice": "two_choices",
    "seeds do nothing": "seeds",
    "one seed for all": "seeds",
    "probable beyond 1": "logprobs",
    "not the best": "logprobs",
    "streams lose a piece": "streaming_equals_whole",
    "streams count wrong": "streaming_equals_whole",
    "others disturb": "concurrent_equals_sequential",
    "counts stops wrong": "usage_counts_tokens",
    "counts chunks wrong": "usage_under_chunked_prefill",
    "caches nothing": "usage_on_a_prefix_cache_hit",
    "caches all": "usage_on_a_prefix_cache_hit",
    "streams lose arguments": "tool_calls_streamed",
    "refuses by 500": "malformed_requests",
    "refuses without words": "malformed_requests",
    "takes what is wrong": "malformed_requests",
    "resets the connection": "malformed_requests",
    "keeps the slot": "aborted_stream_frees_its_slot",
    "makes it all for nobody": "aborted_stream_frees_its_slot",
    "makes it uncounted": "aborted_stream_frees_its_slot",
    "makes less for nobody": "aborted_stream_frees_its_slot",
    "drops some under load": "many_requests_lose_none",
    "streams do not end": "many_requests_lose_none",
}


@pytest.fixture(scope="module")
def right():
    with StandIn() as url:
        yield Server(url)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_right_server_passes(right, check):
    result = run(check, right)
    assert result.status == "pass", result


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, monkeypatch):
    monkeypatch.setattr(Server.idle, "__defaults__", (1.0,))
    check = next(check for check in CHECKS if check.name == FAULTS[fault])
    with StandIn(fault) as url:
        result = run(check, Server(url))
    assert result.status == "fail", result
    assert "Error" not in result.actual.split(":")[0], result  # convicted, not stumbled over


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("resets the connection", "n 0: connection lost: "),
        ("resets the next connection", "n 0: 500 "),
        ("never answers", "n 0: no answer within 0.5 s"),
    ],
)
def test_the_request_that_breaks_the_server_is_named_and_no_other(fault, told):
    (check,) = (check for check in CHECKS if check.name == "malformed_requests")
    with StandIn(fault) as url:
        result = run(check, Server(url, timeout=0.5 if "never" in fault else 10.0))
    assert result.status == "fail"
    assert result.actual.startswith(told) and ";" not in result.actual, result


def test_an_error_without_words_is_told_by_its_name(right, monkeypatch):
    def lost(*_, **__):
        raise httpx.ReadError("")

    monkeypatch.setattr(refusals, "asked", lost)
    result = run(next(check for check in CHECKS if check.name == "malformed_requests"), right)
    assert "connection lost: ReadError" in result.actual
    monkeypatch.setattr(httpx.Client, "get", lost)
    with pytest.raises(ServerError, match=f"no server answers at {right.root}: ReadError"):
        Server(right.root)


@pytest.mark.parametrize("name", ["malformed_requests", "seeds", "many_requests_lose_none"])  # a client each
def test_a_server_on_this_machine_is_asked_past_a_proxy(right, monkeypatch, name):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    result = run(next(check for check in CHECKS if check.name == name), Server(right.root))
    assert result.status == "pass", result


def test_every_check_has_a_fault_that_it_finds():
    alone = {"sampled_stream_equals_whole"}  # of the fault that streaming_equals_whole has
    assert {check.name for check in CHECKS} - set(FAULTS.values()) == alone


def test_what_a_server_lacks_is_skipped_with_the_reason():
    with StandIn("tells no details") as url:
        result = run(next(check for check in CHECKS if check.name == "usage_on_a_prefix_cache_hit"), Server(url))
    assert (result.status, "--enable-prompt-tokens-details" in result.actual) == ("skip", True), result


@pytest.fixture
def conform_server():
    return lambda *arguments: CliRunner().invoke(runner.main, ["conform-server", *map(str, arguments)])


def test_the_report_has_expected_and_actual_of_each_check(right, conform_server, tmp_path):
    out = tmp_path / "result.json"
    names = ["--check", "stop_strings", "--check", "seeds"]
    result = conform_server(right.root + "/v1/", *names, "--json", out)
    assert result.exit_code == 0, result.output
    told = json.loads(out.read_text())
    assert told["verdict"] == "pass" and told["model"] == "stand-in"
    assert [one["name"] for one in told["checks"]] == ["stop_strings", "seeds"]
    assert all(one["expected"] and one["actual"] and one["status"] == "pass" for one in told["checks"])
    assert "2 passed, 0 failed, 0 skipped" in result.output


def test_a_failure_is_exit_code_1_with_what_was_expected(conform_server):
    with StandIn("calls it stop") as url:
        result = conform_server(url, "--check", "finish_reason_at_1_token")
    assert result.exit_code == 1
    assert "finish_reason 'stop'" in result.output and "expected finish_reason 'length'" in result.output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["http://127.0.0.1:9", "--check", "speed"], "unknown check 'speed'; known: "),
        (["http://127.0.0.1:9", "--json", "/not/there/result.json"], "folder /not/there does not exist"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_one_line(conform_server, arguments, word):
    result = conform_server(*arguments)
    assert result.exit_code == 2
    assert word in result.stderr and len(result.stderr.splitlines()) == 1
