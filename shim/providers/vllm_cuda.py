"""Provider `vllm` on GPUs: vLLM's CUDA and Triton kernels and its FlashAttention, called as vLLM (0.24) calls them.

What vLLM never passes is turned into what it has for that, where a look at the batch finds it: negative ids are those of
an expert that is elsewhere, sequences without a slot start from nothing, and rows of no sequence are zeros. What else its
convention leaves open (slots that no block of a grouped product reaches) is not filled in: outputs are allocated empty, as
vLLM allocates them.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache

import torch
from torch import Tensor

from shim.providers.adapters import (
    HALVES,
    Adapters,
    absent,
    any_of,
    build,
    covers,
    has_negatives,
    is_captured,
    keep_states,
    may_be_negative,
    no_gpu,
    once_per_batch,
    starting_states,
)

BUILD = build("vllm")
FLA = ("vllm.model_executor.layers.fla", "vllm.third_party.flash_linear_attention")
CHUNK = 64  # tokens: FLA_CHUNK_SIZE
LARGEST_GRID = 65535  # in any dimension but the first
# tiles as vLLM has them where nothing is tuned
TILES = {"BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 3}


def _missing() -> str:
    reason = no_gpu() or absent("vllm")
    if reason:
        return reason
    import vllm._custom_ops  # noqa: F401 - loads the kernels
    from vllm.platforms import current_platform

    return "" if current_platform.is_cuda() else "this build of vLLM has no CUDA kernels"


adapters = Adapters("vllm", "cuda", _missing)
adapters.lacks(matmul_fp16="vLLM's unquantized linear layers are torch's own")


def _kernel(library: str, name: str):
    """needs: the kernel is in this build."""
    return lambda: "" if hasattr(getattr(torch.ops, library), name) else f"this build of vLLM has no {name}"


# ---- router and experts ---------------------------------------------------------------------------------------------


@adapters("topk_softmax", needs=_kernel("_moe_C", "topk_softmax"))
def topk_softmax(gating_output, topk, renormalize=True, correction_bias=None):
    from vllm import _custom_ops as ops

    shape = (len(gating_output), topk)
    weights = gating_output.new_empty(shape, dtype=torch.float32)
    ids, rows = (gating_output.new_empty(shape, dtype=torch.int32) for _ in range(2))
    ops.topk_softmax(weights, ids, rows, gating_output.contiguous(), renormalize, correction_bias)
    return weights, ids


def _supports_align(topk_ids, block_size, num_experts, expert_map=None):
    return any_of((has_negatives(topk_ids), "vLLM's grouping of experts takes no negative id"))


@adapters("moe_align_block_size", supports=_supports_align, needs=_kernel("_moe_C", "moe_align_block_size"))
def moe_align_block_size(topk_ids, block_size, num_experts, expert_map=None):
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size as align

    return align(
        topk_ids.contiguous(), block_size, num_experts, expert_map, pad_sorted_ids=True, ignore_invalid_experts=True
    )


def _supports_grouped(
    x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, block_size, top_k, slot_weights=None
):
    tile = block_size >= 16 and not block_size & (block_size - 1)
    return any_of((not tile, "vLLM's Triton kernel takes block sizes that are powers of two, from 16 on"))


@adapters("grouped_gemm", supports=_supports_grouped)
def grouped_gemm(x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, block_size, top_k, slot_weights=None):
    from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel
    from vllm.triton_utils import tl

    kinds = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    y = x.new_empty(len(x), top_k, w.shape[1])
    invoke_fused_moe_triton_kernel(
        x,
        w,
        y,
        None,
        None,
        None if slot_weights is None else slot_weights.view(len(x), top_k),
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        slot_weights is not None,
        top_k,
        {"BLOCK_SIZE_M": block_size, **TILES},
        compute_type=kinds[x.dtype],
        use_fp8_w8a8=False,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=False,
    )
    return y.flatten(0, 1)


def _supports_sum(y, topk_ids=None):
    return any_of((topk_ids is not None, "vLLM's moe_sum takes no ids: every slot counts"))


@adapters("moe_sum", supports=_supports_sum, needs=_kernel("_moe_C", "moe_sum"))
def moe_sum(y, topk_ids=None):
    from vllm import _custom_ops as ops

    out = y.new_empty(y.shape[0], y.shape[2])
    ops.moe_sum(y.contiguous(), out)
    return out


def _elsewhere(topk_ids: Tensor, expert_map: Tensor | None, experts: int) -> tuple[Tensor, Tensor]:
    """Negative ids as those of one expert more, which no map has here: so vLLM leaves slots out."""
    if expert_map is None:
        expert_map = torch.arange(experts, dtype=torch.int32, device=topk_ids.device)
    return topk_ids.where(topk_ids >= 0, len(expert_map)), torch.cat([expert_map, expert_map.new_full((1,), -1)])


def _supports_moe(
    x, w1, w2, w3=None, topk_weights=None, topk_ids=None, expert_map=None, apply_router_weight_on_input=False
):
    several = apply_router_weight_on_input and topk_ids.shape[1] != 1
    return any_of((several, "vLLM applies router weights on the input where k is 1 only"))


@adapters("fused_moe", supports=_supports_moe)
def fused_moe(
    x, w1, w2, w3=None, topk_weights=None, topk_ids=None, expert_map=None, apply_router_weight_on_input=False
):
    """Format A is merged into format B, a copy."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    if may_be_negative(topk_ids):
        topk_ids, expert_map = _elsewhere(topk_ids, expert_map, len(w1))
    return fused_experts(
        x.contiguous(),
        w1 if w3 is None else torch.cat([w1, w3], dim=1),
        w2,
        topk_weights.contiguous(),
        topk_ids.contiguous(),
        apply_router_weight_on_input=apply_router_weight_on_input,
        global_num_experts=len(w1) if expert_map is None else len(expert_map),
        expert_map=expert_map,
    )


