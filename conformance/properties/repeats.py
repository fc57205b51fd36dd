"""Rule 5: same inputs, same bits."""

from __future__ import annotations

import torch

from conformance.case import Case
from conformance.compare import Finding
from conformance.properties.roles import Roles
from conformance.properties.trial import Trial, all_same, case, clones, differences

REPEATS = 5
THREADS = (1, 2, 3)


def cases(roles: Roles) -> list[Case]:
    return [case(roles, "determinism", determinism, roles.busy, dtype) for dtype in roles.dtypes]


def determinism(trial: Trial) -> list[Finding]:
    """The bits are the same when the call is repeated, in other memory. When other counts of threads share it, results
    are within the budget: libraries of matrix products, which are right, sum in another order then."""
    first, kept = clones(trial.call(trial.fresh())), []
    for again in range(1, REPEATS):
        kept.append(trial.fresh())  # so that the next call's arguments lie elsewhere
        found = differences(trial.call(trial.fresh()), first, "changes", f"other bits in call {again + 1}")
        if found:
            return found
    before, said = torch.get_num_threads(), ""
    try:
        for threads in THREADS if trial.target.device == "cpu" else ():
            torch.set_num_threads(threads)
            results = trial.call(trial.fresh())
            if all_same(results, first):
                continue
            found, said = trial.judged(results, text=f"with {threads} threads"), "bits depend on the count of threads"
            if any(finding.kind for finding in found):
                return found
    finally:
        torch.set_num_threads(before)
    return [Finding(name, text=said) for name in first]
