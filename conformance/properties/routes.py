"""Properties that are another way to the same results: each an op's own `Route`s, all judged alike.

The exact answer is the whole call's, in float64; what is judged is what the provider comes to on the other way; and the
budget is set by what that way loses in plain PyTorch. So a way may round more often than the whole call does.
"""

from __future__ import annotations

from dataclasses import replace

from conformance.case import Case
from conformance.compare import Finding
from conformance.properties.roles import Roles, Route
from conformance.properties.trial import Trial, all_same, case


def cases(roles: Roles) -> list[Case]:
    made = []
    for route in roles.routes:
        sizes = roles.sizes[0] if route.sizes is None else route.sizes
        make, label = roles.make(route.prepare), {"way": route.name}

        def check(trial, route=route):
            return follow(trial, route)

        for dtype in route.dtypes or roles.dtypes:
            made.append(case(roles, route.kind, check, sizes, dtype, label, make, level=route.level))
    return made


def follow(trial: Trial, route: Route) -> list[Finding]:
    """The provider's results on this way are within budget of the whole's; the findings say if they are its very bits."""
    whole = route.whole or (lambda call, arguments: call(arguments))
    actual = route.way(trial.call, trial.fresh())
    if len(trial.target.calls) > 1:
        trial.target.calls.clear()  # what several calls came to is judged: the whole's arguments say more than the last's
    findings = trial.judged(actual, trial.answers(whole, route.way))
    if route.whole or any(finding.kind for finding in findings):
        return findings
    said = "bitwise equal to the whole call" if all_same(actual, trial.call(trial.fresh())) else "within the budget"
    return [replace(finding, text=said) for finding in findings]
