"""The rules and properties of the ops, each a check of its own on every op it applies to (the contract's last section).

A property is a kind of case whose check may call the provider as often as it needs; reports, certificates, `conform`
and the mutants treat it as any other. Cases are made from an op's `Roles` (`roles.py`), one module per group:

    memory    canary, unwritten, inputs_unchanged, nan_irrelevant, nan_relevant           rules 2 to 4
    layouts   strided, misaligned, large_offsets                                          rules 5 and 6
    repeats   determinism                                                                 rule 5
    routes    permutation, composition, batch_invariance, identities, long_horizon
    residues  every_residue
    quiet     quiet                                                                       nothing on stdout or stderr
    cuda      graph_replay, stream, no_sync, chain                                        rule 8, on CUDA only

Rule 7 is a kind of the case tables: "empty", for every op. Bitwise or within the error budget: where either is right,
a case passes and its findings say which.
"""

from __future__ import annotations

import importlib

from conformance.case import Case

GROUPS = ("memory", "layouts", "repeats", "routes", "residues", "quiet", "cuda")


def cases(roles) -> list[Case]:
    """All property cases of the op that the roles describe."""
    modules = [importlib.import_module(f"{__name__}.{group}") for group in GROUPS]
    return [case for module in modules for case in module.cases(roles)]
