"""What the suite is worth: how many of the mutants each way of testing convicts, and which right answers it convicts.

    python runner.py mutants                        all ops, into docs/results/mutants.md
    python runner.py mutants --op moe_sum           one op, printed only

Each way gets the op's own example arguments, in the layouts that vLLM passes, and compares outputs and in-place
arguments with the reference in the same dtype:

    assert_close  one torch.testing.assert_close with its default tolerances, at the example's sizes, in bfloat16
    vllm ir       DEFAULT_TOLERANCES of vllm/ir/tolerances.py, at the counts of tokens of vLLM's own tests of its IR ops
                  (NUM_TOKENS in tests/ir/ir_test_utils.py), in its three dtypes; integers have to be equal
    gpucheck      its assert_close with its own tolerances, on shapes of its fuzz_shapes up to 129 and, as the op's first
                  argument, values of its edge_inputs; its sanitizers need CUDA and have no part here
    this suite    level quick; for mutants that show only beyond 2^31 elements, level exhaustive
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shim
from conformance.case import FLOATS
from conformance.mutants import all_mutants, equivalents
from conformance.mutants.trial import cases_of, convictions
from conformance.run import Target, lacks_memory, results_of, run

BF16, F16 = torch.bfloat16, torch.float16
RESULT = Path(__file__).resolve().parents[2] / "docs" / "results" / "mutants.md"
NUM_TOKENS = (1, 8, 17, 32, 512, 2048)

# Sizes of an op's example from a count of tokens, and from a shape (tokens, width).
TOKENS: dict[str, Callable[[int], dict]] = {
    "gdn_prefill": lambda n: {"lengths": (n,)},
    "gdn_decode": lambda n: {"B": n},
    "paged_attention_v2": lambda n: {"lengths": (n, 1), "HQ": 4, "D": 64},
    "paged_prefill": lambda n: {"new": (n,), "prefix": (0,), "HQ": 4, "D": 64},
    "matmul_fp16": lambda n: {"M": n},
}
WIDTH: dict[str, Callable[[int], dict]] = {
    "topk_softmax": lambda n: {"E": n, "topk": min(8, n)},
    "gdn_gating": lambda n: {"HV": n},
    "gdn_prefill": lambda n: {"K": n, "V": n},
    "gdn_decode": lambda n: {"K": n, "V": n},
    "moe_align_block_size": lambda n: {"E": n, "topk": min(4, n)},
    "grouped_gemm": lambda n: {"N": n, "K": n},
    "moe_sum": lambda n: {"N": n},
    "fused_moe": lambda n: {"I": n, "Hd": n},
    "reshape_and_cache": lambda n: {"D": n},
    "paged_attention_v2": lambda n: {"D": min(n, 256)},
    "paged_prefill": lambda n: {"D": min(n, 256)},
    "matmul_fp16": lambda n: {"N": n, "K": n},
}


def sizes_of(op: str, tokens: int, width: int | None = None) -> dict[str, Any]:
    """Keyword arguments of the op's example."""
    return TOKENS.get(op, lambda n: {"T": n})(tokens) | ({} if width is None else WIDTH[op](width))


Trial = Callable[[], dict[str, Any]]  # gives fresh arguments


def example(op: str, dtype: torch.dtype, **sizes) -> Trial:
    return lambda: shim.get(op).example(torch.Generator().manual_seed(0), "cpu", dtype, **sizes)


@dataclass(frozen=True)
class Way:
    """A way of testing: on which calls, and how results are compared (AssertionError: not close)."""

    name: str
    trials: Callable[[str], Iterator[Trial]]
    close: Callable[[Tensor, Tensor], None]

    def convicts(self, target: Target) -> bool:
        op = target.op
        for trial in self.trials(op.name):
            try:
                arguments = trial()
                op.check(**arguments)
                expected = results_of(op, op.reference(**arguments), arguments)
            except Exception:  # noqa: BLE001, S112 - a fuzzed shape or value with which the op cannot be called
                continue
            try:
                arguments = trial()
                actual = results_of(op, target.function(**arguments), arguments)
                for name, right in expected.items():
                    self.close(actual[name], right)
            except Exception:  # noqa: BLE001 - not close, or anything that a test would fail with
                return True
        return False


def torch_trials(op: str) -> Iterator[Trial]:
    yield example(op, F16 if op == "matmul_fp16" else BF16)


def vllm_trials(op: str) -> Iterator[Trial]:
    for tokens in NUM_TOKENS:
        yield from (example(op, dtype, **sizes_of(op, tokens)) for dtype in FLOATS)


def vllm_close(actual: Tensor, expected: Tensor) -> None:
    from vllm.ir.tolerances import DEFAULT_TOLERANCES

    torch.testing.assert_close(actual, expected, **DEFAULT_TOLERANCES.get(actual.dtype, {"atol": 0, "rtol": 0}))


