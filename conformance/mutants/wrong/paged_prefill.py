"""Wrong prefill attention over a paged cache."""

from __future__ import annotations

from itertools import pairwise

import torch

from conformance.mutants import mutant
from conformance.mutants.parts import each_sequence, features, queries
from ops_reference.attention import attend


@mutant("paged_prefill", "cached_prefix")
def ignores_the_prefix(call):
    """Only the new tokens are attended to, as if nothing was cached before."""
    def attention(q, keys, values):
        return attend(q, keys[-len(q) :], values[-len(q) :], *features(call))

    return each_sequence(call, attention)


@mutant("paged_prefill", "cached_prefix")
def causal_mask_starts_at_the_prefix(call):
    """Query i sees keys 0 to i: the mask is aligned with the first cached token instead of the last."""
    def attention(q, keys, values):
        rows = [attend(q[i : i + 1], keys[: i + 1], values[: i + 1], *features(call)) for i in range(len(q))]
        return torch.cat(rows)

    return each_sequence(call, attention)


@mutant("paged_prefill", "lengths")
def sees_the_next_token(call):
    """The causal mask is one too wide."""
    def attention(q, keys, values):
        seen = [min(len(keys), len(keys) - len(q) + i + 2) for i in range(len(q))]
        rows = [attend(q[i : i + 1], keys[:end], values[:end], *features(call)) for i, end in enumerate(seen)]
        return torch.cat(rows)

    return each_sequence(call, attention)


@mutant("paged_prefill", "nan_value", "nan_key")
def nan_goes_back_in_time(call):
    """Values of later tokens have weight 0, and 0 * NaN is NaN."""
    def attention(q, keys, values):
        later = values.float().sum(0).repeat_interleave(q.shape[1] // values.shape[1], 0)
        return (attend(q, keys, values, *features(call)) + 0 * later).to(q.dtype)

    return each_sequence(call, attention)


@mutant("paged_prefill", "padding_rows")
def rows_of_no_sequence_are_not_written(call):
    """Rows of q behind the last sequence keep what the memory held."""
    out, end = torch.empty_like(call.q, memory_format=torch.contiguous_format), queries(call)[-1]
    out[:end] = call()[:end]
    return out


@mutant("paged_prefill", "lengths")
def last_tile_of_one_query_is_skipped(call):
    """Tiles of 16 queries, rounded up from 2: a last tile of a single query is left at 0."""
    out, bounds = call(), queries(call)
    for start, end in pairwise(bounds):
        if (end - start) % 16 == 1 and end - start > 1:
            out[end - 1] = 0
    return out
