"""What prefill and decode by the gated delta rule may both get wrong."""

from __future__ import annotations

import torch

from conformance.mutants import mutant
from conformance.mutants.parts import packed


@mutant("gdn_prefill", "sizes", "heads")
@mutant("gdn_decode", "sizes", "heads")
def heads_are_dealt_out(call):
    """Value head hv reads query/key head hv % H instead of hv // (HV/H)."""
    head = torch.arange(call.v.shape[1]) % call.q.shape[1]
    return call(q=call.q[:, head], k=call.k[:, head])


@mutant("gdn_prefill", "scale")
@mutant("gdn_decode", "scale")
def ignores_scale(call):
    """Always K^-0.5."""
    return call(scale=None)


@mutant("gdn_prefill", "sizes", "odd_sizes")
@mutant("gdn_decode", "sizes", "odd_sizes")
def default_scale_of_the_value_size(call):
    """V^-0.5 where K^-0.5 is meant: equal as long as both heads are."""
    return call(scale=call.v.shape[-1] ** -0.5 if call.scale is None else call.scale)


@mutant("gdn_prefill", "no_l2norm")
@mutant("gdn_decode", "no_l2norm")
def always_normalizes(call):
    """l2norm=False is ignored."""
    return call(l2norm=True)


@mutant("gdn_prefill", "tiny_keys")
@mutant("gdn_decode", "tiny_keys")
def epsilon_bounds_the_norm(call):
    """x / max(|x|, eps), torch's normalize, instead of x / sqrt(|x|^2 + eps): another value for small x."""
    if not call.l2norm:
        return call()
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1, eps=1e-6).to(x.dtype) for x in (call.q, call.k))
    size = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
    return call(q=q, k=k, scale=size, l2norm=False)


@mutant("gdn_prefill", "shared_page")
@mutant("gdn_decode", "shared_page")
def pool_without_its_stride(call):
    """Slots are taken to follow each other without the padding of the pages."""
    return call(state=packed(call.state))


@mutant("gdn_prefill", "sizes")
@mutant("gdn_decode", "sizes")
def normalizes_in_place(call):
    """q and k are normalised where they lie."""
    out = call()
    for x in (call.q, call.k):
        x.copy_(torch.nn.functional.normalize(x.float(), dim=-1))
    return out


@mutant("gdn_prefill", "scale_0")
@mutant("gdn_decode", "scale_0")
def scale_0_is_none(call):
    """`scale or K**-0.5`, where only None stands for the default."""
    return call(scale=call.scale or None)
