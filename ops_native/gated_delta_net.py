"""Native gdn_gating, gdn_prefill and gdn_decode: tensors to pointers, sizes and strides."""

from __future__ import annotations

from ctypes import addressof, c_int64

import torch

import shim
from ops_native.libraries import CPU, CUDA, DTYPE, where

# The usual layouts are accepted in one expression: it runs in every call.


def _gating_supports(a, b, A_log, dt_bias):
    usual = a.is_contiguous() and b.is_contiguous() and A_log.is_contiguous() and dt_bias.is_contiguous()
    return usual or _contiguous_inside(a=a, b=b, A_log=A_log, dt_bias=dt_bias)


def _prefill_supports(q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True):
    _, page, row, inner = state.stride()
    _, _, V, K = state.shape
    return (
        q.stride()[2] == k.stride()[2] == v.stride()[2] == inner == 1
        and (g.is_contiguous() and beta.is_contiguous() and has_initial_state.is_contiguous())
        and (cu_seqlens.is_contiguous() and row == K and page == V * K)
    ) or _contiguous_inside(
        state, q=q, k=k, v=v, g=g, beta=beta, has_initial_state=has_initial_state, cu_seqlens=cu_seqlens
    )


def _decode_supports(q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1):
    _, page, row, inner = state.stride()
    _, _, V, K = state.shape
    return (
        q.stride()[2] == k.stride()[2] == v.stride()[2] == inner == 1 == a.stride()[1] == b.stride()[1]
        and (A_log.is_contiguous() and dt_bias.is_contiguous() and row == K and page == V * K)
    ) or _contiguous_inside(state, q=q, k=k, v=v, a=a, b=b, A_log=A_log, dt_bias=dt_bias)


def _contiguous_inside(state=None, **tensors):
    """True where every tensor's last dimension, and each slot of the state, is contiguous; else the words for it."""
    for name, tensor in tensors.items():
        if tensor.stride()[-1] != 1 and tensor.shape[-1] > 1:
            return f"the last dimension of {name} is not contiguous (strides {tensor.stride()})"
    if state is not None:
        _, _, V, K = state.shape
        if state.stride()[1:] != (V * K, K, 1) and not state[:1].is_contiguous():  # sizes of 1 may have any stride
            return f"the slots of state are not contiguous (strides {state.stride()})"
    return True


@shim.native("gdn_gating", library=(CPU, CUDA), symbols={"opshim_gdn_gating": "ppppppiiiii"}, supports=_gating_supports)
def gdn_gating(c, a, b, A_log, dt_bias):
    T, HV = a.shape
    g = torch.empty((T, HV), dtype=torch.float32, device=a.device)
    beta = torch.empty_like(g)
    c.opshim_gdn_gating(
        *(a.data_ptr(), b.data_ptr(), A_log.data_ptr(), dt_bias.data_ptr(), g.data_ptr(), beta.data_ptr()),
        *(T, HV, a.stride()[0], b.stride()[0]),
        *(DTYPE[a.dtype], *where(a)),
    )
    return g, beta


@shim.native(
    "gdn_prefill",
    library=CPU,
    symbols={"opshim_gdn_prefill": 10 * "p" + 17 * "i" + "d" + 3 * "i"},
    supports=_prefill_supports,
)
def gdn_prefill(c, q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True):
    T, H, K = q.shape
    _, HV, V = v.shape
    o = torch.empty((T, HV, V), dtype=v.dtype, device=v.device)
    c.opshim_gdn_prefill(
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(), state.data_ptr()),
        *(state_indices.data_ptr(), has_initial_state.data_ptr(), cu_seqlens.data_ptr(), o.data_ptr()),
        *(T, state_indices.shape[0], H, HV, K, V, state.shape[0]),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], g.stride()[0], beta.stride()[0]),
        *(state.stride()[0], state_indices.stride()[0]),
        K**-0.5 if scale is None else scale,
        *(l2norm, DTYPE[q.dtype], DTYPE[state.dtype], *where(q)),
    )
    return o


@shim.native(
    "gdn_prefill",
    library=CUDA,
    symbols={"opshim_gdn_prefill": 11 * "p" + 17 * "i" + "d" + 3 * "i", "opshim_gdn_prefill_scratch": "p" + 7 * "i"},
    supports=_prefill_supports,
)
def gdn_prefill_cuda(c, q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, scale=None, l2norm=True):
    T, H, K = q.shape
    _, HV, V = v.shape
    sizes = T, len(state_indices), H, HV, K, V
    o = torch.empty((T, HV, V), dtype=v.dtype, device=v.device)
    needed = c_int64()
    c.opshim_gdn_prefill_scratch(addressof(needed), *sizes, DTYPE[q.dtype], *where(q))
    scratch = torch.empty(needed.value, dtype=torch.uint8, device=v.device)
    c.opshim_gdn_prefill(
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(), state.data_ptr()),
        *(state_indices.data_ptr(), has_initial_state.data_ptr(), cu_seqlens.data_ptr(), o.data_ptr()),
        *(scratch.data_ptr(), needed.value, *sizes),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], g.stride()[0], beta.stride()[0]),
        *(state.stride()[0], state_indices.stride()[0]),
        K**-0.5 if scale is None else scale,
        *(l2norm, DTYPE[q.dtype], DTYPE[state.dtype], *where(q)),
    )
    return o


@shim.native(
    "gdn_decode",
    library=(CPU, CUDA),
    symbols={"opshim_gdn_decode": 10 * "p" + 16 * "i" + "d" + 4 * "i"},
    supports=_decode_supports,
)
def gdn_decode(c, q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=None, l2norm=True, null_index=-1):
    B, H, K = q.shape
    _, HV, V = v.shape
    o = torch.empty((B, HV, V), dtype=v.dtype, device=v.device)
    c.opshim_gdn_decode(
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), a.data_ptr(), b.data_ptr(), A_log.data_ptr(), dt_bias.data_ptr()),
        *(state.data_ptr(), state_indices.data_ptr(), o.data_ptr()),
        *(B, H, HV, K, V, state.shape[0]),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], a.stride()[0], b.stride()[0]),
        *(state.stride()[0], state_indices.stride()[0]),
        K**-0.5 if scale is None else scale,
        *(l2norm, null_index, DTYPE[q.dtype], DTYPE[state.dtype], *where(q)),
    )
    return o
