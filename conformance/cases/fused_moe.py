"""Cases of fused_moe: both weight formats, routing of every kind, what must not matter; field bugs 13 to 15."""

from __future__ import annotations

import torch

from conformance.cases import moe
from conformance.cases.moe import INF, NAN, apart, change_ids, drop_some, duplicate, half_here, replace, together
from conformance.properties.roles import Roles, Route, rows_alone, rows_shuffled, shuffled, take


def table(kind, sizes=({},), change=None, **options):
    return moe.table("fused_moe", kind, sizes, change, **options)


def both(*sizes, **more):
    """Every size in format A and in format B."""
    return [size | more | {"merged": merged} for size in sizes for merged in (False, True)]


def map_half(arguments):
    """Global ids run over twice as many experts as live here; half of those that live here are known to the map."""
    local = len(arguments["w1"])
    arguments["topk_ids"].mul_(2)
    arguments["topk_ids"][::2] += 1
    here = half_here(arguments["topk_ids"], 2 * local)
    here[1] = local - 1
    return {"expert_map": here}


def map_none(arguments):
    return {"expert_map": torch.full_like(map_half(arguments)["expert_map"], -1)}


def scale_weights(arguments):
    """Weights that do not sum to 1, negative ones and 0 among them."""
    arguments["topk_weights"].mul_(7)
    arguments["topk_weights"][1, 0] *= -1
    arguments["topk_weights"][2] = 0


def nan_of_weight_0(arguments):
    """A slot's weight of 0 takes its product, it does not drop it: 0 * NaN is NaN (rule 4)."""
    arguments["x"][1, 3] = NAN
    arguments["topk_weights"][1] = 0
    arguments["w2"][int(arguments["topk_ids"][2, 0]), 5, 1] = NAN
    arguments["topk_weights"][2, 0] = 0


def nan_in_unchosen(arguments):
    spared = torch.ones(len(arguments["w1"]), dtype=torch.bool)
    spared[arguments["topk_ids"].unique().long().cpu()] = False
    assert spared.any()
    for name in ("w1", "w2", "w3"):
        if arguments[name] is not None:
            arguments[name][spared] = NAN


def nan_in_dropped(arguments):
    """What a slot without an expert holds does not matter: neither its weight nor, alone in its row, its token."""
    ids = arguments["topk_ids"]
    drop_some(ids)
    arguments["topk_weights"][ids < 0] = NAN
    arguments["x"][0] = NAN


def nan_rows(arguments):
    arguments["x"][1] = NAN
    arguments["x"][4, 7] = NAN


def nan_weights(arguments):
    """In an expert's w2 row: one output of the tokens that chose it. In a router weight: that token."""
    arguments["w2"][int(arguments["topk_ids"][0, 0]), 3, 1] = NAN
    arguments["topk_weights"][2, 0] = NAN


def infinite(arguments):
    """An infinite up-projection; the gate stays finite."""
    inner = arguments["w2"].shape[2]
    up = arguments["w1"][:, inner:] if arguments["w3"] is None else arguments["w3"]
    up[int(arguments["topk_ids"][0, 0]), 2, 5] = INF
    arguments["topk_weights"][3, 0] = INF


def large(arguments):
    """What is between the matmuls exceeds float16; what comes out does not."""
    arguments["x"].mul_(300)
    arguments["topk_weights"].mul_(1e-3)


def nan_beyond(arguments):
    """x ends where NaN begins, so that a row number beyond it shows."""
    x = arguments["x"]
    buffer = x.new_full((x.shape[0] + 40, x.shape[1]), NAN)
    buffer[: len(x)] = x
    return {"x": buffer[: len(x)]}


def top_k_in_place_of_w3(arguments):
    """Field bug 15: an older signature, fused_moe(x, w13, w2, top_k, ...)."""
    return {"w3": arguments["topk_ids"].shape[1]}


SMALL = {"T": 20, "E": 6}
ODD = ((1, 1, 1), (7, 17, 33), (40, 47, 95))  # T, I, Hd
LARGE = {"T": 16388, "E": 256, "topk": 4, "I": 16384, "Hd": 8}  # T*k*2I > 2^31 (field bug 13)

