"""Cases of the stages of the expert chain: moe_align_block_size, grouped_gemm, moe_sum; field bugs 12 and 13.

fused_moe has a module of its own, which borrows the changes that the ops share.
"""

from __future__ import annotations

import torch

from conformance import case
from conformance.case import FLOATS, example
from ops_reference import moe

NAN, INF = float("nan"), float("inf")
F32, HALF = (torch.float32,), (torch.float16,)


def table(op, kind, sizes=({},), change=None, dtypes=FLOATS, level="quick", raises=None, memory=0):
    """Cases on the op's example arguments, after `change(arguments)`, which edits them or returns others."""

    def make(generator, device, dtype, **sizes):
        arguments = example(op, generator, device, dtype, **sizes)
        return arguments | (change(arguments) or {})

    return case.table(op, kind, sizes, dtypes, level, make if change else None, None, raises, memory)


# ---- changes that several ops share ----------------------------------------------------------------------------------


def drop_some(ids):
    """No expert for the whole first token, for the last slot, and for slots in between."""
    ids[0] = -1
    ids[3::4, 0] = -7
    ids[-1, -1] = -1


def duplicate(ids):
    """Tokens that chose one expert twice, or only one."""
    ids[::2, 1] = ids[::2, 0]
    ids[1] = ids[1, 0]


def half_here(ids, experts):
    """A map that keeps every second expert, in another order, and some that no token knows of."""
    here = torch.full((experts,), -1, dtype=torch.int32)
    count = len(here[::2])
    here[::2] = torch.arange(count, dtype=torch.int32).flip(0)
    return here.to(ids.device)


def change_ids(function):
    """A change that edits topk_ids in place."""

    def change(arguments):
        function(arguments["topk_ids"])

    return change


def apart(name):
    """Every row (expert, token) lies in a larger buffer, between rows of NaN."""

    def change(arguments):
        tensor = arguments[name]
        wide = tensor.new_full((tensor.shape[0], tensor[:1].numel() + 24), NAN)
        wide[:, 8:-16] = tensor.flatten(1)
        return {name: wide[:, 8:-16].unflatten(1, tensor.shape[1:]) if tensor.dim() > 2 else wide[:, 8:-16]}

    return change


def together(*changes):
    return lambda arguments: {name: value for change in changes for name, value in (change(arguments) or {}).items()}


def replace(name, function):
    return lambda arguments: {name: function(arguments[name])}


# ---- moe_align_block_size --------------------------------------------------------------------------------------------


def align(kind, sizes=({},), change=None, **options):
    return table("moe_align_block_size", kind, sizes, change, dtypes=F32, **options)


def map_half(arguments):
    return {"expert_map": half_here(arguments["topk_ids"], arguments["num_experts"])}


def map_none(arguments):
    return {"expert_map": torch.full_like(half_here(arguments["topk_ids"], arguments["num_experts"]), -1)}


ALIGN = [
    *align("sizes", [{"T": t, "E": e, "topk": k} for t in (1, 2, 33, 64) for e, k in ((4, 1), (8, 2), (16, 4))]),
    *align("block_sizes", [{"T": 40, "block_size": size} for size in (1, 7, 8, 16, 24, 32, 64, 128, 256)]),
    *align("partial_blocks", [{"T": t, "E": 3, "topk": 2, "block_size": 16} for t in (1, 7, 8, 9, 23, 24, 25)]),
    *align("many_experts", [{"T": 200, "E": e, "topk": 8} for e in (60, 255, 257, 384, 512, 1000)]),
    *align("few_slots_many_experts", [{"T": 1, "E": 512, "topk": 10, "block_size": 64}]),
    *align("one_expert", [{"T": t, "block_size": s} for t, s in ((1, 16), (64, 16), (300, 16), (300, 256))],
           change_ids(lambda ids: ids.fill_(11))),
    *align("last_expert", [{"T": 9, "E": 16}], change_ids(lambda ids: ids.fill_(15))),
    *align("duplicates", [{"T": 20}], change_ids(duplicate)),
    *align("negative_ids", [{"T": 20}, {"T": 64, "block_size": 8}], change_ids(drop_some)),
    *align("only_negative_ids", [{"T": 20}], change_ids(lambda ids: ids.fill_(-1))),
    *align("expert_map", [{"T": 20, "E": e} for e in (16, 17)], map_half),
    *align("expert_map_and_negative_ids", [{"T": 20}], together(change_ids(drop_some), map_half)),
    *align("no_expert_here", [{"T": 20}], map_none),
    *align("empty", [{"T": 0}]),
    *align("strided_ids", [{"T": 20}], replace("topk_ids", lambda ids: torch.cat([ids, ids], 1)[:, : ids.shape[1]])),
    *align("large", [{"T": 4096, "E": 256, "topk": 8, "block_size": 64}], level="standard"),
    *align("wrong_dtype", [{}], replace("topk_ids", lambda ids: ids.long()), raises="topk_ids"),
    *align("wrong_dimensions", [{}], replace("topk_ids", lambda ids: ids.flatten()), raises="topk_ids"),
    *align("block_size_0", [{"block_size": 16}], replace("block_size", lambda size: 0), raises="block_size"),
    *align("no_experts", [{}], replace("num_experts", lambda count: 0), raises="num_experts"),
    *align("short_map", [{}], together(map_half, replace("num_experts", lambda count: count + 1)), raises="expert_map"),
]

