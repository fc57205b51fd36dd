"""The layers that `bench --device cuda` measures (Qwen3.5-35B-A3B's and two attention shapes), and what each call costs
at least: bytes moved, each input read and each output written once, and operations of the matmuls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BF16, F16 = torch.bfloat16, torch.float16
LINEAR_HEADS = {"H": 16, "HV": 32, "K": 128, "V": 128}
HEADS = ({"HQ": 16, "HK": 2, "D": 256}, {"HQ": 32, "HK": 8, "D": 128})
BATCHES = ((1, 1024), (1, 32768), (16, 1024), (16, 8192), (64, 4096), (256, 1024))
PROMPTS = (((1024,), (0,)), ((4096,), (0,)), ((16384,), (0,)), ((1024,), (8192,)), ((256,) * 8, (2048,) * 8))

GPU_LAYER: dict[str, tuple[torch.dtype, list[dict]]] = {
    "topk_softmax": (BF16, [{"T": T, "E": E} for E in (64, 128, 256, 512) for T in (1, 16, 128, 1024, 8192, 65536)]),
    "gdn_gating": (BF16, [{"T": T, "HV": 32} for T in (16, 8192)]),
    "gdn_decode": (BF16, [{"B": B, **LINEAR_HEADS} for B in (1, 8, 32, 128, 256)]),
    "gdn_prefill": (BF16, [{"lengths": (T,), **LINEAR_HEADS} for T in (512, 2048, 8192, 32768)]
                    + [{"lengths": (512,) * 8, **LINEAR_HEADS}]),
    "moe_align_block_size": (BF16, [{"T": T, "E": 256, "topk": 8} for T in (16, 1024, 8192)]),
    "grouped_gemm": (BF16, [{"T": T, "E": 256, "topk": 8, "N": 1024, "K": 2048} for T in (16, 512)]),
    "moe_sum": (BF16, [{"T": T, "topk": 8, "N": 2048} for T in (16, 8192)]),
    "fused_moe": (BF16, [{"T": T, "E": 256, "topk": 8, "I": 512, "Hd": 2048} for T in (1, 8, 32, 128, 512, 2048, 8192)]),
    "reshape_and_cache": (BF16, [{"T": T, **HEADS[0]} for T in (16, 8192)]),
    "paged_attention_v2": (BF16, [{"lengths": (L,) * B, **heads} for heads in HEADS for B, L in BATCHES]),
    "paged_prefill": (BF16, [{"new": new, "prefix": prefix, **heads} for heads in HEADS for new, prefix in PROMPTS]),
    "matmul_fp16": (F16, [{"M": M, "N": N, "K": K} for N, K in ((12288, 2048), (2048, 4096), (248320, 2048))
                          for M in (1, 4, 16, 64, 512, 4096)]),
}  # fmt: skip


def work(op: str, given: dict[str, Any]) -> tuple[int, int]:
    """(bytes, operations) of a call at least."""
    return _WORK[op](**given)


def _bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def _experts(topk_ids: Tensor) -> int:
    return int(topk_ids[topk_ids >= 0].unique().numel())


def _fused_moe(x, w1, w2, topk_ids, **_):
    _, hidden, inner = w2.shape
    weights = _experts(topk_ids) * 3 * inner * hidden * x.element_size()
    return weights + 2 * _bytes(x), 6 * topk_ids.numel() * inner * hidden


def _grouped_gemm(x, w, expert_ids, top_k, **_):
    _, features, inner = w.shape
    slots = len(x) * top_k
    moved = _experts(expert_ids) * features * inner + slots * features
    return moved * x.element_size() + _bytes(x), 2 * slots * features * inner


def _attention(q, key_cache, seq_lens, pairs):
    cached = int(seq_lens.sum()) * key_cache.shape[2] * key_cache.shape[3]
    return 2 * _bytes(q) + 2 * cached * q.element_size(), 4 * q.shape[1] * q.shape[2] * pairs


def _prefill(q, key_cache, cu_seqlens_q, seq_lens, **_):
    new = cu_seqlens_q.diff().long()
    pairs = int((new * seq_lens - new * (new - 1) // 2).sum())  # query i of n sees all but n - 1 - i of the tokens
    return _attention(q, key_cache, seq_lens, pairs)


_WORK = {
    "topk_softmax": lambda gating_output, topk, **_: (_bytes(gating_output) + 8 * topk * len(gating_output), 0),
    "gdn_gating": lambda a, b, **_: (_bytes(a, b) + 8 * a.numel(), 0),
    "gdn_decode": lambda q, k, v, state, state_indices, **_: (
        _bytes(q, k, v, v) + 2 * len(state_indices) * state[0].numel() * state.element_size(), 0),
    "gdn_prefill": lambda q, k, v, g, beta, state, state_indices, **_: (
        _bytes(q, k, v, v, g, beta) + 2 * len(state_indices) * state[0].numel() * state.element_size(), 0),
    "moe_align_block_size": lambda topk_ids, **_: (2 * _bytes(topk_ids), 0),
    "grouped_gemm": _grouped_gemm,
    "moe_sum": lambda y, **_: (_bytes(y) + _bytes(y[:, 0]), 0),
    "fused_moe": _fused_moe,
    "reshape_and_cache": lambda key, value, **_: (2 * _bytes(key, value), 0),
    "paged_attention_v2": lambda q, key_cache, seq_lens, **_: _attention(q, key_cache, seq_lens, int(seq_lens.sum())),
    "paged_prefill": _prefill,
    "matmul_fp16": lambda a, b, **_: (_bytes(a, b) + 2 * a.numel() // a.shape[-1] * len(b), 2 * a.numel() * len(b)),
}  # fmt: skip
