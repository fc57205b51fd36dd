"""`runner.py serve` from start to end around a stand-in for vLLM: readiness, signals, causes, nothing left behind."""

import argparse
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from conformance.serving.engines import free_port
from shim.health import Row
from shim.vllm_plugin import launch
from shim.vllm_plugin.serve import calls_table
from shim.vllm_plugin.supervise import Server

ROOT = Path(__file__).resolve().parents[2]

# What the child runs instead of vLLM: a server with a process of its own beside it, or one that misbehaves.
STAND_IN = """
import http.server, os, signal, socket, subprocess, sys
rules = os.environ.get("OPSHIM_REQUEST_POLICY")
print("arguments:", sys.argv, "policy:", os.environ["OPSHIM_POLICY"], "rules:", rules, flush=True)
left_out = ("OPSHIM_RUN_DIR", "VLLM_API_KEY")
own = {name: value for name, value in os.environ.items() if name.startswith(("OPSHIM_", "VLLM_", "HF_", "TORCH_"))}
print("variables:", sorted((name, value) for name, value in own.items() if value and name not in left_out), flush=True)

def main():
    behaviour = os.environ["BEHAVIOUR"]
    lingering = "import os, signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(int(os.environ['LINGERS']))"
    helper = subprocess.Popen([sys.executable, "-c", lingering])
    print("helper", helper.pid, flush=True)
    if behaviour == "dies":
        print("WARNING this may end in OSError: too many files\\nValueError: no room for the cache\\nRuntimeError: see above", flush=True)
        sys.exit(0)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "loses":
        print("(APIServer pid=7) WARNING 11-30 20:01:30 [shutdown] MPClient: engine core exited unexpectedly; cleanup", flush=True)
        print("(APIServer pid=7) ERROR vllm.v1.engine.exceptions.EngineDeadError: see above", flush=True)
        sys.exit(0)
    if behaviour == "joins":
        from shim.health import IS_SELECTED, counters
        slot = counters.slot("moe_sum", "mine")
        counters.values[slot + IS_SELECTED] = 1
    if behaviour in ("starts", "starts deaf", "joins"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "starts deaf" else signal.SIG_DFL)
        signal.pause()
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
    host, port = (sys.argv[sys.argv.index(name) + 1] for name in ("--host", "--port"))
    http.server.HTTPServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    http.server.HTTPServer((host, int(port)), Answer).serve_forever()
"""

# What the preflight asks of vLLM's code, in a process of its own: never answers.
ASKED = """
import os, pathlib, time
pathlib.Path(os.environ["ASKED"]).write_text(str(os.getpid()))
time.sleep(300)
"""


