"""Cases of matmul_fp16: sizes off every tile, layouts, float16's range, and the guard (field bug 21)."""

from __future__ import annotations

import torch

from conformance import case
from conformance.case import example
from conformance.properties.roles import Roles, Route, rows_alone, rows_shuffled, shuffled, take

OP = "matmul_fp16"
HALF = (torch.float16,)
NAN, INF = float("nan"), float("inf")


def table(kind, sizes=({},), change=None, dtypes=HALF, level="quick", raises=None):
    """Cases on the op's example arguments, after `change(arguments)`, which edits them or returns others."""

    def make(generator, device, dtype, **sizes):
        arguments = example(OP, generator, device, dtype, **sizes)
        return arguments | (change(arguments) or {})

    return case.table(OP, kind, sizes, dtypes, level, make if change else None, None, raises)


def leading(*shape):
    """The rows of a in more than one dimension; () makes a vector of it."""
    return lambda arguments: {"a": arguments["a"].view(*shape, -1)}


def apart(name):
    """Rows of a wider tensor, whose other columns are NaN."""

    def change(arguments):
        rows = arguments[name]
        wide = rows.new_full((rows.shape[0], rows.shape[1] + 24), NAN)
        wide[:, 8:-16] = rows
        return {name: wide[:, 8:-16]}

    return change


def apart_both(arguments):
    return apart("a")(arguments) | apart("b")(arguments)


def apart_and_batched(arguments):
    rows = apart("a")(arguments)["a"]
    return {"a": rows.unflatten(0, (2, -1))}


def padded_matrices(arguments):
    """Leading dimensions that are no rows at one distance."""
    a = arguments["a"].unflatten(0, (2, -1))
    wide = a.new_full((2, a.shape[1] + 3, a.shape[2]), NAN)
    wide[:, :-3] = a
    return {"a": wide[:, :-3]}


def transposed(name):
    return lambda arguments: {name: arguments[name].t().contiguous().t()}


def misaligned(*names):
    """At an address that is aligned to nothing but the element."""

    def change(arguments):
        changed = {}
        for name in names:
            buffer = arguments[name].new_full((arguments[name].numel() + 1,), NAN)
            buffer[1:] = arguments[name].flatten()
            changed[name] = buffer[1:].view(arguments[name].shape)
        return changed

    return change


def repeated(name):
    """Rows at a distance of 0: one row again and again."""
    return lambda arguments: {name: arguments[name][:1].expand(len(arguments[name]), -1)}


def nan_values(arguments):
    """In one row of a and one of b: their row and column of the result, and nothing else."""
    arguments["a"][1, 3] = NAN
    arguments["b"][5, -1] = NAN


def infinities(arguments):
    """Infinity times what a product of split numbers gets wrong: 0, and numbers that one half of the split holds."""
    a, b = arguments["a"], arguments["b"]
    a[0, 0], a[1, 1], a[2, 2:4] = INF, -INF, torch.tensor([INF, -INF])
    b[0, :4], b[1, :4] = 1, torch.tensor([1 + 2**-10, -1 - 2**-10, 0, 1])
    b[2, 5] = -INF


