"""Start-up on CUDA: what vLLM would compile while it answers its first requests is compiled before it is ready.

vLLM's own warm-up runs batches of a few sizes, and one way of sampling. Triton compiles a kernel anew where a count is
one, a multiple of 16, or neither; torch.compile makes the ranks of logprobs when they are first asked for. Each step
here runs such kernels on padding. A step that fails is told, and leaves its kernels to the first request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_pp_group
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.worker.worker_base import WorkerWrapperBase

log = logging.getLogger("opshim")
COUNTS = (1, 2, 16)  # what Triton tells apart
ROWS = (9, 16)  # the same of batches that are sampled by Triton: from 8 rows on
MIXED = 16  # tokens of a batch of decodes and a prefill


def warm_up(worker) -> None:
    runner = worker.model_runner
    if worker.use_v2_model_runner or runner.is_pooling_model:  # the former does it itself
        return
    begin = time.perf_counter()
    with torch.inference_mode(), torch.random.fork_rng([runner.device]), _unwatched():
        for step in (batches, blocks):
            _run(step, runner)
        if get_pp_group().is_last_rank:
            logits = _logits(runner)  # once: the ranks meet in it
            for step in (sampling, ranks, grammars):
                _run(step, runner, logits)
        torch.cuda.synchronize()
    log.info("warmed up for the first requests in %.1f s", time.perf_counter() - begin)


def _run(step, *given) -> None:
    try:
        step(*given)
    except Exception as error:  # noqa: BLE001  vLLM serves without
        log.warning("not warmed up: %s (%s: %s)", step.__name__, type(error).__name__, error)


def batches(runner) -> None:
    """Decodes, and decodes with a prefill, outside of graphs."""
    options = {"cudagraph_runtime_mode": CUDAGraphMode.NONE, "force_attention": True, "skip_eplb": True}
    for count in COUNTS:
        if count <= runner.scheduler_config.max_num_seqs:
            runner._dummy_run(count, uniform_decode=True, **options)
    runner._dummy_run(min(MIXED, runner.max_num_tokens), create_mixed_batch=True, **options)


def blocks(runner) -> None:
    """Slots of new tokens, zeros in new blocks, copies of states between blocks."""
    starts = torch.zeros(2, dtype=torch.int32, device=runner.device)
    runner.input_batch.block_table.compute_slot_mapping(1, starts, starts[:1].long())
    for count in COUNTS:
        runner._zero_block_ids([NULL_BLOCK_ID] * count)
    if runner.cache_config.mamba_cache_mode == "align":
        from vllm.v1.worker.mamba_utils import batch_memcpy

        nowhere = torch.zeros(1, dtype=torch.uint64, device=runner.device)
        batch_memcpy(nowhere, nowhere, starts[:1])


def sampling(runner, logits: Tensor) -> None:
    """Top-k and top-p, alone and together."""
    for rows in ROWS:
        if rows > runner.scheduler_config.max_num_seqs:
            continue
        k = torch.full((rows,), 4, dtype=torch.int32, device=logits.device)
        p = torch.full((rows,), 0.9, device=logits.device)
        for given in ((k, p), (k, None), (None, p)):
            runner.sampler.topk_topp_sampler.forward_native(logits[:rows].float().clone(), {}, *given)


def ranks(runner, logits: Tensor) -> None:
    """Logprobs of sampled tokens and of prompts."""
    logprobs = runner.sampler.compute_logprobs(logits[:2])
    runner.sampler.gather_logprobs(logprobs, 1, torch.zeros(2, dtype=torch.int64, device=logits.device))


def grammars(runner, logits: Tensor) -> None:
    """Masks of structured outputs, for all rows of a batch or some."""
    from xgrammar import apply_token_bitmask_inplace

    for rows in COUNTS:
        allowed = torch.full((rows, -(-logits.shape[1] // 32)), -1, dtype=torch.int32, device=logits.device)
        for some in (None, torch.arange(rows, dtype=torch.int32, device=logits.device)):
            apply_token_bitmask_inplace(logits[:rows].clone(), allowed, indices=some)


def _logits(runner) -> Tensor:
    """Of as many rows as a step takes, [rows,vocabulary]."""
    config, rows = runner.model_config, max(*COUNTS, *ROWS)
    hidden = torch.zeros(rows, config.get_hidden_size(), dtype=config.dtype, device=runner.device)
    return runner.model.compute_logits(hidden)


@contextmanager
def _unwatched() -> Iterator[None]:
    """vLLM reports what Triton compiles from the end of its own warm-up on; what is compiled here is meant."""
    try:
        from triton.knobs import runtime
    except ImportError:
        yield
        return
    watch, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, None
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = watch


def install() -> None:
    """On the wrapper around every worker, which looks its methods up in the worker."""

    def compile_or_warm_up_model(self):
        times = self.worker.compile_or_warm_up_model()
        warm_up(self.worker)
        return times

    WorkerWrapperBase.compile_or_warm_up_model = compile_or_warm_up_model
    if HAS_TRITON:
        from vllm.v1.sample.ops.topk_topp_triton import _topk_topp_kernel

        share(_topk_topp_kernel)


def share(kernel) -> None:
    """One build of vLLM's largest sampling kernel for any count of rows, as later versions of vLLM have it."""
    for parameter in getattr(kernel, "params", ()):
        if parameter.name == "BATCH_SIZE":
            parameter.do_not_specialize_on_alignment = True
