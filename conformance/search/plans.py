"""What the search may draw for each op, as data. Only valid calls: what must be refused is in the case tables.

Of sizes, a range is any whole number in it, a tuple one of its members, `Several(range, most)` a list; the first of
each is the simplest. `values` says which of `problem.VALUES` an argument may hold so that the contract names the
answer: no infinities where the order of summation decides between inf and NaN, no magnitudes that overflow float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Sizes = dict[str, Any]


@dataclass(frozen=True)
class Several:
    """A list of up to `most` members."""

    members: range
    most: int


@dataclass(frozen=True)
class Plan:
    """fit: what makes drawn sizes a valid whole. layouts: the arguments that are laid out anew (default: of `values`).
    not_in_bf16: an argument's value that is not drawn in that dtype."""

    sizes: dict[str, range | tuple | Several]
    values: dict[str, str]
    dtypes: tuple[str, ...] = ("f32", "f16", "bf16")
    fit: Callable[[Sizes], Sizes] = field(default=lambda sizes: sizes)
    layouts: tuple[str, ...] = ()
    not_in_bf16: tuple[str, str] | None = None

    def takes(self, dtype: str, values: dict[str, str]) -> bool:
        return dtype != "bf16" or self.not_in_bf16 not in values.items()

    @property
    def value_pairs(self) -> list[tuple[str, str]]:
        return [(argument, value) for argument, values in self.values.items() for value in values.split()]

    @property
    def layout_pairs(self) -> list[tuple[str, str]]:
        names = ("rows_apart", "misaligned", "elements_apart", "transposed")
        return [(argument, name) for argument in self.layouts or self.values for name in names]


FINITE = "zero constant sorted wide large denormal"
BOOL = (False, True)


def top_of_experts(sizes: Sizes) -> Sizes:
    """No more experts are chosen than there are."""
    return sizes | {"topk": min(sizes["topk"], sizes["E"])}


def heads_per_group(*names: str) -> Callable[[Sizes], Sizes]:
    """The count of the second kind of heads is drawn as a multiple of the first's."""
    groups, heads = names
    return lambda sizes: sizes | {heads: sizes[groups] * sizes[heads]}


def prefill_sizes(sizes: Sizes) -> Sizes:
    """A prefix per sequence."""
    prefix = [*sizes["prefix"], *[0] * len(sizes["new"])][: len(sizes["new"])]
    return heads_per_group("HK", "HQ")(sizes) | {"prefix": prefix}


DELTA_VALUES = {
    "q": f"{FINITE} one_nan",
    "k": f"{FINITE} one_nan",
    "v": f"{FINITE} one_nan",
    "state": "zero constant wide large denormal one_nan",
    "state_indices": "some_negative",
}
GATE_VALUES = {
    "a": f"{FINITE} extreme minus_inf one_inf one_nan",
    "b": f"{FINITE} extreme minus_inf one_inf one_nan",
    "A_log": "zero constant one_nan",
    "dt_bias": "zero constant large one_nan",
}
DELTA_HEADS = {"H": range(1, 4), "HV": range(1, 4), "K": range(8, 130), "V": range(1, 130)}
PAGES = {"HK": range(1, 4), "HQ": range(1, 5), "D": range(1, 257), "BS": (8, 16, 24, 48, 544)}
FORMS = {"softcap": (0.0, 5.0), "window": range(41), "alibi": BOOL}
PAGE_VALUES = {
    "q": f"{FINITE} one_nan",
    "key_cache": f"{FINITE} one_nan",
    "value_cache": f"{FINITE} one_nan",
    "alibi_slopes": "zero constant",
}

AMX_TAKES_FOR_ZERO = ("value_cache", "denormal")  # docs/limits.md

