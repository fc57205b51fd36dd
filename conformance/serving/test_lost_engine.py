"""`runner.py serve` whose engine is killed: a clear end, and nothing left behind. The same server shows that the
preflight's figures of the KV cache are vLLM's."""

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from conformance.meta.test_runner_serve import is_gone
from conformance.serving import engines


@pytest.fixture(scope="module")
def server():
    with engines.serving("--max-model-len", "1024") as server:
        server.ready()
        yield server


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


def test_a_killed_engine_ends_the_server_with_its_cause_and_leaves_nothing(server):
    left = processes(server)
    engine = next(pid for pid, name in left.items() if "EngineCore" in name)
    os.kill(engine, signal.SIGKILL)
    assert server.process.wait(timeout=90) == 1
    server.stop(signal.SIGTERM)
    assert re.search(r"opshim: vLLM .*: engine core exited unexpectedly: killed, or out of memory\?", server.log[-1])
    assert len(left) >= 2 and all(is_gone(pid) for pid in left)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", server.port))
