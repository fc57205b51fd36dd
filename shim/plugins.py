"""Implementations from outside: adapters that come with opshim (shim/providers), provider files, and installed packages
under the entry point group `opshim.providers`.

A provider file is a Python file that registers functions with `@shim.implementation(...)`. All of it counts or nothing:
a file that fails half-way leaves no registration behind.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from shim import providers
from shim.errors import OpshimError, RegistrationError, UnknownNameError
from shim.op import registrations, restore

log = logging.getLogger("opshim")

GROUP = "opshim.providers"
_loaded: dict[str, object] = {}  # what was loaded already: path or entry point -> module
_idle: dict[str, str] = {}  # provider files that registered nothing: path -> as it was given


class _Source(SourceFileLoader):
    """Python source under any suffix. No bytecode is kept, as Python would keep one for both mylib.py and mylib.txt."""

    def path_stats(self, path):
        raise OSError("no bytecode")


def load_file(path: str | os.PathLike) -> ModuleType:
    """Imports a provider file (once per process). RegistrationError with file and line for whatever it does wrong."""
    file = Path(path).resolve()
    if str(file) not in _loaded:
        if not file.is_file():
            raise RegistrationError(f"provider file {path} {'is a folder' if file.is_dir() else 'does not exist'}")
        name = f"opshim_provider_{file.stem}_{abs(hash(str(file))):x}"
        spec = importlib.util.spec_from_loader(name, _Source(name, str(file)))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look modules up there
        before = registrations()
        try:
            _registering(lambda: spec.loader.exec_module(module), f"provider file {path}", str(file))
        except RegistrationError:
            del sys.modules[name]
            raise
        _loaded[str(file)] = module
        if registrations() == before:
            _idle[str(file)] = str(path)
            log.warning("provider file %s registered nothing: is @shim.implementation(...) missing?", path)
    return _loaded[str(file)]


def load_entry_points() -> list[str]:
    """Loads opshim's own adapters and every installed package's providers; returns the entry points' names."""
    providers.register()
    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    for entry in found:
        if entry.value not in _loaded:
            _loaded[entry.value] = _registering(entry.load, f"entry point {entry.name} = {entry.value}", None)
    return [entry.name for entry in found]


def load_all(environ=os.environ) -> None:
    """Installed providers, then the files that OPSHIM_PROVIDER_FILES lists."""
    load_entry_points()
    for path in environ.get("OPSHIM_PROVIDER_FILES", "").split(os.pathsep):
        if path:
            load_file(path)


def forget(path: str | os.PathLike) -> None:
    """Lets `load_file` import a file again (its registrations are undone by `shim.op.temporary`)."""
    for known in (_loaded, _idle):
        known.pop(str(Path(path).resolve()), None)


def unknown(what: str, provider: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a provider that nobody registered, with the files that registered nothing at all."""
    return UnknownNameError(what, provider, known, f"{', '.join(_idle.values())} registered nothing" if _idle else "")


def _registering(load, what: str, file: str | None):
    kept = registrations()
    try:
        return load()
    except RegistrationError as error:
        restore(kept)
        raise RegistrationError(f"{what}: {error}") from error
    except (Exception, SystemExit) as error:
        restore(kept)
        detail = str(error) if isinstance(error, OpshimError) else f"{type(error).__name__}: {error}"
        raise RegistrationError(f"{what} does not import: {detail}; at {_line(error, file)}") from error


def _line(error: BaseException, file: str | None) -> str:
    """file:line where loading went wrong: the last frame inside the file if there is one, else the last of all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return f"{frame.filename}:{frame.lineno}"