CASES = [
    *table("sizes", [{"T": t, "E": e, "topk": k} for t in (1, 2, 6, 40) for e, k in ((4, 1), (8, 2), (16, 4))]),
    *table("format_a", [{"T": t, "merged": False} for t in (1, 6, 40)]),
    *table("format_b", [{"T": t, "merged": True} for t in (1, 6, 40)]),
    *table("odd_sizes", both(*({"T": t, "E": 3, "I": i, "Hd": h} for t, i, h in ODD))),
    *table("odd_i", [{"T": t, "E": 2, "I": i} for t in (4, 40) for i in (3, 15, 31, 33, 63, 65)]),
    *table("every_residue", both(*({"T": 40, "I": i, "Hd": i + 1} for i in range(1, 65))), level="standard"),
    *table("layer", both({"T": 1}, {"T": 16}, {"T": 70}, E=16, topk=4, I=512, Hd=2048), level="standard"),
    *table("on_input", both({"T": 5, "topk": 1}, {"T": 40, "topk": 2}, on_input=True)),
    *table("weights", both(SMALL, SMALL | {"on_input": True}), scale_weights),
    *table("one_expert", both({"T": 9}, {"T": 70}), change_ids(lambda ids: ids.fill_(3))),
    *table("duplicates", both(SMALL), change_ids(duplicate)),
    *table("negative_ids", both(SMALL, SMALL | {"on_input": True}), nan_in_dropped),
    *table("only_negative_ids", [SMALL], change_ids(lambda ids: ids.fill_(-1))),
    *table("expert_map", both(SMALL, SMALL | {"on_input": True}), map_half),
    *table("expert_map_and_negative_ids", both(SMALL), together(map_half, change_ids(drop_some))),
    *table("no_expert_here", [SMALL], map_none),
    *table("unchosen_experts", both({"T": 2, "E": 12}), nan_in_unchosen),
    *table("nan", both(SMALL, {"T": 40, "E": 2}), nan_rows),
    *table("nan_weights", both(SMALL), nan_weights),
    *table("nan_of_weight_0", both(SMALL, SMALL | {"on_input": True}), nan_of_weight_0),
    *table("infinite", both(SMALL, {"T": 40, "E": 2}), infinite),
    *table("large_values", both(SMALL, {"T": 40, "E": 2}), large),
    *table("partial_blocks", both({"T": 1}, {"T": 7}, {"T": 33}), nan_beyond),
    *table("strided", both({"T": 3}, {"T": 40}), apart("x")),
    *table("padded_experts", both(SMALL), together(apart("w1"), apart("w2"))),
    *table("column_major", [SMALL], replace("x", lambda x: x.t().contiguous().t())),
    *table("transposed_w2", [SMALL], replace("w2", lambda w: w.transpose(1, 2).contiguous().transpose(1, 2))),
    *table("empty", both({"T": 0})),
    *table("large_offsets", [LARGE], dtypes=(torch.bfloat16,), level="exhaustive", memory=8 * 2**30),
    *table("w3_is_top_k", [{}], top_k_in_place_of_w3, raises="w3"),
    *table("w3_of_another_shape", both({})[:1], replace("w3", lambda w: w[:, 1:]), raises="w3"),
    *table("w3_of_another_dtype", both({})[:1], replace("w3", lambda w: w.double()), raises="w3"),
    *table("w3_beside_merged", [{}], lambda arguments: {"w3": arguments["w1"]}, raises="w2"),
    *table("w1_is_the_gate_alone", [{"I": 48}], replace("w1", lambda w: w[:, :48]), raises="w2"),
    *table("w1_with_an_odd_row", [{}], replace("w1", lambda w: w[:, 1:]), raises="w1"),
    *table("w1_of_another_width", [{}], replace("w1", lambda w: w[..., 1:]), raises="w1"),
    *table("w2_transposed", [{}], replace("w2", lambda w: w.transpose(1, 2)), raises="w2"),
    *table("mixed_dtypes", [{}], replace("w2", lambda w: w.double()), raises="w2"),
    *table("weights_in_float16", [{}], replace("topk_weights", lambda w: w.half()), raises="topk_weights"),
    *table("no_weights", [{}], replace("topk_weights", lambda w: None), raises="topk_weights"),
    *table("ids_of_other_tokens", [{}], replace("topk_ids", lambda ids: ids[1:]), raises="topk_ids"),
    *table("ids_int64", [{}], replace("topk_ids", lambda ids: ids.long()), raises="topk_ids"),
    *table("map_int64", [{}], lambda arguments: {"expert_map": torch.arange(8)}, raises="expert_map"),
]


# ---- for the properties ----------------------------------------------------------------------------------------------


