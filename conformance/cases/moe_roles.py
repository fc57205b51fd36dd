"""What the properties have to be told of moe_align_block_size, grouped_gemm and moe_sum."""

from __future__ import annotations

import torch

from conformance.case import FLOATS
from conformance.cases.moe import NAN, drop_some, garbage_behind, nan_in_unchosen
from conformance.properties.roles import Roles, Route, rows_alone, rows_shuffled, shuffled, take


def drop_slots(arguments):
    if arguments["topk_ids"] is not None:
        drop_some(arguments["topk_ids"])


# ---- moe_align_block_size --------------------------------------------------------------------------------------------


def other_negative_ids(arguments):
    ids = arguments["topk_ids"]
    ids[ids < 0] = -(2**31)


def renamed_experts(call, arguments):
    """Every expert under another name, and the groups put back into the order of the old ones."""
    ids, size = arguments["topk_ids"], arguments["block_size"]
    names = shuffled(arguments["num_experts"], ids)
    results = call(arguments | {"topk_ids": names[ids.clamp(min=0).long()].int().where(ids >= 0, ids)})
    return in_order(results, names.argsort(), size)


def renamed_by_map(call, arguments):
    """The same, by an expert_map: block ids are the names, groups in the order of the names."""
    names = shuffled(arguments["num_experts"], arguments["topk_ids"])
    results = call(arguments | {"expert_map": names.int()})
    return in_order(results, names.argsort(), arguments["block_size"])


def in_order(results, expert_of, size):
    """Groups in the order of the experts that their names stand for."""
    tokens, names, count = (value.clone() for value in results.values())
    used = int(count) // size
    experts = expert_of[names[:used].long()]
    order = experts.argsort(stable=True)
    tokens[: used * size] = tokens[: used * size].view(-1, size)[order].flatten()
    names[:used] = experts[order].int()
    return dict(zip(results, (tokens, names, count), strict=True))


def same_names(call, arguments):
    count = arguments["num_experts"]
    return call(arguments | {"expert_map": torch.arange(count, dtype=torch.int32, device=arguments["topk_ids"].device)})


ALIGN = Roles(
    "moe_align_block_size",
    sizes=({"T": 20, "E": 9, "topk": 2, "block_size": 8},),
    busy={"T": 3000, "E": 64},
    residues=[{"T": t, "E": 1 + t % 13, "topk": 1, "block_size": 1 + t % 17} for t in range(1, 131)],
    all_residues=[{"T": 50, "E": e, "topk": 1, "block_size": 1 + e % 65} for e in range(1, 1025)],
    dtypes=FLOATS[:1],
    prepare=drop_slots,
    irrelevant=other_negative_ids,
    routes=(
        Route("permutation", "experts", renamed_experts),
        Route("composition", "renamed_by_map", renamed_by_map),
        Route("identities", "map_to_the_same", same_names),
    ),
)

# ---- grouped_gemm ----------------------------------------------------------------------------------------------------


def nan_where_nobody_looks(arguments):
    """Experts without a block, what stands behind the blocks."""
    nan_in_unchosen(arguments)
    garbage_behind(arguments)


def tokens_in_another_order(call, arguments):
    """Rows of x, and the slots that the blocks name."""
    x, top_k, entries = arguments["x"], arguments["top_k"], arguments["sorted_token_ids"]
    order = shuffled(len(x), x)
    slots = (order[:, None] * top_k + torch.arange(top_k, device=x.device)).flatten()  # new slot -> old slot
    places = torch.cat([slots.argsort(), slots.new_full((entries.max() + 1,), len(slots))])  # filling stays filling
    changed = {"x": x[order], "sorted_token_ids": places[entries.long()].int()}
    if arguments["slot_weights"] is not None:
        changed["slot_weights"] = arguments["slot_weights"][slots]
    return {"output": call(arguments | changed)["output"][slots.argsort()]}


def experts_in_another_order(call, arguments):
    order = shuffled(len(arguments["w"]), arguments["w"])
    ids = arguments["expert_ids"]
    renamed = order.argsort()[ids.clamp(min=0).long()].int().where(ids >= 0, ids)
    return call(arguments | {"w": arguments["w"][order], "expert_ids": renamed})


