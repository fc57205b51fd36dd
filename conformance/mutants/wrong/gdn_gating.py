"""Wrong gates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from conformance.mutants import Call, mutant
from conformance.mutants.parts import packed


def gates(call: Call, softplus: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The reference, with another softplus."""
    return -call.A_log.exp() * softplus(call.a.float() + call.dt_bias), call.b.float().sigmoid()


@mutant("gdn_gating", "large_a")
def softplus_overflows(call):
    """log(1 + e^x) as it is written: inf for x above 88."""
    return gates(call, lambda x: (1 + x.exp()).log())


@mutant("gdn_gating", "small_a", "wide_range")
def softplus_vanishes(call):
    """log(1 + e^x) without log1p: 0 for x below -17, where e^x is right."""
    return gates(call, lambda x: torch.where(x > 20, x, (1 + x.clamp(max=20).exp()).log()))


@mutant("gdn_gating", "wide_range")
def softplus_is_linear_too_early(call):
    """The switch to softplus(x) = x is at 4, where e^-x is still 2%."""
    return gates(call, lambda x: torch.where(x > 4, x, torch.nn.functional.softplus(x)))


@mutant("gdn_gating", "sizes")
def gate_has_the_wrong_sign(call):
    """The minus is left out: the state would grow."""
    g, beta = call()
    return -g, beta


@mutant("gdn_gating", "sizes")
def bias_is_added_in_act(call):
    """a + dt_bias is rounded to the activation dtype."""
    return call(a=call.a + call.dt_bias.to(call.a.dtype), dt_bias=torch.zeros_like(call.dt_bias))


@mutant("gdn_gating", "sizes")
def beta_is_rounded_to_act(call):
    """The sigmoid is evaluated in the activation dtype."""
    g, _ = call()
    return g, (call.b.sigmoid() if call.b.dtype != torch.float32 else call.b.bfloat16().sigmoid()).float()


@mutant("gdn_gating", "sizes")
def forgets_the_exponential_of_A(call):
    """A_log is used as if it were A."""
    return call(A_log=call.A_log.abs().log())


@mutant("gdn_gating", "sizes", "strided")
def rows_without_their_stride(call):
    """Rows of a and b are taken to follow each other without a gap; they are halves of one projection."""
    return call(a=packed(call.a), b=packed(call.b))


@mutant("gdn_gating", "infinite", "nan_parameters")
def hides_nan(call):
    """A sanitiser makes NaN 0, which keeps the whole state."""
    g, beta = call()
    return g.nan_to_num(0), beta.nan_to_num(0)
