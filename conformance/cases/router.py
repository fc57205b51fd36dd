"""Cases of topk_softmax: every clause of its contract, and field bugs 8 to 10."""

from __future__ import annotations

import torch

from conformance import case
from conformance.case import FLOATS, example
from conformance.compare import compare_topk
from conformance.properties.roles import Roles, Route, rows_alone, rows_shuffled, shuffled

OP = "topk_softmax"
ODD = (1, 3, 60, 96, 160, 257, 384, 1000)  # field bug 9: no power of two, or above the sizes that kernels are tuned for
NAN, INF = float("nan"), float("inf")


def table(kind, sizes=({},), change=None, dtypes=FLOATS, level="quick", raises=None):
    """Cases on the op's example arguments, after `change(arguments)` where given."""

    def make(generator, device, dtype, **sizes):
        arguments = example(OP, generator, device, dtype, **sizes)
        return arguments | (change(arguments) or {})

    return case.table(OP, kind, sizes, dtypes, level, make if change else None, compare_topk, raises)


def change_logits(function):
    """A change that edits the logits in place."""

    def change(arguments):
        function(arguments["gating_output"])

    return change


def one_nan(logits):
    logits[1, logits.shape[1] // 2] = NAN
    logits[-1, -1] = NAN


def infinite(logits):
    logits[0, 0] = INF
    logits[1, -1] = INF
    logits[2, 3:5] = INF


def some_minus_inf(logits):
    """Fewer experts are possible than are asked for: those with p = 0 follow, lowest index first."""
    logits[:, ::2] = -INF
    logits[1, :] = -INF
    logits[1, 5] = 0
    logits[2, :-1] = -INF


def bad_rows_among_good(logits):
    """What a row holds stays in its row."""
    logits[0] = NAN
    logits[2, 3] = NAN
    logits[4, -1] = INF
    logits[6] = -INF
    logits[8, 1:] = -INF
    logits[10] = 0


def tied_pairs(logits):
    """Every logit twice, far apart: the copy with the lower index comes first, also where k cuts a pair."""
    half = logits.shape[1] // 2
    logits[:, half : 2 * half] = logits[:, :half]


def far_apart(logits):
    """Most probabilities underflow to 0 in float32."""
    logits.copy_(-300 * torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits))


def wide_rows(arguments):
    """Rows of a wider tensor."""
    logits = arguments["gating_output"]
    wide = logits.new_full((logits.shape[0], logits.shape[1] + 24), NAN)
    wide[:, 8:-16] = logits
    return {"gating_output": wide[:, 8:-16]}


def column_major(arguments):
    return {"gating_output": arguments["gating_output"].t().contiguous().t()}


def misaligned(arguments):
    logits = arguments["gating_output"]
    buffer = logits.new_full((logits.numel() + 1,), NAN)
    buffer[1:] = logits.flatten()
    return {"gating_output": buffer[1:].view(logits.shape)}


def strided_bias(arguments):
    bias = arguments["correction_bias"]
    return {"correction_bias": torch.stack([bias, torch.full_like(bias, NAN)], dim=1)[:, 0]}


def bias_decides(arguments):
    """The bias outweighs p: it chooses the experts, and leaves no trace in their weights."""
    bias = arguments["correction_bias"]
    return {"correction_bias": torch.linspace(0, 5, len(bias), device=bias.device).roll(7).to(bias)}


def bias_excludes(arguments):
    """-inf keeps experts out while others are left; NaN ranks with it."""
    bias = arguments["correction_bias"]
    bias[::3] = -INF
    bias[1::3] = NAN


def bias_picks_tiny(arguments):
    """All that the bias chooses has p of 1e-26 and less, whose sum divides them none the less."""
    logits, bias = arguments["gating_output"], arguments["correction_bias"]
    half = len(bias) // 2
    logits[:, half:] = logits[:, half:] - 60
    return {"correction_bias": torch.linspace(-4, 5, len(bias), device=bias.device).to(bias)}


def bias_of_pairs(arguments):
    """Pairs of equal experts, each pair with a bias of its own."""
    bias, half = arguments["correction_bias"], len(arguments["correction_bias"]) // 2
    bias[half : 2 * half] = bias[:half]
    tied_pairs(arguments["gating_output"])


def with_bias(shape=None, dtype=torch.float32):
    def change(arguments):
        experts = arguments["gating_output"].shape[1]
        return {"correction_bias": torch.zeros(shape or (experts,), dtype=dtype)}

    return change


ROWS = [{"T": 16, "E": e, "topk": k} for e, k in ((8, 2), (60, 4), (256, 8), (512, 10))]

