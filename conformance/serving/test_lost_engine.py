"""`runner.py serve` whose engine is killed, and a node of it whose leader is gone: a clear end, and nothing left behind.
The same server shows that the preflight's figures of the KV cache are vLLM's, and what two nodes are to answer."""

import os
import re
import signal
import socket
import time
import urllib.request
from pathlib import Path

import openai
import pytest

from conformance.meta.test_runner_serve import is_gone
from conformance.serving import engines
from shim.vllm_plugin import status

TWO = ("--api-server-count", "2")
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with engines.serving("--max-model-len", "1024") as server:
        server.ready()
        yield server


@pytest.fixture(scope="module")
def nodes():
    """Node 0, with two API servers, and node 1 of one engine."""
    options = ["--nnodes", "2", "--master-port", str(engines.free_port()), "--tensor-parallel-size", "2"]
    with engines.serving(*options, "--node-rank", "1", "--headless") as other, engines.serving(*options, *TWO) as leader:
        leader.ready()
        other.ready()
        yield leader, other


def answers(server) -> list[str]:
    client = openai.OpenAI(base_url=server.ready(), api_key="none", max_retries=0, timeout=120)
    ask = {"model": "opshim-tiny", "temperature": 0, "max_tokens": 16}
    prompts = ("The capital of Italy is", "Once upon a time")
    return [client.completions.create(prompt=prompt, **ask).choices[0].text for prompt in prompts]


def calls(server) -> dict[str, int]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        rows = status.read(answer.read().decode())
    return {row["op"]: row["calls"] for row in rows if row["selected"]}


def processes(server) -> dict[int, str]:
    """The server's descendants, by their names."""
    found, wanted = {}, [server.process.pid]
    for parent in wanted:
        for task in Path(f"/proc/{parent}/task").iterdir():
            children = [int(pid) for pid in (task / "children").read_text().split()]
            wanted += children
            found |= {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip() for pid in children}
    return found


def test_the_cache_is_what_the_preflight_said(server):
    said = re.search(r"about ([\d,]+) tokens in pages of (\d+), ([\d,.]+) requests of 1,024", "".join(server.out))
    log = "".join(server.log)
    size = re.search(
        r"KV cache size: ([\d,]+) tokens, Maximum concurrency for 1,024 tokens per request: ([\d.]+)x", log
    )
    assert said and size, log[-3000:]
    assert abs(int(said[1].replace(",", "")) - int(size[1].replace(",", ""))) <= 1
    assert float(said[3].replace(",", "")) == pytest.approx(float(size[2]), abs=0.06)
    assert f"Setting attention block size to {said[2]} tokens" in log


def test_two_nodes_answer_what_one_does_and_both_are_counted(nodes, server):
    leader, _ = nodes
    assert answers(leader) == answers(server)
    expected = {op: 2 * number for op, number in calls(server).items()}
    deadline = time.monotonic() + 30
    while calls(leader) != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    assert expected["matmul_fp16"]
    assert all(calls(leader) == expected for _ in range(8))  # whichever of the two API servers answers


def test_a_node_whose_leader_is_gone_ends_and_leaves_nothing(nodes):
    leader, other = nodes
    left = processes(leader) | processes(other)
    assert leader.stop(signal.SIGINT) == 0
    assert other.process.wait(timeout=60) == 1
    other.stop(signal.SIGINT)  # it has ended: all that it said is there
    assert other.log[-1].startswith("opshim: vLLM was stopped: node 0 at 127.0.0.1:")
    assert "matmul_fp16" in "".join(other.out[-12:])
    assert len(left) >= 4 and all(is_gone(pid) for pid in left)


def test_a_killed_engine_ends_the_server_with_its_cause_and_leaves_nothing(server):
    client = openai.OpenAI(base_url=server.ready(), api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError):  # whose text vLLM logs as an error, and which is not the cause
        client.post("/messages", cast_to=object, body={"model": "opshim-tiny", "max_tokens": 5000, "messages": USER})
    deadline = time.monotonic() + 30  # the answer may be here before the log is
    while "VLLMValidationError" not in "".join(server.log) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "VLLMValidationError" in "".join(server.log)
    left = processes(server)
    engine = next(pid for pid, name in left.items() if "EngineCore" in name)
    os.kill(engine, signal.SIGKILL)
    assert server.process.wait(timeout=90) == 1
    server.stop(signal.SIGTERM)
    assert re.search(r"opshim: vLLM ended with code \d+: engine core exited unexpectedly: killed, or out of memory\?", server.log[-1])
    assert len(left) >= 2 and all(is_gone(pid) for pid in left)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", server.port))
