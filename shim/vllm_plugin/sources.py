"""Hooks' names looked up in vLLM's source, without importing it: for a version that is not installed, or whose modules
need a GPU that is not there.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from shim.vllm_plugin.versions import Hook, HookError, Parameters, check_parameters

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check(hook: Hook, site: Path) -> None:
    """HookError for the first name of a hook that the vLLM in a folder (the one that holds vllm/) lacks."""
    for target, parameters in hook.targets.items():
        find(target, parameters, site)


def find(target: str, parameters: Parameters, site: Path) -> None:
    """Like versions.find, on source."""
    module, _, path = target.partition(":")
    owner, *attributes = path.split(".")
    if _parse(site, module) is None:
        raise HookError(f"{module} does not exist in {site}")
    found = _in_module(site, module, owner)
    for attribute in attributes:
        found = found and _in_class(site, *found, attribute)
    if found is None:
        raise HookError(f"{target} does not exist")
    if parameters is not None:
        if not isinstance(found[1], DEFINITIONS[:2]):
            raise HookError(f"{target} is no function")
        check_parameters(target, ", ".join(_parameters(found[1])), parameters)


# What is found is a module's name and the node in it that defines the name.


def _in_module(site: Path, module: str, name: str) -> tuple[str, ast.AST] | None:
    tree = _parse(site, module)  # None for what other packages define
    for node in _statements(tree.body if tree else []):
        if isinstance(node, DEFINITIONS) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _in_module(site, node.module, alias.name)
        if name in _assigned(node):
            return module, node
    return None


def _in_class(site: Path, module: str, node: ast.AST, name: str) -> tuple[str, ast.AST] | None:
    if not isinstance(node, ast.ClassDef):
        return None
    for one in _statements(node.body):
        if (isinstance(one, DEFINITIONS) and one.name == name) or name in _assigned(one):
            return module, one
    for base in node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        parent = _in_module(site, module, base.id) if isinstance(base, ast.Name) else None
        found = parent and _in_class(site, *parent, name)
        if found:
            return found
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A body's statements, those under if, try and with included."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))


def _assigned(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names as inspect.signature gives them for the function as an attribute of its class."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    names += [one.arg for one in (given.vararg, *given.kwonlyargs, given.kwarg) if one]
    bound = any(isinstance(one, ast.Name) and one.id == "classmethod" for one in function.decorator_list)
    return names[1:] if bound else names


@functools.cache
def _parse(site: Path, module: str) -> ast.Module | None:
    path = site.joinpath(*module.split("."))
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return ast.parse(files[0].read_text()) if files else None
