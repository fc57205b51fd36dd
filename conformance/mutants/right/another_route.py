"""Right implementations by another route than the reference's, one per op: the suite must acquit each of them.

    python runner.py conform --provider-file conformance/mutants/right/another_route.py --provider another_route
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention, silu, softplus

import shim
from ops_reference.gated_delta_net_chunked import gdn_prefill_chunked


def right(op: str):
    return shim.implementation(op, provider="another_route", explicit=True)


@right("topk_softmax")
def topk_softmax(gating_output, topk, renormalize=True, correction_bias=None):
    """k passes of a maximum over what is left; the softmax as e^x / sum."""
    logits = gating_output.float()
    e = (logits - logits.amax(-1, keepdim=True)).exp()
    p = e / e.sum(-1, keepdim=True)
    p[p.isnan().any(-1)] = torch.nan
    left = (p if correction_bias is None else p + correction_bias).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    taken = torch.zeros_like(left, dtype=torch.bool)
    ids = []
    for _ in range(topk):
        best = left.masked_fill(taken, -torch.inf).amax(-1, keepdim=True)
        first = ((left == best) & ~taken).int().argmax(-1, keepdim=True)  # of equal ones the first
        taken.scatter_(1, first, True)
        ids.append(first)
    ids = torch.cat(ids, 1)
    weights = p.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids.int()


@right("gdn_gating")
def gdn_gating(a, b, A_log, dt_bias):
    """softplus of torch.nn.functional, the sigmoid through an exponential that is at most 1."""
    e = (-b.float().abs()).exp()
    return -(A_log.exp() * softplus(a.float() + dt_bias)), torch.where(b > 0, 1, e) / (1 + e)


@right("gdn_prefill")
def gdn_prefill(
    q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True
):
    """In chunks of 16 tokens, by a triangular solve instead of token by token."""
    arguments = (q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale, l2norm)
    return gdn_prefill_chunked(*arguments, chunk=16)


@right("gdn_decode")
def gdn_decode(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1
):
    """Row by row, head by head; S q from the old state: decay (S q) + (k . q) correction."""
    o = v.new_zeros(v.shape)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for n, slot in enumerate(state_indices.tolist()):
        if slot < 0 or slot == null_index:
            continue
        for h in range(v.shape[1]):
            head = h // (v.shape[1] // q.shape[1])
            x, y = q[n, head].float(), k[n, head].float()
            if l2norm:
                x, y = (z * (z.dot(z) + 1e-6).rsqrt() for z in (x, y))
            decay = (-A_log[h].exp() * softplus(a[n, h].float() + dt_bias[h])).exp()
            s = state[slot, h].float()
            correction = b[n, h].float().sigmoid() * (v[n, h].float() - decay * (s @ y))
            o[n, h] = scale * (decay * (s @ x) + y.dot(x) * correction)
            state[slot, h] = decay * s + torch.outer(correction, y)
    return o


@right("moe_align_block_size")
def moe_align_block_size(topk_ids, block_size, num_experts, expert_map=None):
    """Expert by expert: append its slots, then fill up."""
    slots = topk_ids.numel()
    ids = [i if i < 0 or expert_map is None else int(expert_map[i]) for i in topk_ids.flatten().tolist()]
    tokens, experts = [], []
    for e in range(num_experts):
        mine = [slot for slot, i in enumerate(ids) if i == e]
        mine += [slots] * (-len(mine) % block_size)
        tokens += mine
        experts += [e] * (len(mine) // block_size)
    most = min(slots + num_experts * (block_size - 1), slots * block_size)
    blocks = -(-most // block_size)
    count = len(tokens)
    tokens += [slots] * (blocks * block_size - count)
    experts += [-1] * (blocks - len(experts))
    return tuple(topk_ids.new_tensor(x) for x in (tokens, experts, [count]))


@right("grouped_gemm")
def grouped_gemm(x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, block_size, top_k, slot_weights=None):
    """Block by block, each a matmul over a gathered tile, summed over K in two halves."""
    slots, half = x.shape[0] * top_k, x.shape[1] // 2
    y = torch.zeros(slots, w.shape[1])
    for block in range(int(num_tokens_post_padded) // block_size):
        e = int(expert_ids[block])
        s = sorted_token_ids[block * block_size : (block + 1) * block_size].long()
        s = s[s < slots]
        if e >= 0 and len(s):
            tile, weight = x[s // top_k].float(), w[e].float()
            y[s] = tile[:, half:] @ weight[:, half:].T + tile[:, :half] @ weight[:, :half].T
            if slot_weights is not None:
                y[s] *= slot_weights[s, None]
    return y.to(x.dtype)


@right("moe_sum")
def moe_sum(y, topk_ids=None):
    """Slot after slot, last first."""
    out = torch.zeros(y.shape[0], y.shape[2])
    for j in reversed(range(y.shape[1])):
        slot = y[:, j].float()
        out += slot if topk_ids is None else slot.where(topk_ids[:, j, None] >= 0, 0)
    return out.to(y.dtype)


@right("fused_moe")
def fused_moe(
    x, w1, w2, w3=None, topk_weights=None, topk_ids=None, expert_map=None, apply_router_weight_on_input=False
):
    """Expert by expert over all of its tokens, added to the output in float32."""
    gate, up = w1.chunk(2, dim=1) if w3 is None else (w1, w3)
    out = torch.zeros(x.shape)
    ids = topk_ids if expert_map is None else expert_map[topk_ids.clamp(min=0).long()].where(topk_ids >= 0, -1)
    for e in range(len(w1)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if len(token):
            weight = topk_weights[token, slot, None]
            rows = x[token].float() * (weight if apply_router_weight_on_input else 1)
            hidden = silu(rows @ gate[e].float().T) * (rows @ up[e].float().T)
            part = hidden @ w2[e].float().T
            out.index_add_(0, token, part if apply_router_weight_on_input else weight * part)
    return out.to(x.dtype)


@right("reshape_and_cache")
def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping):
    """Token by token."""
    size = key_cache.shape[1]
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // size, slot % size].copy_(key[t])
            value_cache[slot // size, slot % size].copy_(value[t])


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float, slopes: Tensor | None) -> Tensor:
    """One query [HQ,D] over the keys and values [L,HK,D] that it sees -> [HQ,D]: torch's attention, in float32."""
    heads, length = len(q), len(keys)
    keys, values = (x.float().transpose(0, 1).repeat_interleave(heads // x.shape[1], 0) for x in (keys, values))
    q = q.float()[:, None]
    bias = None if slopes is None else slopes[:, None, None] * torch.arange(1 - length, 1)
    if not softcap:
        with sdpa_kernel(SDPBackend.MATH):  # the fused one for CPUs gives 0 for a query that is NaN
            return scaled_dot_product_attention(q[None], keys[None], values[None], bias, scale=scale)[0, :, 0]
    scores = softcap * (q @ keys.mT * (scale / softcap)).tanh()
    return ((scores if bias is None else scores + bias).softmax(-1) @ values)[:, 0]


def gathered(cache: Tensor, table: Tensor, first: int, length: int) -> Tensor:
    """Tokens `first` to `length`, cut out of whole blocks side by side."""
    size = cache.shape[1]
    skipped = first // size
    blocks = table[skipped : -(-length // size)].long()
    return cache[blocks].flatten(0, 1)[first - skipped * size : length - skipped * size]


@right("paged_attention_v2")
def paged_attention_v2(
    q, key_cache, value_cache, block_tables, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    """As a prefill of one token per sequence."""
    bounds = torch.arange(len(q) + 1)
    return paged_prefill(q, key_cache, value_cache, block_tables, bounds, seq_lens, scale, softcap, window, alibi_slopes)


@right("paged_prefill")
def paged_prefill(
    q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    """Query by query, torch's attention over the gathered blocks of what that query sees."""
    out = q.new_zeros(q.shape)
    for n, (start, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        length = int(seq_lens[n])
        for t in range(max(start, end - length), end):
            seen = length - (end - 1 - t)
            first = max(0, seen - window) if window else 0
            keys, values = (gathered(cache, block_tables[n], first, seen) for cache in (key_cache, value_cache))
            out[t] = attend(q[t], keys, values, scale, softcap, alibi_slopes)
    return out


@right("matmul_fp16")
def matmul_fp16(a, b, bias=None):
    """In float32, K in parts of 32 that are summed as a tree; other dtypes as they are."""
    wide = torch.float64 if a.dtype is torch.float64 else torch.float32
    parts = -(-a.shape[-1] // 32)
    a_parts, b_parts = (pad(x.to(wide), (0, 32 * parts - x.shape[-1])).unflatten(-1, (parts, 32)) for x in (a, b))
    y = torch.einsum("...pk,npk->...np", a_parts, b_parts).sum(-1)
    return (y if bias is None else y + bias).to(a.dtype)