def gpucheck_trials(op: str) -> Iterator[Trial]:
    from gpucheck.fuzzing.inputs import edge_inputs
    from gpucheck.fuzzing.shapes import fuzz_shapes

    for tokens, width in fuzz_shapes(ndim=2, max_size=129, n=40, seed=0):
        yield from (example(op, dtype, **sizes_of(op, tokens, width)) for dtype in FLOATS)
    for dtype in FLOATS:
        name, first = next(iter(example(op, dtype)().items()))
        if first.is_floating_point():
            for _, edge in edge_inputs(tuple(first.shape), dtype, seed=0):
                yield lambda dtype=dtype, name=name, edge=edge: example(op, dtype)() | {name: edge.clone()}


def gpucheck_close(actual: Tensor, expected: Tensor) -> None:
    from gpucheck.assertions import assert_close

    with redirect_stdout(None), redirect_stderr(None):  # it prints a page per mismatch
        assert_close(actual, expected, nan_equal=True)


WAYS = (
    Way("assert_close", torch_trials, torch.testing.assert_close),
    Way("vllm ir", vllm_trials, vllm_close),
    Way("gpucheck", gpucheck_trials, gpucheck_close),
)
SUITE = "this suite"
NAMES = [*(way.name for way in WAYS), SUITE]
NO_MEMORY = "needs more memory"


def _installed(name: str) -> bool:
    needs = {"vllm ir": "vllm", "gpucheck": "gpucheck"}.get(name)
    return needs is None or importlib.util.find_spec(needs) is not None


def verdicts(op: str, name: str) -> dict[str, str]:
    """Of one mutant (or, by the name another_route, of the right implementation): way -> what convicts it, or ""."""
    torch.set_num_threads(1)
    mutant = next((one for one in all_mutants() if (one.op, one.name) == (op, name)), None)
    target = mutant.target if mutant else equivalents()[op]
    found = {way.name: "yes" if way.convicts(target) else "" for way in WAYS if _installed(way.name)}
    if mutant:
        cases = sorted(cases_of(op, mutant.level), key=lambda case: case.kind not in mutant.kinds)
        first = next(convictions(mutant, cases), None)
        unrun = any(case.memory and lacks_memory("cpu", case.memory) for case in cases)
        found[SUITE] = first.kind if first else NO_MEMORY if unrun else ""
    else:
        failed = (case.kind for case in cases_of(op) if run(case, target).status == "fail")
        found[SUITE] = next(failed, "")
    return found


def worth(ops: Sequence[str] = ()) -> None:
    """Tries every mutant of the ops and prints the table per op; where no op is named, of all ops, and writes it to
    RESULT with the list of mutants. UnknownNameError."""
    out = None if ops else RESULT
    ops = [shim.get(op).name for op in ops] or shim.names()
    mutants = [mutant for mutant in all_mutants() if mutant.op in ops]
    tried = [*((mutant.op, mutant.name) for mutant in mutants), *((op, "another_route") for op in ops)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = dict(zip(tried, pool.map(verdicts, *zip(*tried, strict=True)), strict=True))

    def row(label: str, of: list[tuple[str, str]]) -> str:
        of = [one for one in of if found[one][SUITE] != NO_MEMORY]
        counts = [str(sum(bool(found[one][n]) for one in of)) if _installed(n) else "not installed" for n in NAMES]
        return table_line([label, str(len(of)), *counts])

    heads = [table_line(["op", "mutants", *NAMES]), table_line(["---", *["---:"] * (1 + len(NAMES))])]
    rows = [row(op, [one for one in tried if one[0] == op and one[1] != "another_route"]) for op in ops]
    total = row("all", [one for one in tried if one[1] != "another_route"])
    right = row("right, yet convicted", [one for one in tried if one[1] == "another_route"])
    table = "\n".join([*heads, *rows, total, right])
    print(table)
    if out:
        each = [table_line(["op", "mutant", "its fault", *NAMES]), table_line(["---"] * (3 + len(NAMES)))]
        for mutant in mutants:
            marks = [found[mutant.op, mutant.name].get(name, "") for name in NAMES]
            each.append(table_line([mutant.op, mutant.name, mutant.fault, *marks]))
        large = sum(one.level != "quick" and found[one.op, one.name][SUITE] != NO_MEMORY for one in mutants)
        out.write_text(REPORT.format(table=table, large=large, each="\n".join(each)))


def table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


REPORT = """# What the suite is worth

Wrong implementations (`conformance/mutants/wrong`), and how many of them each way of testing convicts. Made by
`python runner.py mutants` (with gpucheck 0.1.0 from PyPI installed; else that column says so);
`conformance/mutants/worth.py` says how each way was used. The last row counts right
implementations (`conformance/mutants/right`) that it convicts as well. Those of gpucheck all come from inputs at the
largest float32: a sum overflows or not by the order of its terms, and the plain comparison takes either for wrong.

{table}

{large} of them show only beyond 2^31 elements, where this suite alone looks, at level exhaustive. Not counted is what
`needs more memory` than there was.

## Each mutant

The last column is the kind of the case that convicts it.

{each}
"""
