"""What `serve` finds out before the engine is built: a line each, with what was done about it.

Nothing here loads weights or starts CUDA, and what only vLLM's own code can tell is asked of it in processes of their
own, once: from a config.json, headers of files, tables of the registry and the chains, most of what would end an engine
after minutes is known within a second.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from shim import device as devices
from shim import variables
from shim.device import human
from shim.errors import OpshimError
from shim.loading import shown, user_cache
from shim.vllm_plugin import capacity, nodes, preflight_model, sizes
from shim.vllm_plugin.findings import Finding, Plan
from shim.vllm_plugin.model_class import Check, ImportCheck, registered
from shim.vllm_plugin.serve import USAGE, ServeError, check_port

LEAST_DISK = 64 * 2**20  # bytes that have to be free where something is written
NODES = Path("/sys/devices/system/node")  # of memory, a folder each
LEAST_LENGTH = 16  # tokens, below which no server is worth its start


def preflight(plan: Plan, tell: Callable[[Finding], None], verdict: Check | None = None) -> list[Finding]:
    """All findings, each told as soon as it is there; those with a code stand in the way. Sets plan.max_model_len.
    `verdict`: of vLLM on the arguments, where it is asked for."""
    findings, importing = [], None
    try:
        module = (registered() or {}).get(plan.architecture)
        importing = ImportCheck(plan.architecture, module) if module else None
        checks = CHECKS | {  # those that wait for a process come last
            "model class": lambda plan: preflight_model.model_class(plan, importing),
            "options": lambda plan: preflight_model.arguments(plan, verdict),
        }
        for name, check in checks.items():
            for one in _safely(name, check, plan):
                findings.append(one)
                tell(one)
    finally:
        for child in filter(None, (importing, verdict)):
            child.close()
    return findings


def _safely(name: str, check: Callable[[Plan], Iterator[Finding]], plan: Plan) -> Iterator[Finding]:
    """What cannot be found out stands in nobody's way: vLLM may still do without it."""
    try:
        yield from check(plan)
    except sizes.ConfigError as error:
        yield Finding(name, f"not checked, as {error}")
    except OpshimError as error:
        yield Finding(name, str(error), code=USAGE)
    except Exception as error:  # noqa: BLE001
        yield Finding(name, f"not checked: {type(error).__name__}: {error}")


# ---- the machine -------------------------------------------------------------------------------------------------------


def device(plan: Plan) -> Iterator[Finding]:
    found = devices.describe(plan.device)
    if plan.device == "cpu":
        yield Finding("device", f"{found.name}, {found.facts['isa']}, {found.facts['cores']} cores, {plan.memory}")
        ranks, here = plan.ranks_here, len(list(NODES.glob("node[0-9]*"))) or 1
        if plan.options.get("--distributed-executor-backend") == "ray":
            text = "vLLM runs no ranks of a CPU under Ray: leave --distributed-executor-backend out, or give mp"
            yield Finding("device", text, code=USAGE)
        bound = plan.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") != "auto"
        if ranks > here and not bound and plan.environ.get("VLLM_CPU_SIM_MULTI_NUMA", "0") == "0":
            text = f"{ranks} ranks of the engine need as many NUMA nodes, here are {here}, or to be told the cores"
            yield Finding("device", f"{text} of each: VLLM_CPU_OMP_THREADS_BIND='0-1|2-3'", code=USAGE)
        return
    capability = "sm_{}{}".format(*found.facts["capability"])
    versions = f"driver {devices.driver_version(found.facts['driver'])}, CUDA {torch.version.cuda} in torch"
    yield Finding("device", f"{torch.cuda.device_count()} x {found.name}, {capability}, {versions}, {plan.memory}")
    ranks, here = plan.ranks_here, torch.cuda.device_count()
    if ranks > here and plan.options.get("--distributed-executor-backend") != "ray":
        yield Finding("device", f"{ranks} ranks of the engine need as many GPUs, here are {here}", code=USAGE)


