"""Provider `fla`: flash-linear-attention's Triton kernels of the gated delta rule, on a GPU."""

from __future__ import annotations

import inspect

import torch

from shim.providers.adapters import Adapters, absent, any_of, build, keep_states, no_gpu, real_rows, starting_states

BUILD = build("fla-core", "flash-linear-attention")
adapters = Adapters("fla", "cuda", lambda: no_gpu() or absent("fla"))
OTHERS = (
    *("topk_softmax", "moe_align_block_size", "grouped_gemm", "moe_sum", "fused_moe", "matmul_fp16"),
    *("reshape_and_cache", "paged_attention_v2", "paged_prefill"),
)
adapters.lacks(**dict.fromkeys(OTHERS, "fla has linear attention only"))
adapters.lacks(gdn_gating="fla has the gate fused into its kernels only")


def _supports_prefill(
    q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True
):
    return any_of((q.dtype is torch.float32, "fla's chunk_gated_delta_rule takes float16 and bfloat16"))


@adapters("gdn_prefill", supports=_supports_prefill)
def gdn_prefill(
    q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True
):
    """States are gathered and transposed to [K,V], float32, and put back."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    slots = state_indices.long()
    start = starting_states(state, slots, has_initial_state)
    packed = (x[None].contiguous() for x in (q, k, v, g, beta))
    o, final = chunk_gated_delta_rule(
        *packed,
        scale=scale,
        initial_state=start.mT.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=l2norm,
        cu_seqlens=cu_seqlens.long(),
    )
    keep_states(state, slots, final.mT)
    return o[0]


def _needs_gates() -> str:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as kernel

    known = inspect.signature(kernel).parameters
    missing = [name for name in ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel") if name not in known]
    return f"this version's fused_recurrent_gated_delta_rule has no {missing[0]}" if missing else ""


@adapters("gdn_decode", needs=_needs_gates)
def gdn_decode(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1
):
    """Rows that are no padding are picked; their states are gathered, transposed to [K,V], and put back."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    rows, slots = real_rows(state_indices, null_index)
    o = v.new_zeros(v.shape)
    if len(rows):
        one = [x[rows][:, None].contiguous() for x in (q, k, v, a, b)]
        out, final = fused_recurrent_gated_delta_rule(
            *one[:3],
            g=one[3],
            beta=one[4],
            scale=scale,
            initial_state=state[slots].float().mT.contiguous(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=l2norm,
            use_gate_in_kernel=True,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=True,
        )
        o[rows] = out[:, 0]
        state[slots] = final.mT.to(state.dtype)
    return o
