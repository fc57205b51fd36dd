"""gdn_prefill in chunks of tokens: the form for kernels whose strength is matrix products. Equal to the recurrence.

Within a chunk of C tokens that starts from state S, the corrections u_i that the tokens write solve a unit triangular
system, so that all that needs a loop over tokens becomes products of C-row matrices (the WY form of Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule", arXiv:2406.06484, with the gates of arXiv:2412.06464):

    D_ij = exp(g_{j+1} + ... + g_i)  for j <= i, the decay from token j to token i;  d_i = exp(g_1 + ... + g_i)
    (I + A) u = beta (v - d k S^T)      A_ij = beta_i (k_i . k_j) D_ij  for j < i, else 0
    o_i = scale (d_i S q_i + sum_{j <= i} D_ij (q_i . k_j) u_j)
    S  <- d_C S + sum_j D_Cj u_j k_j^T

Phase 1 does for all chunks at once what does not depend on S: with T = (I + A)^-1 beta it needs only U = T v and
W = T d k, since u = U - W S^T. Phase 2 walks over the chunks, three products each.

What keeps it right for every input:
- D is the exponential of sums of gates *between* two tokens, never a quotient exp(G_i) / exp(G_j) or exp(G_i - G_j):
  no sum is positive, so nothing overflows; and -inf - -inf, which is NaN, does not come up.
- Slots that pad the last chunk have gate 0 and key 0: the state passes them unchanged.
- A product with a triangle's zeros would spread a NaN to *earlier* tokens (0 * NaN is NaN). So tokens that are not
  finite take no part in the products, and are marked in the results instead, as the recurrence would: NaN from there
  on, in their row of the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ops_reference.gated_delta_net import initial_state, prepare


def gdn_prefill_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    cu_seqlens: Tensor,
    scale: float | None = None,
    l2norm: bool = True,
    chunk: int = 64,
) -> Tensor:
    """As the op gdn_prefill, computed in chunks of `chunk` tokens; where it gives inf, this may give NaN."""
    o = v.new_zeros(v.shape)
    q, k, v, scale = prepare(q, k, v, scale, l2norm)
    bounds = cu_seqlens.tolist()
    for n, (slot, continued) in enumerate(zip(state_indices.tolist(), has_initial_state.tolist(), strict=True)):
        s = initial_state(state, slot if continued else -1, v.dtype)
        tokens = slice(bounds[n], bounds[n + 1])
        if bounds[n] < bounds[n + 1]:
            s, o[tokens] = _sequence(s, *(x[tokens] for x in (q, k, v, g, beta)), scale, chunk)
        if slot >= 0:
            state[slot] = s
    return o


def _sequence(s, q, k, v, g, beta, scale, chunk):
    """One sequence from state s [HV,V,K]; q, k [T,HV,K], v [T,HV,V], g, beta [T,HV] -> its final state, o [T,HV,V]."""
    lost = ~(k.isfinite().all(-1) & beta.isfinite() & ~g.isnan())[..., None] | ~v.isfinite()
    lost = lost.cummax(0).values  # [T,HV,V]: this token, or one before it, was not finite
    unread = ~q.isfinite().all(-1, keepdim=True)
    clean = [x.where(x.isfinite(), 0) for x in (q, k, v, beta)]
    q, k, v, beta, g = (_chunks(x, chunk) for x in (*clean, g.clamp(max=0).nan_to_num(0, neginf=-torch.inf)))

    s, o = _scan(_local(q, k, v, g, beta), s, scale)

    o = o.flatten(1, 2)[:, : len(lost)].transpose(0, 1)
    return s.masked_fill(lost[-1][..., None], torch.nan), o.masked_fill(lost | unread, torch.nan)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[T,HV,...] -> [HV,chunks,C,...], the last chunk filled up with zeros."""
    rest = -len(x) % chunk
    x = torch.cat([x, x.new_zeros(rest, *x.shape[1:])]).transpose(0, 1)
    return x.unflatten(1, (-1, chunk))


@dataclass
class _Local:
    """What phase 1 leaves to phase 2, for every head and chunk: [HV,chunks,...]."""

    U: Tensor  # [C,V] the corrections, were the state zero
    W: Tensor  # [C,K] minus their derivative by the state
    P: Tensor  # [C,C] what output i takes of correction j
    q: Tensor  # [C,K] queries, decayed from the chunk's start
    k: Tensor  # [C,K] keys, decayed to the chunk's end
    decay: Tensor  # [1,1] of the whole chunk


def _local(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Local:
    """Phase 1. q, k [HV,chunks,C,K], v [HV,chunks,C,V], g, beta [HV,chunks,C]."""
    size = g.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    later = causal.tril(-1)
    # entry (l, j) is g_l where l > j; its running sum over l is the gate from j to i
    between = g[..., :, None].where(later, 0).cumsum(-2).exp().where(causal, 0)
    from_start = g.cumsum(-1).exp()[..., None]

    A = beta[..., None] * (k @ k.mT * between).where(later, 0)
    rhs = beta[..., None] * torch.cat([v, from_start * k], dim=-1)
    solution = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True)
    U, W = solution.split([v.shape[-1], k.shape[-1]], dim=-1)
    to_end = between[..., -1, :, None]
    return _Local(U, W, q @ k.mT * between, from_start * q, to_end * k, from_start[..., -1:, :])


def _scan(local: _Local, s: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Phase 2: the states, chunk after chunk. s [HV,V,K] -> the final state, o [HV,chunks,C,V]."""
    o = torch.empty_like(local.U)
    for c in range(o.shape[1]):
        u = local.U[:, c] - local.W[:, c] @ s.mT
        o[:, c] = scale * (local.q[:, c] @ s.mT + local.P[:, c] @ u)
        s = local.decay[:, c] * s + u.mT @ local.k[:, c]
    return s, o
