"""Provider `flashinfer`: its paged attention and its gated delta rule, on a GPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shim.providers.adapters import (
    HALVES,
    Adapters,
    absent,
    any_of,
    build,
    keep_states,
    no_gpu,
    real_rows,
    starting_states,
)

BUILD = build("flashinfer-python")
WORKSPACE_BYTES = 128 << 20  # what its documentation recommends
adapters = Adapters("flashinfer", "cuda", lambda: no_gpu() or absent("flashinfer"))
adapters.lacks(
    topk_softmax="flashinfer has routers of other formulas only",
    gdn_gating="flashinfer has the gate fused into its kernels only",
    moe_align_block_size="flashinfer has no grouping into blocks",
    grouped_gemm="flashinfer's grouped matmuls take other groupings",
    moe_sum="flashinfer has the sum fused into its kernels only",
    fused_moe="flashinfer's CUTLASS experts are not adapted",
    reshape_and_cache="flashinfer's append takes positions in sequences, not slots",
    matmul_fp16="flashinfer's float16 matmuls are cuBLAS's, as torch's are",
)


# ---- gated delta net ------------------------------------------------------------------------------------------------


def _supports_prefill(
    q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True
):
    return any_of(
        (q.dtype not in HALVES, "flashinfer takes float16 and bfloat16"),
        (q.shape[2] != 128 or v.shape[2] != 128, "flashinfer's gated delta rule takes K = V = 128"),
        (scale == 0, "flashinfer takes a scale of zero for none"),
    )


@adapters("gdn_prefill", supports=_supports_prefill)
def gdn_prefill(
    q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True
):
    """It takes exp(g), and q and k normalised; states are gathered in float32 and put back."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    if l2norm:
        q, k = ((x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) for x in (q, k))
    slots = state_indices.long()
    o, final = chunk_gated_delta_rule(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        g=g.contiguous().exp(),
        beta=beta.contiguous(),
        scale=scale,
        initial_state=starting_states(state, slots, has_initial_state),
        output_final_state=True,
        cu_seqlens=cu_seqlens,
    )
    keep_states(state, slots, final)
    return o


def _supports_decode(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1
):
    return any_of(
        (q.dtype not in HALVES, "flashinfer takes float16 and bfloat16"),
        (state.dtype is not torch.float32, "flashinfer gathers no states from a pool in float16 or bfloat16 here"),
        (q.shape[2] != 128 or v.shape[2] != 128, "flashinfer's gated delta rule takes K = V = 128"),
    )


@adapters("gdn_decode", supports=_supports_decode)
def gdn_decode(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1
):
    """Rows that are no padding are picked; their states are gathered and put back."""
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    rows, slots = real_rows(state_indices, null_index)
    o = v.new_zeros(v.shape)
    if len(rows):
        q, k, v, a, b = (x[rows][:, None].contiguous() for x in (q, k, v, a, b))
        out, final = gated_delta_rule_decode_pretranspose(
            q, k, v, state[slots], A_log, a, dt_bias, b, scale=scale, use_qk_l2norm=l2norm
        )
        o[rows] = out[:, 0]
        state[slots] = final
    return o


# ---- attention ------------------------------------------------------------------------------------------------------


@cache
def _wrapper(name: str, device: torch.device):
    """One planner and workspace per device, as a server has them."""
    import flashinfer

    return getattr(flashinfer, name)(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD")


def _pages(block_tables: Tensor, seq_lens: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables as flashinfer has them: bounds [B+1], the used block ids end to end, tokens in each last page."""
    used = (seq_lens + block_size - 1) // block_size
    mask = torch.arange(block_tables.shape[1], device=used.device) < used[:, None]
    bounds = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    return bounds, block_tables[mask], seq_lens - (used - 1).clamp(min=0) * block_size


def _attention_takes(q: Tensor, key_cache: Tensor, alibi_slopes: Tensor | None) -> bool | str:
    return any_of(
        (q.dtype not in HALVES, "flashinfer takes float16 and bfloat16"),
        (q.shape[2] not in (64, 128, 256), "flashinfer takes head sizes 64, 128 and 256"),
        (alibi_slopes is not None, "flashinfer's ALiBi has its slopes built in"),
    )


def _supports_paged_decode(
    q, key_cache, value_cache, block_tables, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    return _attention_takes(q, key_cache, alibi_slopes)


def _supports_paged_prefill(
    q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    return _attention_takes(q, key_cache, alibi_slopes)


def _options(q: Tensor, scale: float, softcap: float, window: int) -> dict:
    return {
        "sm_scale": float(scale),
        "logits_soft_cap": softcap or None,
        "window_left": window - 1 if window else -1,
        "q_data_type": q.dtype,
        "kv_data_type": q.dtype,
    }


@adapters("paged_attention_v2", supports=_supports_paged_decode)
def paged_attention_v2(
    q, key_cache, value_cache, block_tables, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    _, block_size, kv_heads, size = key_cache.shape
    wrapper = _wrapper("BatchDecodeWithPagedKVCacheWrapper", q.device)
    pages = _pages(block_tables, seq_lens, block_size)
    wrapper.plan(*pages, q.shape[1], kv_heads, size, block_size, **_options(q, scale, softcap, window))
    return wrapper.run(q.contiguous(), (key_cache, value_cache))


@adapters("paged_prefill", supports=_supports_paged_prefill)
def paged_prefill(
    q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    _, block_size, kv_heads, size = key_cache.shape
    wrapper = _wrapper("BatchPrefillWithPagedKVCacheWrapper", q.device)
    sizes = (q.shape[1], kv_heads, size, block_size)
    pages = _pages(block_tables, seq_lens, block_size)
    wrapper.plan(cu_seqlens_q, *pages, *sizes, causal=True, **_options(q, scale, softcap, window))
    return wrapper.run(q.contiguous(), (key_cache, value_cache))
