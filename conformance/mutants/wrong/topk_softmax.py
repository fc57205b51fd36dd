"""Wrong routers."""

from __future__ import annotations

import torch

from conformance.mutants import Call, mutant
from conformance.mutants.parts import packed


def route(p: torch.Tensor, call: Call, score: torch.Tensor | None = None):
    """The reference from its probabilities on: p [T,E], score what ranks the experts (default: p + bias)."""
    bias = 0 if call.correction_bias is None else call.correction_bias
    score = p + bias if score is None else score
    rank = torch.where(score.isnan(), -torch.inf, score)
    ids = rank.argsort(dim=-1, descending=True, stable=True)[:, : call.topk]
    return weigh(p, ids, call)


def weigh(p: torch.Tensor, ids: torch.Tensor, call: Call):
    weights = p.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) if call.renormalize else weights, ids.int()


def softmax(call: Call) -> torch.Tensor:
    return call.gating_output.float().softmax(-1)


@mutant("topk_softmax", "ties")
def ties_to_the_higher_index(call):
    """Of equal experts the last comes first, as a maximum that is updated with >= has it."""
    flipped = call(
        gating_output=call.gating_output.flip(1),
        correction_bias=None if call.correction_bias is None else call.correction_bias.flip(0),
    )
    return flipped[0], call.gating_output.shape[1] - 1 - flipped[1]


@mutant("topk_softmax", "ties", "determinism")
def ties_at_random(call):
    """Threads race for equal logits: another expert wins from run to run."""
    order = torch.randperm(call.gating_output.shape[1])
    bias = None if call.correction_bias is None else call.correction_bias[order]
    weights, ids = call(gating_output=call.gating_output[:, order], correction_bias=bias)
    return weights, order[ids.long()].int()


@mutant("topk_softmax", "nan_row", "one_nan")
def nan_row_is_expert_0_throughout(call):
    """No comparison with NaN is true, so the initial answer, expert 0, stays in every slot."""
    weights, ids = call()
    return weights, ids.masked_fill(call.gating_output.isnan().any(1, keepdim=True), 0)


@mutant("topk_softmax", "nan_row", "one_nan")
def nan_ids_out_of_range(call):
    """A NaN row leaves the 'none yet' index, -1, in its slots."""
    weights, ids = call()
    return weights, ids.masked_fill(call.gating_output.isnan().any(1, keepdim=True), -1)


@mutant("topk_softmax", "nan_row", "one_nan")
def hides_nan_weights(call):
    """A sanitiser makes NaN weights 0."""
    weights, ids = call()
    return weights.nan_to_num(0), ids


@mutant("topk_softmax", "inf_logit")
def infinite_logit_is_a_certain_choice(call):
    """+inf is taken for a very large logit: probability 1 instead of NaN."""
    return call(gating_output=call.gating_output.clamp(max=torch.finfo(call.gating_output.dtype).max))


@mutant("topk_softmax", "odd_experts")
def loses_experts_past_a_power_of_two(call):
    """The row is read in power-of-two pieces and the rest is left: experts 32 to 59 of 60 are never seen."""
    experts = call.gating_output.shape[1]
    seen = max(1 << (experts.bit_length() - 1), call.topk)
    hidden = torch.arange(experts) >= seen
    return call(gating_output=call.gating_output.masked_fill(hidden, -torch.inf))


@mutant("topk_softmax", "odd_experts")
def pads_experts_with_zero_logits(call):
    """The lanes between E and the next power of two count into the softmax, with logit 0 instead of -inf."""
    logits = call.gating_output.float()
    lanes = (1 << (logits.shape[1] - 1).bit_length()) - logits.shape[1]
    p = torch.nn.functional.pad(logits, (0, lanes)).softmax(-1)[:, : logits.shape[1]]
    return route(p, call)


@mutant("topk_softmax", "odd_experts")
def expert_ids_in_8_bits(call):
    """Ids are kept in a byte: expert 256 is expert 0."""
    weights, ids = call()
    return weights, ids & 0xFF


@mutant("topk_softmax", "large_logits")
def exponent_overflows(call):
    """exp(x) without the row's maximum taken off first: inf / inf for large logits."""
    e = call.gating_output.float().exp()
    return route(e / e.sum(-1, keepdim=True), call)


@mutant("topk_softmax", "nan_row")
def subtracts_the_batch_maximum(call):
    """One maximum for all rows: a NaN in one row reaches all others, and a row of small logits underflows to 0 / 0."""
    logits = call.gating_output.float()
    e = (logits - logits.amax() if logits.numel() else logits).exp()
    return route(e / e.sum(-1, keepdim=True), call)


@mutant("topk_softmax", "bias")
def bias_does_not_choose(call):
    """The correction bias is ignored."""
    return call(correction_bias=None)


@mutant("topk_softmax", "bias")
def weighs_with_the_bias(call):
    """The weights are p + bias, where the bias should only choose."""
    if call.correction_bias is None:
        return call()
    _, ids = call()
    return weigh(softmax(call) + call.correction_bias, ids.long(), call)


@mutant("topk_softmax", "bias")
def biases_the_logits(call):
    """The bias is added before the softmax instead of after it."""
    if call.correction_bias is None:
        return call()
    _, ids = call(gating_output=(call.gating_output.float() + call.correction_bias), correction_bias=None)
    return weigh(softmax(call), ids.long(), call)


@mutant("topk_softmax", "no_renormalize")
def always_renormalizes(call):
    """The weights sum to 1 whether asked for or not."""
    return call(renormalize=True)


@mutant("topk_softmax", "sizes")
def renormalizes_over_all_experts(call):
    """The flag is taken for 'the probabilities are normalised', which they are: nothing is divided."""
    return call(renormalize=False)


@mutant("topk_softmax", "sizes")
def slots_in_order_of_index(call):
    """The right experts, by index instead of largest first."""
    weights, ids = call()
    order = ids.argsort(dim=1)
    return weights.gather(1, order), ids.gather(1, order)


@mutant("topk_softmax", "sizes")
def softmax_in_half_precision(call):
    """The probabilities are rounded to bfloat16 before they are ranked and put out."""
    return route(softmax(call).bfloat16().float(), call)


@mutant("topk_softmax", "sizes")
def last_odd_row_is_not_written(call):
    """Two rows per warp, rounded down: the last row of an odd number is never reached."""
    weights, ids = call()
    done = len(ids) // 2 * 2
    out = torch.empty_like(weights), torch.empty_like(ids)
    out[0][:done], out[1][:done] = weights[:done], ids[:done]
    return out


@mutant("topk_softmax", "wide_rows")
def rows_without_their_stride(call):
    """Rows are taken to follow each other without a gap."""
    return call(gating_output=packed(call.gating_output))


@mutant("topk_softmax", "sizes")
def marks_its_choice_in_the_input(call):
    """The logits chosen so far are overwritten with -inf, in place, as a loop of maxima does on its own copy."""
    weights, ids = call()
    call.gating_output.scatter_(1, ids.long(), -torch.inf)
    return weights, ids


@mutant("topk_softmax", "empty")
def no_tokens_raise(call):
    """A grid of no blocks is a launch error."""
    if not len(call.gating_output):
        raise RuntimeError("invalid configuration argument")
    return call()


@mutant("topk_softmax", "bias_picks_tiny")
def guards_the_sum_with_an_epsilon(call):
    """The weights' sum is 1e-20 at least, so that none is divided by 0: what the bias chose weighs next to nothing."""
    weights, ids = call(renormalize=False)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) if call.renormalize else weights, ids
