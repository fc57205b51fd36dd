"""vLLM's options that opshim cannot honour, each with its reason: the same that the hooks would give while the engine
is built (`_refusal` in attention, experts, delta_rule, linear_cuda; `refusal` in attention_cuda), said before it is
started. A name such as "--kernel-config.moe_backend" is of a field, however its option was given (options.py)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from shim.vllm_plugin.models import ATTENTION, EXPERTS, GATED_DELTA_NET, LINEAR, ROUTER
from shim.vllm_plugin.options import DATA, PIPELINE, Options

DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names
TAKEN = ("float16", "bfloat16", "float32")
COMPILING = ("--no-enforce-eager", "--compilation-config", "-cc", "--optimization-level", "-O")


class Asked(NamedTuple):
    """What is asked for: vLLM's options, the dtype and device that are served."""

    options: Options
    dtype: str
    device: str
    quantized: bool

    def is_dtype(self, value: str) -> bool:
        return DTYPES.get(value, value) in ("auto", "", self.dtype)


class Rule(NamedTuple):
    """`ops`: those that would not be called, none where nothing at all could be served. `honoured`: of a value."""

    names: tuple[str, ...]
    reason: str
    ops: tuple[str, ...] = ()
    honoured: Callable[[str, Asked], bool] = lambda value, asked: False


RULES = (
    Rule(("--uds",), "`serve` watches over a host and a port"),
    Rule(("--grpc",), "`serve` watches over a server of HTTP"),
    Rule(
        ("--api-server-count", "-asc"),
        "a node with --headless has no server, any other has one, which `serve` watches over",
        honoured=lambda value, asked: ("--headless" in asked.options) == bool(re.fullmatch(r"0+|-\d+", value)),
    ),
    Rule(  # 0.32: the first request ends an eager engine, in sync_and_gather_intermediate_tensors
        PIPELINE,
        "on a CPU the stages of vLLM take what they hand on from its compiling start: add --no-enforce-eager",
        honoured=lambda value, asked: (
            asked.device != "cpu"
            or value == "1"
            or ("--enforce-eager" not in asked.options and any(name in asked.options for name in COMPILING))
        ),
    ),
    Rule(
        ("--dtype",),
        f"opshim's ops take {', '.join(TAKEN)}",
        honoured=lambda value, asked: DTYPES.get(value, value) in ("auto", *TAKEN),
    ),
    Rule(
        ("--quantization", "-q", "--quantization-config"),
        "opshim's experts and linear layers take the checkpoint's own weights, not quantized ones",
        (*ROUTER, *EXPERTS, *LINEAR),
        lambda value, asked: asked.quantized or value == "None",
    ),
    Rule(
        ("--kv-cache-dtype",),
        "opshim's attention keeps keys and values in the model's dtype",
        ATTENTION,
        lambda value, asked: asked.is_dtype(value),
    ),
    Rule(
        ("--attention-backend", "--attention-config.backend", "-ac.backend"),
        "opshim's attention takes the place of FLASH_ATTN, other backends stay vLLM's",
        ATTENTION,
        lambda value, asked: asked.device == "cpu" or value.upper() == "FLASH_ATTN",
    ),
    Rule(
        ("--block-size",),
        "opshim's attention takes pages of a multiple of 16 tokens",
        ATTENTION,
        lambda value, asked: asked.device == "cpu" or not value.isdigit() or int(value) % 16 == 0,
    ),
    Rule(
        ("--decode-context-parallel-size", "-dcp"),
        "opshim's attention needs all of a sequence's cache on one rank",
        ATTENTION,
        lambda value, asked: value == "1",
    ),
    Rule(
        ("VLLM_BATCH_INVARIANT",),
        "opshim's kernels do not promise equal bits for every batch size",
        ATTENTION,
        lambda value, asked: asked.device == "cpu" or value in ("", "0"),
    ),
    Rule(
        ("--speculative-config", "-sc", "--spec-method", "--spec-model"),
        "opshim's Gated DeltaNet cannot take tokens back that a draft got wrong",
        GATED_DELTA_NET,
    ),
    Rule(
        ("--mamba-ssm-cache-dtype",),
        "opshim's Gated DeltaNet keeps states in float32 or in the model's dtype",
        GATED_DELTA_NET,
        lambda value, asked: value == "float32" or asked.is_dtype(value),
    ),
    Rule(("--enable-lora",), "opshim's experts know no adapters", EXPERTS),
    Rule(
        ("--moe-backend", "--kernel-config.moe_backend"),
        "it asks for vLLM's own experts",
        EXPERTS,
        lambda value, asked: value.lower() == "auto",
    ),
    Rule(  # 0.32: for layers that are not quantized the other backends are what "auto" is
        ("--linear-backend", "--kernel-config.linear_backend"),
        "it asks for FlashInfer's linear layers",
        LINEAR,
        lambda value, asked: asked.device == "cpu" or value.lower().replace("-", "_") != "flashinfer_cutedsl",
    ),
    Rule(
        ("--all2all-backend", "-a2a"),
        "opshim's experts get tokens of other ranks by allgather_reducescatter only",
        EXPERTS,
        lambda value, asked: (
            value in ("allgather_reducescatter", "naive", "pplx")
            or "--enable-expert-parallel" not in asked.options
            or asked.options.whole(1, *DATA) == 1
        ),
    ),
    Rule(
        ("--model-impl",),
        "opshim's hooks are in vLLM's own model, not in others",
        (*GATED_DELTA_NET, *ROUTER, *EXPERTS),
        lambda value, asked: value in ("auto", "vllm"),
    ),
)


def refused(asked: Asked, needed: tuple[str, ...], environ: Mapping[str, str]) -> Iterator[tuple[str, Rule]]:
    """The options that cannot be honoured for a model that needs these ops: as given ("--name value"), and why."""
    for rule in RULES:
        ops = set(rule.ops) & set(needed)
        for name, value in _given(rule, asked.options, environ):
            if (ops or not rule.ops) and not rule.honoured(value, asked):
                yield f"{name} {value}".rstrip(), rule._replace(ops=tuple(op for op in needed if op in ops))


def _given(rule: Rule, options: Options, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in rule.names:
        value = options.get(name) if name.startswith("-") else environ.get(name)
        if value is not None:
            yield name, value
