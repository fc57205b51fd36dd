"""How sure the error budget is: how often it convicts right implementations, and slight faults.

    python -m conformance.mutants.power                      1,000 seeds, into docs/results/power.md
    python -m conformance.mutants.power --op moe_sum --seeds 50    one op, printed only

Right are the native implementation and the one by another route (`right/`); both run the smallest case of kind "sizes"
(see KINDS) that has several tokens, of several experts each, and rows of 16 elements or more, in each dtype, with fresh
inputs per seed. Faults are put into what the native one returns, in one output: a row off by 1%, the last element 0, two
heads exchanged (two eighths of a row, where the output has no heads). A fault that changes nothing (the last element was
0 before) is drawn again with the next seed. Right ones run the op's search of level quick, too, by other seeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import click
import torch
from torch import Tensor

import opshim  # noqa: F401 - registers every op and its native implementations
import shim
from conformance.case import DTYPE_NAMES, Case
from conformance.mutants import equivalents
from conformance.mutants.trial import cases_of
from conformance.mutants.worth import table_line
from conformance.run import Target, results_of, run
from conformance.search.hunt import EXAMPLES

RESULT = Path(__file__).resolve().parents[2] / "docs" / "results" / "power.md"
FAULT_SEEDS = 100
SEARCHES = 100
KINDS = {"moe_sum": "slots", "paged_attention_v2": "padded_pages", "paged_prefill": "padded_pages"}  # of the case, else "sizes"
SHORTEST = 16  # elements of a row from which on 1% shows in every dtype (compare.py)


def row_off_by_one_percent(output: Tensor, seed: int) -> None:
    shape = output.shape[:-1]
    output[torch.unravel_index(torch.tensor(seed % shape.numel()), shape)] *= 1.01


def last_element_dropped(output: Tensor, seed: int) -> None:
    output[(-1,) * output.dim()] = 0


def heads_swapped(output: Tensor, seed: int) -> None:
    if output.dim() > 2 and output.shape[-2] > 1:
        output[..., [0, 1], :] = output[..., [1, 0], :].clone()
    else:
        eighth = max(1, output.shape[-1] // 8)
        first, second = output[..., :eighth].clone(), output[..., -eighth:].clone()
        output[..., :eighth], output[..., -eighth:] = second, first


FAULTS = (row_off_by_one_percent, last_element_dropped, heads_swapped)


def faulty(target: Target, fault: Callable, seed: int, changed: list[bool]) -> Target:
    """The target with a fault in its longest floating-point result; `changed` hears whether it changed anything."""

    def function(**arguments):
        returned = target.function(**arguments)
        results = results_of(target.op, returned, arguments)
        floating = [value for value in results.values() if value.dtype.is_floating_point]
        output = max(floating, key=lambda value: value.shape[-1])
        before = output.clone()
        fault(output, seed)
        changed.append(not torch.equal(before, output))
        return returned

    return replace(target, provider=f"native with {fault.__name__}", function=function)


def case_for(op: str, dtype: torch.dtype) -> Case | None:
    """The smallest case of the op's table of sizes with several rows, long enough."""
    for case in cases_of(op):
        several = all(case.sizes.get(name, 2) > 1 for name in ("T", "M", "topk"))
        if case.kind == KINDS.get(op, "sizes") and case.dtype == dtype and several and not case.check:
            target = Target.find(op, "reference", "cpu")
            arguments = case.arguments("cpu", 0)
            results = results_of(target.op, target.function(**arguments), arguments)
            widths = [value.shape[-1] for value in results.values() if value.dtype.is_floating_point and value.numel()]
            if not widths or max(widths) >= SHORTEST or op == "topk_softmax":
                return case
    return None


