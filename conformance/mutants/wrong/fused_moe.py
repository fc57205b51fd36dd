"""Wrong fused experts."""

from __future__ import annotations

import torch

from conformance.mutants import mutant


@mutant("fused_moe", "format_b", "sizes")
def up_before_gate(call):
    """The merged w13 is split the wrong way."""
    return call(w1=torch.cat(call.w1.chunk(2, 1)[::-1], 1)) if call.w3 is None else call()


@mutant("fused_moe", "format_b", "sizes")
def gate_and_up_interleaved(call):
    """The merged w13 is taken for gate, up, gate, up, ..."""
    return call(w1=call.w1[:, 0::2], w3=call.w1[:, 1::2]) if call.w3 is None else call()


@mutant("fused_moe", "format_a")
def w3_is_the_gate(call):
    """Of two separate weights the second is taken for the gate."""
    return call() if call.w3 is None else call(w1=call.w3, w3=call.w1)


@mutant("fused_moe", "duplicates")
def duplicates_count_once(call):
    """An expert chosen twice in a row is a set's one element."""
    again = (call.topk_ids[:, :, None] == call.topk_ids[:, None, :]).tril(-1).any(-1)
    return call(topk_ids=call.topk_ids.masked_fill(again, -1))


@mutant("fused_moe", "negative_ids")
def negative_ids_count_from_the_end(call):
    """A slot without an expert is computed by the last one."""
    experts = len(call.w1) if call.expert_map is None else len(call.expert_map)
    return call(topk_ids=torch.where(call.topk_ids < 0, experts - 1, call.topk_ids))


@mutant("fused_moe", "expert_map")
def ignores_the_map(call):
    """Global ids index this rank's weights, modulo their number."""
    return call() if call.expert_map is None else call(topk_ids=call.topk_ids % len(call.w1), expert_map=None)


@mutant("fused_moe", "expert_map")
def unmapped_experts_are_expert_0(call):
    """An expert of another rank is computed by this rank's first."""
    return call(expert_map=None if call.expert_map is None else call.expert_map.clamp(min=0))


@mutant("fused_moe", "on_input")
def weight_never_on_the_input(call):
    """apply_router_weight_on_input is ignored: right but for the nonlinearity in between."""
    return call(apply_router_weight_on_input=False)


@mutant("fused_moe", "weights")
def renormalizes_the_weights(call):
    """The router's weights are made to sum to 1 once more."""
    return call(topk_weights=call.topk_weights / call.topk_weights.sum(-1, keepdim=True))


@mutant("fused_moe", "one_expert")
def experts_have_a_capacity(call):
    """An expert takes 8 slots; what comes after is dropped."""
    ids, kept = call.topk_ids.flatten(), call.topk_ids.flatten().clone()
    for e in ids.unique().tolist():
        kept[(ids == e).nonzero().flatten()[8:]] = -1
    return call(topk_ids=kept.view_as(call.topk_ids))


@mutant("fused_moe", "unchosen_experts")
def every_expert_meets_every_token(call):
    """A dense form: experts that a token did not choose have weight 0, and their NaN stays."""
    used = call()
    return used + 0 * call.w2.sum((0, 2), dtype=used.dtype)


@mutant("fused_moe", "large_values")
def intermediate_in_float16(call):
    """The activations between the two matmuls are float16, whatever act is."""
    out = torch.zeros(call.x.shape)
    gate_up = call.w1 if call.w3 is None else torch.cat([call.w1, call.w3], 1)
    ids = call.topk_ids if call.expert_map is None else call.expert_map[call.topk_ids.long()]
    for t, j in (ids >= 0).nonzero().tolist():
        e, weight = ids[t, j], call.topk_weights[t, j]
        x = call.x[t].float() * (weight if call.apply_router_weight_on_input else 1)
        gate, up = (gate_up[e].float() @ x).chunk(2)
        h = (torch.nn.functional.silu(gate) * up).half().float()
        out[t] += call.w2[e].float() @ h * (1 if call.apply_router_weight_on_input else weight)
    return out.to(call.x.dtype)


@mutant("fused_moe", "sizes", "odd_sizes", "every_residue", "odd_i")
def drops_the_tail_of_the_intermediate(call):
    """I is done in steps of 16 and the rest is left out."""
    gate, up = call.w1.chunk(2, 1) if call.w3 is None else (call.w1, call.w3)
    whole = gate.shape[1] // 16 * 16
    return call(w1=gate[:, :whole], w3=up[:, :whole], w2=call.w2[:, :, :whole])


@mutant("fused_moe", "sizes")
def one_token_has_no_weights(call):
    """The path for one token forgets the router's weights."""
    return call(topk_weights=torch.ones_like(call.topk_weights)) if len(call.x) == 1 else call()


@mutant("fused_moe", "large_offsets", level="exhaustive")
def row_offsets_in_32_bits(call):
    """slot * 2I wraps beyond 2^31 in the intermediate: the slots behind it contribute nothing."""
    inner = call.w1.shape[1] * (1 if call.w3 is None else 2)
    slot = torch.arange(call.topk_ids.numel()).view_as(call.topk_ids)
    return call(topk_ids=call.topk_ids.masked_fill(slot * inner >= 2**31, -1))


@mutant("fused_moe", "many_experts")
def expert_ids_in_7_bits(call):
    """An id is kept in a signed byte without its sign: expert 128 is expert 0."""
    return call(topk_ids=torch.where(call.topk_ids >= 0, call.topk_ids & 0x7F, call.topk_ids))


@mutant("fused_moe", "many_experts")
def room_for_8_slots(call):
    """A token's slots lie in an array of 8: the ninth and tenth expert are left out."""
    return call(topk_weights=call.topk_weights[:, :8], topk_ids=call.topk_ids[:, :8])


@mutant("fused_moe", "many_tokens")
def tokens_beyond_the_first_tile_are_cleared(call):
    """The grid covers 128 tokens; what it does not reach is 0."""
    out = call()
    out[128:] = 0
    return out


@mutant("fused_moe", "nan_of_weight_0")
def skips_slots_of_weight_0(call):
    """A slot of weight 0 is not computed, to save time: NaN in its token or expert is hidden."""
    return call(topk_ids=call.topk_ids.masked_fill(call.topk_weights == 0, -1))
