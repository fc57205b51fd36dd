"""Mixture of experts: grouping slots by expert, one matmul per group, the sum over a token's experts, and all of it.

A token t has k slots t*k ... t*k+k-1, one per chosen expert. The staged chain

    sorted_ids, experts, count = moe_align_block_size(topk_ids, block_size, num_experts)
    gate_up = grouped_gemm(x, w13, sorted_ids, experts, count, block_size, top_k=k)               [T*k, 2I]
    h = silu(gate_up[:, :I]) * gate_up[:, I:]
    y = grouped_gemm(h, w2, sorted_ids, experts, count, block_size, top_k=1, slot_weights=weights.flatten())
    out = moe_sum(y.view(T, k, Hd), topk_ids)

is `fused_moe`, but for the rounding to act between the stages. Expert ids are below the count of experts; negative
ones mean "no expert" everywhere (padding, or an expert that lives on another rank).
"""

from __future__ import annotations

import torch
from torch import Tensor

import shim
from ops_reference.common import INT32, NATIVE_ACT, names_of, need_act, need_tensor, refuse, wide


@shim.op()
def moe_align_block_size(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Groups the T*k slots by expert, in blocks of one expert each.

    topk_ids [T,k] int32, expert_map [num_experts] int32 -> sorted_token_ids [capacity] int32,
    expert_ids [capacity / block_size] int32, num_tokens_post_padded [1] int32.

    Experts come in ascending order, and so do the slots of one expert; each group is filled up to a multiple of
    block_size with the sentinel T*k. expert_ids names the expert of each block. Only the first num_tokens_post_padded
    entries are blocks; after them, sorted_token_ids holds the sentinel and expert_ids -1. Dropped are negative ids, and
    those that expert_map sends to -1; with expert_map (global to local) the expert_ids are local.

        capacity = min(T*k + num_experts * (block_size - 1), T*k * block_size), rounded up to a block: the worst case

    Source: vLLM's moe_align_block_size. Raises OpArgumentError for wrong dtypes and shapes.
    """
    slots = topk_ids.numel()
    ids = topk_ids.flatten().long()
    if expert_map is not None:
        ids = torch.where(ids >= 0, expert_map[ids.clamp(min=0)], -1)
    order = ids.argsort(stable=True)
    order = order[ids[order] >= 0]
    expert = ids[order]
    counts = torch.bincount(expert, minlength=num_experts)
    blocks = (counts + block_size - 1) // block_size
    rank = torch.arange(len(order), device=ids.device) - (counts.cumsum(0) - counts)[expert]
    place = ((blocks.cumsum(0) - blocks) * block_size)[expert] + rank

    capacity = align_capacity(slots, block_size, num_experts)
    sorted_token_ids = topk_ids.new_full((capacity,), slots)
    sorted_token_ids[place] = order.to(torch.int32)
    used = torch.arange(num_experts, device=ids.device).repeat_interleave(blocks)
    expert_ids = topk_ids.new_full((capacity // block_size,), -1)
    expert_ids[: len(used)] = used.to(torch.int32)
    return sorted_token_ids, expert_ids, (blocks.sum(0, keepdim=True) * block_size).to(torch.int32)


def align_capacity(slots: int, block_size: int, num_experts: int) -> int:
    """The entries that the groups take at most: every expert's last block all but empty, or one slot per block."""
    most = min(slots + num_experts * (block_size - 1), slots * block_size)
    return -(-most // block_size) * block_size


@shim.op()
def grouped_gemm(
    x: Tensor,
    w: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    block_size: int,
    top_k: int,
    slot_weights: Tensor | None = None,
) -> Tensor:
    """Each slot's row times its expert's weights, over the blocks of `moe_align_block_size`.

    x [M,Kd] act, w [E,N,Kd] act, sorted_token_ids, expert_ids, num_tokens_post_padded int32,
    slot_weights [M * top_k] float32 -> y [M * top_k, N] act.

        y[s] = (x[s // top_k] @ w[expert(s)]^T) * slot_weights[s]       M * top_k = T*k slots; top_k 1: x has a row each

    Entries of sorted_token_ids from M * top_k on are filling, blocks of expert -1 are skipped, and a slot that is in no
    block has a row of zeros. Raises OpArgumentError for wrong dtypes and shapes.
    """
    slots, width = x.shape[0] * top_k, wide(x.dtype)
    entries = int(num_tokens_post_padded)
    expert_of = expert_ids.repeat_interleave(block_size)[:entries]
    y = x.new_zeros((slots, w.shape[1]), dtype=width)
    for e in expert_of.unique().tolist():
        if e >= 0:
            s = sorted_token_ids[:entries][expert_of == e].long()
            s = s[s < slots]
            rows = x[s // top_k].to(width) @ w[e].to(width).T
            y[s] = rows if slot_weights is None else rows * slot_weights[s, None]
    return y.to(x.dtype)


@shim.op()
def moe_sum(y: Tensor, topk_ids: Tensor | None = None) -> Tensor:
    """Sum over a token's slots: y [T,k,N] act, topk_ids [T,k] int32 -> [T,N] act.

    Slots with a negative id contribute nothing, whatever they hold. Raises OpArgumentError for wrong dtypes and shapes.
    """
    values = y.to(wide(y.dtype))
    if topk_ids is not None:
        values = values.masked_fill(topk_ids[..., None] < 0, 0)
    return values.sum(dim=1).to(y.dtype)


@shim.op()
def fused_moe(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None = None,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """The experts' SwiGLU networks, summed with the router's weights.

    x [T,Hd] act, topk_weights [T,k] float32, topk_ids [T,k] int32 (both required: they have a default only because they
    follow w3), expert_map [experts of all ranks] int32 -> [T,Hd] act. Format A, w3 given: w1 [E,I,Hd] is the gate,
    w3 [E,I,Hd] up, w2 [E,Hd,I]. Format B, w3 None: w1 [E,2I,Hd] is both, gate first.

        out[t] = sum_j weight_tj * (silu(x_t w_gate^T) * (x_t w_up^T)) w2^T         with the weights of expert id_tj

    expert_map sends global ids to ids of w1 (-1: not here); negative ids, before or after it, contribute nothing. An
    expert that is chosen twice counts twice. With apply_router_weight_on_input, x_t is multiplied by weight_tj before
    the first matmul, in float32, instead of the result (vLLM's meaning, which there needs k = 1).

    Source: SwiGLU is arXiv:2002.05202, the layer Mixtral's (arXiv:2401.04088). Raises OpArgumentError for wrong dtypes
    and shapes, and for a w3 that is no tensor.
    """
    width = wide(x.dtype)
    if expert_map is not None:
        topk_ids = torch.where(topk_ids >= 0, expert_map[topk_ids.clamp(min=0).long()], -1)
    y = x.new_zeros((*topk_ids.shape, x.shape[1]), dtype=width)
    for e in topk_ids.unique().tolist():
        if e >= 0:
            token, slot = (topk_ids == e).nonzero(as_tuple=True)
            rows, weight = x[token].to(width), topk_weights[token, slot, None]
            if apply_router_weight_on_input:
                rows, weight = rows * weight, 1
            gate_up = w1[e] if w3 is None else torch.cat([w1[e], w3[e]])
            gate, up = (rows @ gate_up.to(width).T).chunk(2, dim=-1)
            y[token, slot] = (torch.nn.functional.silu(gate) * up) @ w2[e].to(width).T * weight
    return y.sum(dim=1).to(x.dtype)


# ---- beside the references: checks, domains, fakes, example arguments ------------------------------------------------


@moe_align_block_size.checks
def _check_align(topk_ids, block_size, num_experts, expert_map=None):
    op = "moe_align_block_size"
    device = topk_ids.get_device() if isinstance(topk_ids, Tensor) else -1
    need_tensor(op, "topk_ids", topk_ids, 2, INT32, device)
    if not isinstance(block_size, int) or block_size < 1:
        refuse(op, "block_size", "a positive int", block_size)
    if not isinstance(num_experts, int) or num_experts < 1:
        refuse(op, "num_experts", "a positive int", num_experts)
    if expert_map is not None and need_tensor(op, "expert_map", expert_map, 1, INT32, device)[0] != num_experts:
        refuse(op, "expert_map", f"[{num_experts}], one per expert", expert_map)


@grouped_gemm.checks
def _check_grouped(
    x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, block_size, top_k, slot_weights=None
):
    op = "grouped_gemm"
    rows, inner = need_act(op, "x", x, 2)
    device = x.get_device()
    if need_tensor(op, "w", w, 3, {x.dtype}, device)[2] != inner:
        refuse(op, "w", f"[E,N,{inner}]", w)
    if not isinstance(block_size, int) or block_size < 1:
        refuse(op, "block_size", "a positive int", block_size)
    if not isinstance(top_k, int) or top_k < 1:
        refuse(op, "top_k", "a positive int", top_k)
    (entries,) = need_tensor(op, "sorted_token_ids", sorted_token_ids, 1, INT32, device)
    blocks = -(-entries // block_size)
    if need_tensor(op, "expert_ids", expert_ids, 1, INT32, device)[0] != blocks:
        refuse(op, "expert_ids", f"[{blocks}], one per block", expert_ids)
    if need_tensor(op, "num_tokens_post_padded", num_tokens_post_padded, 1, INT32, device)[0] != 1:
        refuse(op, "num_tokens_post_padded", "[1]", num_tokens_post_padded)
    if slot_weights is None:
        return
    if need_tensor(op, "slot_weights", slot_weights, 1, {wide(x.dtype)}, device)[0] != rows * top_k:
        refuse(op, "slot_weights", f"[{rows * top_k}], one per slot", slot_weights)


@moe_sum.checks
def _check_sum(y, topk_ids=None):
    slots = need_act("moe_sum", "y", y, 3)[:2]
    if topk_ids is not None and need_tensor("moe_sum", "topk_ids", topk_ids, 2, INT32, y.get_device()) != slots:
        refuse("moe_sum", "topk_ids", f"{list(slots)}, one per slot", topk_ids)


@fused_moe.checks
def _check_fused(
    x, w1, w2, w3=None, topk_weights=None, topk_ids=None, expert_map=None, apply_router_weight_on_input=False
):
    op = "fused_moe"
    tokens, hidden = need_act(op, "x", x, 2)
    dtypes, device = {x.dtype}, x.get_device()
    first = need_tensor(op, "w1", w1, 3, dtypes, device)
    experts, inner, width = first
    if width != hidden:
        refuse(op, "w1", f"[E,N,{hidden}]", w1)
    if w3 is None:
        if inner % 2:
            refuse(op, "w1", f"[E,2I,{hidden}] (gate, then up) where w3 is None", w1)
        inner //= 2
    elif need_tensor(op, "w3", w3, 3, dtypes, device) != first:
        refuse(op, "w3", f"the shape of w1, {list(first)}, or None", w3)
    if need_tensor(op, "w2", w2, 3, dtypes, device) != (experts, hidden, inner):
        refuse(op, "w2", f"{[experts, hidden, inner]}, as w1 and w3 have it", w2)
    chosen = need_tensor(op, "topk_ids", topk_ids, 2, INT32, device)
    if chosen[0] != tokens:
        refuse(op, "topk_ids", f"[{tokens},k], a row per token", topk_ids)
    if need_tensor(op, "topk_weights", topk_weights, 2, {wide(x.dtype)}, device) != chosen:
        refuse(op, "topk_weights", f"the shape of topk_ids, {list(chosen)}", topk_weights)
    if expert_map is not None:
        need_tensor(op, "expert_map", expert_map, 1, INT32, device)


@moe_align_block_size.domain
def _any_call(*args, **kwargs):
    return True


@grouped_gemm.domain
@moe_sum.domain
@fused_moe.domain
def _domain(*args, **kwargs):
    first = args[0] if args else kwargs.get("x", kwargs.get("y"))
    return first.dtype in NATIVE_ACT or f"activations are {names_of([first.dtype])}"


@moe_align_block_size.fakes
def _fake_align(topk_ids, block_size, num_experts, expert_map=None):
    capacity = align_capacity(topk_ids.shape[0] * topk_ids.shape[1], block_size, num_experts)
    return topk_ids.new_empty(capacity), topk_ids.new_empty(capacity // block_size), topk_ids.new_empty(1)


@grouped_gemm.fakes
def _fake_grouped(x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, block_size, top_k, slot_weights=None):
    return x.new_empty((x.shape[0] * top_k, w.shape[1]))


@moe_sum.fakes
def _fake_sum(y, topk_ids=None):
    return y.new_empty((y.shape[0], y.shape[2]))


@fused_moe.fakes
def _fake_fused(x, *args, **kwargs):
    return x.new_empty(x.shape)


def make_routing(generator, device, T: int, E: int, topk: int) -> tuple[Tensor, Tensor]:
    """Weights [T,k] float32 that sum to 1 and distinct ids [T,k] int32, as a router puts them out."""
    ids = torch.rand(T, E, generator=generator).topk(topk).indices
    weights = torch.randn(T, topk, generator=generator).softmax(dim=-1)
    return weights.to(device), ids.to(device, torch.int32)


def make_weights(generator, device, dtype, *shape: int) -> Tensor:
    """Weights that keep the scale of what they multiply; drawn in place, since a layer's experts are large."""
    return torch.empty(shape, dtype=dtype).normal_(0, shape[-1] ** -0.5, generator=generator).to(device)


@moe_align_block_size.inputs
def _inputs_align(generator, device, dtype=None, T=64, E=16, topk=4, block_size=16):
    _, ids = make_routing(generator, device, T, E, topk)
    return {"topk_ids": ids, "block_size": block_size, "num_experts": E, "expert_map": None}


@grouped_gemm.inputs
def _inputs_grouped(
    generator, device, dtype, T=32, E=8, topk=2, N=96, K=64, block_size=16, row_per_slot=False, weighted=False
):
    """`row_per_slot`: x has a row per slot, as the second matmul of the chain has it; `weighted`: with slot_weights."""
    weights, ids = make_routing(generator, device, T, E, topk)
    sorted_token_ids, expert_ids, count = moe_align_block_size.reference(ids, block_size, E)
    rows = T * topk if row_per_slot else T
    return {
        "x": torch.randn(rows, K, generator=generator).to(device, dtype),
        "w": make_weights(generator, device, dtype, E, N, K),
        "sorted_token_ids": sorted_token_ids,
        "expert_ids": expert_ids,
        "num_tokens_post_padded": count,
        "block_size": block_size,
        "top_k": 1 if row_per_slot else topk,
        "slot_weights": weights.flatten().to(wide(dtype)) if weighted else None,
    }


@moe_sum.inputs
def _inputs_sum(generator, device, dtype, T=64, topk=8, N=256, with_ids=False):
    y = torch.randn(T, topk, N, generator=generator)
    ids = torch.randint(-1, 8, (T, topk), generator=generator, dtype=torch.int32)
    return {"y": y.to(device, dtype), "topk_ids": ids.to(device) if with_ids else None}


@fused_moe.inputs
def _inputs_fused(generator, device, dtype, T=32, E=8, topk=2, I=48, Hd=64, merged=True, on_input=False):
    """`merged`: format B, one tensor for gate and up."""
    weights, ids = make_routing(generator, device, T, E, topk)
    return {
        "x": torch.randn(T, Hd, generator=generator).to(device, dtype),
        "w1": make_weights(generator, device, dtype, E, 2 * I if merged else I, Hd),
        "w2": make_weights(generator, device, dtype, E, Hd, I),
        "w3": None if merged else make_weights(generator, device, dtype, E, I, Hd),
        "topk_weights": weights.to(wide(dtype)),
        "topk_ids": ids,
        "expert_map": None,
        "apply_router_weight_on_input": on_input,
    }