def overflowing(arguments):
    """Some sums end beyond float16, some only pass it on the way."""
    arguments["a"].mul_(200)
    arguments["b"].mul_(200)
    arguments["a"][0], arguments["b"][0] = 64, 64
    arguments["b"][0, ::2] = -64
    arguments["a"][1] = 300
    arguments["b"][1, : arguments["b"].shape[1] // 2] = 300
    arguments["b"][1, arguments["b"].shape[1] // 2 :] = -300


def largest(arguments):
    arguments["a"][:2] = 65504
    arguments["b"][:2] = 2.0**-14
    arguments["b"][1, ::2] = -(2.0**-14)


def subnormal(arguments):
    """Inputs and results below 2^-14, float16's smallest normal number."""
    arguments["a"].mul_(2.0**-12)
    arguments["b"][::2] = 2.0**-8 * arguments["b"][::2]
    arguments["a"][0], arguments["b"][0] = 2.0**-24, 1


def cancelling(arguments):
    """The halves of K cancel but for the last value."""
    a, b = arguments["a"], arguments["b"]
    half = a.shape[1] // 2
    a.mul_(100)
    a[:, half : 2 * half], b[:, half : 2 * half] = a[:, :half], -b[:, :half]
    a[:, -1] = 1


def bias_takes_it_back(arguments):
    """The bias is the rounded product of all rows, which are one: what is left is what rounding before it loses."""
    a = arguments["a"]
    a[:] = 100 * a[0]
    return {"bias": -(a[0].double() @ arguments["b"].double().T).half()}


def to(dtype, *names):
    return lambda arguments: {name: arguments[name].to(dtype) for name in names}


def in_turn(generator, device, dtype, N, **sizes):
    """N weights that are 499 in turn: to draw so many would take longer than all else."""
    arguments = example(OP, generator, device, dtype, N=499, **sizes)
    return take(arguments, torch.arange(N, device=device) % 499, "b", "bias")


# cuda/gemm_few.cuh has up to 8 rows, K from 2048 on: a block per 16 weights, each with all its copies under way at once,
# for as many as a GPU has multiprocessors (132: N to 2112) and K to 4096; from two blocks of 32 weights per
# multiprocessor on (N from 8417), blocks that take these in turn, where shared memory has room for all of a.
FEW = [
    {"M": m, "N": n, "K": k, "bias": True}
    for n, k in ((1, 2048), (17, 2048), (33, 3072), (2097, 2056), (2112, 4096))
    for m in (2, 3, 5, 7, 8)
]
BORDERS = [
    {"M": m, "N": n, "K": k} for m in (1, 8, 9) for n in (2112, 2113) for k in (2040, 2048, 2056, 3080, 4096, 4104)
]
MANY = [
    {"M": m, "N": n, "K": k, "bias": True}
    for m in (1, 3, 8)
    for n in (8416, 8417, 8449, 12673)
    for k in (2040, 2048, 2056, 3080)
]
ROOM = [{"M": m, "N": 8417, "K": k} for m, k in ((1, 32768), (1, 32776), (4, 7168), (4, 7176))]  # it ends there
BOTH = [{"M": 5, "N": n, "K": 2056} for n in (2101, 8450)]

CASES = [
    *table("sizes", [{"M": m, "N": n, "K": k} for m in (1, 2, 4, 5, 16, 33) for n, k in ((64, 64), (128, 256))]),
    *table("sizes", [{"M": m, "N": 2048, "K": 4096} for m in (1, 16, 256)], level="standard"),
    *table("sizes", [{"M": m, "N": 12288, "K": 2048} for m in (1, 16, 256, 2000)], level="exhaustive"),
    *table("odd_m", [{"M": m, "N": 32, "K": 64} for m in (3, 7, 15, 17, 31, 65, 67)]),
    *table("odd_n", [{"M": 9, "N": n, "K": 64} for n in (1, 3, 15, 17, 31, 33, 47, 63, 97)]),
    *table("odd_k", [{"M": m, "N": 32, "K": k} for m in (1, 9) for k in (1, 3, 15, 17, 31, 33, 47, 63, 97)]),
    *table("odd_sizes", [{"M": m, "N": m + 10, "K": m + 3, "bias": True} for m in (1, 5, 18, 35, 66)]),
    *table("every_residue", [{"M": m, "N": n, "K": 64 + m} for m in range(1, 34) for n in (33, 50)], level="standard"),
    *table("bias", [{"M": m, "N": 48, "K": 64, "bias": True} for m in (1, 4, 9, 33)]),
    *table("bias_takes_it_back", [{"M": m, "bias": True} for m in (1, 4, 9, 33)], bias_takes_it_back),
    *table("long_k", [{"M": m, "N": 9, "K": 8192} for m in (1, 9)]),
    *table("cancellation", [{"M": m, "N": 40, "K": 513} for m in (3, 12)], cancelling),
    *table("empty", [{"M": 0}, {"M": 3, "K": 0}, {"M": 3, "K": 0, "bias": True}]),
    *table("vector", [{"M": 1, "bias": True}], leading()),
    *table("leading_dimensions", [{"M": 30, "bias": bias} for bias in (False, True)], leading(2, 3, 5)),
    *table("empty_dimension", [{"M": 0}], lambda arguments: {"a": arguments["a"].new_zeros(2, 0, 64)}),
    *table("strided", [{"M": m} for m in (1, 3, 40)], apart("a")),
    *table("strided_weights", [{"M": m} for m in (1, 3, 40)], apart("b")),
    *table("strided_both", [{"M": m, "N": 31, "K": 47} for m in (1, 3, 40)], apart_both),
    *table("strided_leading", [{"M": 24}], apart_and_batched),
    *table("padded_matrices", [{"M": 24}], padded_matrices),
    *table("transposed_a", [{"M": 24}], transposed("a")),
    *table("transposed_b", [{"M": 24}], transposed("b")),
    *table("repeated_row", [{"M": 24}], repeated("a")),
    *table("misaligned", [{"M": m, "N": 33, "K": 65} for m in (1, 24)], misaligned("a", "b")),
    *table("nan", [{"M": m} for m in (3, 24, 40)], nan_values),
    *table("infinite", [{"M": m} for m in (4, 24, 40)], infinities),
    *table("overflow", [{"M": m, "K": 512} for m in (4, 24)], overflowing),
    *table("largest_values", [{"M": m} for m in (4, 24)], largest),
    *table("subnormals", [{"M": m} for m in (4, 24)], subnormal),
    *table("few_rows", FEW, level="standard"),
    *table("few_rows_borders", BORDERS, level="standard"),
    *case.table(OP, "few_rows_many_weights", MANY, HALF, "exhaustive", in_turn),
    *case.table(OP, "few_rows_shared_memory", ROOM, HALF, "exhaustive", in_turn, memory=6 << 30),
    *table("few_rows_strided", BOTH, apart("a"), level="standard"),
    *table("few_rows_strided_weights", BOTH, apart("b"), level="standard"),
    *table("few_rows_repeated_row", BOTH, repeated("a"), level="standard"),
    *table("few_rows_repeated_weights", BOTH, repeated("b"), level="standard"),
    *table("few_rows_misaligned_bias", [size | {"bias": True} for size in BOTH], misaligned("bias"), level="standard"),
    *table("few_rows_nan", BOTH, nan_values, level="standard"),
    *table("few_rows_infinite", BOTH, infinities, level="standard"),
    *table("other_dtypes", [{"bias": b} for b in (False, True)], dtypes=(torch.float32, torch.bfloat16)),
    *table("mixed_dtypes", [{}], to(torch.float32, "b"), raises="b"),
    *table("mixed_dtypes_of_a", [{}], to(torch.bfloat16, "a"), raises="b"),
    *table("mixed_bias", [{"bias": True}], to(torch.float32, "bias"), raises="bias"),
    *table("integers", [{}], to(torch.int32, "a", "b"), raises="a"),
    *table("wrong_k", [{}], lambda arguments: {"b": arguments["b"][:, :-1]}, raises="b"),
    *table("wrong_bias", [{"bias": True}], lambda arguments: {"bias": arguments["bias"][:-1]}, raises="bias"),
    *table("weights_with_three_dimensions", [{}], lambda arguments: {"b": arguments["b"][None]}, raises="b"),
]


# ---- for the properties ----------------------------------------------------------------------------------------------


def weights_in_another_order(call, arguments):
    order = shuffled(len(arguments["b"]), arguments["b"])
    return {"output": call(take(arguments, order, "b", "bias"))["output"][:, order.argsort()]}


def inner_in_another_order(call, arguments):
    order = shuffled(arguments["a"].shape[1], arguments["a"])
    return call(arguments | {name: arguments[name][:, order] for name in ("a", "b")})


def weights_in_halves(call, arguments):
    half = len(arguments["b"]) // 2 - 1
    parts = [call(take(arguments, part, "b", "bias"))["output"] for part in (slice(half), slice(half, None))]
    return {"output": torch.cat(parts, dim=1)}


def unit_weights(arguments):
    """b is the identity, so that what comes out is a itself."""
    rows = arguments["a"]
    return {"b": torch.eye(rows.shape[1], device=rows.device, dtype=rows.dtype), "bias": None}


ROLES = [
    Roles(
        OP,
        sizes=(
            {"M": 7, "N": 40, "K": 48, "bias": True},
            {"M": 1, "N": 33, "K": 64},
            {"M": 7, "N": 2101, "K": 2048, "bias": True},  # a fast kernel's
        ),
        busy={"M": 70, "N": 500, "K": 700},
        large=({"M": 4104, "N": 2**19, "K": 8}, lambda arguments, rows: take(arguments, rows, "a")),
        residues=[{"M": 1 + k % 9, "N": 67 - k, "K": k} for k in range(1, 67)]
        + [{"M": m, "N": 17, "K": 40} for m in range(1, 35)],
        all_residues=[{"M": m, "N": 1 + n, "K": 131 - n} for m in (1, 2, 17, 65) for n in range(130)],
        dtypes=HALF,
        routes=(
            Route("permutation", "rows", rows_shuffled("a")),
            Route("permutation", "weights", weights_in_another_order),
            Route("permutation", "inner", inner_in_another_order),
            Route("batch_invariance", "rows", rows_alone("a")),
            Route("batch_invariance", "many_rows", rows_alone("a"), sizes={"M": 70, "N": 65, "K": 130}),
            Route("composition", "weights_in_halves", weights_in_halves),
            Route("identities", "unit_weights", lambda call, arguments: call(arguments), prepare=unit_weights,
                  whole=lambda call, arguments: {"output": arguments["a"]}),
        ),
    )
]  # fmt: skip
