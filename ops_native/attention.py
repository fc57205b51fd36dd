"""Native attention over the paged cache: cache writes, decode, prefill, at any strides but the innermost."""

from __future__ import annotations

import functools

import torch

import shim
from ops_native.libraries import CPU, CUDA, DTYPE, pointers, where
from ops_reference.attention import MAX_HEAD_SIZE

UNIT_QUERIES = 8  # query heads that cuda/paged_attention.cu takes at once
UNIT_BLOCKS = 4  # the most blocks that it has per SM


def _dense(**tensors):
    """True when the innermost dimension of each tensor is contiguous, else words."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            return f"{name} has an innermost stride of {tensor.stride(-1)}, needs 1"
    return True


def _supports_cache_write(key, value, key_cache, value_cache, slot_mapping):
    return _dense(key=key, value=value, key_cache=key_cache, value_cache=value_cache)


def _supports_decode(
    q, key_cache, value_cache, block_tables, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    usual = q.stride()[2] == key_cache.stride()[3] == value_cache.stride()[3] == 1
    return usual or _dense(q=q, key_cache=key_cache, value_cache=value_cache)


def _supports_prefill(
    q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    usual = q.stride()[2] == key_cache.stride()[3] == value_cache.stride()[3] == 1
    return usual or _dense(q=q, key_cache=key_cache, value_cache=value_cache)


@shim.native(
    "reshape_and_cache",
    library=(CPU, CUDA),
    symbols={"opshim_reshape_and_cache": "ppppp" + "i" * 16},
    supports=_supports_cache_write,
)
def reshape_and_cache(c, key, value, key_cache, value_cache, slot_mapping):
    slots = slot_mapping.contiguous()
    blocks, block_size, heads, size = key_cache.shape
    c.opshim_reshape_and_cache(
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slots.data_ptr(),
        key.element_size(),
        key.shape[0],
        heads,
        size,
        blocks,
        block_size,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *where(key),
    )


def _rows(block_tables):
    """Block tables whose rows are contiguous; those that vLLM passes are."""
    return block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()


def _slopes(alibi_slopes):
    return None if alibi_slopes is None else alibi_slopes.contiguous()


def _layout(q, key_cache, value_cache, tables):
    """Sizes and strides, in the order of the C functions."""
    blocks, block_size, kv_heads, size = key_cache.shape
    strides = *q.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3]
    return q.shape[1], kv_heads, size, blocks, block_size, tables.shape[1], tables.stride(0), *strides


@shim.native(
    "paged_attention_v2",
    library=CPU,
    symbols={"opshim_paged_attention_v2": "p" * 7 + "i" * 17 + "dd" + "i"},
    supports=_supports_decode,
)
def paged_attention_v2(
    c, q, key_cache, value_cache, block_tables, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tables, lengths = _rows(block_tables), seq_lens.contiguous()
    slopes = _slopes(alibi_slopes)
    c.opshim_paged_attention_v2(
        *pointers(q, key_cache, value_cache, tables, lengths, slopes, out),
        DTYPE[q.dtype],
        q.shape[0],
        *_layout(q, key_cache, value_cache, tables),
        scale,
        softcap,
        window,
        *where(q),
    )
    return out


@functools.cache
def _sm_count(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


@shim.native(
    "paged_attention_v2",
    library=CUDA,
    symbols={"opshim_paged_attention_v2": "p" * 9 + "i" * 18 + "dd" + "i"},
    supports=_supports_decode,
)
def paged_attention_v2_cuda(
    c, q, key_cache, value_cache, block_tables, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tables, lengths = _rows(block_tables), seq_lens.contiguous()
    slopes = _slopes(alibi_slopes)
    count, heads = q.shape[:2]
    units = key_cache.shape[2] * -(-heads // key_cache.shape[2] // UNIT_QUERIES)
    blocks = max(units, UNIT_BLOCKS * _sm_count(q.get_device()))
    records = torch.empty((blocks, 2, UNIT_QUERIES, MAX_HEAD_SIZE + 2), dtype=torch.float32, device=q.device)
    firsts = torch.empty(count + 1, dtype=torch.int32, device=q.device)
    c.opshim_paged_attention_v2(
        *pointers(q, key_cache, value_cache, tables, lengths, slopes, out, records, firsts),
        blocks,
        DTYPE[q.dtype],
        count,
        *_layout(q, key_cache, value_cache, tables),
        scale,
        softcap,
        window,
        *where(q),
    )
    return out


@shim.native(
    "paged_prefill",
    library=(CPU, CUDA),
    symbols={"opshim_paged_prefill": "p" * 8 + "i" * 18 + "dd" + "i"},
    supports=_supports_prefill,
)
def paged_prefill(
    c, q, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens, scale, softcap=0.0, window=0, alibi_slopes=None
):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tables, bounds, lengths = _rows(block_tables), cu_seqlens_q.contiguous(), seq_lens.contiguous()
    slopes = _slopes(alibi_slopes)
    c.opshim_paged_prefill(
        *pointers(q, key_cache, value_cache, tables, bounds, lengths, slopes, out),
        DTYPE[q.dtype],
        q.shape[0],
        lengths.shape[0],
        *_layout(q, key_cache, value_cache, tables),
        scale,
        softcap,
        window,
        *where(q),
    )
    return out
