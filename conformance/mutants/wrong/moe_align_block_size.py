"""Wrong groupings of slots by expert."""

from __future__ import annotations

import torch

from conformance.mutants import mutant
from ops_reference.moe import align_capacity


def local(call) -> torch.Tensor:
    """topk_ids after the map."""
    ids = call.topk_ids
    return ids if call.expert_map is None else torch.where(ids >= 0, call.expert_map[ids.clamp(min=0).long()], -1)


@mutant("moe_align_block_size", "sizes")
def slots_of_an_expert_in_reverse(call):
    """Slots take their places by an atomic counter: their order within an expert is whatever came first."""
    slots = call.topk_ids.numel()
    ids, experts, count = call(topk_ids=call.topk_ids.flatten().flip(0).view_as(call.topk_ids))
    return torch.where(ids < slots, slots - 1 - ids, ids), experts, count


@mutant("moe_align_block_size", "sizes", "partial_blocks")
def filling_is_slot_0(call):
    """The rest of a block is 0, which is a slot, instead of the sentinel."""
    ids, experts, count = call()
    return ids.masked_fill(ids == call.topk_ids.numel(), 0), experts, count


@mutant("moe_align_block_size", "sizes")
def tail_is_not_written(call):
    """Behind the last block, memory is left as it was."""
    ids, experts, count = call()
    out = torch.empty_like(ids), torch.empty_like(experts), count
    blocks = int(count) // call.block_size
    out[0][: int(count)], out[1][:blocks] = ids[: int(count)], experts[:blocks]
    return out


@mutant("moe_align_block_size", "negative_ids")
def negative_ids_are_expert_0(call):
    """A slot without an expert is given the first one."""
    return call(topk_ids=call.topk_ids.clamp(min=0))


@mutant("moe_align_block_size", "negative_ids")
def negative_ids_count_from_the_end(call):
    """A negative id indexes the counters from behind, as Python does."""
    ids = call.topk_ids
    return call(topk_ids=torch.where(ids < 0, ids + call.num_experts, ids).clamp(min=-1))


@mutant("moe_align_block_size", "expert_map")
def ignores_the_map(call):
    """Every expert is taken to live here."""
    return call(expert_map=None)


@mutant("moe_align_block_size", "expert_map")
def blocks_name_global_experts(call):
    """Unmapped experts are dropped, but the blocks of the others carry the global id."""
    ids, experts, count = call()
    if call.expert_map is None:
        return ids, experts, count
    back = {int(here): everywhere for everywhere, here in enumerate(call.expert_map.tolist()) if here >= 0}
    return ids, experts.clone().apply_(lambda e: back.get(e, e)), count


@mutant("moe_align_block_size", "sizes", "partial_blocks")
def counts_without_filling(call):
    """num_tokens_post_padded is the number of slots, not of the entries that they take."""
    ids, experts, _ = call()
    return ids, experts, (local(call) >= 0).sum().view(1).int()


@mutant("moe_align_block_size", "many_experts")
def expert_ids_in_8_bits(call):
    """The id is kept in a byte while it is sorted: expert 256 is expert 0."""
    return call(topk_ids=torch.where(call.topk_ids >= 0, call.topk_ids & 0xFF, call.topk_ids))


@mutant("moe_align_block_size", "one_expert")
def counters_in_8_bits(call):
    """An expert's slots are counted in a byte: its 256th starts again at its first place."""
    ids = call.topk_ids.flatten()
    kept = ids.clone()
    for e in ids.unique().tolist():
        kept[(ids == e).nonzero().flatten()[255:]] = -1
    return call(topk_ids=kept.view_as(call.topk_ids))


@mutant("moe_align_block_size", "duplicates")
def duplicates_count_once(call):
    """A token that chose an expert twice has one slot there."""
    ids = call.topk_ids.clone()
    again = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(-1)
    return call(topk_ids=ids.masked_fill(again, -1))


@mutant("moe_align_block_size", "block_sizes")
def block_size_is_rounded_to_a_power_of_two(call):
    """Groups are filled up to a power of two."""
    size = 1 << (call.block_size - 1).bit_length()
    ids, experts, count = call(block_size=size)
    capacity = align_capacity(call.topk_ids.numel(), call.block_size, call.num_experts)
    blocks = capacity // call.block_size
    ids = torch.nn.functional.pad(ids, (0, max(0, capacity - len(ids))), value=call.topk_ids.numel())
    experts = torch.nn.functional.pad(experts, (0, max(0, blocks - len(experts))), value=-1)
    return ids[:capacity].contiguous(), experts[:blocks].contiguous(), count


@mutant("moe_align_block_size", "empty")
def no_slots_count_a_block(call):
    """Without any slot there is still one block."""
    ids, experts, count = call()
    return ids, experts, count if call.topk_ids.numel() else count + call.block_size
