"""The part of the preflight that looks at the model: its class, options, shapes and weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from shim.device import human
from shim.errors import OpshimError
from shim.loading import shown
from shim.vllm_plugin import capacity, checkpoint, honoured, sizes
from shim.vllm_plugin.findings import Finding, Plan
from shim.vllm_plugin.model_class import Check, ImportCheck, other_plugins, registered
from shim.vllm_plugin.options import PIPELINE, TENSOR
from shim.vllm_plugin.serve import UNSERVED, USAGE

GUARDS_OF_ANY_DEVICE = ("native", "reference")  # providers that may be asked about a GPU's call with tensors of the CPU


def model_class(plan: Plan, importing: ImportCheck | None) -> Iterator[Finding]:
    """`importing`: the check of the class's module, None where vLLM's registry does not have the class."""
    name, architecture, plugins = "model class", plan.architecture, other_plugins()
    transformers = plan.options.get("--model-impl") == "transformers"
    if importing is not None:
        problem = importing.result()
        told = f"{architecture}: {importing.module.rpartition('.')[2]}.py of vLLM "
        if problem is None:
            yield Finding(name, f"{told}imports")
        else:
            yield Finding(name, f"{told}does not import: {problem}", code=USAGE)
    elif registered() is None:
        yield Finding(name, f"{architecture}: not checked, as this vLLM keeps no list of models where it used to")
    elif plugins or transformers:
        who = f"a plugin ({', '.join(plugins)})" if plugins else "transformers"
        yield Finding(name, f"{architecture}: not in vLLM's registry", f"left to vLLM, as {who} may bring it")
    else:
        yield Finding(name, f"the installed vLLM knows no {architecture}: expected a newer one", code=USAGE)


def arguments(plan: Plan, verdict: Check | None) -> Iterator[Finding]:
    """The options, by opshim's rules and vLLM's parser, the tokenizer, by vLLM's loader, and the configuration that
    vLLM makes for its engine. `verdict`: of vLLM on these three, None where it is not asked."""
    problem = verdict and verdict.result()
    name, _, text = (problem or "").partition(": ")
    unknown = [Finding("options", text, code=USAGE)] if name == "options" else []
    wrong = [*_refused(plan), *_unreadable(plan.options), *unknown]
    yield from wrong or [Finding("options", "opshim honours all that were given")]
    if verdict:
        yield _tokenizer(plan, problem)
        yield _engine(plan, problem)


def _tokenizer(plan: Plan, problem: str | None) -> Finding:
    name, _, text = (problem or "").partition(": ")
    plugins = other_plugins()
    if problem is None or name == "engine":
        where = shown(Path(plan.options.get("--tokenizer") or plan.model.path))
        skipped = "--skip-tokenizer-init" in plan.options
        return Finding("tokenizer", "none, as --skip-tokenizer-init" if skipped else f"vLLM loads it from {where}")
    if name == "options":
        return Finding("tokenizer", "not checked, as vLLM does not take the options")
    if name != "tokenizer":
        return Finding("tokenizer", f"not checked, nor are the options' names: {problem}")
    if plugins and "No tokenizer registered" in text:
        return Finding("tokenizer", text, f"left to vLLM, as a plugin ({', '.join(plugins)}) may bring it")
    return Finding("tokenizer", text, code=USAGE)


def _engine(plan: Plan, problem: str | None) -> Finding:
    name, _, text = (problem or "").partition(": ")
    if problem is None:
        return Finding("engine", "vLLM configures it")
    if name != "engine":
        return Finding("engine", "not checked, as vLLM was not asked any more")
    text = f"vLLM does not configure it: {text}"
    if plan.max_model_len:
        return Finding("engine", text, "left to vLLM, which was asked with another --max-model-len")
    return Finding("engine", text, code=USAGE)


def _refused(plan: Plan) -> Iterator[Finding]:
    """Options that opshim cannot honour."""
    asked = honoured.Asked(plan.options, plan.dtype, plan.device, plan.quantized)
    needed = tuple(chain.op.name for chain in plan.chains)
    for given, rule in honoured.refused(asked, needed, plan.environ):
        reason = f"{given}: {rule.reason}"
        if not rule.ops:
            yield Finding("options", f"{reason}: it cannot be honoured", code=USAGE)
        elif plan.mode == "strict":
            unused = f"policy strict does not go on without {', '.join(rule.ops)}"
            yield Finding("options", f"{reason}; {unused}", code=USAGE)
        else:
            yield Finding("options", reason, f"vLLM's own code serves instead of {', '.join(rule.ops)}")


def _unreadable(options) -> Iterator[Finding]:
    """Files that vLLM opens once its engine is there, and does not name then."""
    for name in ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"):
        file = options.get(name)
        if file and not (Path(file).is_file() and os.access(file, os.R_OK)):
            yield Finding("options", f"{name} {file}: there is no such file, or it cannot be read", code=USAGE)


def shapes(plan: Plan) -> Iterator[Finding]:
    """The ops' own checks, domains and guards over calls of the model's sizes, one rank's share of them."""
    ranks, heads = plan.options.whole(1, *TENSOR), plan.sizes.heads
    if heads % ranks:
        text = f"{heads} heads of attention cannot be shared by {ranks} ranks ({TENSOR[0]})"
        yield Finding("shapes", text, code=USAGE)
        return
    attend = [bool({*kinds} - {sizes.LINEAR}) for kinds in _stages(plan)]
    if plan.device == "cpu" and len(set(attend)) > 1:  # 0.32 ends: "Workers disagree on supported KV cache layouts"
        text = f"stage {attend.index(False)} of {PIPELINE[0]} has no layer of full attention, which ends vLLM on a CPU"
        yield Finding("shapes", text, code=USAGE)
        return
    if plan.dtype not in honoured.TAKEN:
        if not plan.options.get("--dtype"):  # else that option has been refused
            text = f"config.json has the dtype {plan.dtype}: expected {', '.join(honoured.TAKEN)}, or --dtype"
            yield Finding("shapes", text, code=UNSERVED)
        return
    examples, served, chains = _examples(plan), 0, plan.chains
    for chain in chains:
        problem, harmless = _refusal(chain, examples[chain.op.name], plan)
        served += problem is None
        if problem is None:
            continue
        stops = plan.mode == "strict" and not harmless
        done = "" if stops else "the reference or vLLM's own code serves these calls"
        yield Finding("shapes", f"{chain.op.name}: {problem}", done, UNSERVED if stops else 0)
    s = plan.sizes
    parts = [f"heads of {s.head}, {s.heads} on {s.kv_heads}"]
    parts += [f"states of {s.linear_k} x {s.linear_v}"] * bool(s.linear_layers)
    parts += [f"{s.top_k} of {s.experts} experts"] * bool(s.experts)
    yield Finding("shapes", f"{', '.join(parts)}, in {plan.dtype}: {served} of {len(chains)} ops take them")


