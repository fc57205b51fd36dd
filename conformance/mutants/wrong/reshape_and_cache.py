"""Wrong writes to the paged cache."""

from __future__ import annotations

import torch

from conformance.mutants import mutant
from conformance.mutants.parts import packed


@mutant("reshape_and_cache", "negative_slots")
def negative_slots_are_the_last(call):
    """Slot -1 of padding is written, from behind."""
    blocks, size = call.key_cache.shape[:2]
    call(slot_mapping=torch.where(call.slot_mapping < 0, blocks * size - 1, call.slot_mapping))


@mutant("reshape_and_cache", "negative_slots")
def only_minus_1_is_skipped(call):
    """Padding is recognised by -1; other negative slots are clamped to the first."""
    slots = call.slot_mapping
    call(slot_mapping=torch.where(slots < -1, 0, slots))


@mutant("reshape_and_cache", "negative_slots")
def stops_at_the_first_padding(call):
    """Padding is taken to stand at the end: tokens behind it are not written."""
    call(slot_mapping=call.slot_mapping.masked_fill((call.slot_mapping < 0).cummax(0).values, -1))


@mutant("reshape_and_cache", "page_sizes")
def page_size_is_rounded_to_a_power_of_two(call):
    """slot // BS and slot % BS by shift and mask, which a page of 784 tokens does not allow."""
    size = call.key_cache.shape[1]
    power = 1 << (size.bit_length() - 1)
    slots = call.slot_mapping
    moved = (slots // power % len(call.key_cache)) * size + slots % power
    call(slot_mapping=torch.where(slots < 0, slots, moved))


@mutant("reshape_and_cache", "sizes")
def keys_are_written_as_values(call):
    """The value cache gets the keys."""
    call(value=call.key)


@mutant("reshape_and_cache", "sizes")
def last_odd_token_is_not_written(call):
    """Two tokens per block of threads, rounded down."""
    tokens = len(call.key) // 2 * 2
    call(key=call.key[:tokens], value=call.value[:tokens], slot_mapping=call.slot_mapping[:tokens])


@mutant("reshape_and_cache", "odd_head_sizes")
def tail_of_the_head_is_not_written(call):
    """Vectors of 8 elements: the rest of a head of another size is left."""
    whole = call.key.shape[-1] // 8 * 8
    cut = {name: getattr(call, name)[..., :whole] for name in ("key", "value", "key_cache", "value_cache")}
    call(**cut)


@mutant("reshape_and_cache", "sizes", "padded_pages")
def pages_without_their_stride(call):
    """Pages are taken to follow each other: values, or padding, of the buffer they share are overwritten."""
    call(key_cache=packed(call.key_cache), value_cache=packed(call.value_cache))


@mutant("reshape_and_cache", "sizes", "split_heads")
def tokens_without_their_stride(call):
    """Keys and values are taken to be contiguous; they are views of one projection."""
    call(key=packed(call.key), value=packed(call.value))


@mutant("reshape_and_cache", "nan_values")
def hides_nan(call):
    """A sanitiser on the way into the cache makes NaN 0."""
    call(key=call.key.nan_to_num(0, torch.inf, -torch.inf), value=call.value.nan_to_num(0, torch.inf, -torch.inf))


@mutant("reshape_and_cache", "block_ids")
def block_ids_in_16_bits(call):
    """The block of a slot is kept in 16 bits: block 65,536 is block 0."""
    size, slots = call.key_cache.shape[1], call.slot_mapping
    call(slot_mapping=torch.where(slots < 0, slots, (slots // size & 0xFFFF) * size + slots % size))