def measure(op: str, dtype: torch.dtype, seeds: int) -> dict | None:
    """One row of the table: how many of the seeds convict each right implementation, and of FAULT_SEEDS each fault."""
    torch.set_num_threads(1)
    case, native = case_for(op, dtype), Target.find(op, "native", "cpu")
    if case is None or native.refusal(case.arguments("cpu", 0)):
        return None
    right = {"native": native, "another route": equivalents()[op]}
    row: dict = {"op": op, "dtype": DTYPE_NAMES[dtype], "case": case.id, "worst": 0.0}
    for name, target in right.items():
        results = [run(case, target, seed) for seed in range(seeds)]
        row[name] = sum(result.status == "fail" for result in results)
        row["worst"] = max(row["worst"], *(result.ratio for result in results))
    integers = not any(v.dtype.is_floating_point for v in _results(case, native).values())
    for fault in () if integers else FAULTS:
        caught = tried = seed = 0
        while tried < min(seeds, FAULT_SEEDS) and seed < 4 * FAULT_SEEDS:
            changed: list[bool] = []
            result = run(case, faulty(native, fault, seed, changed), seed)
            if changed and changed[0]:
                tried, caught = tried + 1, caught + (result.status == "fail")
            seed += 1
        row[fault.__name__] = f"{caught} of {tried}"
    return row


def searched(op: str, count: int) -> dict:
    """One row of the table of searches: how many of so many convict each right implementation."""
    torch.set_num_threads(1)
    case = next(case for case in cases_of(op) if case.kind == "search")
    row, worst = {"op": op}, 0.0
    for name, target in (("native", Target.find(op, "native", "cpu")), ("another route", equivalents()[op])):
        results = [run(case, target, seed) for seed in range(count)]
        row[name] = str(sum(result.status == "fail" for result in results))
        worst = max(worst, *(result.ratio for result in results))
    return row | {"worst": f"{worst:.2f}"}


def _results(case: Case, target: Target) -> dict[str, Tensor]:
    arguments = case.arguments("cpu", 0)
    return results_of(target.op, target.function(**arguments), arguments)


def power(ops: list[str], seeds: int, out: Path | None) -> str:
    """Measures every op in every dtype, prints the table and writes it to `out`."""
    wanted = [(op, dtype, seeds) for op in ops or shim.names() for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        rows = [row for row in pool.map(measure, *zip(*wanted, strict=True)) if row]
        searches = list(pool.map(searched, ops or shim.names(), repeat(min(seeds, SEARCHES))))
    lacking = set(ops or shim.names()) - {row["op"] for row in rows}
    if lacking:
        raise click.ClickException(f"nothing to measure for {', '.join(sorted(lacking))}: no case of kind 'sizes'; see KINDS")
    columns = ["native", "another route", *(fault.__name__ for fault in FAULTS)]
    heads = ["op", "dtype", f"native of {seeds}", f"another route of {seeds}", "worst error/budget", *columns[2:]]
    lines = [table_line(heads), table_line(["---"] * len(heads))]
    for row in rows:
        shown = [str(row.get(name, "integers")) for name in columns]
        lines.append(table_line([row["op"], row["dtype"], *shown[:2], f"{row['worst']:.2f}", *shown[2:]]))
    table, found = "\n".join(lines), _of_searches(searches, min(seeds, SEARCHES))
    print(table, found, sep="\n\n")
    if out:
        cases = "\n".join(f"- `{row['case']}`" for row in rows)
        out.write_text(REPORT.format(table=table, searches=found, cases=cases, examples=EXAMPLES["quick"]))
    return table


def _of_searches(rows: list[dict], count: int) -> str:
    heads = ["op", f"native of {count}", f"another route of {count}", "worst error/budget"]
    lines = [heads, ["---"] * len(heads), *(list(row.values()) for row in rows)]
    return "\n".join(map(table_line, lines))


REPORT = """# How sure the error budget is

Made by `python -m conformance.mutants.power`, which says what is run: convictions of right implementations (there must
be none), and of slight faults (it must be all).

{table}

Each count is of one example case, below. A run has many cases, and a search looks for the calls that come closest to
their budget, so a rate of theirs is another. Convictions of right implementations by searches of level quick,
{examples} calls each, every search by another seed (the worst is next to 1 where the budget grew: more witnesses of
noise are heard only above 1):

{searches}

The cases:

{cases}
"""


@click.command()
@click.option("--op", "ops", multiple=True, metavar="OP", help="Only this op (repeatable); nothing is written.")
@click.option("--seeds", default=1000, show_default=True, help="Inputs per right implementation.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write (default: docs/results/power.md).")
def main(ops, seeds, out):
    """Table of false alarms and of slight faults caught."""
    power(list(ops), seeds, out or (None if ops else RESULT))


if __name__ == "__main__":
    main()
