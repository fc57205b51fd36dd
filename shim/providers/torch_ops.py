"""Provider `torch`: the ops as PyTorch's own functions have them, on any device."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from shim.providers.adapters import Adapters, any_of

adapters = Adapters("torch")
BUILD = f"torch {torch.__version__}"
adapters.lacks(
    gdn_prefill="torch has no gated delta rule",
    gdn_decode="torch has no gated delta rule",
    moe_align_block_size="torch has no grouping into blocks",
)


@adapters("topk_softmax")
def topk_softmax(gating_output, topk, renormalize=True, correction_bias=None):
    p = torch.softmax(gating_output, dim=-1, dtype=torch.float32)
    ids = (p if correction_bias is None else p + correction_bias).topk(topk, dim=-1).indices
    weights = p.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids.int()


@adapters("gdn_gating")
def gdn_gating(a, b, A_log, dt_bias):
    return -A_log.exp() * F.softplus(a.float() + dt_bias), torch.sigmoid(b.float())


def _grouped_mm_takes(x: Tensor, *weights: Tensor) -> bool | str:
    odd = any(t.shape[-1] * t.itemsize % 16 for t in (x, *weights))
    strided = any(w.stride(2) != 1 or w.stride(1) * w.itemsize % 16 for w in weights)
    return any_of(
        (odd, "torch's grouped_mm takes rows of a multiple of 16 bytes"),
        (strided, "torch's grouped_mm takes weights with contiguous rows"),
    )


def _grouped(rows: Tensor, w: Tensor, expert: Tensor) -> Tensor:
    """rows [R,K] times w[expert]^T, for experts in ascending order."""
    ends = torch.bincount(expert, minlength=len(w)).cumsum(0, dtype=torch.int32)
    return F.grouped_mm(rows, w.transpose(1, 2), offs=ends)


def _supports_grouped(
    x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, block_size, top_k, slot_weights=None
):
    return _grouped_mm_takes(x, w)


@adapters("grouped_gemm", supports=_supports_grouped)
def grouped_gemm(x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, block_size, top_k, slot_weights=None):
    """Slots are sorted by expert and their rows gathered."""
    slots, entries = len(x) * top_k, int(num_tokens_post_padded)
    expert, order = expert_ids.repeat_interleave(block_size)[:entries].sort(stable=True)
    slot = sorted_token_ids[:entries][order]
    used = (slot < slots) & (expert >= 0)
    slot, expert = slot[used].long(), expert[used]
    rows = _grouped(x[slot // top_k], w, expert)
    y = x.new_zeros(slots, w.shape[1])
    y[slot] = rows if slot_weights is None else (rows * slot_weights[slot, None]).to(x.dtype)
    return y


@adapters("moe_sum")
def moe_sum(y, topk_ids=None):
    values = y if topk_ids is None else y.masked_fill(topk_ids[..., None] < 0, 0)
    return values.sum(1, dtype=torch.float32).to(y.dtype)


def _supports_moe(
    x, w1, w2, w3=None, topk_weights=None, topk_ids=None, expert_map=None, apply_router_weight_on_input=False
):
    return _grouped_mm_takes(x, w1, w2, *([] if w3 is None else [w3]))


@adapters("fused_moe", supports=_supports_moe)
def fused_moe(
    x, w1, w2, w3=None, topk_weights=None, topk_ids=None, expert_map=None, apply_router_weight_on_input=False
):
    """Slots are sorted by expert and their rows gathered."""
    ids = topk_ids if expert_map is None else expert_map[topk_ids.clamp(min=0).long()].where(topk_ids >= 0, -1)
    expert, slot = ids.flatten().sort(stable=True)
    slot, expert = slot[expert >= 0], expert[expert >= 0]
    token, weight = slot // ids.shape[1], topk_weights.flatten()[slot, None]
    rows = (x[token] * weight).to(x.dtype) if apply_router_weight_on_input else x[token]
    gate, up = _grouped(rows, w1, expert).chunk(2, -1) if w3 is None else (_grouped(rows, w, expert) for w in (w1, w3))
    y = _grouped(F.silu(gate) * up, w2, expert).float()
    out = torch.zeros(x.shape, device=x.device)
    return out.index_add_(0, token, y if apply_router_weight_on_input else y * weight).to(x.dtype)


@adapters("reshape_and_cache")
def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping):
    used = slot_mapping >= 0
    slots, size = slot_mapping[used], key_cache.shape[1]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.index_put_((slots // size, slots % size), new[used])


NO_CAP = "scaled_dot_product_attention has no soft cap"


def _supports_decode(
    q, key_cache, value_cache, block_tables, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    return any_of((softcap > 0, NO_CAP))


def _supports_prefill(
    q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    return any_of((softcap > 0, NO_CAP))


@adapters("paged_attention_v2", supports=_supports_decode)
def paged_attention_v2(
    q, key_cache, value_cache, block_tables, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    """As a prefill of one token per sequence."""
    bounds = torch.arange(len(q) + 1)
    return paged_prefill(q, key_cache, value_cache, block_tables, bounds, seq_lens, scale, softcap, window, alibi_slopes)


@adapters("paged_prefill", supports=_supports_prefill)
def paged_prefill(
    q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    """Sequence by sequence, over its gathered blocks; window and slopes as a mask."""
    out, size = torch.zeros_like(q, memory_format=torch.contiguous_format), key_cache.shape[1]
    for n, (first, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        length = int(seq_lens[n])
        first = max(first, end - length)
        if first >= end:
            continue
        j = torch.arange(length, device=q.device)
        i = j[length - (end - first) :, None]
        keys, values = (c[block_tables[n, j // size].long(), j % size] for c in (key_cache, value_cache))
        visible = (j <= i) & (j > i - window) if window else j <= i
        mask = visible
        if alibi_slopes is not None:
            mask = (alibi_slopes[:, None, None] * (j - i)).masked_fill(~visible, -torch.inf).to(q.dtype)
        heads_first = (x.transpose(0, 1)[None] for x in (q[first:end], keys, values))
        o = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scale, enable_gqa=True)
        out[first:end] = o[0].transpose(0, 1)
    return out


@adapters("matmul_fp16")
def matmul_fp16(a, b, bias=None):
    return F.linear(a, b, bias)
