"""The plugin: vLLM calls `register()` in each of its processes before it builds anything.

vLLM logs and skips a plugin that raises an Exception while it is imported, so whatever stops opshim ends the process
with SystemExit, after one line (or the chain table) on stderr.
"""

from __future__ import annotations

import importlib
import logging
import sys

from shim import plugins, policy
from shim.errors import OpshimError
from shim.vllm_plugin import hooking, versions
from shim.vllm_plugin.versions import Hook, HookError

_registered = False


def register() -> None:
    """Entry point of the group vllm.general_plugins; does its work once per process."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        _register()
    except OpshimError as error:
        print(f"opshim: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def hooks(platform: str = "cpu") -> list[Hook]:
    """The hooks for a platform, with their state in this process."""
    return versions.PLATFORMS.get(platform, [])


def _register() -> None:
    import vllm
    from vllm.platforms import current_platform

    _log_with_vllm()
    versions.check_version(vllm.__version__)
    plugins.load_all()
    policy.current().validate()
    platform = current_platform.device_type
    if not hooks(platform):
        hooking.miss("every layer", f"opshim has no hooks for vLLM's platform {platform}")
    for hook in hooks(platform):
        _set(hook, vllm.__version__)


def _log_with_vllm() -> None:
    """opshim's warnings go where vLLM's go, in its format, unless the program has set up opshim's logger itself."""
    log = logging.getLogger("opshim")
    if not log.handlers:
        log.handlers, log.propagate = list(logging.getLogger("vllm").handlers), False


def _set(hook: Hook, version: str) -> None:
    try:
        for target, parameters in hook.targets.items():
            versions.find(target, parameters)
        importlib.import_module(hook.module).install()
        hook.state = "set"
    except (HookError, ImportError) as error:
        hook.state, hook.reason = "missed", str(error)
        hooking.miss(f"hook {hook.name} ({', '.join(hook.ops)})", f"in vLLM {version}, {error}")
