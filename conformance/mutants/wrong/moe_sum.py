"""Wrong sums over slots."""

from __future__ import annotations

import ctypes

import torch

from conformance.mutants import mutant
from conformance.mutants.parts import packed


@mutant("moe_sum", "cancellation")
def sums_in_act(call):
    """The running sum is rounded to the activation dtype after each slot."""
    y = call.y if call.topk_ids is None else call.y.masked_fill(call.topk_ids[..., None] < 0, 0)
    out = torch.zeros_like(y[:, 0])
    for j in range(y.shape[1]):
        out += y[:, j]
    return out


@mutant("moe_sum", "negative_ids")
def negative_ids_are_summed(call):
    """Slots without an expert count."""
    return call(topk_ids=None)


@mutant("moe_sum", "negative_ids")
def masks_with_a_product(call):
    """Slots without an expert are multiplied by 0, and the NaN in them stays."""
    y = call.y if call.topk_ids is None else call.y * (call.topk_ids[..., None] >= 0)
    return call(y=y, topk_ids=None)


@mutant("moe_sum", "negative_ids")
def expert_0_is_no_expert(call):
    """Slots of expert 0 are dropped with the negative ones."""
    return call() if call.topk_ids is None else call(topk_ids=call.topk_ids - 1)


@mutant("moe_sum", "sizes", "slots")
def drops_the_last_odd_slot(call):
    """Slots are added in pairs, and the last of an odd number is left out."""
    pairs = call.y.shape[1] // 2 * 2
    return call(y=call.y[:, :pairs], topk_ids=None if call.topk_ids is None else call.topk_ids[:, :pairs].contiguous())


@mutant("moe_sum", "slots", "sizes")
def at_most_8_slots(call):
    """Unrolled for up to 8 slots; the others are never read."""
    return call(y=call.y[:, :8], topk_ids=None if call.topk_ids is None else call.topk_ids[:, :8].contiguous())


@mutant("moe_sum", "odd_n", "sizes")
def leaves_the_tail_of_n(call):
    """Vectors of 8 columns: those of the last, partial one are never written."""
    y = torch.empty_like(call.y[:, 0])
    whole = y.shape[1] // 8 * 8
    y[:, :whole] = call()[:, :whole]
    return y


@mutant("moe_sum", "nan")
def hides_nan(call):
    """A sanitiser makes NaN 0."""
    return call().nan_to_num(0, posinf=torch.inf, neginf=-torch.inf)


@mutant("moe_sum", "determinism")
def sums_in_another_order_each_time(call):
    """Atomic adds: the order of the slots, and with it the last bits, changes from run to run."""
    order = torch.randperm(call.y.shape[1])
    return call(y=call.y[:, order], topk_ids=None if call.topk_ids is None else call.topk_ids[:, order].contiguous())


@mutant("moe_sum", "strided")
def slots_without_their_stride(call):
    """y is taken to be contiguous."""
    return call(y=packed(call.y))


@mutant("moe_sum", "inputs_unchanged", "sizes")
def leaves_its_input_another_shape(call):
    """y gets a leading dimension in place, which the kernel wants, and keeps it."""
    out = call()
    call.y.unsqueeze_(0)
    return out


@mutant("moe_sum", "quiet")
def prints_each_call(call):
    """A print of the time of debugging has stayed."""
    print("moe_sum", tuple(call.y.shape))
    return call()


@mutant("moe_sum", "quiet")
def its_kernel_prints_each_call(call):
    """A printf of native code has stayed, which has a buffer of its own."""
    ctypes.CDLL(None).printf(b"moe_sum %d\n", len(call.y))
    return call()