def _stages(plan: Plan) -> Iterator[tuple[str, ...]]:
    """The kinds of layers of each stage of the pipeline, shared out as vLLM does: the last stages but one get what is
    left over."""
    kinds, stages = plan.sizes.kinds, plan.options.whole(1, *PIPELINE)
    given = plan.environ.get("VLLM_PP_LAYER_PARTITION")
    each, more = divmod(len(kinds), stages)
    counts = [each + (2 <= stages - at < more + 2) for at in range(stages)]
    rest = iter(kinds)
    for count in map(int, given.split(",")) if given else counts:
        yield tuple(islice(rest, count))


def _refusal(chain, arguments: dict, plan: Plan) -> tuple[str | None, bool]:
    """Why the chain's choice would not take a call, and whether that is by the op's own domain."""
    generator = torch.Generator().manual_seed(0)
    try:
        call = chain.op.example(generator, "cpu", getattr(torch, plan.dtype), **arguments)
        chain.op.check(**call)
        verdict = chain.op.in_domain(**call)
        if verdict is not True:
            return verdict, True
        asked = plan.device == "cpu" or chain.selected.provider in GUARDS_OF_ANY_DEVICE
        guard = chain.selected.supports if asked else None
        verdict = True if guard is None else guard(**call)
    except OpshimError as error:
        return str(error).removeprefix(f"{chain.op.name}: "), False
    except Exception as error:  # noqa: BLE001 - sizes that no example can be made of
        return f"no call can be made of these sizes: {type(error).__name__}: {error}", False
    return (None, False) if verdict is True else (f"{chain.selected.label} does not take it: {verdict}", False)


