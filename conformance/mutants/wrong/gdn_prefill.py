"""Wrong prefills by the gated delta rule."""

from __future__ import annotations

from itertools import pairwise

import torch

from conformance.mutants import mutant
from conformance.mutants.parts import CHUNK, chunked, prefill
from ops_reference.gated_delta_net import apply, initial_state, step


@mutant("gdn_prefill", "gate_positive")
def gate_is_not_bounded(call):
    """A positive gate lets the state grow to infinity within 64 tokens."""
    return prefill(call, decay=call.g.exp())


@mutant("gdn_prefill", "gate_positive")
def gate_is_bounded_at_2(call):
    """The clamp of the gate only delays the overflow."""
    return prefill(call, decay=call.g.clamp(max=2).exp())


@mutant("gdn_prefill", "gate_strong")
def decay_is_divided_out(call):
    """The chunk form with exp(-cumsum g): overflow, then inf * 0 = NaN."""
    return chunked(call, between=lambda later, earlier: later.exp() * (-earlier).exp())


@mutant("gdn_prefill", "gate_reset")
def gates_are_subtracted(call):
    """The decay between two tokens is exp(G_i - G_j) of running sums: -inf - -inf is NaN behind a gate of -inf."""
    return chunked(call)


@mutant("gdn_prefill", "residues", "every_residue")
def final_state_decays_by_the_padding(call):
    """The running sum of the gate is read at the chunk's last slot, which is padding (0) where a chunk is not full."""
    return chunked(call, last=lambda total: total[..., -1:] * (total.shape[-1] == CHUNK))


@mutant("gdn_prefill", "residues", "every_residue")
def state_of_the_last_full_chunk(call):
    """Tokens of a chunk that is not full are put out, but never reach the state."""
    o = call(state=call.state.clone())
    bounds = call.cu_seqlens.tolist()
    for n, (start, end) in enumerate(pairwise(bounds)):
        full = call.cu_seqlens.new_tensor([start, end - (end - start) % CHUNK])
        own = slice(n, n + 1)
        call(cu_seqlens=full, state_indices=call.state_indices[own], has_initial_state=call.has_initial_state[own])
    return o


@mutant("gdn_prefill", "continued")
def continues_from_zero(call):
    """The state of an earlier call is ignored."""
    return call(has_initial_state=torch.zeros_like(call.has_initial_state))


@mutant("gdn_prefill", "fresh")
def starts_from_what_the_slot_holds(call):
    """A new sequence starts from the state that the slot's last owner left."""
    return call(has_initial_state=torch.ones_like(call.has_initial_state))


@mutant("gdn_prefill", "fresh_over_nan")
def clears_the_slot_with_a_product(call):
    """A new sequence starts from 0 times the slot's old state: NaN if that was."""
    old = call.state[call.state_indices.long().clamp(min=0)] * 0
    for index, fresh, zero in zip(call.state_indices.tolist(), ~call.has_initial_state, old, strict=True):
        if index >= 0 and fresh:
            call.state[index] = zero
    return call(has_initial_state=torch.ones_like(call.has_initial_state) & (call.state_indices >= 0))


@mutant("gdn_prefill", "nan_value")
def sanitises(call):
    """NaN is made 0, so that every layer puts out zeros and the model looks alive."""
    o = call()
    call.state.nan_to_num_(0)
    return o.nan_to_num(0)


@mutant("gdn_prefill", "nan_value")
def nan_goes_back_in_time(call):
    """The causal mask is a product with 0: a NaN reaches the tokens before it in the chunk."""
    o = call()
    bounds = call.cu_seqlens.tolist()
    for first, end in pairwise(bounds):
        for c in range(first, end, CHUNK):
            chunk = o[c : min(c + CHUNK, end)]
            chunk += 0 * chunk.sum(0, keepdim=True)
    return o


@mutant("gdn_prefill", "nan_value")
def nan_reaches_all_heads(call):
    """Heads share a tile, and are told apart by a product with 0."""
    return call(v=call.v + 0 * call.v.sum(1, keepdim=True))


@mutant("gdn_prefill", "large_state")
def state_is_clamped_to_100(call):
    """The state is kept within +-100: right on small inputs."""
    return prefill(call, keep=lambda s: s.clamp(-100, 100))


