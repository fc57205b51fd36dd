"""The names that vLLM's hooks for CUDA rely on, in the source of any version.

OPSHIM_TEST_VLLM_SITES lists folders that hold the vllm/ of other versions; what is installed is always looked at.
"""

import ast
import json
import os
from pathlib import Path

import pytest

import opshim
from shim.vllm_plugin import sources, versions
from shim.vllm_plugin.versions import HookError

PLUGIN = Path(sources.__file__).parent
SITES = [Path(site) for site in os.environ.get("OPSHIM_TEST_VLLM_SITES", "").split(":") if site]


def test_find_takes_any_of_the_parameters_that_versions_have():
    target = "json:JSONDecoder.raw_decode"
    assert versions.find(target, ("self, text", "self, s, idx")) is json.JSONDecoder.raw_decode
    with pytest.raises(HookError, match=r"takes \(self, s, idx\), expected \(self\) or \(s\)"):
        versions.find(target, ("self", "s"))


@pytest.fixture
def site(tmp_path):
    """A package with each way in which vLLM defines a name."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from package.base import Base as Parent\n")
    (tmp_path / "package" / "base.py").write_text(
        "class Base:\n    inherited: bool = True\n    def f(self, x, /, y=1, *, z=2, **rest): ...\n"
    )
    (tmp_path / "package" / "module.py").write_text(
        "from typing import Generic\n"
        "from package import Parent\n"
        "if True:\n    def g(a, *b): ...\n"
        "try:\n    CONSTANT = 1\nexcept ImportError:\n    pass\n"
        "class Child(Generic[int], Parent):\n    MEMBER = 'x'\n    @classmethod\n    def make(cls, size): ...\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        ("package.module:g", "a, b"),
        ("package.module:CONSTANT", None),
        ("package.module:Child.MEMBER", None),
        ("package.module:Child.make", "size"),
        ("package.module:Child.inherited", None),
        ("package.module:Child.f", ("other", "self, x, y, z, rest")),
        ("package.module:Parent.f", None),
    ],
)
def test_a_name_is_found_in_source_wherever_it_is_defined(site, target, parameters):
    sources.find(target, parameters, site)


@pytest.mark.parametrize(
    ("target", "parameters", "words"),
    [
        ("package.absent:x", None, r"package\.absent does not exist in"),
        ("package.module:absent", None, "package.module:absent does not exist"),
        ("package.module:Child.absent", None, "Child.absent does not exist"),
        ("package.module:CONSTANT.absent", None, "CONSTANT.absent does not exist"),
        ("package.module:CONSTANT", "", "CONSTANT is no function"),
        ("package.module:g", "a", r"takes \(a, b\), expected \(a\)"),
    ],
)
def test_source_says_what_is_wrong_with_a_target(site, target, parameters, words):
    with pytest.raises(HookError, match=words):
        sources.find(target, parameters, site)


@pytest.fixture(params=[None, *SITES], ids=lambda site: str(site or "installed"))
def vllm(request):
    """The folder of a vLLM. The build for the CPU has the Python code of CUDA too, yet not all of it imports there."""
    return request.param or Path(pytest.importorskip("vllm").__file__).parents[1]


@pytest.mark.parametrize("hook", versions.CUDA, ids=lambda hook: hook.name)
def test_every_target_is_in_the_sources(hook, vllm):
    sources.check(hook, vllm)
    for name in hook.ops:
        opshim.get(name)


@pytest.mark.parametrize("hook", versions.CUDA, ids=lambda hook: hook.name)
def test_every_import_of_a_hook_is_in_the_sources(hook, vllm):
    imports = [node for name in modules(hook.module.rpartition(".")[2]) for node in imported(name)]
    assert imports
    for node in imports:
        for alias in node.names:
            folder = vllm.joinpath(*node.module.split("."), alias.name)
            if not (folder.with_suffix(".py").is_file() or (folder / "__init__.py").is_file()):
                sources.find(f"{node.module}:{alias.name}", None, vllm)


def imported(name, of="vllm"):
    """What a module of the plugin imports from a package, as nodes of its source."""
    nodes = ast.walk(ast.parse((PLUGIN / f"{name}.py").read_text()))
    return [node for node in nodes if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{of}.")]


def modules(name):
    """A module of the plugin and those that it imports."""
    others = [node.module.rpartition(".")[2] for node in imported(name, "shim.vllm_plugin")]
    return {name}.union(*map(modules, others))
