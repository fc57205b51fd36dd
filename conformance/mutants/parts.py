"""The references with a part to replace: what wrong implementations are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.mutants import Call
from ops_reference.attention import gather
from ops_reference.gated_delta_net import initial_state, prepare, step

CHUNK = 64


def prefill(call: Call, decay=None, step=step, start=initial_state, keep=lambda s: s, slot=lambda n, slot: slot):
    """The loop of gdn_prefill's reference: `keep` is what is kept of a state, `slot` where sequence n leaves it."""
    o = call.v.new_zeros(call.v.shape)
    q, k, v, scale = prepare(call.q, call.k, call.v, call.scale, call.l2norm)
    decay = call.g.clamp(max=0).exp() if decay is None else decay
    bounds = call.cu_seqlens.tolist()
    for n, index in enumerate(call.state_indices.tolist()):
        s = start(call.state, index if call.has_initial_state[n] else -1, v.dtype)
        for t in range(bounds[n], bounds[n + 1]):
            s, o[t] = step(s, q[t], k[t], v[t], decay[t], call.beta[t], scale)
            s = keep(s)
        if slot(n, index) >= 0:
            call.state[slot(n, index)] = s
    return o


def chunked(call: Call, between=lambda later, earlier: (later - earlier).exp(), last=lambda total: total[..., -1:]):
    """The chunk form (ops_reference/gated_delta_net_chunked.py) with decays from running sums of the gate.

    between  (sum up to a later token, up to an earlier one) -> the decay from one to the other
    last     sums up to each token of a chunk -> the sum up to its end
    """
    o = call.v.new_zeros(call.v.shape)
    q, k, v, scale = prepare(call.q, call.k, call.v, call.scale, call.l2norm)
    bounds = call.cu_seqlens.tolist()
    for n, index in enumerate(call.state_indices.tolist()):
        s = initial_state(call.state, index if call.has_initial_state[n] else -1, v.dtype)
        for c in range(bounds[n], bounds[n + 1], CHUNK):
            part = slice(c, min(c + CHUNK, bounds[n + 1]))
            Q, K, V, beta, g = (x[part].transpose(0, 1) for x in (q, k, v, call.beta[..., None], call.g))
            G = g.clamp(max=0).cumsum(-1)
            causal = torch.ones(len(G[0]), len(G[0]), dtype=torch.bool).tril()
            D, start = between(G[:, :, None], G[:, None, :]), G.exp()[..., None]
            A = (beta * (K @ K.mT) * D).where(causal.tril(-1), 0)
            u = torch.linalg.solve_triangular(A, beta * (V - start * (K @ s.mT)), upper=False, unitriangular=True)
            o[part] = scale * (start * (Q @ s.mT) + (Q @ K.mT * D).where(causal, 0) @ u).transpose(0, 1)
            end = last(G)
            s = end.exp()[..., None] * s + (between(end, G)[..., None] * u).mT @ K
        if index >= 0:
            call.state[index] = s
    return o


def queries(call: Call) -> list[int]:
    """First row of each sequence's queries, and the end of the last."""
    return call.cu_seqlens_q.tolist() if hasattr(call, "cu_seqlens_q") else list(range(len(call.q) + 1))


def each_sequence(call: Call, attention) -> Tensor:
    """The reference's loop over sequences, with attention(q [n,HQ,D], keys, values [L,HK,D]) in place of `attend`."""
    caches = call.key_cache, call.value_cache
    out, bounds = torch.zeros_like(call.q, memory_format=torch.contiguous_format), queries(call)
    for n, length in enumerate(call.seq_lens.tolist()):
        start = max(bounds[n], bounds[n + 1] - length)
        if start < bounds[n + 1]:
            keys, values = (gather(cache, call.block_tables[n], 0, length) for cache in caches)
            out[start : bounds[n + 1]] = attention(call.q[start : bounds[n + 1]], keys, values)
    return out


def features(call: Call) -> tuple:
    return call.scale, call.softcap, call.window, call.alibi_slopes


def rows_within_31_bits(x: Tensor) -> Tensor:
    """x as code sees it that cannot address rows from 2^31 elements on: it gets what lies 2^31 elements before."""
    offsets = [row * x.stride(0) for row in range(len(x))]
    if max(offsets) < 2**31:
        return x
    rows = [x.as_strided(x.shape[1:], x.stride()[1:], x.storage_offset() + offset % 2**31) for offset in offsets]
    return torch.stack(rows)


def packed(x: Tensor) -> Tensor:
    """x at the strides of a contiguous tensor, though it is none: what code sees that does not ask for strides."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
