"""The example of CONTRIBUTING.md, which people copy, is the code of the op that it is about."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"((?:[^\n]+\n)+)\n```python\n(.*?)```", re.DOTALL)  # a paragraph, and the code below it


def functions(source):
    """Name -> the function without its docstring, whose place is elsewhere, and without comments and layout."""
    found = {one.name: one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef)}
    for one in found.values():
        one.body = one.body[ast.get_docstring(one) is not None :]
    return {name: ast.unparse(one) for name, one in found.items()}


def test_the_functions_shown_are_those_of_the_files_that_are_named():
    shown = {}
    for paragraph, code in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text()):
        files = [ROOT / name for name in re.findall(r"`([\w/]+\.py)`", paragraph)]
        there = {name: text for file in files for name, text in functions(file.read_text()).items()}
        for name, text in functions(code).items():
            assert text == there.get(name), paragraph
            shown.setdefault(name, []).append(text)
    assert len(shown.pop("moe_sum")) == 2  # the reference and the binding
    assert len(shown) == 1  # a mutant
