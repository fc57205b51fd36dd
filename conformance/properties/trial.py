"""One provider on trial by a property: its calls, and the judgement of what came of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import shim
from conformance import compare, run
from conformance.accelerator import settled
from conformance.case import Case
from conformance.compare import Evaluation, Finding, moved
from conformance.memory import WRONG, Forms
from conformance.properties.roles import Arguments, Results, Roles
from conformance.run import Ended, Target, describe, double, noted, poisoned_memory, reference_of, results_of, told


@dataclass(frozen=True)
class Caller:
    """An op of one provider as a function of its arguments by name: call(arguments) -> results by name.

    In-place arguments are written to, and are among the results. A refusal or an error ends the case, and so does an
    argument that is another tensor afterwards.
    """

    target: Target

    def __call__(self, arguments: Arguments) -> Results:
        op = self.target.op
        op.check(**arguments)
        try:
            refusal = self.target.refusal(arguments)
        except Exception as error:  # the guard is the provider's too
            raise Ended("fail", "raised", f"supports: {told(error)}") from error
        if refusal:
            raise Ended("skip", "refused", refusal)
        self.target.calls[-1:] = [None] if self.target.calls else []  # only the last one is ever told
        self.target.calls.append(noted(arguments))
        forms = Forms(arguments)
        try:
            with poisoned_memory(), settled(self.target.device):
                returned = self.target.function(**arguments)
        except Exception as error:  # whatever it is, it is the provider's failure
            raise Ended("fail", "raised", told(error)) from error
        rebound = forms.finding()
        if rebound:
            raise Ended("fail", rebound.kind, describe(rebound))
        return results_of(op, returned, arguments)

    def of(self, op: str) -> Caller:
        """Another op: the provider's, or the reference where it has none."""
        own = self.target.provider != "reference" and Target.find(op, self.target.provider, self.target.device)
        return Caller(own if own and own.function else reference(op, self.target.device))


def reference(op: str, device: str) -> Target:
    return Target(shim.get(op), "reference", device, reference_of(shim.get(op)))


@dataclass
class Trial:
    """What a property's check gets: `fresh()` arguments, the provider's `call`, the reference's, and the judge."""

    target: Target
    fresh: Callable[[], Arguments]
    compare: Callable

    @cached_property
    def call(self) -> Caller:
        return Caller(self.target)

    @cached_property
    def reference(self) -> Caller:
        return Caller(reference(self.target.op.name, self.target.device))

    @cached_property
    def right(self) -> Evaluation:
        """The reference's answers for `fresh()`, with nothing to judge yet."""
        return self.answers(lambda call, arguments: call(arguments), lambda call, arguments: call(arguments))

    def answers(self, whole: Callable, way: Callable) -> Evaluation:
        """By the reference: the exact answer is the whole's, what the way there loses in the plain dtype is noise."""

        def exactly(raised: Callable) -> Results:
            return whole(self.reference, {name: raised(value) for name, value in self.fresh().items()})

        exact, plain = exactly(double), way(self.reference, self.fresh())
        return Evaluation(self.target.op.name, self.fresh(), {}, exact, plain, move=lambda draw: exactly(moved(draw)))

    def judged(self, actual: Results, answers: Evaluation | None = None, text: str = "") -> list[Finding]:
        """The verdict on results; text: which call they are from."""
        findings = self.compare(replace(answers or self.right, actual=actual).on(run.judge_device))
        return [replace(f, text=": ".join(filter(None, (text, f.text)))) for f in findings]


Check = Callable[[Trial], list[Finding]]


def case(
    roles: Roles, kind: str, check: Check, sizes: dict, dtype, label: dict | None = None, make=None, **more: Any
) -> Case:
    """A property's case. label: what stands in its name beside the sizes; make: in place of the prepared example."""
    make, label, judge = make or roles.make(), label or {}, roles.compare or compare.by_budget

    def arguments(generator, device, dtype, **named):
        return make(generator, device, dtype, **{name: size for name, size in named.items() if name not in label})

    def on_trial(target: Target, fresh: Callable[[], Arguments]) -> list[Finding]:
        return check(Trial(target, fresh, judge))

    return Case(roles.op, kind, sizes | label, dtype, make=arguments, check=on_trial, **more)


def same(a: Tensor, b: Tensor) -> Tensor:
    """Elements with equal bits; any NaN equals any other."""
    if not a.is_floating_point():
        return a == b
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())


def all_same(a: Results, b: Results) -> bool:
    return all(a[name].shape == b[name].shape and bool(same(a[name], b[name]).all()) for name in a)


def differences(a: Results, b: Results, kind: str, text: str) -> list[Finding]:
    """A finding for the first result in which the bits of `a` are not those of `b`."""
    for name, wanted in b.items():
        wrong = ~same(a[name], wanted)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            values = (float(x[at]) for x in (a[name], wanted))
            text = f"{text}; {int(wrong.sum())} of {wrong.numel()} elements"
            return [Finding(name, kind, WRONG, at=at, text=text, **dict(zip(("actual", "exact"), values, strict=True)))]
    return []


def clones(results: Results) -> Results:
    return {name: value.clone() for name, value in results.items()}
