"""The references of paged attention: equal to contiguous attention, and to each other, in float64."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import shim
from ops_reference.attention import attend, gather, paged_attention_v2, paged_prefill, reshape_and_cache
from shim.policy import Policy, using

NAN = float("nan")
SIZES = {"HQ": 6, "HK": 2, "D": 24, "BS": 8}
FORMS = [{}, {"window": 7}, {"softcap": 2.0}, {"alibi": True}, {"window": 9, "softcap": 0.7, "alibi": True}]


def example(op, **sizes):
    return op.example(torch.Generator().manual_seed(3), "cpu", torch.float64, **SIZES, **sizes)


def sequences(arguments):
    """(keys, values) of every sequence, contiguous: [L,HK,D]."""
    for table, length in zip(arguments["block_tables"], arguments["seq_lens"].tolist(), strict=True):
        yield tuple(gather(arguments[name], table, 0, length) for name in ("key_cache", "value_cache"))


def sdpa(q, keys, values, scale):
    """torch's own causal attention of the last len(q) tokens."""
    mask = torch.ones(len(q), len(keys), dtype=torch.bool).tril(len(keys) - len(q))
    q, keys, values = (t.transpose(0, 1)[None] for t in (q, keys, values))
    return scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def by_the_formula(q, keys, values, scale, softcap=0.0, window=0, alibi_slopes=None):
    """The docstring of `attend`, one query and one head at a time."""
    out = torch.empty_like(q)
    for row in range(len(q)):
        i = len(keys) - len(q) + row
        seen = range(max(0, i - window + 1) if window else 0, i + 1)
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // keys.shape[1])
            scores = []
            for j in seen:
                score = scale * (q[row, head] @ keys[j, group])
                if softcap:
                    score = softcap * torch.tanh(score / softcap)
                if alibi_slopes is not None:
                    score = score + alibi_slopes[head] * (j - i)
                scores.append(score)
            out[row, head] = torch.stack(scores).softmax(0) @ values[list(seen), group]
    return out


def test_decode_is_contiguous_attention():
    arguments = example(paged_attention_v2, lengths=(1, 8, 37, 64))
    out = paged_attention_v2.reference(**arguments)
    for b, (keys, values) in enumerate(sequences(arguments)):
        torch.testing.assert_close(out[b : b + 1], sdpa(arguments["q"][b : b + 1], keys, values, arguments["scale"]))


def test_prefill_is_contiguous_attention():
    arguments = example(paged_prefill, new=(5, 1, 0, 20), prefix=(0, 30, 9, 13))
    out = paged_prefill.reference(**arguments)
    bounds = arguments["cu_seqlens_q"].tolist()
    for n, (keys, values) in enumerate(sequences(arguments)):
        rows = slice(bounds[n], bounds[n + 1])
        torch.testing.assert_close(out[rows], sdpa(arguments["q"][rows], keys, values, arguments["scale"]))


@pytest.mark.parametrize("form", FORMS)
def test_window_softcap_and_alibi_follow_the_formula(form):
    arguments = example(paged_prefill, new=(12,), prefix=(6,), **form)
    keys, values = next(sequences(arguments))
    rest = [arguments[name] for name in ("scale", "softcap", "window", "alibi_slopes")]
    expected = by_the_formula(arguments["q"], keys, values, *rest)
    torch.testing.assert_close(paged_prefill.reference(**arguments), expected)


@pytest.mark.parametrize("form", FORMS)
def test_decode_is_prefill_of_one_token(form):
    decode = example(paged_attention_v2, lengths=(1, 9, 30), **form)
    prefill = decode | {"cu_seqlens_q": torch.arange(4, dtype=torch.int32)}
    torch.testing.assert_close(paged_attention_v2.reference(**decode), paged_prefill.reference(**prefill))


@pytest.mark.parametrize("form", FORMS)
def test_split_prefill_is_whole_prefill(form):
    whole = example(paged_prefill, new=(30,), prefix=(0,), **form)
    out = paged_prefill.reference(**whole)
    for start, end in ((0, 11), (11, 12), (12, 30)):
        part = whole | {
            "q": whole["q"][start:end],
            "cu_seqlens_q": torch.tensor([0, end - start], dtype=torch.int32),
            "seq_lens": torch.tensor([end], dtype=torch.int32),
        }
        torch.testing.assert_close(paged_prefill.reference(**part), out[start:end])


def test_nan_value_reaches_later_queries_of_its_head_only():
    q, keys, values = (torch.randn(6, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    clean = attend(q, keys, values, 0.5)
    values[3, 1, 2] = NAN
    out = attend(q, keys, values, 0.5)
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[3:, 2:, 2] = True
    assert torch.equal(out.isnan(), hit)
    torch.testing.assert_close(out[~hit], clean[~hit])


def test_nan_key_reaches_later_queries_of_its_head_only():
    q, keys, values = (torch.randn(6, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    keys[3, 0, 1] = NAN
    out = attend(q, keys, values, 0.5, window=2)
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[3:5, :2] = True
    assert torch.equal(out.isnan(), hit)


def test_sequences_of_length_zero_and_rows_of_no_sequence_are_zero():
    decode = example(paged_attention_v2, lengths=(0, 5))
    assert not paged_attention_v2.reference(**decode)[0].any()
    prefill = example(paged_prefill, new=(3, 2), prefix=(0, 0))
    prefill["q"] = torch.cat([prefill["q"], torch.full_like(prefill["q"], NAN)])
    prefill["seq_lens"][1] = 0
    out = paged_prefill.reference(**prefill)
    assert out[:3].all()
    assert not out[3:].any()


@pytest.mark.parametrize("mode", ["strict", "auto", "reference"])
@pytest.mark.parametrize("op", [paged_attention_v2, paged_prefill], ids=lambda op: op.name)
@pytest.mark.parametrize("block", [-1, 10**6])
def test_a_block_that_is_not_there_is_an_error_under_every_policy(op, block, mode, scratch):
    arguments = op.example(torch.Generator().manual_seed(3), "cpu", torch.float32, **SIZES)
    arguments["block_tables"][0, 0] = block
    with using(Policy(mode)), pytest.raises(shim.OpExecutionError):
        op(**arguments)


def test_cache_write_then_gather_returns_the_tokens():
    arguments = example(reshape_and_cache, T=20)
    slots = torch.arange(20)
    arguments["slot_mapping"] = torch.where(slots % 7 == 3, -1 - slots, slots)
    before = arguments["key_cache"].clone()
    reshape_and_cache.reference(**arguments)
    written = gather(arguments["key_cache"], torch.arange(3, dtype=torch.int32), 0, 20)
    kept = slots % 7 == 3
    assert torch.equal(written[~kept], arguments["key"][~kept])
    assert torch.equal(written[kept], gather(before, torch.arange(3, dtype=torch.int32), 0, 20)[kept])
