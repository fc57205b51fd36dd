"""The plugin: vLLM calls `register()` in each of its processes before it builds anything.

vLLM logs and skips a plugin that raises an Exception while it is imported, so whatever stops opshim ends the process
with SystemExit, after one line (or the chain table) on stderr.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shim import plugins, policy, variables
from shim.errors import OpshimError
from shim.vllm_plugin import hooking, metrics, versions
from shim.vllm_plugin.versions import Hook, HookError

COPIED = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
_registered = False


def register() -> None:
    """Entry point of the group vllm.general_plugins; does its work once per process."""
    global _registered
    if _registered:
        return
    _registered = True
    with _ending_in_one_line():
        _register()


def hooks(platform: str = "cpu") -> list[Hook]:
    """The hooks for a platform, with their state in this process."""
    return versions.PLATFORMS.get(platform, [])


def _register() -> None:
    import vllm
    from vllm.platforms import current_platform

    _log_with_vllm()
    variables.check()
    versions.check_version(vllm.__version__)
    _reach_other_machines(os.environ)
    plugins.load_all()
    policy.current().validate()
    if os.environ.get("OPSHIM_RUN_DIR"):
        metrics.install(os.environ["OPSHIM_RUN_DIR"])
    platform = _name(current_platform)
    if not hooks(platform):
        hooking.miss("every layer", f"opshim has no hooks for vLLM's platform {platform}")
    if platform == "cuda":
        _set_in_workers(platform, vllm.__version__)
    else:
        _set_all(platform, vllm.__version__)


@contextmanager
def _ending_in_one_line() -> Iterator[None]:
    try:
        yield
    except OpshimError as error:
        print(f"opshim: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def _set_in_workers(platform: str, version: str) -> None:
    """Sets the hooks only where there is a worker, once it has its device and no model yet. The modules that they reach
    into initialise CUDA when they are imported: a server's other processes would hold memory of the GPU, and could not
    be forked."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    stock = WorkerWrapperBase.init_device

    def init_device(self):
        stock(self)
        with _ending_in_one_line():
            _set_all(platform, version)

    WorkerWrapperBase.init_device = init_device


def _set_all(platform: str, version: str) -> None:
    for hook in hooks(platform):
        if hook.state == "not set":
            _set(hook, version)


def _name(platform) -> str:
    """What `hooks` knows vLLM's platform by. Torch calls ROCm's devices cuda, too."""
    device = platform.device_type
    return "rocm" if device == "cuda" and not platform.is_cuda() else device


def _log_with_vllm() -> None:
    """opshim's warnings go where vLLM's go, in its format, unless the program has set up opshim's logger itself."""
    log = logging.getLogger("opshim")
    if not log.handlers:
        vllm = logging.getLogger("vllm")
        log.handlers, log.propagate = list(vllm.handlers), False
        log.setLevel(vllm.level)


def _reach_other_machines(environ) -> None:
    """Lets vLLM copy opshim's variables to its Ray workers. The list of such prefixes is also part of the key under
    which vLLM keeps what torch.compile made, so that it never takes a graph that was traced without the hooks."""
    prefixes = [prefix for prefix in environ.get(COPIED, "").split(",") if prefix]
    if variables.PREFIX not in prefixes:
        environ[COPIED] = ",".join([*prefixes, variables.PREFIX])


def _set(hook: Hook, version: str) -> None:
    try:
        for target, parameters in hook.targets.items():
            versions.find(target, parameters)
        importlib.import_module(hook.module).install()
        hook.state = "set"
    except (HookError, ImportError) as error:
        hook.state, hook.reason = "missed", str(error)
        if not hook.ops:  # nothing that is served depends on it
            hooking.log.warning("hook %s is not set: in vLLM %s, %s", hook.name, version, error)
            return
        hooking.miss(f"hook {hook.name} ({', '.join(hook.ops)})", f"in vLLM {version}, {error}")
