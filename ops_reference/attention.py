"""Attention over a paged cache: writing keys and values into it, decoding one token, prefilling many.

A cache is [NB,BS,HK,D]: NB blocks (pages) of BS tokens. Token j of a sequence lives in block `block_table[j // BS]` at
offset `j % BS`. Only dimension 3 has to be contiguous: pages may be padded, and keys and values may share one buffer.
What the formulas do not reach is never read: slots that no token occupies, entries of a block table beyond the last
token, tokens before the window. A block id that is read has to be within [0, NB): on a CPU any other is an
OpExecutionError, under every policy; on a GPU nobody looks, as that would wait for the data.
"""

from __future__ import annotations

import torch
from torch import Tensor

import shim
from ops_reference.common import INT32, INT64, NATIVE_ACT, names_of, need_act, need_tensor, refuse, wide

MAX_HEAD_SIZE = 256


@shim.op(mutates=("key_cache", "value_cache"))
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes the keys and values of T tokens into their slots of the cache, in place.

    key, value [T,HK,D] act; key_cache, value_cache [NB,BS,HK,D] act; slot_mapping [T] int64.

        key_cache[slot // BS, slot % BS] = key[t] with slot = slot_mapping[t]; value likewise; slot < 0 is skipped

    Slots are distinct, but for the negative ones. Raises OpArgumentError for wrong dtypes and shapes.
    """
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    block_size = key_cache.shape[1]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, offsets] = key[used]
    value_cache[blocks, offsets] = value[used]


@shim.op()
def paged_attention_v2(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Decode attention: one query token per sequence, the last of its seq_lens[b] cached tokens.

    q [B,HQ,D] act, caches [NB,BS,HK,D] act, block_tables [B,MB] int32, seq_lens [B] int32, alibi_slopes [HQ] float32
    -> [B,HQ,D] act. The formula is `attend`'s, with one query. A sequence of length 0 gives zeros.

    Source: vLLM's PagedAttention (arXiv:2309.06180). Raises OpArgumentError for wrong dtypes and shapes.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for b, length in enumerate(seq_lens.tolist()):
        if length > 0:
            first = max(0, length - window) if window > 0 else 0
            keys = gather(key_cache, block_tables[b], first, length)
            values = gather(value_cache, block_tables[b], first, length)
            out[b] = attend(q[b : b + 1], keys, values, scale, softcap, window, alibi_slopes)[0]
    return out


@shim.op()
def paged_prefill(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's new tokens, which are the last of its seq_lens[n] cached ones, over them all.

    q [T,HQ,D] act: sequence n owns rows cu_seqlens_q[n] to cu_seqlens_q[n+1]; caches [NB,BS,HK,D] act,
    block_tables [N,MB] int32, cu_seqlens_q [N+1] int32, seq_lens [N] int32, alibi_slopes [HQ] float32 -> [T,HQ,D] act.
    The formula is `attend`'s. Rows that have no place in a sequence are zero: those from cu_seqlens_q[N] on, and those
    that a sequence shorter than its count of new tokens (length 0, as padding has it) does not reach.

    Raises OpArgumentError for wrong dtypes and shapes.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    bounds = cu_seqlens_q.tolist()
    for n, length in enumerate(seq_lens.tolist()):
        end = bounds[n + 1]
        start = max(bounds[n], end - length)
        if end > start:
            first = max(0, length - (end - start) + 1 - window) if window > 0 else 0
            keys = gather(key_cache, block_tables[n], first, length)
            values = gather(value_cache, block_tables[n], first, length)
            out[start:end] = attend(q[start:end], keys, values, scale, softcap, window, alibi_slopes)
    return out


def gather(cache: Tensor, block_table: Tensor, first: int, length: int) -> Tensor:
    """Tokens `first` to `length` of one sequence, [length - first, HK, D]. IndexError for a block that is not there."""
    token = torch.arange(first, length, device=cache.device)
    block_size = cache.shape[1]
    blocks = block_table[token // block_size].long()
    if (blocks < 0).any():  # torch would count them from the end
        raise IndexError(f"block id {int(blocks.min())} in block_tables is negative")
    return cache[blocks, token % block_size]


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Causal attention of a sequence's last tokens over that sequence: q [n,HQ,D], keys, values [L,HK,D] -> [n,HQ,D].

    Query head h reads key head h // (HQ/HK). With i and j the positions of query and key in the sequence:

        s_ij = scale * q_i . k_j
        s_ij = softcap * tanh(s_ij / softcap)       where softcap > 0
        s_ij = s_ij + alibi_slopes[h] * (j - i)     where given; after the cap, as in vLLM
        o_i  = sum_j softmax_j(s_ij) v_j            over j <= i, and j > i - window where window > 0
    """
    (count, heads, size), (length, kv_heads, _) = q.shape, keys.shape
    width = wide(q.dtype)
    grouped = q.to(width).reshape(count, kv_heads, heads // kv_heads, size)
    values = values.to(width)
    scores = torch.einsum("ihgd,jhd->hgij", grouped, keys.to(width)) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(length - count, length, device=q.device)[:, None]
    j = torch.arange(length, device=q.device)[None, :]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(width).view(kv_heads, -1, 1, 1) * (j - i)
    visible = (j <= i) & (j > i - window) if window > 0 else j <= i
    p = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)

    # 0 * NaN is NaN: values that are not finite stay out of the product, and are added to the queries that see them
    odd = ~values.isfinite().flatten(1).all(dim=1)
    out = torch.einsum("hgij,jhd->ihgd", p, values.masked_fill(odd[:, None, None], 0))
    for t in odd.nonzero().flatten().tolist():
        sees = visible[:, t]
        out[sees] += torch.einsum("hgi,hd->ihgd", p[:, :, sees, t], values[t])
    return out.reshape(count, heads, size).to(q.dtype)


# ---- beside the references: checks, domains, fakes, example arguments ------------------------------------------------


def _check_caches(op: str, key_cache, value_cache, like: Tensor, device: int, size: int) -> int:
    """Refuses caches that do not fit activations `like` of head size `size`; returns their count of heads."""
    dtypes = {like.dtype}
    shape = need_tensor(op, "key_cache", key_cache, 4, dtypes, device)
    _, block_size, heads, cache_size = shape
    if cache_size != size or block_size < 1:
        refuse(op, "key_cache", f"[NB,BS,HK,{size}] with blocks of one token or more", key_cache)
    if need_tensor(op, "value_cache", value_cache, 4, dtypes, device) != shape:
        refuse(op, "value_cache", f"the shape of key_cache, {list(shape)}", value_cache)
    return heads


@reshape_and_cache.checks
def _check_cache_write(key, value, key_cache, value_cache, slot_mapping):
    op = "reshape_and_cache"
    shape = need_act(op, "key", key, 3)
    tokens, heads, size = shape
    device = key.get_device()
    if need_tensor(op, "value", value, 3, {key.dtype}, device) != shape:
        refuse(op, "value", f"the shape of key, {list(shape)}", value)
    if _check_caches(op, key_cache, value_cache, key, device, size) != heads:
        refuse(op, "key_cache", f"[NB,BS,{heads},{size}]", key_cache)
    if need_tensor(op, "slot_mapping", slot_mapping, 1, INT64, device)[0] != tokens:
        refuse(op, "slot_mapping", f"[{tokens}], one per token", slot_mapping)


def _check_attention(op, q, key_cache, value_cache, block_tables, seq_lens, scale, softcap, window, alibi_slopes):
    """Refuses what decode and prefill both refuse; returns the counts of tokens and of sequences, and the device."""
    tokens, heads, size = need_act(op, "q", q, 3)
    device = q.get_device()
    if not 1 <= size <= MAX_HEAD_SIZE or heads < 1:
        refuse(op, "q", f"[tokens,heads,D] with a head or more and D from 1 to {MAX_HEAD_SIZE}", q)
    kv_heads = _check_caches(op, key_cache, value_cache, q, device, size)
    if kv_heads == 0 or heads % kv_heads:
        refuse(op, "key_cache", f"a count of heads that divides the {heads} of q", key_cache)
    (count,) = need_tensor(op, "seq_lens", seq_lens, 1, INT32, device)
    if need_tensor(op, "block_tables", block_tables, 2, INT32, device)[0] != count:
        refuse(op, "block_tables", f"[{count},MB], a row per sequence", block_tables)
    if not isinstance(scale, float | int):
        refuse(op, "scale", "a number", scale)
    if not isinstance(softcap, float | int) or not softcap >= 0:
        refuse(op, "softcap", "0 for none, or a positive number", softcap)
    if not isinstance(window, int) or window < 0:
        refuse(op, "window", "0 for none, or a positive count of tokens", window)
    slopes = alibi_slopes
    if slopes is not None and need_tensor(op, "alibi_slopes", slopes, 1, {wide(q.dtype)}, device)[0] != heads:
        refuse(op, "alibi_slopes", f"[{heads}], one per query head", slopes)
    return tokens, count, device


def _usual(q, key_cache, value_cache, block_tables, seq_lens, scale, softcap, window, alibi_slopes, sequences) -> bool:
    """Whether a call is plainly right, in one expression, as it runs in every call. The checks below look at others."""
    try:
        act, device, (_, heads, size), cache = q.dtype, q.get_device(), q.shape, key_cache.shape
        _, block_size, kv_heads, cache_size = cache
        return (
            (act in NATIVE_ACT and key_cache.dtype is value_cache.dtype is act and alibi_slopes is None)
            and block_tables.dtype is seq_lens.dtype is torch.int32
            and key_cache.get_device() == value_cache.get_device() == device
            and block_tables.get_device() == seq_lens.get_device() == device
            and (value_cache.shape == cache and seq_lens.shape == (sequences,) and block_tables.shape[0] == sequences)
            and (block_tables.dim() == 2 and cache_size == size and 1 <= size <= MAX_HEAD_SIZE)
            and (block_size > 0 and kv_heads > 0 and heads > 0 and heads % kv_heads == 0)
            and (isinstance(scale, float | int) and softcap >= 0 and window >= 0)
        )
    except (AttributeError, TypeError, ValueError):  # no tensor, or another count of dimensions
        return False


@paged_attention_v2.checks
def _check_decode(
    q, key_cache, value_cache, block_tables, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    op, given = "paged_attention_v2", (q, key_cache, value_cache, block_tables, seq_lens, scale, softcap, window)
    if isinstance(q, Tensor) and _usual(*given, alibi_slopes, q.shape[0]):
        return
    tokens, count, _ = _check_attention(op, *given, alibi_slopes)
    if count != tokens:
        refuse(op, "seq_lens", f"[{tokens}], one per row of q", seq_lens)


@paged_prefill.checks
def _check_prefill(
    q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    op, given = "paged_prefill", (q, key_cache, value_cache, block_tables, seq_lens, scale, softcap, window)
    bounds = cu_seqlens_q
    if (
        (isinstance(bounds, Tensor) and bounds.dtype is torch.int32 and bounds.dim() == 1)
        and _usual(*given, alibi_slopes, bounds.shape[0] - 1)
        and bounds.get_device() == q.get_device()
    ):
        return
    _, count, device = _check_attention(op, *given, alibi_slopes)
    if need_tensor(op, "cu_seqlens_q", bounds, 1, INT32, device)[0] != count + 1:
        refuse(op, "cu_seqlens_q", f"[{count + 1}], one more than sequences", bounds)


@reshape_and_cache.domain
@paged_attention_v2.domain
@paged_prefill.domain
def _domain(*args, **kwargs):
    first = args[0] if args else kwargs.get("q", kwargs.get("key"))
    return first.dtype in NATIVE_ACT or f"activations are {names_of([first.dtype])}"


@reshape_and_cache.fakes
def _fake_cache_write(key, value, key_cache, value_cache, slot_mapping):
    return None


@paged_attention_v2.fakes
@paged_prefill.fakes
def _fake_attention(q, *args, **kwargs):
    return q.new_empty(q.shape)


def make_cache(generator, device, dtype, NB: int, BS: int, HK: int, D: int) -> tuple[Tensor, Tensor]:
    """A key and a value cache [NB,BS,HK,D], interleaved page by page in one buffer as vLLM lays them out."""
    pages = torch.randn(NB, 2, BS, HK, D, generator=generator).to(device, dtype)
    return pages[:, 0], pages[:, 1]


def make_block_tables(generator, device, lengths, NB: int, BS: int) -> Tensor:
    """Distinct blocks in random order for each sequence; the entries that it does not need are garbage."""
    needed = [-(-length // BS) for length in lengths]
    order = torch.randperm(NB, generator=generator).to(torch.int32)
    tables = torch.full((len(lengths), max(needed, default=0) + 1), 2**31 - 1, dtype=torch.int32)
    start = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[start : start + count]
        start += count
    return tables.to(device)


def make_packed(generator, device, dtype, T: int, *heads: int, D: int) -> tuple[Tensor, ...]:
    """Views [T,heads,D] into one packed projection, as vLLM passes q, k and v."""
    packed = torch.randn(T, sum(heads) * D, generator=generator).to(device, dtype)
    return tuple(part.unflatten(1, (-1, D)) for part in packed.split([count * D for count in heads], dim=1))


@reshape_and_cache.inputs
def _inputs_cache_write(generator, device, dtype, T=64, HQ=16, HK=2, D=256, BS=16, NB=None):
    NB = NB or -(-T // BS) + 2
    key_cache, value_cache = make_cache(generator, device, dtype, NB, BS, HK, D)
    _, key, value = make_packed(generator, device, dtype, T, HQ, HK, HK, D=D)
    slots = torch.randperm(NB * BS, generator=generator)[:T]
    return {
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": slots.to(device),
    }


def _inputs_common(
    generator, device, dtype, tokens, lengths, HQ=16, HK=2, D=256, BS=16, NB=None, softcap=0.0, window=0, alibi=False
) -> dict:
    NB = NB or sum(-(-length // BS) for length in lengths) + 2
    key_cache, value_cache = make_cache(generator, device, dtype, NB, BS, HK, D)
    slopes = 2.0 ** (-8 * torch.arange(1, HQ + 1) / HQ)  # the geometric series of the ALiBi paper (arXiv:2108.12409)
    return {
        "q": make_packed(generator, device, dtype, tokens, HQ, HK, HK, D=D)[0],
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": make_block_tables(generator, device, lengths, NB, BS),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
        "scale": D**-0.5,
        "softcap": softcap,
        "window": window,
        "alibi_slopes": slopes.to(device, wide(dtype)) if alibi else None,
    }


@paged_attention_v2.inputs
def _inputs_decode(generator, device, dtype, lengths=(37, 5, 64), **sizes):
    return _inputs_common(generator, device, dtype, len(lengths), lengths, **sizes)


@paged_prefill.inputs
def _inputs_prefill(generator, device, dtype, new=(20, 1, 33), prefix=(0, 12, 31), **sizes):
    lengths = [a + b for a, b in zip(new, prefix, strict=True)]
    bounds = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    return _inputs_common(generator, device, dtype, sum(new), lengths, **sizes) | {"cu_seqlens_q": bounds}
