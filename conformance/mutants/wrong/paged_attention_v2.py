"""Wrong decode attention over a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.mutants import Call, mutant
from conformance.mutants.parts import each_sequence
from ops_reference.attention import attend

PARTITION = 512


def partitions(call: Call, weigh) -> Tensor:
    """Each partition of the keys on its own, then their outputs summed with weights weigh(sizes) -> [partitions]."""
    if call.softcap or call.window or call.alibi_slopes is not None:
        return call()

    def attention(q, keys, values):
        pairs = list(zip(keys.split(PARTITION), values.split(PARTITION), strict=True))
        weights = weigh(torch.tensor([float(len(k)) for k, _ in pairs]))
        parts = [w * attend(q, k, v, call.scale).float() for w, (k, v) in zip(weights, pairs, strict=True)]
        return sum(parts).to(q.dtype)

    return each_sequence(call, attention)


@mutant("paged_attention_v2", "long", "lengths")
def partitions_count_by_their_length(call):
    """Partitions are averaged by their number of tokens, not by the mass of their scores."""
    return partitions(call, lambda sizes: sizes / sizes.sum())


@mutant("paged_attention_v2", "long", "lengths")
def drops_a_partition_of_one_token(call):
    """length // 512 partitions and one if the rest is more than 1: token 513 is never seen."""
    lengths = call.seq_lens
    return call(seq_lens=lengths - ((lengths > 1) & (lengths % PARTITION == 1)).int())


@mutant("paged_attention_v2", "lengths")
def all_are_as_long_as_the_longest(call):
    """One length for the batch: shorter sequences read into the blocks of others."""
    tables = call.block_tables.clamp(0, len(call.key_cache) - 1)
    used = torch.where(call.seq_lens > 0, call.seq_lens.amax() if len(call.seq_lens) else 0, 0)
    return call(seq_lens=used.int(), block_tables=tables)


@mutant("paged_attention_v2", "determinism")
def sums_in_another_order_each_time(call):
    """Partitions are added as they finish: the last bits change from run to run."""
    if call.window or call.alibi_slopes is not None:
        return call()

    def attention(q, keys, values):
        order = torch.randperm(len(keys))
        return attend(q, keys[order], values[order], call.scale, call.softcap)

    return each_sequence(call, attention)
