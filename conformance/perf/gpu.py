"""`runner.py bench --device cuda`: medians under CUDA graphs, every provider side by side, next to the floor.

Calls are captured into one graph, each on inputs of its own as far as it takes to leave the L2 cache, and the graph is
replayed; a provider that cannot be captured is timed call by call, and marked, and so is a size of which all inputs
stay in that cache. Floors come from two ceilings measured in the same run, of a large copy or sum and of a large float16
matmul: the larger of bytes over the one and operations over the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import shim
from conformance.case import Case
from conformance.perf.bench import reason, refusal
from conformance.perf.gpu_sizes import GPU_LAYER, work
from conformance.run import Target

MOST_INPUTS = 128
CALLS = 24  # in a graph, at least
REPLAYS, SECONDS = 30, 0.25
WARM = 0.05  # seconds of replays before: clocks rise with work, and whoever is timed first must not pay for it


@dataclass(frozen=True)
class Ceilings:
    """What this device reaches: bytes per second, the most of a copy (read and written) and of a sum (read); operations
    per second of a float16 matmul."""

    memory: float
    matmul: float

    @classmethod
    def measure(cls) -> Ceilings:
        source = torch.randn(1 << 29, device="cuda")
        target = torch.empty_like(source)
        copied = 2 * source.nbytes / _seconds(lambda: target.copy_(source))
        summed = source.nbytes / _seconds(source.sum)
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
        product = torch.empty_like(a)
        return cls(max(copied, summed), 2 * 8192**3 / _seconds(lambda: torch.mm(a, b, out=product)))

    def floor_us(self, traffic: int, operations: int) -> float:
        return 1e6 * max(traffic / self.memory, operations / self.matmul)


def _seconds(call: Callable[[], Any]) -> float:
    return time_calls([call])[0] / 1e6


def rows(names: Sequence[str], providers: Sequence[str], ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """One row per op and size: the floor, and of each provider microseconds and how it was timed, or why it was not."""
    for name in names:
        dtype, sizes = GPU_LAYER[name]
        targets = {provider: Target.find(name, provider, "cuda") for provider in providers}
        for size in sizes:
            case = Case(name, "layer", size, dtype)
            inputs = rotation(case)
            traffic, operations = work(name, inputs[0])
            row = {"op": name, "size": case.id.removeprefix(f"{name}-layer-"), "bytes": traffic, "flops": operations}
            row |= {"floor_us": ceilings.floor_us(traffic, operations), "cached": traffic * len(inputs) <= _cache()}
            row["providers"] = {}
            for provider, target in targets.items():
                row["providers"][provider] = timed(target, inputs)
            del inputs
            yield row


def timed(target: Target, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """{"us", "how": "graph" or "events", "reason"}: us is None where there is a reason."""
    why = refusal(target, inputs[0])
    if why:
        return {"us": None, "how": "", "reason": why}
    try:
        us, how = time_calls([lambda given=given: target.function(**given) for given in inputs])
    except Exception as error:  # noqa: BLE001 - whatever a provider raises
        return {"us": None, "how": "", "reason": reason(error)}
    return {"us": us, "how": how, "reason": ""}


def rotation(case: Case) -> list[dict[str, Any]]:
    """Argument sets of one size, made on the device: calls on all of them move three times what the L2 cache holds, or
    there are MOST_INPUTS."""
    inputs, moved = [], 0
    while not inputs or (moved < 3 * _cache() and len(inputs) < MOST_INPUTS):
        generator = torch.Generator("cuda").manual_seed(case.seed(len(inputs)))
        with torch.device("cuda"):
            inputs.append(shim.get(case.op).example(generator, "cuda", case.dtype, **case.sizes))
        moved += work(case.op, inputs[-1])[0]
    return inputs


def _cache() -> int:
    return torch.cuda.get_device_properties("cuda").L2_cache_size


def time_calls(calls: list[Callable[[], Any]]) -> tuple[float, str]:
    """(median microseconds per call, "graph" or "events") of calls made in turn."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:  # what is compiled or tuned is so before it is captured
            call()
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    rounds = -(-CALLS // len(calls))
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        return _median(graph.replay) / (rounds * len(calls)), "graph"
    except RuntimeError:
        torch.cuda.synchronize()
        return statistics.median(_median(call, 5) for call in calls), "events"


def _median(run: Callable[[], Any], replays: int = REPLAYS) -> float:
    begin = time.monotonic()
    while time.monotonic() - begin < WARM:
        run()
        torch.cuda.synchronize()
    times: list[float] = []
    begin = time.monotonic()
    while len(times) < 3 or (len(times) < replays and time.monotonic() - begin < SECONDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def printed(found: Iterator[dict[str, Any]], providers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Passes the rows on, printing each: microseconds, and of the first provider how it stands to floor and best other."""
    heads = "".join(f"{provider:>12}" for provider in providers)
    print(f"{'op':22}{'size':50}{'floor us':>10}{heads}{'x floor':>9}{'x best other':>14}")
    for row in found:
        cells, notes = "", []
        for provider, one in row["providers"].items():
            mark = "*" if one["how"] == "events" else " "
            cells += f"{'-':>11} " if one["us"] is None else f"{one['us']:11.2f}{mark}"
            notes += [f"{provider}: {one['reason']}"] if one["reason"] and "has no" not in one["reason"] else []
        first, *others = (one["us"] for one in row["providers"].values())
        others = [us for us in others if us]
        row["to_floor"] = first and first / row["floor_us"]
        row["to_best_other"] = first / min(others) if first and others else None
        cells += f"{row['to_floor']:9.1f}" if first and row["to_floor"] < 1000 else f"{'':9}"
        cells += f"{row['to_best_other']:14.2f}" if row["to_best_other"] else ""
        size = row["size"] + " +" * row["cached"]
        print(f"{row['op']:22}{size:50}{row['floor_us']:10.2f}{cells}  {'; '.join(notes)[:160]}".rstrip(), flush=True)
        yield row
    print("* timed call by call: it cannot be captured into a graph; + all inputs fit the L2 cache together")
