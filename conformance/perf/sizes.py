"""What `bench` measures: each op at the sizes of a Qwen3-Next layer, a decode batch and a prefill batch of it.

Hidden 2048; 16 attention heads on 2 KV heads of 256; 16 key and 32 value heads of 128 in the linear layers; experts of
width 512, top 8. Sizes are keyword arguments of each op's example. Weights are those of 64 experts, the share of one
rank in four, so that a run fits into small machines.
"""

from __future__ import annotations

import torch

BF16, F16 = torch.bfloat16, torch.float16
LINEAR_HEADS = {"H": 16, "HV": 32, "K": 128, "V": 128}
EXPERTS = {"E": 64, "topk": 8}
PAGES = {"HQ": 16, "HK": 2, "D": 256}

LAYER: dict[str, tuple[torch.dtype, list[dict]]] = {
    "topk_softmax": (BF16, [{"T": 1, "E": 256}, {"T": 64, "E": 256}, {"T": 1024, "E": 512, "topk": 10}]),
    "moe_align_block_size": (BF16, [{"T": 16, "E": 256, "topk": 8}, {"T": 1024, "E": 256, "topk": 8}]),
    "grouped_gemm": (BF16, [{"T": T, **EXPERTS, "N": 1024, "K": 2048} for T in (1, 16, 128)]),
    "moe_sum": (BF16, [{"T": T, "topk": 8, "N": 2048} for T in (16, 1024)]),
    "fused_moe": (BF16, [{"T": T, **EXPERTS, "I": 512, "Hd": 2048} for T in (1, 16, 128)]),
    "gdn_gating": (BF16, [{"T": T, "HV": 32} for T in (16, 1024)]),
    "gdn_prefill": (BF16, [{"lengths": (256,), **LINEAR_HEADS}, {"lengths": (17, 64, 100), **LINEAR_HEADS}]),
    "gdn_decode": (BF16, [{"B": B, **LINEAR_HEADS} for B in (1, 16)]),
    "reshape_and_cache": (BF16, [{"T": T, **PAGES, "BS": 544} for T in (16, 1024)]),
    "paged_attention_v2": (
        BF16,
        [{"lengths": (L,) * B, **PAGES, "BS": BS} for B, L, BS in ((1, 4096, 16), (8, 1024, 16), (4, 4096, 544))],
    ),
    "paged_prefill": (
        BF16,
        [{"new": (512,), "prefix": (0,), **PAGES}, {"new": (64, 64), "prefix": (1024, 448), **PAGES, "BS": 544}],
    ),
    "matmul_fp16": (
        F16,
        [{"M": M, "N": N, "K": K} for N, K in ((12288, 2048), (2048, 4096)) for M in (1, 32, 256)],
    ),
}

# A call so small that what surrounds the kernel is what takes the time.
TINY: dict[str, dict] = {
    "topk_softmax": {"T": 1, "E": 8, "topk": 2},
    "moe_align_block_size": {"T": 1, "E": 4, "topk": 2},
    "grouped_gemm": {"T": 1, "E": 2, "topk": 1, "N": 8, "K": 8},
    "moe_sum": {"T": 1, "topk": 2, "N": 8},
    "fused_moe": {"T": 1, "E": 2, "topk": 1, "I": 8, "Hd": 8},
    "gdn_gating": {"T": 1, "HV": 2},
    "gdn_prefill": {"lengths": (1,), "H": 1, "HV": 1, "K": 8, "V": 8},
    "gdn_decode": {"B": 1, "H": 1, "HV": 1, "K": 8, "V": 8},
    "reshape_and_cache": {"T": 1, "HQ": 1, "HK": 1, "D": 8, "BS": 8},
    "paged_attention_v2": {"lengths": (1,), "HQ": 1, "HK": 1, "D": 8, "BS": 8},
    "paged_prefill": {"new": (1,), "prefix": (0,), "HQ": 1, "HK": 1, "D": 8, "BS": 8},
    "matmul_fp16": {"M": 1, "N": 8, "K": 8},
}