def blocks_in_another_order(call, arguments):
    return call(arguments | blocks(arguments, shuffled(used_blocks(arguments), arguments["x"])))


def blocks_alone(call, arguments):
    """One block per call: the other slots' rows are zero there, so that the calls' sum is the whole."""
    parts = [call(arguments | blocks(arguments, [block]))["output"] for block in range(used_blocks(arguments))]
    return {"output": torch.stack(parts).sum(0)}


def used_blocks(arguments):
    return int(arguments["num_tokens_post_padded"]) // arguments["block_size"]


def blocks(arguments, order):
    """Arguments of a call with those blocks."""
    size = arguments["block_size"]
    tokens, experts = arguments["sorted_token_ids"].clone(), arguments["expert_ids"].clone()
    tokens[: len(order) * size] = arguments["sorted_token_ids"].view(-1, size)[order].flatten()
    experts[: len(order)] = arguments["expert_ids"][order]
    count = torch.full_like(arguments["num_tokens_post_padded"], len(order) * size)
    return {"sorted_token_ids": tokens, "expert_ids": experts, "num_tokens_post_padded": count}


def slots_alone(arguments, slots):
    """Of x with a row per slot; the places of the others in the blocks become filling."""
    place = torch.full((len(arguments["x"]) + 1,), len(slots), dtype=torch.int32, device=slots.device)
    place[slots] = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    blocks = arguments["sorted_token_ids"].clamp(max=len(arguments["x"]))
    return take(arguments, slots, "x") | {"sorted_token_ids": place[blocks.long()]}


GEMM = Roles(
    "grouped_gemm",
    sizes=(
        {"T": 5, "E": 16, "topk": 2, "N": 40, "K": 48, "weighted": True},
        {"T": 9, "E": 24, "topk": 2, "N": 33, "K": 64, "block_size": 8, "row_per_slot": True},
    ),
    busy={"T": 150, "E": 8, "N": 160, "K": 128},
    large=({"T": 8200, "E": 2, "topk": 1, "N": 2**18, "K": 8}, slots_alone),  # field bug 13
    residues=[{"T": 9, "E": 2, "topk": 1, "N": 67 - k, "K": k} for k in range(1, 67)],
    all_residues=[{"T": t, "E": 2, "N": 131 - k, "K": k} for t in (1, 40) for k in range(1, 131)],
    irrelevant=nan_where_nobody_looks,
    routes=(
        Route("permutation", "tokens", tokens_in_another_order),
        Route("permutation", "experts", experts_in_another_order),
        Route("permutation", "blocks", blocks_in_another_order),
        Route("batch_invariance", "blocks", blocks_alone),
    ),
)

# ---- moe_sum ---------------------------------------------------------------------------------------------------------


def nan_in_dropped(arguments):
    arguments["y"][arguments["topk_ids"] < 0] = NAN


def slots_in_another_order(call, arguments):
    return call(arguments | {name: arguments[name].flip(1) for name in ("y", "topk_ids")})


def zeros_instead(call, arguments):
    """A slot without an expert is a slot of zeros."""
    y, ids = arguments["y"], arguments["topk_ids"]
    return call(arguments | {"y": y.masked_fill(ids[..., None] < 0, 0), "topk_ids": None})


SUM = Roles(
    "moe_sum",
    sizes=({"T": 9, "topk": 5, "N": 40, "with_ids": True},),
    busy={"T": 1500, "topk": 8, "N": 96},
    residues=[{"T": 3, "topk": 1 + n % 11, "N": n, "with_ids": n % 2 == 0} for n in range(1, 131)],
    prepare=drop_slots,
    irrelevant=nan_in_dropped,
    routes=(
        Route("permutation", "tokens", rows_shuffled("y", "topk_ids")),
        Route("permutation", "slots", slots_in_another_order),
        Route("batch_invariance", "tokens", rows_alone("y", "topk_ids")),
        Route("identities", "zeros_instead", zeros_instead),
    ),
)

ROLES = [ALIGN, GEMM, SUM]