def _examples(plan: Plan) -> dict[str, dict]:
    """Sizes of the ops' example calls. One expert stands for all: they are alike, and large."""
    s = plan.sizes
    ranks = plan.options.whole(1, *TENSOR)
    heads = {"HQ": max(1, s.heads // ranks), "HK": max(1, s.kv_heads // ranks), "D": s.head}
    linear = {"H": max(1, s.linear_k_heads // ranks), "HV": max(1, s.linear_v_heads // ranks)}
    states = linear | {"K": s.linear_k, "V": s.linear_v}
    width, one = max(1, s.expert_width // ranks), {"T": 1, "E": 1, "topk": 1}
    return {
        "topk_softmax": {"T": 2, "E": s.experts, "topk": s.top_k},
        "moe_align_block_size": {"T": 2, "E": s.experts, "topk": s.top_k},
        "grouped_gemm": one | {"N": 2 * width, "K": s.hidden},
        "fused_moe": one | {"I": width, "Hd": s.hidden},
        "moe_sum": {"T": 1, "topk": s.top_k, "N": s.hidden},
        "gdn_gating": {"T": 2, "HV": linear["HV"]},
        "gdn_prefill": {"lengths": (2,), **states},
        "gdn_decode": {"B": 1, **states},
        "reshape_and_cache": {"T": 1, **heads},
        "paged_attention_v2": {"lengths": (1,), **heads},
        "paged_prefill": {"new": (1,), "prefix": (0,), **heads},
        "matmul_fp16": {"M": 1, "N": 16, "K": s.hidden},
    }


def weights(plan: Plan) -> Iterator[Finding]:
    stored, architecture = plan.stored, plan.architecture
    if stored is None:
        missing = "no safetensors files" if plan.model.local else "vLLM downloads it"
        yield Finding("checkpoint", f"not compared: {'dummy weights' if plan.options.dummy else missing}")
        return
    files = len({one.file for one in stored.values()})
    total = f"{len(stored)} tensors, {human(sum(one.size for one in stored.values()))}, {files} file{'s' * (files > 1)}"
    needed = None if plan.quantized else checkpoint.parameters(plan.sizes, architecture, stored)
    if needed is None:
        why = "it is quantized" if plan.quantized else f"no table for {architecture}"
        yield Finding("checkpoint", f"{total}, none cut short; not compared with the model's parameters: {why}")
        return
    text_only = "--language-model-only" in plan.options
    found = checkpoint.compare(stored, needed, architecture, capacity.SIZES.get(plan.dtype, 4), text_only)
    stranger = ("", USAGE) if plan.mode == "strict" else ("left to vLLM, which refuses what it does not know", 0)
    for what, tensors, done, code in (
        ("missing: the model needs them", found.missing, "", USAGE),
        ("that the model has no parameter for", found.unknown, *stranger),
        ("of the vision tower", found.vision, "not compared", 0),
        ("of drafts, or that are stored twice", found.skipped, "vLLM skips them", 0),
    ):
        if tensors:
            count = f"{len(tensors)} tensor{'s' * (len(tensors) > 1)} ({human(sum(tensors.values()))})"
            yield Finding("checkpoint", f"{count} {what}", done, code, tuple(checkpoint.listed(tensors)))
    if found.shapes:
        first, *others = found.shapes
        yield Finding("checkpoint", f"{len(found.shapes)} of another shape: {first}", "", USAGE, tuple(others))
    complete = f"all {len(needed)} of the model are there" if not (found.missing or found.shapes) else "not the model's"
    yield Finding("checkpoint", f"{total}; {complete}")
