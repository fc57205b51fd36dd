"""Rule 5: same inputs, same bits."""

from __future__ import annotations

import torch

from conformance.case import Case
from conformance.compare import Finding
from conformance.properties.roles import Roles
from conformance.properties.trial import Trial, case, clones, differences

REPEATS = 5
THREADS = (1, 2, 3)


def cases(roles: Roles) -> list[Case]:
    return [case(roles, "determinism", determinism, roles.busy, dtype) for dtype in roles.dtypes]


def determinism(trial: Trial) -> list[Finding]:
    """The bits are the same when the call is repeated, in other memory, and when other counts of threads share it."""
    first, kept = clones(trial.call(trial.fresh())), []
    for again in range(1, REPEATS):
        kept.append(trial.fresh())  # so that the next call's arguments lie elsewhere
        found = differences(trial.call(trial.fresh()), first, "changes", f"other bits in call {again + 1}")
        if found:
            return found
    before = torch.get_num_threads()
    try:
        for threads in THREADS if trial.target.device == "cpu" else ():
            torch.set_num_threads(threads)
            found = differences(trial.call(trial.fresh()), first, "changes", f"other bits with {threads} threads")
            if found:
                return found
    finally:
        torch.set_num_threads(before)
    return [Finding(name) for name in first]
