"""What the ops did is on /metrics, from all processes, and in the table of `runner.py status`."""

import http.server
import socket
import threading
import time
import urllib.request

import pytest
import torch

import shim
from conformance.meta.scratch import double_op, provider
from shim.dispatch import Chain
from shim.health import CALLS, OPEN_UNTIL, Counters
from shim.policy import Policy
from shim.vllm_plugin import status
from shim.vllm_plugin.metrics import Collector, install

prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus_client comes with vLLM")
multiprocess = pytest.importorskip("prometheus_client.multiprocess")


def scraped(folder) -> str:
    registry = prometheus_client.CollectorRegistry()
    registry.register(Collector(folder))
    return prometheus_client.generate_latest(registry).decode()


def test_calls_of_all_processes_are_added_up(tmp_path):
    for calls in (2, 5):  # two processes: a file each
        mine = Counters()
        mine.open(tmp_path)
        mine.values[mine.slot("moe_sum", "native:jit") + CALLS] = calls
        mine.values[mine.slot("moe_sum", "native:jit") + OPEN_UNTIL] = int(time.time()) + 60
    text = scraped(tmp_path)
    assert 'opshim_calls_total{candidate="native:jit",op="moe_sum"} 7.0' in text
    assert 'opshim_breaker_open{candidate="native:jit",op="moe_sum"} 2.0' in text
    (row,) = status.read(text)
    assert (row["op"], row["candidate"], row["calls"], row["breaker_open"]) == ("moe_sum", "native:jit", 7, 2)


@pytest.mark.parametrize("shared", [False, True])
def test_every_api_server_has_them_once(tmp_path, monkeypatch, shared):
    """Several API servers read their metrics from files that all write to, through a registry that each makes anew."""
    mine = Counters()
    mine.open(tmp_path)
    mine.values[mine.slot("moe_sum", "native:jit") + CALLS] = 3
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(multiprocess, "MultiProcessCollector", multiprocess.MultiProcessCollector)  # put back at the end
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())
    install(tmp_path)
    registry = prometheus_client.CollectorRegistry() if shared else prometheus_client.REGISTRY
    if shared:
        multiprocess.MultiProcessCollector(registry)
    text = prometheus_client.generate_latest(registry).decode()
    assert text.count('opshim_calls_total{candidate="native:jit",op="moe_sum"} 3.0') == 1


@pytest.mark.parametrize(("wish", "counted"), [("1", 1), ("0", 0)])
def test_answers_that_are_not_finite_are_counted_where_they_are_watched(scratch, monkeypatch, caplog, wish, counted):
    monkeypatch.setenv("OPSHIM_WATCH_NON_FINITE", wish)
    op = double_op(f"watched_op_{wish}")
    provider(op, "p", result=lambda call: float("nan") if call == 2 else 7.0)
    chain = Chain(op, "cpu", Policy("auto"))
    chain.call(torch.ones(3))
    chain.call(torch.ones(3))
    rows = [row for row in shim.health.summary() if row.op == op.name and row.candidate == "p"]
    assert [row.non_finite for row in rows] == [counted]
    assert ("NaN or infinity" in caplog.text) == bool(counted)


def test_the_table_says_who_serves_and_what_went_wrong():
    rows = status.read('opshim_calls_total{candidate="p",op="a"} 3.0\nopshim_selected{candidate="p",op="a"} 1.0\n')
    assert status.table(rows).splitlines()[1].split() == ["a", "p", "serves", "3"]


@pytest.fixture
def empty():
    """The URL of a server without opshim's metrics."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"vllm:num_requests_running 0\n")

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_url_without_opshim_is_said_so(empty, capsys):
    assert status.status(f"{empty}/v1") == 2
    assert "has no opshim_ metrics, which a server has that runner.py serve started\n" in capsys.readouterr().err
    assert status.status("http://127.0.0.1:9") == 2


def test_this_machine_is_asked_past_a_proxy(empty, capsys, monkeypatch):
    monkeypatch.setattr(urllib.request, "_opener", None)  # which knows the proxies of its time
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert status.status(empty) == 2
    assert "has no opshim_ metrics" in capsys.readouterr().err
    for host, here in (("localhost", True), ("[::1]", True), ("10.0.0.1", False), ("example.org", False)):
        assert status.is_here(f"http://{host}:8000") is here


def test_what_does_not_speak_http_has_no_status(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = "http://{}:{}".format(*listener.getsockname())

        def answer():
            with listener.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert status.status(url) == 2
    assert capsys.readouterr().err == f"status: {url}/metrics: BadStatusLine('SSH-2.0\\r\\n')\n"
