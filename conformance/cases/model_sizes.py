"""Counts as Qwen3-Next and its kin have them: 512 experts of which a token takes 10, 32 value heads, thousands of tokens.

Code with room for fewer (an id in 7 bits, 8 slots, 16 heads, a window of 1,024) is right below that, so no other case
shows it. Whatever else a size has is small here, as the counts make references slow enough.
"""

from __future__ import annotations

from conformance.case import FLOATS, table
from conformance.cases import router

F32, HALF, BF16 = FLOATS[:1], FLOATS[1:2], FLOATS[2:]
EXPERTS = {"E": 512, "topk": 10}
SHARE = EXPERTS | {"I": 64, "Hd": 2048}  # what one rank of eight has of a layer
HEADS = {"H": 16, "HV": 32}
ONE = {"HQ": 2, "HK": 1, "D": 64}  # heads of attention over long sequences


def both(*sizes):
    """Each size in both of fused_moe's formats."""
    return [size | {"merged": merged} for size in sizes for merged in (False, True)]


MOE = [
    *table("fused_moe", "many_experts", both(EXPERTS | {"T": 5, "I": 8, "Hd": 32})),
    *table("fused_moe", "many_tokens", [{"T": t, "I": 16, "Hd": 32} for t in (300, 1100)]),
    *table("fused_moe", "many_tokens", [{"T": t, "E": 4, "I": 64, "Hd": 32} for t in (4099, 8193)], level="standard"),
    *table("fused_moe", "layer_of_512", both(*(EXPERTS | {"T": t, "I": 32, "Hd": 64} for t in (1, 16, 300))), BF16,
           "standard"),
    *table("fused_moe", "layer_of_512", [EXPERTS | {"T": 1100, "I": 32, "Hd": 64}], level="standard"),
    *table("fused_moe", "layer_of_512", [EXPERTS | {"T": 300, "I": 32, "Hd": 512}], BF16, "standard"),
    *table("fused_moe", "layer_of_512", [SHARE | {"T": 300}], BF16, "exhaustive", memory=6 << 30),
    *table("fused_moe", "wide_layer", both({"T": 3, "E": 4, "I": 16, "Hd": 4096})),
    *table("grouped_gemm", "many_experts", [EXPERTS | {"T": 5, "N": 24, "K": 32}]),
    *table("grouped_gemm", "many_tokens", [{"T": t, "N": 32, "K": 48} for t in (300, 1100)]),
    *table("grouped_gemm", "layer_of_512", [EXPERTS | {"T": t, "N": 64, "K": 128, "weighted": w} for t, w in
                                            ((1, False), (300, True), (1100, False))], level="standard"),
    *table("moe_align_block_size", "many_tokens", [{"T": t, "topk": 10} for t in (3300, 6600)], F32),
    *table("moe_align_block_size", "layer_of_512", [EXPERTS | {"T": 1100}], F32),
    *table("moe_align_block_size", "layer_of_512", [EXPERTS | {"T": 8200}], F32, "standard"),
    *table("moe_sum", "many_tokens", [{"T": 4099, "topk": 2, "N": 16}]),
    *table("moe_sum", "wide_layer", [{"T": 3, "topk": 10, "N": 5120}]),
    *router.table("many_tokens", [{"T": 4200, "E": 16, "topk": 2}]),
    *router.table("many_tokens", [{"T": 65_600, "E": 16, "topk": 2}], level="standard"),
]  # fmt: skip

GATED_DELTA_NET = [
    *table("gdn_gating", "many_tokens", [{"T": 2100, "HV": 96}]),
    *table("gdn_prefill", "many_heads", [HEADS | {"lengths": (9, 4), "K": 128, "V": 128}]),
    *table("gdn_prefill", "many_heads", [HEADS | {"lengths": (70, 33), "K": 128, "V": 128}], level="standard"),
    *table("gdn_prefill", "many_tokens", [{"lengths": (1100,), "H": 1, "HV": 1, "K": 64, "V": 64}], F32),
    *table("gdn_prefill", "many_sequences", [{"lengths": (2, 1, 0) * 33, "H": 1, "HV": 2, "K": 64, "V": 64}]),
    *table("gdn_decode", "many_heads", [HEADS | {"B": 3, "K": 128, "V": 128}]),
    *table("gdn_decode", "many_heads", [HEADS | {"B": 5, "K": 128, "V": 128}], level="standard"),
    *table("gdn_decode", "many_rows", [{"B": b, "H": 1, "HV": hv, "K": 64, "V": 64} for b, hv in ((9, 8), (70, 2), (300, 1))]),
]


def long(kind, lengths, form=None, dtypes=FLOATS, level="quick"):
    """Of decode over each length, and of prefill, whose last 40 tokens are new."""
    decode = [ONE | {"lengths": (length,)} | (form or {}) for length in lengths]
    prefill = [ONE | {"new": (40,), "prefix": (length - 40,)} | (form or {}) for length in lengths]
    return [
        *table("paged_attention_v2", kind, decode, dtypes, level),
        *table("paged_prefill", kind, prefill, dtypes, level),
    ]


ATTENTION = [
    *long("long_windows", [300], {"window": 200}),
    *long("long_windows", [2500], {"window": 1500}),
    *long("long_windows", [9000], {"window": 8200, "BS": 544}, level="standard"),
    *long("longest", [33_000], {"BS": 544}, BF16),
    *long("longest", [33_000, 66_000], {"BS": 784}, level="standard"),
    *table("paged_attention_v2", "many_sequences", [ONE | {"lengths": tuple(n % 41 for n in range(300))}], BF16),
    *table("paged_prefill", "many_queries", [ONE | {"new": (600,), "prefix": (0,)}]),
    *table("paged_prefill", "many_queries", [ONE | {"new": (2100,), "prefix": (70,)}], level="standard"),
    *table("reshape_and_cache", "many_heads", [{"T": 7, "HQ": 32, "HK": 32, "D": 64}]),
    *table("reshape_and_cache", "many_tokens", [{"T": 1100, "HK": 1, "D": 32}]),
]

LINEAR = [
    *table("matmul_fp16", "many_columns", [{"M": m, "N": 4200, "K": 24} for m in (1, 9)], HALF),
    *table("matmul_fp16", "many_rows", [{"M": m, "N": 24, "K": 40} for m in (600, 2100)], HALF),
    *table("matmul_fp16", "longest_k", [{"M": m, "N": 9, "K": 12_300} for m in (1, 9)], HALF),
    *table("matmul_fp16", "longest_k", [{"M": m, "N": 33, "K": 32_768} for m in (1, 9)], HALF, "standard"),
    *table("matmul_fp16", "layer", [{"M": m, "N": 520, "K": 2048, "bias": True} for m in (600, 2100)], HALF, "standard"),
]

CASES = [*MOE, *GATED_DELTA_NET, *ATTENTION, *LINEAR]
