"""One engine over several machines (vLLM's --nnodes): who leads it, whether that one is there, what the others counted.

All its processes meet in a store of torch.distributed, which rank 0 keeps at --master-addr and --master-port as long as
it lives. `serve` of each node is a guest there: the others leave their counters in it, node 0 takes them into its own
folder, where /metrics and the table at the end add up what lies there.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

from shim.errors import OpshimError
from shim.health import packed, standings
from shim.vllm_plugin.capacity import whole

COUNT, RANK, DATA = ("--nnodes", "-n"), ("--node-rank", "-r"), ("--data-parallel-size", "-dp")
# Where the nodes were given different ones, requests may hang, with no word on node 0.
SAME = ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--dtype", "--kv-cache-dtype")
PAUSE = 1.0  # seconds between two visits to the store
SILENCE = 10.0  # seconds after which a store that nobody answers for is gone: an engine that starts anew takes longer
PATIENCE = 2.0  # seconds for one answer


@dataclass(frozen=True)
class Node:
    rank: int
    count: int
    host: str  # of the store
    port: int
    headless: bool
    same: str = ""  # those of the options SAME that it was given

    def __str__(self) -> str:
        return f"node {self.rank} of {self.count}"

    @property
    def leader(self) -> str:
        return f"node 0 at {self.host}:{self.port}"


def of(options) -> Node | None:
    """This node by vLLM's options; None where it is the only one, OpshimError where nothing would lead or join it."""
    count, rank, headless = whole(options, 1, *COUNT), options.get(*RANK) or "0", "--headless" in options
    port = whole(options, 29501, "--master-port")  # vLLM's own
    if not rank.isdigit() or int(rank) >= count:
        raise OpshimError(f"{RANK[0]} must be from 0 to {count - 1} with {COUNT[0]} {count}, got {rank}")
    engines = whole(options, 1, *DATA)
    if headless and engines > 1:
        raise OpshimError(f"--headless: an engine of {DATA[0]} {engines} has no leader that `serve` could watch over")
    if headless and rank == "0":
        where = f"--master-addr ADDRESS {RANK[0]} 1" if count > 1 else f"{COUNT[0]} 2 {RANK[0]} 1 --master-addr ADDRESS"
        raise OpshimError(f"--headless: node 0 serves, only others go without a server: {where}")
    if not headless and int(rank) and engines == 1:
        raise OpshimError(f"{RANK[0]} {rank} needs --headless: only node 0 serves")
    host = options.get("--master-addr") or "127.0.0.1"
    same = " ".join(f"{name} {options.get(name)}" for name in SAME if name in options)
    return Node(int(rank), count, host, port, headless, same) if count > 1 else None


class Guest:
    """A node's visits to the store in a thread, for a `with` block; the supervisor's `watched` of a headless one."""

    def __init__(self, node: Node, run_dir: str | Path):
        self.node, self.run_dir, self.heard = node, Path(run_dir), None
        self.name = f"process {os.getpid()} on {socket.gethostname()}"  # in the store
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
            return f"{first} has joined {self.node.leader} as {self.node} already"
        given = store.get(options).decode() if store.check([options]) else self.node.same
        if given != self.node.same:
            told = [one or f"none of {', '.join(SAME)}" for one in (given, self.node.same)]
            return f"{self.node.leader} was given {told[0]}, and {self.node} {told[1]}: give all nodes the same"
        return ""
