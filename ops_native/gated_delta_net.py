"""Native gdn_gating, gdn_prefill and gdn_decode: tensors to pointers, sizes and strides."""

from __future__ import annotations

import torch

import shim
from ops_native.libraries import CPU, DTYPE


def _refusal(state=None, **tensors):
    """True where the last dimension of every tensor, and each slot of the state, is contiguous; else what is not."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            return f"{name} is not contiguous in its last dimension (stride {tensor.stride(-1)})"
    if state is not None and not state[:1].is_contiguous():
        return f"state is not contiguous within a slot (strides {state.stride()})"
    return True


def _gating_supports(a, b, A_log, dt_bias):
    return _refusal(a=a, b=b, A_log=A_log, dt_bias=dt_bias)


def _prefill_supports(q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True):
    return _refusal(state, q=q, k=k, v=v, g=g, beta=beta, has_initial_state=has_initial_state, cu_seqlens=cu_seqlens)


def _decode_supports(q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1):
    return _refusal(state, q=q, k=k, v=v, a=a, b=b, A_log=A_log, dt_bias=dt_bias)


def _row_strides(q, k, v):
    """Token and head strides of q, k and v."""
    return *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]


@shim.native("gdn_gating", library=CPU, symbols={"opshim_gdn_gating": "ppppppiiiiii"}, supports=_gating_supports)
def gdn_gating(c, a, b, A_log, dt_bias):
    g = a.new_empty(a.shape, dtype=torch.float32)
    beta = torch.empty_like(g)
    c.opshim_gdn_gating(
        *(x.data_ptr() for x in (a, b, A_log, dt_bias, g, beta)),
        *a.shape,
        a.stride(0),
        b.stride(0),
        DTYPE[a.dtype],
        torch.get_num_threads(),
    )
    return g, beta


@shim.native(
    "gdn_prefill",
    library=CPU,
    symbols={"opshim_gdn_prefill": 10 * "p" + 17 * "i" + "d" + 4 * "i"},
    supports=_prefill_supports,
)
def gdn_prefill(c, q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True):
    o = v.new_empty(v.shape)
    T, H, K = q.shape
    c.opshim_gdn_prefill(
        *(x.data_ptr() for x in (q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, o)),
        *(T, state_indices.shape[0], H, v.shape[1], K, v.shape[2], state.shape[0]),
        *_row_strides(q, k, v),
        *(g.stride(0), beta.stride(0), state.stride(0), state_indices.stride(0)),
        K**-0.5 if scale is None else scale,
        *(l2norm, DTYPE[q.dtype], DTYPE[state.dtype], torch.get_num_threads()),
    )
    return o


@shim.native(
    "gdn_decode",
    library=CPU,
    symbols={"opshim_gdn_decode": 10 * "p" + 16 * "i" + "d" + 5 * "i"},
    supports=_decode_supports,
)
def gdn_decode(c, q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1):
    o = v.new_empty(v.shape)
    B, H, K = q.shape
    c.opshim_gdn_decode(
        *(x.data_ptr() for x in (q, k, v, a, b, A_log, dt_bias, state, state_indices, o)),
        *(B, H, v.shape[1], K, v.shape[2], state.shape[0]),
        *_row_strides(q, k, v),
        *(a.stride(0), b.stride(0), state.stride(0), state_indices.stride(0)),
        K**-0.5 if scale is None else scale,
        *(l2norm, null_index, DTYPE[q.dtype], DTYPE[state.dtype], torch.get_num_threads()),
    )
    return o
