"""Native matmul_fp16: tensors to pointers, sizes and strides."""

from __future__ import annotations

import torch

import shim
from ops_native.libraries import CPU, CUDA, where
from ops_reference.common import describe


def _row_stride(a: torch.Tensor) -> int | None:
    """The distance of rows where all leading dimensions together are rows at one distance; None where they are not."""
    distance = expected = None
    if a.numel() == 0:
        return a.shape[-1]
    for size, stride in zip(reversed(a.shape[:-1]), reversed(a.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return None
        distance = stride if distance is None else distance
        expected = stride * size
    return a.shape[-1] if distance is None else distance


def _supports(a, b, bias=None):
    if a.dtype is not torch.float16:
        return f"needs float16, got {describe(a)}"
    for name, tensor in (("a", a), ("b", b), ("bias", bias)):
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            return f"{name} is not contiguous in its last dimension (strides {tensor.stride()})"
    if _row_stride(a) is None:
        return f"the rows of a are not at one distance (strides {a.stride()})"
    return True


@shim.native("matmul_fp16", library=CPU, symbols={"opshim_matmul_fp16": "ppppiiiii"}, supports=_supports)
def matmul_fp16(c, a, b, bias=None):
    features, inner = b.shape
    y = a.new_empty((*a.shape[:-1], features))
    c.opshim_matmul_fp16(
        a.data_ptr(),
        b.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        y.numel() // features if features else 0,
        features,
        inner,
        _row_stride(a),
        b.stride(0),
        *where(a),
    )
    return y


WORKSPACE = 32 << 20  # what cuBLAS takes on Hopper; only more than 8 rows are left to it


@shim.native("matmul_fp16", library=CUDA, symbols={"opshim_matmul_fp16": "pppppiiiiii"}, supports=_supports)
def matmul_fp16_cuda(c, a, b, bias=None):
    features, inner = b.shape
    y = a.new_empty((*a.shape[:-1], features))
    rows = y.numel() // features if features else 0
    workspace = torch.empty(WORKSPACE if rows > 8 else 0, dtype=torch.uint8, device=a.device)
    c.opshim_matmul_fp16(
        a.data_ptr(),
        b.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        workspace.data_ptr(),
        rows,
        features,
        inner,
        _row_stride(a),
        b.stride(0),
        workspace.numel(),
        *where(a),
    )
    return y
