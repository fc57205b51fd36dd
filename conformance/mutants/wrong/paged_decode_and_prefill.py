"""What decode and prefill over a paged cache may both get wrong."""

from __future__ import annotations

import torch

from conformance.mutants import mutant
from conformance.mutants.parts import each_sequence, packed, queries


def both(*kinds: str):
    """For decode and for prefill."""
    return lambda wrong: mutant("paged_attention_v2", *kinds)(mutant("paged_prefill", *kinds)(wrong))


@both("block_ids")
def block_ids_in_16_bits(call):
    """Block ids are read as 16 bits: garbage once the pool has more than 65,536 blocks."""
    return call(block_tables=call.block_tables & 0xFFFF)


@both("long")
def pages_above_128_tokens(call):
    """Beyond 4,096 tokens the offset in a page is taken modulo 128, the largest page there was."""
    size = call.key_cache.shape[1]
    if size <= 128 or int(call.seq_lens.max()) <= 4096:
        return call()
    token = torch.arange(size)
    moved = torch.where(token >= 128, token % 128, token)
    return call(key_cache=call.key_cache[:, moved], value_cache=call.value_cache[:, moved])


@both("head_sizes")
def at_most_128_of_a_head(call):
    """Tiles are tuned for heads up to 128; the rest of a head of 256 takes no part in the scores."""
    q = call.q.clone()
    q[..., 128:] = 0
    return call(q=q)


@both("head_sizes")
def head_is_rounded_to_32(call):
    """The part of a head behind a multiple of 32 takes no part in the scores."""
    q = call.q.clone()
    q[..., q.shape[-1] // 32 * 32 :] = 0
    return call(q=q)


@both("forms")
def ignores_softcap(call):
    """The scores are not capped."""
    return call(softcap=0.0)


@both("forms")
def caps_without_scaling_back(call):
    """tanh(s / cap), without the factor cap in front."""
    return call(scale=call.scale / call.softcap, softcap=1.0) if call.softcap else call()


@both("window_sizes")
def ignores_window(call):
    """All cached tokens are seen."""
    return call(window=0)


@both("window_sizes")
def window_is_one_too_long(call):
    """The window is counted without the token itself."""
    return call(window=call.window + 1 if call.window else 0)


@both("forms")
def ignores_alibi(call):
    """The slopes are left out."""
    return call(alibi_slopes=None)


@both("forms")
def alibi_has_the_wrong_sign(call):
    """Far tokens are favoured."""
    return call(alibi_slopes=None if call.alibi_slopes is None else -call.alibi_slopes)


@both("forms")
def alibi_is_capped_too(call):
    """The bias is added before the cap."""
    if call.alibi_slopes is None or not call.softcap:
        return call()

    def attention(q, keys, values):
        (n, heads, _), length = q.shape, len(keys)
        k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (keys, values))
        i, j = torch.arange(length - n, length)[:, None], torch.arange(length)
        s = torch.einsum("ihd,jhd->hij", q.float(), k) * call.scale + call.alibi_slopes[:, None, None] * (j - i)
        visible = (j <= i) & (j > i - call.window) if call.window else j <= i
        p = (call.softcap * (s / call.softcap).tanh()).masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", p, v).to(q.dtype)

    return each_sequence(call, attention)


@both("scale")
def ignores_scale(call):
    """Always D^-0.5."""
    return call(scale=call.q.shape[-1] ** -0.5)


@both("heads")
def heads_are_dealt_out(call):
    """Query head h reads key head h % HK instead of h // (HQ/HK)."""
    heads, kv_heads = call.q.shape[1], call.key_cache.shape[2]
    order = torch.arange(heads).view(-1, kv_heads).T.flatten()  # position -> the head that reads that position's keys
    slopes = None if call.alibi_slopes is None else call.alibi_slopes[order]
    return call(q=call.q[:, order], alibi_slopes=slopes)[:, order.argsort()].contiguous()


@both("unused_nan")
def unused_slots_are_masked_with_a_product(call):
    """The last page is read whole, and what is beyond the length multiplied by 0: NaN in it stays."""
    out, size, bounds = call(), call.key_cache.shape[1], queries(call)
    for n, length in enumerate(call.seq_lens.tolist()):
        if length and length % size:
            rest = call.value_cache[int(call.block_tables[n, length // size]), length % size :]
            heads = call.q.shape[1] // rest.shape[1]
            out[bounds[n] : bounds[n + 1]] += 0 * rest.sum(0).repeat_interleave(heads, 0)
    return out


@both("nan_value", "nan_key", "nan_query")
def hides_nan(call):
    """A sanitiser makes NaN 0."""
    return call().nan_to_num(0, posinf=torch.inf, neginf=-torch.inf)


@both("zero_length")
def empty_sequence_is_nan(call):
    """A softmax over nothing is 0 / 0."""
    out, bounds = call(), queries(call)
    for n, length in enumerate(call.seq_lens.tolist()):
        if length == 0:
            out[bounds[n] : bounds[n + 1]] = torch.nan
    return out


@both("large_scores")
def exponent_overflows(call):
    """exp(s) without the maximum taken off first: inf / inf for large scores."""
    if call.softcap or call.window or call.alibi_slopes is not None:
        return call()

    def attention(q, keys, values):
        k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        e = (torch.einsum("ihd,jhd->hij", q.float(), k) * call.scale).exp().tril(len(keys) - len(q))
        return torch.einsum("hij,jhd->ihd", e / e.sum(-1, keepdim=True), v).to(q.dtype)

    return each_sequence(call, attention)


@both("padded_pages")
def pages_without_their_stride(call):
    """Pages are taken to follow each other, without the values that share their buffer."""
    return call(key_cache=packed(call.key_cache), value_cache=packed(call.value_cache))


@both("sparse_rows")
def queries_without_their_stride(call):
    """q is taken to be contiguous; it is a view of one projection."""
    return call(q=packed(call.q))


@both("long_windows")
def window_is_at_most_1024(call):
    """The window's keys lie in a ring of 1,024."""
    return call(window=min(call.window, 1024))


@both("scale_negative")
def scale_has_no_sign(call):
    """The scale is handed over as its logarithm."""
    return call(scale=abs(call.scale))