CASES = [
    *table("sizes", [{"T": t, "E": e, "topk": k} for t in (1, 33) for e, k in ((16, 4), (128, 8), (512, 10))]),
    *table("odd_experts", [{"T": 9, "E": e, "topk": min(8, e)} for e in (*ODD, 1023, 1024)]),
    *table("odd_experts", [{"T": 9, "E": e, "topk": 3, "renormalize": False} for e in (3, 60, 257)]),  # padding weighs
    *table("all_experts", [{"T": 3, "E": e, "topk": e} for e in (1, 2, 17, 60, 257, 1024)]),
    *table("one_expert", [{"T": 9, "E": e, "topk": 1} for e in (1, 2, 60, 256)]),
    *table("no_renormalize", [{"T": 9, "E": 256, "topk": 8, "renormalize": False}]),
    *table("empty", [{"T": 0, "E": 60, "topk": 4}]),
    *table("ties", ROWS, change_logits(lambda logits: logits.zero_())),
    *table("tied_pairs", [*ROWS, {"T": 16, "E": 60, "topk": 7}], change_logits(tied_pairs)),
    *table("nan_row", ROWS, change_logits(lambda logits: logits[1::2].fill_(NAN))),
    *table("one_nan", ROWS, change_logits(one_nan)),
    *table("inf_logit", ROWS, change_logits(infinite)),
    *table("only_minus_inf", ROWS, change_logits(lambda logits: logits[1::2].fill_(-INF))),
    *table("minus_inf", [*ROWS, {"T": 16, "E": 10, "topk": 9}], change_logits(some_minus_inf)),
    *table("bad_rows_among_good", ROWS, change_logits(bad_rows_among_good)),
    *table("bad_rows_no_renormalize", [ROWS[1] | {"renormalize": False}], change_logits(bad_rows_among_good)),
    *table("far_apart", ROWS, change_logits(far_apart)),
    *table("large_logits", ROWS, change_logits(lambda logits: logits.add_(1000))),
    *table("bias", [size | {"bias": True, "renormalize": r} for size in ROWS for r in (True, False)]),
    *table("bias_decides", [{"T": 9, "E": e, "topk": 8, "bias": True} for e in (60, 256, 257)], bias_decides),
    *table("bias_picks_tiny", [{"T": 9, "E": e, "topk": 8, "bias": True} for e in (60, 256)], bias_picks_tiny),
    *table("bias_ties", [size | {"bias": True} for size in ROWS], bias_of_pairs),
    *table("bias_excludes", [{"T": 9, "E": 60, "topk": 8, "bias": True}], bias_excludes),
    *table("bias_excludes_all", [{"T": 9, "E": 9, "topk": 9, "bias": True}], bias_excludes),
    *table("bias_bad_rows", [size | {"bias": True} for size in ROWS], change_logits(bad_rows_among_good)),
    *table("wide_rows", ROWS, wide_rows),
    *table("column_major", ROWS[:2], column_major),
    *table("misaligned", ROWS[:2], misaligned),
    *table("strided_bias", [ROWS[1] | {"bias": True}], strided_bias),
    *table("sizes_large", [{"T": t, "E": e, "topk": 8} for t in (1024, 4099) for e in (60, 512)], level="standard"),
    *table("counts", [{"T": 5, "E": e, "topk": min(e, 1 + e % 11)} for e in range(1, 1025, 7)], level="exhaustive"),
    *table("topk_zero", [{"T": 4, "E": 8}], lambda a: {"topk": 0}, FLOATS[:1], raises="topk"),
    *table("topk_above_experts", [{"T": 4, "E": 8}], lambda a: {"topk": 9}, FLOATS[:1], raises="topk"),
    *table(
        "too_many_experts", change=lambda a: {"gating_output": torch.zeros(2, 1025)}, dtypes=FLOATS[:1],
        raises="gating_output",
    ),
    *table(
        "no_experts", change=lambda a: {"gating_output": torch.zeros(2, 0)}, dtypes=FLOATS[:1], raises="gating_output"
    ),
    *table(
        "one_dimension", change=lambda a: {"gating_output": torch.zeros(8)}, dtypes=FLOATS[:1], raises="gating_output"
    ),
    *table(
        "integer_logits", change=lambda a: {"gating_output": torch.zeros(2, 8, dtype=torch.int32)}, dtypes=FLOATS[:1],
        raises="gating_output",
    ),
    *table("bias_shape", change=with_bias((7,)), dtypes=FLOATS[:1], raises="correction_bias"),
    *table("bias_dtype", change=with_bias(dtype=torch.float16), dtypes=FLOATS[:1], raises="correction_bias"),
]  # fmt: skip


# ---- for the properties ----------------------------------------------------------------------------------------------


def distinct_logits(arguments):
    """No ties, in any dtype: multiples of 1/8."""
    logits = arguments["gating_output"]
    generator = torch.Generator().manual_seed(3)
    order = torch.stack([torch.randperm(logits.shape[1], generator=generator) for _ in logits])
    logits.copy_((order / 8 - 4).to(logits))


def experts_in_another_order(call, arguments):
    order = shuffled(arguments["gating_output"].shape[1], arguments["gating_output"])
    changed = {"gating_output": arguments["gating_output"][:, order], "correction_bias": arguments["correction_bias"][order]}
    results = call(arguments | changed)
    return results | {"output[1]": order[results["output[1]"].long()].int()}


def shifted_logits(call, arguments):
    """softmax(x + 4) = softmax(x), and x + 4 is exact."""
    return call(arguments | {"gating_output": arguments["gating_output"] + 4})


def divided_afterwards(call, arguments):
    results = call(arguments | {"renormalize": False})
    weights = results["output[0]"]
    return results | {"output[0]": weights / weights.sum(-1, keepdim=True)}


ROLES = [
    Roles(
        OP,
        sizes=({"T": 9, "E": 60, "topk": 4, "bias": True},),
        busy={"T": 1500, "E": 60, "topk": 4},
        residues=[{"T": 2, "E": e, "topk": min(e, 1 + e % 11)} for e in range(1, 131)],
        all_residues=[{"T": 2, "E": e, "topk": min(e, 1 + e % 19)} for e in range(1, 1025)],
        quiet=("correction_bias",),  # NaN ranks lowest there
        compare=compare_topk,
        routes=(
            Route("permutation", "tokens", rows_shuffled("gating_output")),
            Route("permutation", "experts", experts_in_another_order, prepare=distinct_logits),
            Route("batch_invariance", "tokens", rows_alone("gating_output")),
            Route("identities", "softmax_shift", shifted_logits, prepare=distinct_logits),
            Route("composition", "renormalized_afterwards", divided_afterwards),
        ),
    )
]