PLANS: dict[str, Plan] = {
    "topk_softmax": Plan(
        sizes={"T": range(13), "E": range(1, 1025), "topk": range(1, 17), "renormalize": (True, False), "bias": BOOL},
        values={
            "gating_output": f"{FINITE} descending ties extreme minus_inf one_inf one_nan",
            "correction_bias": "zero constant sorted ties wide minus_inf one_nan",
        },
        fit=top_of_experts,
    ),
    "gdn_gating": Plan(sizes={"T": range(41), "HV": range(1, 41)}, values=GATE_VALUES),
    "gdn_prefill": Plan(
        sizes={"lengths": Several(range(1, 71), 4), **DELTA_HEADS, "state_dtype": (None, "act")},
        values={
            **DELTA_VALUES,
            "k": "zero large wide denormal one_nan",  # where keys are all alike, chunks lose digits: a case's matter
            "g": "zero constant large positive denormal minus_inf one_nan",
            "beta": "zero constant denormal one_nan",
            "has_initial_state": "zero",
        },
        fit=heads_per_group("H", "HV"),
    ),
    "gdn_decode": Plan(
        sizes={"B": range(10), **DELTA_HEADS, "state_dtype": (None, "act")},
        values=DELTA_VALUES | GATE_VALUES,
        fit=heads_per_group("H", "HV"),
    ),
    "moe_align_block_size": Plan(
        sizes={"T": range(71), "E": range(1, 301), "topk": range(1, 11), "block_size": range(1, 70)},
        values={"topk_ids": "constant sorted some_negative"},
        dtypes=("f32",),
        fit=top_of_experts,
    ),
    "grouped_gemm": Plan(
        sizes={
            "T": range(41), "E": range(1, 13), "topk": range(1, 5), "N": range(1, 101), "K": range(1, 101),
            "block_size": (8, 16, 32, 64), "row_per_slot": BOOL, "weighted": BOOL,
        },
        values={  # no subnormal operands: AMX, which serves five rows and more, takes them for zero (docs/limits.md)
            "x": "zero constant sorted wide large one_inf one_nan",
            "w": "zero constant sorted wide large one_nan",
            "slot_weights": "zero constant wide one_nan",
            "expert_ids": "some_negative",
        },
        fit=top_of_experts,
    ),
    "moe_sum": Plan(
        sizes={"T": range(21), "topk": range(1, 13), "N": range(1, 301), "with_ids": BOOL},
        values={"y": f"{FINITE} ties minus_inf one_inf one_nan", "topk_ids": "constant some_negative"},
    ),
    "fused_moe": Plan(
        sizes={
            "T": range(31), "E": range(1, 9), "topk": range(1, 5), "I": range(1, 66), "Hd": range(1, 66),
            "merged": (True, False), "on_input": BOOL,
        },
        values={  # no subnormal operands, as for grouped_gemm
            "x": "zero constant sorted wide large one_nan",
            **dict.fromkeys(("w1", "w2", "w3"), "zero constant one_nan"),
            "topk_weights": "zero constant one_nan",
            "topk_ids": "constant some_negative",
        },
        fit=top_of_experts,
    ),
    "reshape_and_cache": Plan(
        sizes={"T": range(41), "HQ": (1,), "HK": range(1, 5), "D": range(1, 131), "BS": (8, 16, 24, 32)},
        values={
            **dict.fromkeys(("key", "value"), "zero denormal extreme minus_inf one_nan"),
            "key_cache": "one_nan",
            "value_cache": "one_nan",
            "slot_mapping": "some_negative",
        },
    ),
    "paged_attention_v2": Plan(
        sizes={"lengths": Several(range(91), 4), **PAGES, **FORMS},
        values=PAGE_VALUES,
        fit=heads_per_group("HK", "HQ"),
        not_in_bf16=AMX_TAKES_FOR_ZERO,
    ),
    "paged_prefill": Plan(
        sizes={"new": Several(range(41), 4), "prefix": Several(range(61), 4), **PAGES, **FORMS},
        values=PAGE_VALUES,
        fit=prefill_sizes,
        not_in_bf16=AMX_TAKES_FOR_ZERO,
    ),
    "matmul_fp16": Plan(
        sizes={"M": range(41), "N": range(1, 131), "K": range(1, 131), "bias": BOOL},
        values={"a": f"{FINITE} one_inf one_nan", "b": f"{FINITE} one_nan", "bias": "zero constant wide one_nan"},
        dtypes=("f16",),
    ),
}  # fmt: skip