def node(plan: Plan) -> Iterator[Finding]:
    """Of several machines that one engine runs on."""
    found = nodes.of(plan.options)
    if found and not found.rank:
        check_port("0.0.0.0", found.port)
    if found and found.rank:
        yield Finding("nodes", f"{found}, joins {found.leader}")
    elif found:
        yield Finding("nodes", f"{found}, which the others join at {found.host}:{found.port}{_elsewhere(found)}")


def _elsewhere(leader: nodes.Node) -> str:
    """Words for a master address that is not of this machine. Its port is free."""
    try:
        check_port(leader.host, leader.port)
    except ServeError:
        return f"; {leader.host} is no address of this machine, which is right behind address translation only"
    return ""


def libraries(plan: Plan) -> Iterator[Finding]:
    """Which builds serve, and for which ops there is a proof. What else there is stands in the chain table."""
    chosen = [chain for chain in plan.chains if chain.selected is not None]
    builds = Counter(_build(chain.selected) for chain in chosen)
    certified = [chain.op.name for chain in chosen if chain.selected.certificate.valid]
    told = ", ".join(f"{count} op{'s' * (count > 1)} by {build}" for build, count in builds.items())
    rest = len(plan.chains) - len(certified)
    if not rest:
        yield Finding("libraries", f"{told}; all certified for this build and device")
        return
    names = f"{len(certified)} certified for it ({', '.join(certified)})" if certified else "none certified for it"
    failed = [chain.op.name for chain in chosen if chain.selected.certificate.failed]
    names += f"; `conform` found failures in {', '.join(failed)}" if failed else ""
    yield Finding(
        "libraries",
        f"{told}; {names}",
        f"the other {rest} serve without a proof" if certified else "served without a proof",
    )


def _build(candidate) -> str:
    if candidate.library is None:
        return candidate.label
    file = candidate.library.path.name
    return f"{file} {candidate.build['identity'][:8]} ({candidate.library.info['arch']})"


def environment(plan: Plan) -> Iterator[Finding]:
    """The values were checked before anything began."""
    strangers = list(variables.unknown(plan.environ))
    for name, meant in strangers:
        yield Finding("environment", f"{name} is no variable of opshim", f"is {meant} meant?" if meant else "not read")
    given = [f"{name}={plan.environ[name]}" for name in variables.NAMES if plan.environ.get(name)]
    if given or not strangers:
        yield Finding("environment", ", ".join(given) or "no variable of opshim is set")


