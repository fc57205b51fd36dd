"""The case tables, one module per op family (named as in `ops_reference`); `all_cases` collects them."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from conformance.case import Case


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case of every family, in a stable order; two cases of one name are an error."""
    cases: dict[str, Case] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        for case in importlib.import_module(f"{__name__}.{module}").CASES:
            if case.id in cases:
                raise ValueError(f"two cases are named {case.id} (the second in {module}.py)")
            cases[case.id] = case
    return tuple(cases.values())
