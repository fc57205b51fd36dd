"""Wrong decode steps of the gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.mutants import Call, mutant


def padding(call: Call) -> Tensor:
    return (call.state_indices < 0) | (call.state_indices == call.null_index)


@mutant("gdn_decode", "padding")
def padding_updates_the_last_slot(call):
    """A padding row's state is written, from behind."""
    out = call()
    if padding(call).any():
        row = padding(call).nonzero()[0]
        one = {name: getattr(call, name)[row] for name in ("q", "k", "v", "a", "b")}
        call(**one, state_indices=torch.full_like(call.state_indices[row], len(call.state) - 1), null_index=-1)
    return out


@mutant("gdn_decode", "null_slot")
def null_index_is_a_slot(call):
    """Only negative indices are padding; the null slot is read and written."""
    return call(null_index=-1)


@mutant("gdn_decode", "padding")
def padding_output_is_not_written(call):
    """A padding row keeps what the memory held."""
    out = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    real = ~padding(call)
    out[real] = call()[real]
    return out


@mutant("gdn_decode", "padding")
def padding_is_masked_with_a_product(call):
    """The rows are all computed and those of padding multiplied by 0: NaN in them stays."""
    return call() + 0 * call.v * padding(call)[:, None, None]


@mutant("gdn_decode", "sizes")
def reads_before_it_writes(call):
    """The output is of the decayed state, without what this token adds."""
    before = call.state.clone()
    call()
    return call(state=before, b=torch.full_like(call.b, -torch.inf))


@mutant("gdn_decode", "sizes")
def forgets_the_sigmoid(call):
    """b itself is the write strength."""
    b = call.b.float().clamp(0.01, 0.99)
    return call(b=(b / (1 - b)).log().to(call.b.dtype))


@mutant("gdn_decode", "large_a_slow_decay")
def softplus_overflows(call):
    """log(1 + e^x) as it is written: the gate is -inf for x above 88, and a head of slow decay forgets all."""
    hit = call.a.float() + call.dt_bias > 88
    return call(a=call.a.masked_fill(hit, torch.inf))


@mutant("gdn_decode", "sizes")
def state_is_kept_in_act(call):
    """The state is rounded to bfloat16 though the pool is float32: it drifts over thousands of steps."""
    out = call()
    rows = call.state_indices[~padding(call)].long()
    call.state[rows] = call.state[rows].bfloat16().to(call.state.dtype)
    return out


@mutant("gdn_decode", "rows")
def one_row_is_not_normalized(call):
    """The path for a batch of one leaves the l2 norm out."""
    return call(l2norm=False) if len(call.q) == 1 else call()


@mutant("gdn_decode", "nan_value")
def sanitises(call):
    """NaN is made 0, in the output and in the state."""
    o = call()
    call.state.nan_to_num_(0)
    return o.nan_to_num(0)


@mutant("gdn_decode", "nan_value")
def nan_reaches_the_whole_batch(call):
    """Rows share a tile, and are told apart by a product with 0."""
    return call(v=call.v + 0 * call.v.sum(0, keepdim=True))
