"""Runs the bundled model: scoring in a process of its own, or as the server of `runner.py serve`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "opshim-tiny"
STOCK = "stock"
# Two engines at a time on two cores: none may pin its threads to one of them, and threads that wait for each other are
# slow where cores are shared with other tests, 10 times and more.
COMMON = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


def environment(policy: str) -> dict[str, str]:
    """For a policy of opshim, or for vLLM without it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPSHIM_P", "VLLM_"))}
    return kept | COMMON | ({"VLLM_PLUGINS": ""} if policy == STOCK else {"OPSHIM_POLICY": policy})


def score(policy: str, dtype: str, folder: Path) -> dict:
    """What score.py says under a policy (or STOCK)."""
    return result_of("score", policy, folder / f"{policy}-{dtype}.json", MODEL, dtype)


def result_of(program: str, policy: str, out: Path, *arguments) -> dict:
    """What a program of this folder writes to `out`, its last argument."""
    done = subprocess.run(
        [sys.executable, "-m", f"conformance.serving.{program}", *map(str, arguments), out],
        env=environment(policy) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        what = " ".join(map(str, (program, *arguments)))
        raise AssertionError(f"{what} under {policy} ended with code {done.returncode}\n{done.stdout[-6000:]}")
    return json.loads(out.read_text())


def scores(runs: list[tuple[str, str]], folder: Path) -> dict[tuple[str, str], dict]:
    """Several (policy, dtype), two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(runs, pool.map(lambda run: score(*run, folder), runs)))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """`runner.py serve` with some options, or of a headless node; `ready()` waits for it, `stop()` ends it by a signal."""

    def __init__(self, *options: str):
        self.port = free_port()
        self.out, self.log = [], []
        command = [sys.executable, ROOT / "runner.py", "serve", MODEL, "--port", str(self.port), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment("strict"), cwd=ROOT, **pipes)
        self._ready = threading.Event()
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.log))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe, lines: list[str]) -> None:
        for line in pipe:
            lines.append(line)
            if _says_ready(line):
                self._ready.set()
        self._ready.set()  # it will never be: nobody is to wait for it any longer

    def ready(self, seconds: float = 400) -> str:
        """The server's base URL; AssertionError with the log's end where it does not get ready."""
        self._ready.wait(seconds)
        if self.process.poll() is not None or not any(map(_says_ready, self.out)):
            raise AssertionError("not ready\n" + "".join(self.out[-20:] + self.log[-60:]))
        return f"http://127.0.0.1:{self.port}/v1"

    def stop(self, number: int) -> int:
        """Ends it; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        for reader in self._readers:
            reader.join(timeout=10)
        return code


def _says_ready(line: str) -> bool:
    return line.startswith("opshim: ") and ("ready on" in line or "has joined" in line)


@contextmanager
def serving(*options: str):
    """A server for a `with` block, never left behind."""
    server = Server(*options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()  # its lifeline takes the engine along
            server.process.wait()
