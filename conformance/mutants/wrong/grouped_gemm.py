"""Wrong grouped matmuls."""

from __future__ import annotations

import torch

from conformance.mutants import mutant
from conformance.mutants.parts import packed


@mutant("grouped_gemm", "partial_blocks", "block_sizes")
def filling_is_taken_for_a_row(call):
    """The sentinel is clamped to the last row instead of masked, and its result written there."""
    slots, used = call.x.shape[0] * call.top_k, int(call.num_tokens_post_padded)
    y = call()
    filled = (call.sorted_token_ids[:used] >= slots).nonzero().flatten()
    if len(filled) and slots:
        e = int(call.expert_ids[int(filled[-1]) // call.block_size])
        y[-1] = (call.x[-1].float() @ call.w[e].float().T).to(y.dtype)
    return y


@mutant("grouped_gemm", "sizes", "block_sizes")
def block_takes_its_neighbours_expert(call):
    """Two blocks share a tile, which uses the expert of the first."""
    experts = call.expert_ids.clone()
    experts[1::2] = experts[0::2][: len(experts[1::2])]
    return call(expert_ids=torch.where(call.expert_ids >= 0, experts, call.expert_ids))


@mutant("grouped_gemm", "skipped_blocks", "dropped_slots")
def block_of_no_expert_uses_the_last(call):
    """Expert -1 indexes the weights from behind."""
    return call(expert_ids=call.expert_ids % max(1, len(call.w)))


@mutant("grouped_gemm", "tail")
def reads_blocks_beyond_the_count(call):
    """All entries of sorted_token_ids are worked on, not the first num_tokens_post_padded of them."""
    y, used, slots = call(), int(call.num_tokens_post_padded), call.x.shape[0] * call.top_k
    ids, experts = call.sorted_token_ids[used:], call.expert_ids[used // call.block_size :]
    behind = call(sorted_token_ids=ids, expert_ids=experts, num_tokens_post_padded=torch.tensor([len(ids)]))
    written = ids[(experts.repeat_interleave(call.block_size) >= 0) & (ids < slots)].long()
    y[written] = behind[written]
    return y


@mutant("grouped_gemm", "slot_weights")
def ignores_slot_weights(call):
    """The router's weights are left out."""
    return call(slot_weights=None)


@mutant("grouped_gemm", "slot_weights")
def weight_of_the_token(call):
    """Slot s is multiplied by the weight at s // top_k."""
    w = call.slot_weights
    return call() if w is None else call(slot_weights=w[torch.arange(len(w)) // 2])


@mutant("grouped_gemm", "row_per_slot")
def rows_are_always_per_token(call):
    """The second matmul, whose x has a row per slot, is given the rows of the first."""
    return call(x=call.x[torch.arange(len(call.x)) // 2]) if call.top_k == 1 else call()


@mutant("grouped_gemm", "dropped_slots")
def dropped_slots_are_not_written(call):
    """A slot that is in no block keeps what the memory held."""
    y = call()
    listed = torch.zeros(len(y) + 1, dtype=torch.bool)
    listed[call.sorted_token_ids[: int(call.num_tokens_post_padded)].long().clamp(max=len(y))] = True
    out = torch.empty_like(y)
    out[listed[:-1]] = y[listed[:-1]]
    return out


@mutant("grouped_gemm", "odd_k", "every_residue")
def drops_the_tail_of_k(call):
    """K is done in steps of 16 and the rest is left out."""
    whole = call.x.shape[1] // 16 * 16
    return call(x=call.x[:, :whole], w=call.w[:, :, :whole])


@mutant("grouped_gemm", "odd_n", "every_residue")
def leaves_the_tail_of_n(call):
    """N is done in tiles of 16 columns, and those of the last, partial one are never written."""
    y = torch.empty(len(call.x) * call.top_k, call.w.shape[1], dtype=call.x.dtype)
    whole = y.shape[1] // 16 * 16
    y[:, :whole] = call()[:, :whole]
    return y


@mutant("grouped_gemm", "nan")
def nan_spreads_through_the_tile(call):
    """Rows that are not in the tile are multiplied by 0: a NaN row of one token reaches all others."""
    return call(x=call.x + 0 * call.x.sum(0, keepdim=True))


@mutant("grouped_gemm", "unchosen_experts")
def reads_unchosen_experts(call):
    """All experts' weights meet every row, those not chosen times 0."""
    return call() + 0 * call.w.sum(dtype=call.x.dtype)


@mutant("grouped_gemm", "strided")
def rows_without_their_stride(call):
    """Rows of x are taken to follow each other without a gap."""
    return call(x=packed(call.x))


@mutant("grouped_gemm", "large_offsets", level="exhaustive")
def row_offsets_in_32_bits(call):
    """slot * N wraps beyond 2^31: those rows are written elsewhere, and what they hold was never computed."""
    y = call()
    y.flatten()[2**31 :] = 0
    return y


@mutant("grouped_gemm", "block_sizes")
def large_blocks_have_no_weights(call):
    """The kernel of tiles above 64 rows was written for the first matmul, and knows no slot_weights."""
    return call(slot_weights=None) if call.block_size > 64 else call()