# ---- gated delta net ------------------------------------------------------------------------------------------------


@cache
def _linear_attention(module: str = ""):
    """vLLM's copy of flash-linear-attention, where 0.24 has it or where 0.32 does."""
    place = next(place for place in FLA if importlib.util.find_spec(place))
    return importlib.import_module(f"{place}.ops{module}")


def _needs_gating() -> str:
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layer

    return "" if hasattr(layer, "fused_gdn_gating") else "this version of vLLM has the gate fused into its kernels only"


@adapters("gdn_gating", needs=_needs_gating)
def gdn_gating(a, b, A_log, dt_bias):
    """beta comes back in the activations' dtype."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import fused_gdn_gating

    g, beta = fused_gdn_gating(*(x.contiguous() for x in (A_log, a, b, dt_bias)))
    return g[0], beta[0].float()


def _supports_prefill(
    q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True
):
    tokens, value_heads, values = v.shape
    per_state = state[0].numel() if len(state) else 0
    sequences = len(state_indices)
    states = (tokens // CHUNK + sequences) * per_state  # one per chunk, and one at most for each sequence's rest
    return any_of(
        (q.dtype not in HALVES, "vLLM's chunk_gated_delta_rule does not support float32"),
        (q.shape[2] > 256, "vLLM's chunk_gated_delta_rule takes K up to 256"),
        (
            max(states, tokens * value_heads * max(values, q.shape[2])) >= 1 << 31,
            "vLLM's chunk_gated_delta_rule counts elements in 32 bits",
        ),
    )


@once_per_batch
def _chunks(cu_seqlens: Tensor) -> list[Tensor]:
    """Chunk indices and offsets, worked out on the host as vLLM's metadata does. Left to the kernels they would be kept
    by tensor, even those of a capture that failed, which nobody has computed."""
    index, bounds = _linear_attention(".index"), cu_seqlens.cpu()
    prepared = index.prepare_chunk_indices(bounds, CHUNK), index.prepare_chunk_offsets(bounds, CHUNK)
    return [tensor.to(cu_seqlens.device) for tensor in prepared]


@adapters("gdn_prefill", supports=_supports_prefill)
def gdn_prefill(
    q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True
):
    """States are gathered and put back, as vLLM does around the kernels, which it never captures."""
    if is_captured(q):
        raise RuntimeError("vLLM plans a prefill on the host: it cannot be captured")
    if not len(state_indices):
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    slots, some = state_indices.long(), has_negatives(state_indices)
    if some:
        start = starting_states(state, slots, has_initial_state)
    else:
        start = state[slots]
        start[~has_initial_state] = 0
    packed = (x[None].contiguous() for x in (q, k, v, g, beta))
    indices, offsets = _chunks(cu_seqlens)
    o, final = _linear_attention().chunk_gated_delta_rule(
        *packed,
        scale=scale,
        initial_state=start,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        chunk_indices=indices,
        chunk_offsets=offsets,
        use_qk_l2norm_in_kernel=l2norm,
    )
    if some:
        keep_states(state, slots, final)
    else:
        state[slots] = final.to(state.dtype)
    return o[0]


def _supports_decode(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1
):
    rows, value_heads = a.shape
    inner = state[:1].is_contiguous() and state.stride(3) == 1
    return any_of(
        (not inner, "vLLM's kernel takes pools whose states are contiguous"),
        (a.stride(1) != 1 or b.stride(1) != 1, "vLLM's kernel takes a and b contiguous in the last dimension"),
        (rows * max(a.stride(0), b.stride(0)) >= 1 << 31, "vLLM's kernel counts elements in 32 bits"),
        (rows * value_heads > LARGEST_GRID, f"vLLM's kernel takes up to {LARGEST_GRID} rows times value heads"),
    )


def _mixed_qkv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, 2*H*K + HV*V], what the kernel reads: the projection of which q, k and v are views, as a server has them; a
    copy where they are not, or where the kernel's offsets, in 32 bits, do not reach its rows."""
    rows, heads, size = q.shape
    memory, first, row = q.untyped_storage().data_ptr(), q.storage_offset(), q.stride(0)
    views = all(
        x.untyped_storage().data_ptr() == memory
        and x.storage_offset() == first + part * heads * size
        and x.stride() == (row, x.shape[2], 1)
        for part, x in enumerate((q, k, v))
    )
    if views and rows * row < 1 << 31:
        return q.as_strided((rows, 2 * heads * size + v.shape[1] * v.shape[2]), (row, 1))
    return torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)


