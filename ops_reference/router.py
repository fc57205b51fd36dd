"""The MoE router: softmax over the experts, and the k best of them."""

from __future__ import annotations

import torch
from torch import Tensor

import shim
from ops_reference.common import NATIVE_ACT, names_of, need_act, need_tensor, refuse, wide

MAX_EXPERTS = 1024


@shim.op()
def topk_softmax(
    gating_output: Tensor, topk: int, renormalize: bool = True, correction_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax routing: the k experts with the largest p + correction_bias, and their p.

    gating_output [T,E] act, correction_bias [E] float32 -> weights [T,k] float32, ids [T,k] int32; 1 <= k <= E <= 1024.

        p = softmax(gating_output)                                  -inf has p = 0
        ids = the k largest of p + correction_bias, largest first, ties to the lower index
        weights = p[ids], with `renormalize` divided by their sum   the bias chooses, it does not weigh

    The ids of a row are distinct and within [0, E) whatever the row holds: a score that is NaN ranks lowest, together
    with -inf. A row with a NaN or +inf logit, or of only -inf, has p = NaN throughout: experts 0 to k-1, weights NaN.

    Source: switch and Mixtral routing (arXiv:2101.03961, 2401.04088); the bias is DeepSeek-V3's (arXiv:2412.19437).
    Raises OpArgumentError for wrong dtypes and shapes, and for k or E out of range.
    """
    p = torch.softmax(gating_output.to(wide(gating_output.dtype)), dim=-1)
    score = p if correction_bias is None else p + correction_bias
    rank = torch.where(score.isnan(), -torch.inf, score)  # NaN has no order of its own
    ids = rank.argsort(dim=-1, descending=True, stable=True)[:, :topk]
    weights = p.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.contiguous(), ids.to(torch.int32)


@topk_softmax.checks
def _check(gating_output, topk, renormalize=True, correction_bias=None):
    op = "topk_softmax"
    _, experts = need_act(op, "gating_output", gating_output, 2)
    if not 1 <= experts <= MAX_EXPERTS:
        refuse(op, "gating_output", f"[T,E] with 1 to {MAX_EXPERTS} experts", gating_output)
    if not isinstance(topk, int) or not 1 <= topk <= experts:
        refuse(op, "topk", f"an int from 1 to {experts}", topk)
    if correction_bias is not None:
        dtypes, device = {wide(gating_output.dtype)}, gating_output.get_device()
        if need_tensor(op, "correction_bias", correction_bias, 1, dtypes, device) != (experts,):
            refuse(op, "correction_bias", f"[{experts}], one per expert", correction_bias)


@topk_softmax.domain
def _domain(gating_output, topk, renormalize=True, correction_bias=None):
    return gating_output.dtype in NATIVE_ACT or f"gating_output is {names_of([gating_output.dtype])}"


@topk_softmax.fakes
def _fake(gating_output, topk, renormalize=True, correction_bias=None):
    shape = (gating_output.shape[0], topk)
    return (
        gating_output.new_empty(shape, dtype=wide(gating_output.dtype)),
        gating_output.new_empty(shape, dtype=torch.int32),
    )


@topk_softmax.inputs
def _inputs(generator, device, dtype, T=64, E=256, topk=8, renormalize=True, bias=False):
    """Logits as a trained router puts them out: a few experts stand out of the crowd."""
    logits = 2 * torch.randn(T, E, generator=generator)
    correction = 0.01 * torch.randn(E, generator=generator) if bias else None
    return {
        "gating_output": logits.to(device, dtype),
        "topk": topk,
        "renormalize": renormalize,
        "correction_bias": correction if correction is None else correction.to(device, wide(dtype)),
    }
