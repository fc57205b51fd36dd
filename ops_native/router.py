"""Native topk_softmax."""

from __future__ import annotations

import torch

import ops_reference.router  # noqa: F401  declares the op
import shim
from ops_native.libraries import CPU, CUDA, DTYPE, where


@shim.native("topk_softmax", library=(CPU, CUDA), symbols={"opshim_topk_softmax": "pppp" + "i" * 8})
def topk_softmax(c, gating_output, topk, renormalize=True, correction_bias=None):
    tokens, experts = gating_output.shape
    weights = torch.empty((tokens, topk), dtype=torch.float32, device=gating_output.device)
    ids = torch.empty((tokens, topk), dtype=torch.int32, device=gating_output.device)
    bias = correction_bias
    c.opshim_topk_softmax(
        gating_output.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        DTYPE[gating_output.dtype],
        tokens,
        experts,
        *gating_output.stride(),
        0 if bias is None else bias.stride(0),
        topk,
        renormalize,
        *where(gating_output),
    )
    return weights, ids