@adapters("gdn_decode", supports=_supports_decode)
def gdn_decode(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1
):
    """The packed kernel, with which vLLM decodes where nobody prefills or speculates. Padding is slot 0 there (the null
    block), which it never serves, and negative ones. In 0.24 beta is rounded to the activations' dtype."""
    rows, heads, size = v.shape
    out = v.new_empty(rows, 1, heads, size)
    _linear_attention().fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=_mixed_qkv(q, k, v),
        a=a,
        b=b,
        A_log=A_log.contiguous(),
        dt_bias=dt_bias.contiguous(),
        scale=q.shape[2] ** -0.5 if scale is None else float(scale),
        initial_state=state,
        out=out,
        ssm_state_indices=state_indices if null_index <= 0 else state_indices.masked_fill(state_indices == null_index, 0),
        use_qk_l2norm_in_kernel=l2norm,
    )
    return out[:, 0]


# ---- attention ------------------------------------------------------------------------------------------------------


@cache
def _one_each(sequences: int, device: torch.device) -> Tensor:
    """cu_seqlens of sequences with one token each: kept, as vLLM keeps it."""
    return torch.arange(sequences + 1, device=device, dtype=torch.int32)


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def _supports_cache_write(key, value, key_cache, value_cache, slot_mapping):
    size = key.shape[2]
    inside = {x.stride()[1:] for x in (key, value)} | {(size, x.stride(3)) for x in (key_cache, value_cache)}
    return any_of(
        (inside != {(size, 1)}, "vLLM's kernel takes the heads of a token end to end"),
        (key_cache.stride() != value_cache.stride(), "vLLM's kernel takes both caches at the same strides"),
    )


@adapters("reshape_and_cache", supports=_supports_cache_write, needs=_kernel("_C_cache_ops", "reshape_and_cache_flash"))
def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping):
    from vllm import _custom_ops as ops

    one = _one(key.device)
    ops.reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping.contiguous(), "auto", one, one)


@cache
def _flash_version(alibi: bool = False, size: int | None = None) -> int | None:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    return get_flash_attn_version(requires_alibi=alibi, head_size=size)


def _needs_flash() -> str:
    return "" if _flash_version() else "this build of vLLM has no FlashAttention for this GPU"


def _flash_takes(q: Tensor, key_cache: Tensor, block_tables: Tensor, alibi_slopes: Tensor | None) -> bool | str:
    alibi = alibi_slopes is not None
    return any_of(
        (alibi and not _flash_version(alibi), "this build of vLLM has no FlashAttention 2, the one with ALiBi"),
        (q.dtype not in HALVES, "FlashAttention takes float16 and bfloat16"),
        (key_cache.shape[1] % 16 != 0, "vLLM's FlashAttention takes block sizes that are multiples of 16"),
        (q.shape[2] % 8 != 0, "vLLM's FlashAttention takes head sizes that are multiples of 8"),
        (block_tables.stride(1) != 1, "vLLM's FlashAttention takes block tables contiguous in the last dimension"),
    )


def _supports_paged_decode(
    q, key_cache, value_cache, block_tables, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    return _flash_takes(q, key_cache, block_tables, alibi_slopes)


def _supports_paged_prefill(
    q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    return _flash_takes(q, key_cache, block_tables, alibi_slopes)


def _flash(q, caches, block_tables, bounds, longest, seq_lens, scale, softcap, window, alibi_slopes) -> Tensor:
    """The longest context is taken from the width of the block table, so that nothing is read from the GPU. Tokens of no
    sequence are left as they are, which a server does not mind."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q,
        *caches,
        max_seqlen_q=longest,
        cu_seqlens_q=bounds,
        max_seqlen_k=block_tables.shape[1] * caches[0].shape[1],
        seqused_k=seq_lens,
        softmax_scale=scale,
        causal=True,
        window_size=[window - 1, 0] if window else [-1, -1],
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        block_table=block_tables,
        out=torch.empty_like(q, memory_format=torch.contiguous_format) if covers(bounds, len(q)) else torch.zeros_like(q),
        fa_version=_flash_version(alibi_slopes is not None, q.shape[2]),
    )


@adapters("paged_prefill", supports=_supports_paged_prefill, needs=_needs_flash)
def paged_prefill(
    q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    features = (scale, softcap, window, alibi_slopes)
    return _flash(q, (key_cache, value_cache), block_tables, cu_seqlens_q, len(q), seq_lens, *features)


@adapters("paged_attention_v2", supports=_supports_paged_decode, needs=_needs_flash)
def paged_attention_v2(
    q, key_cache, value_cache, block_tables, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    features = (scale, softcap, window, alibi_slopes)
    return _flash(q, (key_cache, value_cache), block_tables, _one_each(len(q), q.device), 1, seq_lens, *features)