def disk(plan: Plan) -> Iterator[Finding]:
    """Every folder that something is written to while the server starts and runs."""
    home = Path(plan.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(plan.environ.get("VLLM_CACHE_ROOT") or home / "vllm").expanduser()
    temporary = Path(plan.environ.get("TMPDIR") or tempfile.gettempdir())
    told, ours = [], user_cache()
    for what, folder in (("vLLM's cache", root), ("opshim's cache", ours), ("temporary files", temporary)):
        problem, free = writable(folder)
        if problem is None:
            told.append(f"{human(free)} at {shown(folder)}")
        elif folder == ours:
            yield Finding(
                "disk", f"{what} {folder}: {problem}", "nothing is kept there: libraries, certificates, replays"
            )
        else:
            yield Finding("disk", f"{what} {folder}: {problem}", code=USAGE)
    if told:
        yield Finding("disk", f"free: {', '.join(told)}")


def writable(folder: Path) -> tuple[str | None, int]:
    """Why nothing can be written there (None: it can), and the free bytes. The folder need not exist yet."""
    there = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        free = shutil.disk_usage(there).free
        with tempfile.NamedTemporaryFile(dir=there, prefix=".opshim-") as file:
            file.write(b"\0" * 65536)
            file.flush()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"{'the disk is full' if full else 'cannot be written'} ({error.strerror})", 0
    if free < LEAST_DISK:
        return f"{human(free)} are free on this disk, {human(LEAST_DISK)} are needed at least", free
    return None, free


# ---- memory ------------------------------------------------------------------------------------------------------------


def cache(plan: Plan) -> Iterator[Finding]:
    """vLLM refuses a cache that does not hold one sequence of max_model_len."""
    need = capacity.demand(plan.sizes, plan.options, plan.dtype, plan.device)
    given = plan.options.get("--max-model-len")
    if need is None or (given or "").lower() in ("auto", "-1") or "--num-gpu-blocks-override" in plan.options:
        yield Finding("KV cache", "not estimated", "vLLM sizes it")
        return
    longest = plan.sizes.need("max_position_embeddings", None if given is None else 0)
    wanted = longest if given is None else capacity.human_number(given, "--max-model-len")
    if not wanted:
        raise OpshimError(f"--max-model-len must be a number from 1 on, got {given!r}")
    if longest and wanted > longest and _is_limit(plan):
        text = f"--max-model-len {wanted} is above the model's {longest:,} (max_position_embeddings), vLLM refuses it"
        yield Finding("KV cache", f"{text}: VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 allows it", code=USAGE)
        return
    room, source = plan.room
    fits = need.longest(room)
    if wanted <= fits:
        held = need.at_once(room, wanted)
        text = f"{human(room)} ({source}): about {held * wanted:,.0f} tokens in pages of {need.block}"
        yield Finding("KV cache", f"{text}, {held:,.1f} requests of {wanted:,} (max_model_len) at once")
        return
    text = f"a request of {wanted:,} tokens (max_model_len) needs about {human(need.bytes(wanted))}"
    text += f", {human(room)} ({source}) hold {fits:,}"
    if plan.mode == "auto" and fits >= LEAST_LENGTH:
        plan.max_model_len = fits
        yield Finding("KV cache", text, f"served with --max-model-len {fits}")
    else:
        largest = f"--max-model-len {fits} is the largest, or policy auto fits it"
        yield Finding("KV cache", f"{text}: {largest if fits >= LEAST_LENGTH else 'too little'}", code=USAGE)


def _is_limit(plan: Plan) -> bool:
    """Whether vLLM refuses lengths above max_position_embeddings: not where a factor scales it, or it is told so."""
    config, allowed = sizes.text_of(plan.model.config), plan.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "")
    scaled = any("'factor'" in str(config.get(name)) for name in ("rope_scaling", "rope_parameters"))
    return not (scaled or config.get("model_max_length")) and allowed.strip().lower() not in ("1", "true")


def memory(plan: Plan) -> Iterator[Finding]:
    """What vLLM itself would refuse to start with, and what the machine cannot hold."""
    room, _ = plan.room
    held, free = plan.weights, plan.memory.free
    told = f"{'unknown' if held is None else human(held)} of weights and {human(room)} of KV cache, "
    told += "free memory is not known" if free is None else f"{human(free)} free"
    needed = (held or 0) + room
    ranks = plan.ranks_here
    if plan.device == "cpu" and ranks > 1:  # all of them live in this machine's memory
        told, needed = f"{ranks} ranks, each with {told}", ranks * needed
    asked = plan.device == "cuda" and "--kv-cache-memory-bytes" not in plan.options
    share = int(capacity.utilization(plan.options) * plan.memory.total) if asked else 0
    if free is not None and needed > free:
        yield Finding("memory", f"{told}: {human(needed - free)} are missing", code=USAGE)
    elif free is not None and share > free:
        wanted = f"vLLM asks for {human(share)} (--gpu-memory-utilization)"
        yield Finding("memory", f"{told}, but {wanted}: at most {free / plan.memory.total:.2f} is free", code=USAGE)
    else:
        yield Finding("memory", told)


CHECKS = {
    "device": device,
    "nodes": node,
    "libraries": libraries,
    "environment": environment,
    "shapes": preflight_model.shapes,
    "checkpoint": preflight_model.weights,
    "KV cache": cache,
    "memory": memory,
    "disk": disk,
}
