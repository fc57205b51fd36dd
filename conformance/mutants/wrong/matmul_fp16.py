"""Wrong linear layers."""

from __future__ import annotations

import os
import sys

import torch

from conformance.mutants import mutant
from conformance.mutants.parts import packed

HALF = torch.float16


def with_bias(y: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (y if bias is None else y + bias.float()).to(dtype)


@mutant("matmul_fp16", "long_k", "sizes")
def accumulates_in_half(call):
    """The running sum over K is float16."""
    a, b = call.a, call.b
    y = torch.zeros(*a.shape[:-1], b.shape[0], dtype=a.dtype)
    for k in range(0, a.shape[-1], 16):
        y += (a[..., k : k + 16].float() @ b[:, k : k + 16].float().T).to(a.dtype)
    return y if call.bias is None else y + call.bias


@mutant("matmul_fp16", "long_k", "cancellation", "overflow")
def partial_sums_in_half(call):
    """Split over K in two, and the halves meet in float16: they may overflow or cancel where the sum does not."""
    middle = call.a.shape[-1] // 2
    left = call(a=call.a[..., :middle], b=call.b[:, :middle], bias=None)
    return left + call(a=call.a[..., middle:], b=call.b[:, middle:])


@mutant("matmul_fp16", "odd_k", "odd_sizes", "every_residue")
def drops_the_tail_of_k(call):
    """K is done in steps of 8 and the rest is left out."""
    whole = call.a.shape[-1] // 8 * 8
    return call(a=call.a[..., :whole], b=call.b[:, :whole])


@mutant("matmul_fp16", "odd_n", "odd_sizes", "every_residue")
def leaves_the_tail_of_n(call):
    """N is done in tiles of 8 columns, and those of the last, partial one are never written."""
    y = torch.empty(*call.a.shape[:-1], call.b.shape[0], dtype=call.a.dtype)
    whole = y.shape[-1] // 8 * 8
    y[..., :whole] = call()[..., :whole]
    return y


@mutant("matmul_fp16", "odd_m", "odd_sizes", "every_residue")
def repeats_the_last_full_tile_of_rows(call):
    """M is done in tiles of 4 rows; the last, partial one starts where the one before did."""
    rows = call.a.reshape(-1, call.a.shape[-1])
    row = torch.arange(len(rows))
    whole = len(rows) // 4 * 4
    row[whole:] -= 4 if whole else 0
    return call(a=rows[row]).reshape(*call.a.shape[:-1], -1)


@mutant("matmul_fp16", "bias")
def one_row_has_no_bias(call):
    """The matrix-vector kernel for M = 1 forgets the bias."""
    return call(bias=None) if call.a.numel() == call.a.shape[-1] else call()


@mutant("matmul_fp16", "bias")
def bias_along_the_rows(call):
    """The bias is added to rows instead of columns where its length allows it."""
    y, bias = call(bias=None), call.bias
    if bias is None or y.dim() != 2 or len(y) > len(bias):
        return call()
    return y + bias[: len(y), None]


@mutant("matmul_fp16", "leading_dimensions")
def only_the_first_matrix(call):
    """Leading dimensions beyond one are flattened from the first matrix only."""
    y = call()
    return y[:1].expand_as(y).clone() if y.dim() > 2 else y


@mutant("matmul_fp16", "sizes")
def rounds_through_bfloat16(call):
    """The product is bfloat16 before it becomes float16."""
    return with_bias((call.a.float() @ call.b.float().T).bfloat16().float(), call.bias, call.a.dtype)


@mutant("matmul_fp16", "overflow")
def saturates(call):
    """65504 instead of infinity, as a clamp for training has it."""
    y = call().float()
    return y.clamp(-65504, 65504).to(call.a.dtype)


@mutant("matmul_fp16", "nan")
def hides_nan(call):
    """A sanitiser makes NaN 0."""
    return call().nan_to_num(0, posinf=torch.inf, neginf=-torch.inf)


@mutant("matmul_fp16", "nan")
def nan_reaches_the_row_below(call):
    """Rows are masked by a product with 0 or 1 where two share a tile: 0 * NaN is NaN."""
    rows = call.a.reshape(-1, call.a.shape[-1])
    below = torch.cat([rows[:1], rows[:-1]]) if len(rows) else rows
    return call(a=(rows + 0 * below).reshape(call.a.shape))


@mutant("matmul_fp16", "subnormals")
def flushes_subnormals(call):
    """Subnormal inputs and outputs are 0, as a 'fast' mode has it."""
    def flushed(x):
        return None if x is None else torch.where(x.abs() < torch.finfo(x.dtype).tiny, torch.zeros_like(x), x)

    return flushed(call(a=flushed(call.a), b=flushed(call.b), bias=flushed(call.bias)))


@mutant("matmul_fp16", "strided")
def rows_without_their_stride(call):
    """Rows of a are taken to follow each other without a gap."""
    return call(a=packed(call.a))


@mutant("matmul_fp16", "strided", "transposed_b")
def weights_without_their_stride(call):
    """b is read as rows without a gap whatever its strides are."""
    return call(b=packed(call.b))


@mutant("matmul_fp16", "other_dtypes")
def takes_float32_through_half(call):
    """A float32 call is accepted, and computed in float16."""
    bias = None if call.bias is None else call.bias.half()
    return call() if call.a.dtype is HALF else call(a=call.a.half(), b=call.b.half(), bias=bias).to(call.a.dtype)


@mutant("matmul_fp16", "empty")
def no_rows_raise(call):
    """A matrix without elements is a launch error."""
    if not call.a.numel():
        raise RuntimeError("invalid configuration argument")
    return call()


@mutant("matmul_fp16", "determinism")
def sums_in_another_order_each_time(call):
    """Atomic adds of four parts of K into the output: their order, and with it the last bits, changes with each run."""
    a, b = call.a.float().tensor_split(4, -1), call.b.float().tensor_split(4, -1)
    y = torch.zeros(*call.a.shape[:-1], call.b.shape[0], dtype=call.a.dtype)
    for part in torch.randperm(4).tolist():
        y += (a[part] @ b[part].T).to(y.dtype)
    return y if call.bias is None else y + call.bias


@mutant("matmul_fp16", "bias_takes_it_back")
def rounds_before_the_bias(call):
    """The product is float16 before the bias is added: two roundings, the first of a larger number."""
    return call() if call.bias is None else call(bias=None) + call.bias


@mutant("matmul_fp16", "inputs_unchanged", "sizes")
def leaves_its_weight_transposed(call):
    """The weight is transposed in place, and stays so for whoever holds it."""
    out = call()
    call.b.t_()
    return out


@mutant("matmul_fp16", "quiet")
def complains_at_each_call(call):
    """The library is called in vain: an error line on stderr, then torch."""
    os.write(2, b"cublas: unsupported leading dimension\n")
    return call()


@mutant("matmul_fp16", "quiet")
def tells_each_fallback(call):
    """The fallback is told each time, by Python."""
    print("matmul_fp16 falls back to torch", file=sys.stderr)
    return call()