# ---- grouped_gemm ----------------------------------------------------------------------------------------------------


def gemm(kind, sizes=({},), change=None, **options):
    return table("grouped_gemm", kind, sizes, change, **options)


def routed(ids_change=None, expert_map=None):
    """Blocks of other ids than the example's: those of a fixed routing, changed."""

    def change(arguments):
        slots = len(arguments["x"]) * arguments["top_k"]
        experts, block_size = len(arguments["w"]), arguments["block_size"]
        generator = torch.Generator().manual_seed(slots)
        ids = torch.randint(experts, (slots // 2, 2), generator=generator, dtype=torch.int32)
        if ids_change:
            ids_change(ids)
        blocks = moe.moe_align_block_size.reference(ids, block_size, experts)
        names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
        return dict(zip(names, (block.to(arguments["x"].device) for block in blocks), strict=True))

    return change


def skip_blocks(arguments):
    """Blocks of experts that live elsewhere."""
    arguments["expert_ids"][1::3] = -1


def garbage_behind(arguments):
    """Entries beyond the count name slots and experts that exist; what they would write is wrong."""
    used, size = int(arguments["num_tokens_post_padded"]), arguments["block_size"]
    arguments["sorted_token_ids"][used:] = 0
    arguments["expert_ids"][used // size :] = 0


def nan_beyond(arguments):
    """x and the weights end where NaN begins: a sentinel taken for a row reads it (field bug 12)."""
    changed = {}
    for name in ("x", "w"):
        tensor = arguments[name]
        buffer = tensor.new_full((3 * tensor.numel(),), NAN)
        buffer[tensor.numel() : 2 * tensor.numel()] = tensor.flatten()
        changed[name] = buffer[tensor.numel() : 2 * tensor.numel()].view(tensor.shape)
    return changed


def nan_in_unchosen(arguments):
    used = int(arguments["num_tokens_post_padded"])
    chosen = arguments["expert_ids"][: used // arguments["block_size"]].unique().long()
    spared = torch.ones(len(arguments["w"]), dtype=torch.bool)
    spared[chosen.cpu()] = False
    assert spared.any()
    arguments["w"][spared] = NAN


def nan_in_chosen(arguments):
    arguments["x"][1] = NAN
    arguments["x"][3, 5] = NAN
    arguments["w"][int(arguments["expert_ids"][0]), 2, -1] = NAN


def infinite(arguments):
    x, w = arguments["x"], arguments["w"]
    x[1, 0], x[2, 3], x[4, 1:3] = INF, -INF, torch.tensor([INF, -INF])
    w[:, 1, 0] = 0
    w[:, 2, :4] = 1
    w[0, 3, 4] = -INF


def large(arguments):
    arguments["x"].mul_(100)
    arguments["w"].mul_(100)


def nan_weight(arguments):
    arguments["slot_weights"][1] = NAN
    arguments["slot_weights"][5] = INF


def nan_of_weight_0(arguments):
    """Rows of weight 0 are products: 0 * NaN is NaN (rule 4), and 0 * 3 is 0."""
    arguments["x"][1, 3] = NAN
    arguments["slot_weights"][1:5] = 0


def negative_weights(arguments):
    arguments["slot_weights"][::2] *= -1


GEMM = [
    *gemm("sizes", [{"T": t, "E": e, "topk": k} for t in (1, 5, 40) for e, k in ((4, 1), (8, 2), (16, 4))]),
    *gemm("sizes", [{"T": t, "E": 16, "topk": 4, "N": 1024, "K": 2048} for t in (1, 16, 128)], level="standard"),
    *gemm("block_sizes", [{"T": 33, "E": 3, "block_size": size} for size in (8, 16, 32, 64, 128)]),
    *gemm("block_sizes", [{"T": 33, "E": 3, "block_size": size, "weighted": True} for size in (16, 128, 256)]),
    *gemm("partial_blocks", [{"T": t, "E": 3, "block_size": 16} for t in (1, 7, 9, 25)], nan_beyond),
    *gemm("row_per_slot", [{"T": t, "row_per_slot": True} for t in (1, 40)]),
    *gemm("slot_weights", [{"T": 20, "row_per_slot": rows, "weighted": True} for rows in (False, True)]),
    *gemm("odd_n", [{"T": 9, "N": n} for n in (1, 15, 17, 31, 33)]),
    *gemm("odd_k", [{"T": t, "K": k} for t in (2, 40) for k in (1, 15, 17, 31, 33, 95)]),
    *gemm("every_residue", [{"T": 40, "N": n + 1, "K": n} for n in range(1, 65)], level="standard"),
    *gemm("one_expert", [{"T": t, "E": 4} for t in (40, 70)], routed(lambda ids: ids.fill_(2))),
    *gemm("duplicates", [{"T": 20}], routed(duplicate)),
    *gemm("dropped_slots", [{"T": 20}, {"T": 20, "weighted": True}], routed(drop_some)),
    *gemm("only_dropped_slots", [{"T": 5}], routed(lambda ids: ids.fill_(-1))),
    *gemm("skipped_blocks", [{"T": 40, "block_size": 8}], skip_blocks),
    *gemm("tail", [{"T": 20, "E": 4}], garbage_behind),
    *gemm("unchosen_experts", [{"T": 3, "E": 12}], nan_in_unchosen),
    *gemm("nan", [{"T": t} for t in (8, 40)], nan_in_chosen),
    *gemm("infinite", [{"T": t, "E": 2} for t in (8, 40)], infinite),
    *gemm("nan_weight", [{"T": 8, "weighted": True}], nan_weight),
    *gemm("nan_of_weight_0", [{"T": t, "weighted": True} for t in (8, 40)], nan_of_weight_0),
    *gemm("negative_weights", [{"T": t, "weighted": True} for t in (3, 40)], negative_weights),
    *gemm("large_values", [{"T": 20}], large),
    *gemm("strided", [{"T": t} for t in (3, 40)], apart("x")),
    *gemm("padded_experts", [{"T": 20}], apart("w")),
    *gemm("column_major", [{"T": 20}], replace("x", lambda x: x.t().contiguous().t())),
    *gemm("empty", [{"T": 0}]),
    *gemm("mixed_dtypes", [{}], replace("w", lambda w: w.double()), raises="w"),
    *gemm("wrong_k", [{}], replace("w", lambda w: w[:, :, 1:]), raises="w"),
    *gemm("wrong_weights", [{"weighted": True}], replace("slot_weights", lambda w: w[1:]), raises="slot_weights"),
    *gemm("wrong_blocks", [{}], replace("expert_ids", lambda ids: ids[1:]), raises="expert_ids"),
    *gemm("top_k_0", [{}], replace("top_k", lambda k: 0), raises="top_k"),
]

# ---- moe_sum ---------------------------------------------------------------------------------------------------------


def sums(kind, sizes=({},), change=None, **options):
    return table("moe_sum", kind, sizes, change, **options)


def cancel(arguments):
    """A large term that a later one takes away: what is between is lost unless float32 keeps it."""
    y = arguments["y"]
    y[:, 0] = 64 + y[:, 0].abs()
    y[:, -1] = -y[:, 0]


def nan_where_dropped(arguments):
    y, ids = arguments["y"], arguments["topk_ids"]
    ids[0, 0], ids[0, 1], ids[-1] = -1, 0, -3
    y[ids < 0] = NAN
    y[0, 0] = INF


def some_nan(arguments):
    arguments["y"][1, 0, 3] = NAN
    arguments["y"][2, -1, 4] = INF
    arguments["y"][3, :2, 5] = torch.tensor([INF, -INF])


SUM = [
    *sums("sizes", [{"T": t, "topk": k, "N": 128} for t in (1, 20) for k in (1, 2, 5, 8, 9)]),
    *sums("slots", [{"T": 5, "topk": k, "N": 64} for k in (3, 7, 10, 16, 22)]),
    *sums("odd_n", [{"T": 5, "topk": 4, "N": n} for n in (1, 3, 7, 15, 17, 31, 33, 257)]),
    *sums("negative_ids", [{"topk": k, "N": n, "with_ids": True} for k, n in ((8, 256), (2, 33))], nan_where_dropped),
    *sums("only_negative_ids", [{"T": 3, "with_ids": True}], change_ids(lambda ids: ids.fill_(-1))),
    *sums("cancellation", [{"T": 9, "topk": k} for k in (4, 8)], cancel),
    *sums("nan", [{"T": 9}], some_nan),
    *sums("strided", [{"T": 9, "N": 100}], apart("y")),
    *sums("padded_slots", [{"T": 9, "N": 112}], replace("y", lambda y: y[:, :, :100])),
    *sums("slots_first", [{"T": 9}], replace("y", lambda y: y.transpose(0, 1).contiguous().transpose(0, 1))),
    *sums("column_major", [{"T": 9}], replace("y", lambda y: y.transpose(1, 2).contiguous().transpose(1, 2))),
    *sums("empty", [{"T": 0}, {"T": 0, "with_ids": True}]),
    *sums("large", [{"T": 1024, "topk": 10, "N": 2048}], level="standard"),
    *sums("wrong_ids", [{"with_ids": True}], replace("topk_ids", lambda ids: ids[:, 1:]), raises="topk_ids"),
    *sums("ids_int64", [{"with_ids": True}], replace("topk_ids", lambda ids: ids.long()), raises="topk_ids"),
    *sums("flat", [{}], replace("y", lambda y: y.flatten(1)), raises="y"),
]

CASES = [*ALIGN, *GEMM, *SUM]
