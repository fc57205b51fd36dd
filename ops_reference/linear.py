"""The linear layer in float16, which not every device's library has."""

from __future__ import annotations

import torch
from torch import Tensor

import shim
from ops_reference.common import ACT, describe, need_tensor, refuse


@shim.op()
def matmul_fp16(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer: a [...,K], b [N,K], bias [N], all of one dtype -> a @ b^T + bias [...,N] of that dtype.

    float16 accumulates in float32 and rounds once. Any other dtype is torch's own linear layer: this op is native for
    float16 only. Raises OpArgumentError for mixed dtypes and wrong shapes.
    """
    if a.dtype is not torch.float16:
        return torch.nn.functional.linear(a, b, bias)
    y = a.float() @ b.float().T
    return (y if bias is None else y + bias.float()).half()


@matmul_fp16.checks
def _check(a, b, bias=None):
    op = "matmul_fp16"
    if not isinstance(a, Tensor) or a.dim() < 1 or a.dtype not in ACT:
        refuse(op, "a", "a floating-point tensor [...,K]", a)
    dtypes, device = {a.dtype}, a.get_device()
    features, inner = need_tensor(op, "b", b, 2, dtypes, device)
    if inner != a.shape[-1]:
        refuse(op, "b", f"[N,{a.shape[-1]}]", b)
    if bias is not None and need_tensor(op, "bias", bias, 1, dtypes, device)[0] != features:
        refuse(op, "bias", f"[{features}], one per row of b", bias)


@matmul_fp16.domain
def _domain(a, b, bias=None):
    return a.dtype is torch.float16 or f"a is {describe(a)}"


@matmul_fp16.fakes
def _fake(a, b, bias=None):
    return a.new_empty((*a.shape[:-1], b.shape[0]))


@matmul_fp16.inputs
def _inputs(generator, device, dtype, M=32, N=96, K=64, bias=False):
    b = torch.empty(N, K, dtype=dtype).normal_(0, max(K, 1) ** -0.5, generator=generator)
    return {
        "a": torch.randn(M, K, generator=generator).to(device, dtype),
        "b": b.to(device),
        "bias": torch.randn(N, generator=generator).to(device, dtype) if bias else None,
    }
