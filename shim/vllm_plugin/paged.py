"""What the attention seams of CPU and CUDA share: the ops of the paged cache over a batch of decodes and prefills.

In a batch, sequences with one new token come first and are decoded; the others, chunks of prompts included, are
prefilled.
"""

from __future__ import annotations

from torch import Tensor
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

import shim
from shim.vllm_plugin.models import ATTENTION
from shim.vllm_plugin.versions import HookError

reshape_and_cache, paged_attention_v2, paged_prefill = map(shim.get, ATTENTION)


def split(common) -> dict:
    """From vLLM's metadata of a batch the fields that `attend` takes beside it: num_decodes, num_decode_tokens, and
    prefill_start_loc [prefills + 1] int32, of the tokens after the decodes (None without prefills)."""
    if common.causal is not True:
        raise HookError("opshim's attention is causal, this batch is not; run vLLM without opshim (VLLM_PLUGINS=)")
    decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(common)
    starts = common.query_start_loc if prefills else None
    if prefills and decodes:
        starts = starts[decodes:] - decode_tokens
    return {"num_decodes": decodes, "num_decode_tokens": decode_tokens, "prefill_start_loc": starts}


def attend(query: Tensor, caches: tuple[Tensor, Tensor], metadata, options: tuple, output: Tensor) -> Tensor:
    """query [T,HQ,D], caches [NB,BS,HK,D], options: what the ops take after seq_lens; fills output's first
    num_actual_tokens rows. Where graphs pad tokens or sequences of a batch of decodes, the rows beyond either are
    nobody's."""
    tables, lengths = metadata.block_table, metadata.seq_lens
    tokens, first, end = metadata.num_decode_tokens, metadata.num_decodes, metadata.num_actual_tokens
    if tokens:
        rows = min(tokens, first)
        output[:rows] = paged_attention_v2(query[:rows], *caches, tables[:rows], lengths[:rows], *options)
    if metadata.prefill_start_loc is not None:
        starts = metadata.prefill_start_loc
        output[tokens:end] = paged_prefill(
            query[tokens:end], *caches, tables[first:], starts, lengths[first:], *options
        )
    return output
