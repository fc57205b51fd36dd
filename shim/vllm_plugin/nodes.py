"""One engine over several machines (vLLM's --nnodes): who leads it, whether that one is there, what the others counted.

All its processes meet in a store of torch.distributed, which rank 0 keeps at --master-addr and --master-port as long as
it lives. `serve` of each node is a guest there: the others leave their counters in it, node 0 takes them into its own
folder, where /metrics and the table at the end add up what lies there.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Self
from uuid import uuid4

from shim.errors import OpshimError
from shim.health import packed, standings
from shim.vllm_plugin.checkpoint import weight_files
from shim.vllm_plugin.honoured import DTYPES
from shim.vllm_plugin.options import DATA, PIPELINE, TENSOR, Options

COUNT, RANK = ("--nnodes", "-n"), ("--node-rank", "-r")
BALANCED = ("--data-parallel-external-lb", "-dpe", "--data-parallel-hybrid-lb", "-dph", "--data-parallel-rank", "-dpn")
BALANCED += ("--data-parallel-start-rank", "-dpr")
# Where the nodes were given different ones, requests hang, or are answered wrongly, with no word on node 0.
SAME = (
    *(("--max-model-len",), ("--max-num-seqs",), ("--max-num-batched-tokens",), ("--block-size",), ("--dtype",)),
    *(TENSOR, PIPELINE, ("--enable-expert-parallel", "-ep")),
    *(("--kv-cache-dtype",), ("--load-format",), ("--revision",)),
)
PAUSE = 1.0  # seconds between two visits to the store
SILENCE = 10.0  # seconds after which a store that nobody answers for is gone: an engine that starts anew takes longer
PATIENCE = 2.0  # seconds for one answer
GRACE = 5.0  # from a signal to SIGKILL: there is no request to end, and vLLM's processes of a node are deaf to it


@dataclass(frozen=True)
class Node:
    rank: int
    count: int
    host: str  # of the store
    port: int
    headless: bool
    same: str = ""  # those of the options SAME that it was given, and the model's contents

    def __str__(self) -> str:
        return f"node {self.rank} of {self.count}"

    @property
    def leader(self) -> str:
        return f"node 0 at {self.host}:{self.port}"


def of(options: Options, contents: str = "") -> Node | None:
    """This node by vLLM's options, which serves a model of these contents; None where it is the only one, OpshimError where nothing would lead or join it."""
    count, rank, headless = options.whole(1, *COUNT), options.get(*RANK) or "0", "--headless" in options
    if not rank.isdigit() or int(rank) >= count:
        raise OpshimError(f"{RANK[0]} must be from 0 to {count - 1} with {COUNT[0]} {count}, got {rank}")
    engines = options.whole(1, *DATA)
    if headless and engines > 1:
        raise OpshimError(f"--headless: an engine of {DATA[0]} {engines} has no leader that `serve` could watch over")
    if count > 1 and engines > 1 and not any(name in options for name in BALANCED):
        raise OpshimError(f"{COUNT[0]} {count} with {DATA[0]} {engines} needs a server per node: {BALANCED[0]}")
    if headless and rank == "0":
        where = f"--master-addr ADDRESS {RANK[0]} 1" if count > 1 else f"{COUNT[0]} 2 {RANK[0]} 1 --master-addr ADDRESS"
        raise OpshimError(f"--headless: node 0 serves, only others go without a server: {where}")
    if not headless and int(rank) and engines == 1:
        raise OpshimError(f"{RANK[0]} {rank} needs --headless: only node 0 serves")
    host = options.get("--master-addr") or "127.0.0.1"
    same = " ".join([*_given(options), *[f"model {contents}"] * bool(contents)])
    return Node(int(rank), count, host, master_port(options), headless, same) if count > 1 else None


def master_port(options: Options) -> int:
    """At which the processes of all nodes meet."""
    return options.whole(29501, "--master-port")  # vLLM's own


def _given(options: Options) -> Iterator[str]:
    for names in SAME:
        value = options.get(*names)
        if value not in (None, "auto"):
            yield f"{names[0]} {DTYPES.get(value, value)}".rstrip()


def contents(config: Mapping, folder: str | None) -> str:
    """A word for a model: of its configuration and, in a folder, of the names and sizes of its weights."""
    files = weight_files(Path(folder)) if folder else ()
    weights = sorted((file.name, file.stat().st_size) for file in files)
    return sha256(json.dumps([config, weights], sort_keys=True, default=str).encode()).hexdigest()[:8]


class Guest:
    """A node's visits to the store in a thread, for a `with` block; the supervisor's `watched` of a headless one."""

    grace = GRACE

    def __init__(self, node: Node, run_dir: str | Path):
        self.node, self.run_dir, self.heard = node, Path(run_dir), None
        # in the store; in a container the process is always number 1
        self.name = f"process {os.getpid()} on {socket.gethostname()} ({uuid4().hex[:8]})"
        self._refused = ""
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._visit, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.leave()

    def leave(self) -> None:
        """No visit after this: torch's client writes a stack trace where the store ends in the middle of one."""
        self._left.set()
        self._thread.join(timeout=2 * PATIENCE)

    def is_ready(self, group: int) -> bool:
        """The first layers of a worker are made after the processes of all nodes have met."""
        return self.heard is not None and bool(standings(self.run_dir))

    @property
    def trouble(self) -> str:
        silent = self.heard is not None and time.monotonic() - self.heard > SILENCE
        return self._refused or (f"{self.node.leader} is gone" if silent and not self._listens() else "")

    def _listens(self) -> bool:
        """Whether anyone does at the master port: also a leader that is stopped for a while and answers later, in which
        a visit stays as long (torch's client has no limit for it)."""
        try:
            socket.create_connection((self.node.host, self.node.port), PATIENCE).close()
            return True
        except (OSError, ValueError):  # the second: "a..b" is no name
            return False

    def _visit(self) -> None:
        while not self._left.wait(PAUSE):
            try:
                if self._listens():  # torch's client logs a page of C++ where nobody does
                    self._exchange()
                    self.heard = time.monotonic()
            except (OSError, RuntimeError):  # the second is torch's
                pass  # it is not there yet, or no more: `trouble` tells

    def _exchange(self) -> None:
        from torch.distributed import TCPStore

        where, patience = (self.node.host, self.node.port), timedelta(seconds=PATIENCE)
        store = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=patience)
        mine, options = f"opshim/node{self.node.rank}", "opshim/options"
        if self.node.rank:
            self._refused = self._refusal(store, f"{mine}/process", options)
            if not self._refused:
                store.set(mine, packed(self.run_dir))
            return
        store.set(options, self.node.same)
        for rank in range(1, self.node.count):
            if store.check([f"opshim/node{rank}"]):
                file = self.run_dir / f"calls-of-node{rank}.bin"
                part = file.with_suffix(".part")
                part.write_bytes(store.get(f"opshim/node{rank}"))
                part.replace(file)  # whoever adds up sees no half of it

    def _refusal(self, store, process: str, options: str) -> str:
        """Why this node may not join that store, "" where it may."""
        first = store.compare_set(process, "", self.name).decode()
        if first != self.name:
            return f"{first} has joined {self.node.leader} as {self.node} already; if it has ended, start node 0 anew"
        given = store.get(options).decode() if store.check([options]) else self.node.same
        if given != self.node.same:
            told = [one or "none of that" for one in (given, self.node.same)]
            return f"{self.node.leader} was given {told[0]}, and {self.node} {told[1]}: give all nodes the same"
        return ""