def drop_slots(arguments):
    drop_some(arguments["topk_ids"])


def nan_where_nobody_looks(arguments):
    """Unchosen experts, the weights of slots without an expert, a token that has none."""
    ids = arguments["topk_ids"]
    spared = torch.ones(len(arguments["w1"]), dtype=torch.bool)
    spared[ids[ids >= 0].unique().long().cpu()] = False
    assert spared.any()
    for name in ("w1", "w2", "w3"):
        if arguments[name] is not None:
            arguments[name][spared] = NAN
    arguments["topk_weights"][ids < 0] = NAN
    arguments["x"][(ids < 0).all(dim=1)] = NAN


def experts_in_another_order(call, arguments):
    order = shuffled(len(arguments["w1"]), arguments["w1"])
    ids = arguments["topk_ids"]
    renamed = order.argsort()[ids.clamp(min=0).long()].int().where(ids >= 0, ids)
    return call(take(arguments, order, "w1", "w2", "w3") | {"topk_ids": renamed})


def slots_in_another_order(call, arguments):
    return call(arguments | {name: arguments[name].flip(1) for name in ("topk_weights", "topk_ids")})


def other_format(call, arguments):
    """Format A of format B's weights, or the other way round."""
    w1, w3 = arguments["w1"], arguments["w3"]
    if w3 is not None:
        return call(arguments | {"w1": torch.cat([w1, w3], dim=1), "w3": None})
    gate, up = w1.chunk(2, dim=1)
    return call(arguments | {"w1": gate.contiguous(), "w3": up.contiguous()})


def staged(call, arguments):
    """The chain of the four stages, as the head of `ops_reference/moe.py` has it."""
    x, w1, ids = arguments["x"], arguments["w1"], arguments["topk_ids"]
    w13 = w1 if arguments["w3"] is None else torch.cat([w1, arguments["w3"]], dim=1)
    align = call.of("moe_align_block_size")({"topk_ids": ids, "block_size": 16, "num_experts": len(w1)})
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    blocks = dict(zip(names, align.values(), strict=True)) | {"block_size": 16}
    gemm = call.of("grouped_gemm")
    gate, up = gemm({"x": x, "w": w13, **blocks, "top_k": ids.shape[1]})["output"].chunk(2, dim=1)
    hidden = torch.nn.functional.silu(gate) * up
    weights = arguments["topk_weights"].flatten()
    y = gemm({"x": hidden, "w": arguments["w2"], **blocks, "top_k": 1, "slot_weights": weights})["output"]
    return call.of("moe_sum")({"y": y.unflatten(0, ids.shape), "topk_ids": ids})


def on_two_ranks(call, arguments):
    """Half of the experts each, by a map; the ranks' outputs are added."""
    count = len(arguments["w1"])
    half, out = count // 2, 0
    for first, end in ((0, half), (half, count)):
        local = torch.arange(count, dtype=torch.int32, device=arguments["x"].device) - first
        here = {"expert_map": local.where((local >= 0) & (local < end - first), -1)}
        out = out + call(take(arguments, slice(first, end), "w1", "w2", "w3") | here)["output"]
    return {"output": out}


TINY = {"T": 6, "E": 16, "topk": 2, "I": 24, "Hd": 40}
TOKENS = ("x", "topk_weights", "topk_ids")

ROLES = [
    Roles(
        "fused_moe",
        sizes=both(TINY),
        busy={"T": 70, "E": 8, "topk": 2, "I": 64, "Hd": 128},
        residues=[{"T": 5, "E": 2, "topk": 1, "I": i, "Hd": 67 - i, "merged": i % 2 == 0} for i in range(1, 67)],
        all_residues=[{"T": 40, "E": 2, "I": i, "Hd": 131 - i, "merged": i % 2 == 0} for i in range(1, 131)],
        prepare=drop_slots,
        irrelevant=nan_where_nobody_looks,
        routes=(
            Route("permutation", "tokens", rows_shuffled(*TOKENS)),
            Route("permutation", "experts", experts_in_another_order),
            Route("permutation", "slots", slots_in_another_order),
            Route("batch_invariance", "tokens", rows_alone(*TOKENS)),
            Route("composition", "other_format", other_format),
            Route("composition", "staged", staged),
            Route("composition", "staged_of_format_a", staged, sizes=TINY | {"merged": False}),
            Route("composition", "two_ranks", on_two_ranks),
        ),
    )
]
