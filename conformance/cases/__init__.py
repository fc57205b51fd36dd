"""The case tables, one module per op family (named as in `ops_reference`); `all_cases` collects them.

A module has `CASES`, the tables, and `ROLES`, what the properties need to know of the ops (`conformance/properties`);
a long family has its roles in a second module, `<family>_roles`. `model_sizes` has what only large counts show, of any op.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from conformance import properties
from conformance.case import Case


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case of every family, in a stable order; two cases of one name are an error."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    cases: dict[str, Case] = {}
    for module in modules:
        of_roles = [case for roles in getattr(module, "ROLES", ()) for case in properties.cases(roles)]
        for case in [*getattr(module, "CASES", ()), *of_roles]:
            if case.id in cases:
                raise ValueError(f"two cases are named {case.id} (the second in {module.__name__})")
            cases[case.id] = case
    return tuple(cases.values())