@mutant("gdn_prefill", "large_state")
def state_is_clamped_to_float16(call):
    """The state is kept within +-65504, the range of float16."""
    return prefill(call, keep=lambda s: s.clamp(-65504, 65504))


@mutant("gdn_prefill", "sizes", "residues")
def state_is_rounded_per_token(call):
    """The state is bfloat16 from token to token."""
    return prefill(call, keep=lambda s: s.bfloat16().to(s.dtype))


@mutant("gdn_prefill", "sizes")
def decays_after_the_update(call):
    """S <- decay * (S + correction): what a token writes is decayed at once."""
    def late(s, q, k, v, decay, beta, scale):
        s, _ = step(s, q, k, v, torch.ones_like(decay), beta, scale)
        s = decay[..., None, None] * s
        return s, scale * apply(s, q)

    return prefill(call, step=late)


@mutant("gdn_prefill", "sizes")
def corrects_the_undecayed_state(call):
    """v - S k is taken before the state decays."""
    def early(s, q, k, v, decay, beta, scale):
        correction = beta[..., None] * (v - apply(s, k))
        s = decay[..., None, None] * s + correction[..., None] * k[..., None, :]
        return s, scale * apply(s, q)

    return prefill(call, step=early)


@mutant("gdn_prefill", "sizes")
def beta_is_left_out(call):
    """Every token writes with full strength."""
    return call(beta=torch.ones_like(call.beta))


@mutant("gdn_prefill", "sizes")
def states_in_order_of_sequences(call):
    """Sequence n ends in slot n of the pool, whatever its index is."""
    return prefill(call, slot=lambda n, slot: n)


@mutant("gdn_prefill", "no_slot")
def negative_index_is_the_last_slot(call):
    """The final state of a sequence without a slot is written from behind."""
    return prefill(call, slot=lambda n, slot: slot % len(call.state))


@mutant("gdn_prefill", "empty_fresh")
def empty_sequence_keeps_the_slot(call):
    """A new sequence without tokens leaves in its slot what the last owner wrote, instead of zero."""
    tokens = call.cu_seqlens.diff()
    return prefill(call, slot=lambda n, slot: slot if tokens[n] else -1)


@mutant("gdn_prefill", "uncovered_tokens")
def tokens_of_no_sequence_are_not_written(call):
    """Rows behind the last sequence keep what the memory held."""
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    first, end = int(call.cu_seqlens[0]), int(call.cu_seqlens[-1])
    o[first:end] = call()[first:end]
    return o


@mutant("gdn_prefill", "ragged", "empty_fresh")
def state_runs_on_into_the_next_sequence(call):
    """A new sequence starts from where the one before it ended."""
    last = []

    def start(state, slot, dtype):
        return last[-1] if last and slot < 0 else initial_state(state, slot, dtype)

    def keep(s):
        last[:] = [s]
        return s

    return prefill(call, start=start, keep=keep)


@mutant("gdn_prefill", "sizes")
def float32_has_no_kernel(call):
    """float32 activations reach a kernel that takes half types only, and no guard says so."""
    if call.q.dtype == torch.float32:
        raise RuntimeError("expected scalar type Half but found Float")
    return call()


@mutant("gdn_prefill", "sizes", "shared_page")
def clears_the_page_behind_the_state(call):
    """A slot is cleared as a page, with the padding that may be another layer's state."""
    o = call()
    for index in call.state_indices.tolist():
        if 0 <= index < len(call.state) - 1:
            size = call.state[0].numel()
            at = call.state.storage_offset() + index * call.state.stride(0) + size
            call.state.as_strided((call.state.stride(0) - size,), (1,), at).zero_()
    return o


@mutant("gdn_prefill", "many_heads")
def heads_beyond_16_are_cleared(call):
    """One group of 16 heads is worked on; the rest is 0."""
    o = call()
    o[:, 16:] = 0
    return o


@mutant("gdn_prefill", "beta_beyond_1")
def beta_is_at_most_1(call):
    """beta is taken for a probability, and clamped to one."""
    return call(beta=call.beta.clamp(0, 1))