@pytest.fixture
def serve(tmp_path):
    """serve(behaviour, *arguments) -> (process, port): runner.py serve with the stand-in; ended after the test. What the
    stand-in leaves behind it `lingers` so many seconds, of which serve waits 5."""
    package = tmp_path / "stand_in" / "vllm"
    for folder in (package, package / "entrypoints", package / "entrypoints" / "cli"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (package / "entrypoints" / "cli" / "main.py").write_text(STAND_IN)
    model = tmp_path / "a-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["SomeForCausalLM"], "dtype": "float32"}))
    (model / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")  # no tensors
    started = []

    def start(behaviour, *arguments, variables=(), shell='exec "$@"', lingers=300):
        port = free_port()
        command = [sys.executable, ROOT / "runner.py", "serve", model, "--policy", "reference", "--port", str(port)]
        paths = [str(package.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "BEHAVIOUR": behaviour, "LINGERS": str(lingers)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started_by = ["sh", "-c", shell, "sh", *command, *arguments]
        process = subprocess.Popen(started_by, env=environment | dict(variables), **pipes)
        started.append(process)
        return process, port

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


def lines_until(pipe, word):
    lines = []
    for line in pipe:
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError(f"'{word}' never came:\n{''.join(lines)}")


def helper_of(process):
    return int(lines_until(process.stderr, "helper")[-1].split()[1])


def is_gone(pid, seconds=20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_cleanly(serve, number):
    process, port = serve("serves", "--max-model-len", "64", "--dtype=float32")
    ready = lines_until(process.stdout, "curl")
    assert f"ready on http://127.0.0.1:{port}" in ready[-2]
    table = "".join(ready)
    assert "topk_softmax" not in table and "paged_prefill   cpu" in table  # only what this model uses
    assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
    helper = helper_of(process)
    process.send_signal(number)
    out, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert f"stopped by {number.name}" in out and "no op was called" in out
    assert is_gone(helper)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))


@pytest.mark.parametrize("behaviour", ["starts", "starts deaf"])
def test_a_signal_before_it_is_ready_is_no_success(serve, behaviour):
    process, _ = serve(behaviour, lingers=0)
    helper = helper_of(process)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 14  # what vLLM has once it is ready is 15 s
    assert process.returncode == 128 + signal.SIGINT and is_gone(helper)
    assert out.splitlines()[-1] == "opshim: stopped by SIGINT before it was ready"
    assert "opshim: SIGINT: stopping vLLM, which has 5 s; another signal kills it" in out


@pytest.fixture
def asking(serve, tmp_path):
    """asking(**options of serve) -> (process, what it asks vLLM in a process of its own)."""
    (tmp_path / "stand_in" / "vllm" / "entrypoints" / "cli" / "serve.py").write_text(ASKED)

    def start(**options):
        process, _ = serve("serves", variables={"ASKED": tmp_path / "asked", "OPSHIM_CACHE": tmp_path / "cache"}, **options)
        lines_until(process.stdout, "  disk ")
        deadline = time.monotonic() + 60
        while not ((asked := tmp_path / "asked").exists() and asked.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return process, int(asked.read_text())

    return start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_preflight_ends_what_was_asked_too(asking, number):
    process, asked = asking()
    process.send_signal(number)
    _, log = process.communicate(timeout=60)
    assert (process.returncode, log) == (128 + number, f"opshim: stopped by {number.name}\n")
    assert is_gone(asked)


def test_what_is_asked_during_the_preflight_ignores_what_is_ignored_on_purpose(asking):
    process, asked = asking(shell='trap "" INT HUP; exec setsid "$@"')  # a group of its own, as under nohup
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGHUP)
    assert not is_gone(asked, seconds=1)
    process.terminate()
    _, log = process.communicate(timeout=60)
    assert (process.returncode, log) == (128 + signal.SIGTERM, "opshim: stopped by SIGTERM\n")
    assert is_gone(asked)


def test_vllm_hears_the_signal_that_ends_it_where_that_is_ignored_here(serve):
    process, _ = serve("serves", shell='trap "" TERM; exec "$@"', lingers=0)
    lines_until(process.stdout, "curl")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0 and time.monotonic() - began < 14  # SIGKILL comes after 15 s


def test_signals_that_are_ignored_on_purpose_stop_nothing(serve):
    process, port = serve("serves", shell='trap "" INT HUP; exec "$@"', lingers=0)
    for last in ("preflight", "curl"):
        lines_until(process.stdout, last)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and out.endswith("opshim: stopped by SIGTERM\n")


def test_options_of_vllm_and_the_policy_reach_the_child(serve):
    process, _ = serve("serves", "--max-model-len", "64", "--dtype=float32")
    told = lines_until(process.stderr, "arguments:")[-1]
    assert "'--max-model-len', '64', '--dtype=float32'" in told
    assert "'--served-model-name', 'a-model'" in told and "policy: reference" in told


def test_keys_and_tokens_reach_the_child_and_are_not_told(serve):
    given = ["--api-key", "secret 1", "secret 2", "--seed", "1", "--hf_token=secret 3"]
    process, _ = serve("serves", *given)
    assert str(given)[1:-1] in lines_until(process.stderr, "arguments:")[-1]
    told = "".join(lines_until(process.stdout, "curl"))
    assert "secret" not in told and "--api-key '***' '***' --seed 1 '--hf_token=***'\n" in told


def test_a_variable_that_is_not_the_users_does_not_reach_the_child(serve):
    process, _ = serve("serves", variables={"OPSHIM_REQUEST_POLICY": "refuse_large_n"})
    told, log = "".join(lines_until(process.stdout, "curl")), lines_until(process.stderr, "arguments:")
    assert "opshim: OPSHIM_REQUEST_POLICY is set by serve only; not read\n" in log and "OPSHIM_REQUEST_POLICY" not in told
    assert "rules: None" in log[-1]


def test_the_example_asks_for_the_name_that_is_served(serve):
    process, _ = serve("serves", "--served-model-name", "mine", "--enforce-eager")
    assert '"model": "mine"' in lines_until(process.stdout, "curl")[-1]


def test_a_server_that_completes_nothing_has_no_such_example(serve):
    process, _ = serve("serves", "--runner", "pooling", lingers=0)
    assert lines_until(process.stdout, "ready on")[-1].endswith("Ctrl-C stops it\n")
    process.terminate()
    assert "curl" not in process.communicate(timeout=60)[0]


def test_the_request_policy_reaches_the_child(serve):
    process, _ = serve("serves", "--request-policy", "refuse_large_n")
    told = lines_until(process.stderr, "arguments:")[-1]
    assert "'--middleware', 'shim.vllm_plugin.request_policy.RequestPolicy'" in told and "rules: refuse_large_n" in told


def test_the_line_that_is_told_starts_the_same_by_hand(serve, tmp_path):
    """In a shell that has nothing of what was set for the command itself."""
    file = tmp_path / "it's mine.py"
    file.write_text("import shim\n\n\n@shim.implementation('moe_sum', provider='mine')\ndef sums(y, topk_ids=None):\n    pass\n")
    given = ["--provider-file", file, "--provider", "moe_sum=mine", "--request-policy", "refuse_large_n"]
    variables = {"OPSHIM_MOE": "staged", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_API_KEY": "secret"}
    process, _ = serve("serves", *given, "--hf-overrides", '{"a": 1}', variables=variables, lingers=0)
    line = lines_until(process.stdout, "curl")[-3].removeprefix("opshim: ")
    assert "secret" not in line
    told, own = (lines_until(process.stderr, word)[-1] for word in ("arguments:", "variables:"))
    process.terminate()
    process.communicate(timeout=60)

    paths = os.pathsep.join([str(tmp_path / "stand_in"), str(ROOT)])
    environment = {"PATH": os.environ["PATH"], "BEHAVIOUR": "serves", "LINGERS": "0", "PYTHONPATH": paths}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    by_hand = subprocess.Popen(["bash", "-c", f"exec env {line}"], env=environment, start_new_session=True, **pipes)
    try:
        assert [lines_until(by_hand.stdout, word)[-1] for word in ("arguments:", "variables:")] == [told, own]
    finally:
        os.killpg(by_hand.pid, signal.SIGKILL)
        by_hand.communicate()
    for text in ("'OPSHIM_POLICY', 'reference'", "'OPSHIM_PROVIDER', 'moe_sum=mine'", "it's mine.py", "'0|1'", "'staged'"):
        assert text in own


def test_a_child_that_ignores_the_signal_is_ended_by_a_second_one(serve):
    process, _ = serve("stubborn")
    lines_until(process.stdout, "curl")
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped by SIGTERM" in out


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("dies", "ended with code 0: ValueError: no room for the cache"),
        ("crashes", "ended by signal 11"),
        ("loses", "ended with code 0: engine core exited unexpectedly: killed, or out of memory?"),
    ],
)
def test_a_child_that_ends_by_itself_is_a_failure_with_its_cause(serve, behaviour, told):
    process, _ = serve(behaviour, lingers=300 if behaviour == "crashes" else 0)
    helper = helper_of(process)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert told in log.splitlines()[-1]
    assert is_gone(helper)


def test_the_answer_of_another_process_on_the_port_is_not_ready(serve):
    process, port = serve("starts")
    helper = helper_of(process)
    other = http.server.HTTPServer(("127.0.0.1", port), Healthy)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        out, log = process.communicate(timeout=60)
    finally:
        other.shutdown()
        other.server_close()
    assert process.returncode == 1 and is_gone(helper)
    assert "another process has taken its port" in log.splitlines()[-1] and "opshim: ready" not in out


@pytest.mark.parametrize("host", ["::", "::1"])
def test_a_server_on_ipv6_is_ready_too(serve, host):
    with socket.socket(socket.AF_INET6) as other:
        try:
            other.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    process, port = serve("serves", "--host", host)
    assert f"ready on http://[::1]:{port} after" in lines_until(process.stdout, "curl")[-2]


@pytest.fixture
def listening():
    """listening(answer) -> Server: of what answers each request so, in a thread of this process."""
    opened = []

    def start(answer):
        listener = socket.create_server(("127.0.0.1", 0))
        opened.append(listener)

        def run():
            with suppress(OSError):  # closed
                while True:
                    with listener.accept()[0] as asking:
                        asking.recv(4096)
                        asking.sendall(answer)

        threading.Thread(target=run, daemon=True).start()
        port = listener.getsockname()[1]
        return Server(f"http://127.0.0.1:{port}/health", port)

    yield start
    for listener in opened:
        listener.close()


def test_the_server_is_asked_past_a_proxy(listening, monkeypatch):
    monkeypatch.setattr(urllib.request, "_opener", None)  # which knows the proxies of its time
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    assert listening(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").is_ready(os.getpgrp())


def test_what_does_not_speak_http_is_not_ready(listening):
    assert not listening(b"220 mail.example.org\r\n").is_ready(os.getpgrp())


def test_a_dry_run_ends_before_vllm_starts(serve):
    process, port = serve("serves", "--dry-run")
    out, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert "preflight" in out and f"{port} on 127.0.0.1 is free" in out
    assert out.splitlines()[-1].startswith("opshim: dry run") and "helper" not in log


def test_the_summary_has_the_ops_that_nobody_called():
    rows = [Row("fused_moe", "native:jit", 12, 0, 0, 0)]
    assert calls_table(rows, {"fused_moe": "native:jit", "moe_sum": "mylib"}).splitlines() == [
        "op         provider    calls",
        "fused_moe  native:jit     12",
        "moe_sum    mylib           0",
    ]


def test_nothing_survives_the_death_of_the_command_itself(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process, port = serve("serves")
    lines_until(process.stdout, "curl")
    helper = helper_of(process)
    process.kill()
    process.wait()
    assert is_gone(helper)
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
    deadline = time.monotonic() + 20
    while list(tmp_path.glob("opshim-run-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(tmp_path.glob("opshim-run-*")), "the folder of the counters is left"


def test_vllm_takes_no_abbreviated_options(monkeypatch, capsys):
    monkeypatch.setattr(argparse.ArgumentParser, "__init__", argparse.ArgumentParser.__init__)
    launch._whole_names()
    parser = argparse.ArgumentParser()
    parser.add_argument("--port")
    parser.add_argument("-q", "--quantization")
    assert parser.parse_args(["--port", "1", "-qawq"]).quantization == "awq"
    for name in ("--por", "--quant"):
        with pytest.raises(SystemExit):
            parser.parse_args([name, "1"])
        assert f"unrecognized arguments: {name} 1" in capsys.readouterr().err
