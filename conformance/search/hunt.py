"""The search itself: hypothesis draws problems of an op until one fails, then looks for the smallest that does.

An op's search is one case of kind "search" at each level; its examples follow from the case's seed. The problem being
tried is noted on disk before the provider is called (`replay.py`), so that a crash or a hang has a culprit too.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

import torch

from conformance.case import Case
from conformance.compare import Finding
from conformance.run import Ended, Result, Target, run
from conformance.search import replay
from conformance.search.plans import PLANS
from conformance.search.problem import Problem
from shim.errors import is_sticky

EXAMPLES = {"quick": 20, "standard": 60, "exhaustive": 200}
SHRINKING = 15.0  # seconds
CONTENTS = range(4)  # seeds


def cases() -> list[Case]:
    """A search per op and level."""
    return [search(op, examples, level) for op in PLANS for level, examples in EXAMPLES.items()]


def search(op: str, examples: int, level: str = "quick") -> Case:
    def make(generator, device, dtype, examples):
        return {"seed": generator.initial_seed()}  # the search's own, the rest is drawn

    def check(target, fresh):
        return Hunt(target, case, fresh()["seed"]).findings(examples)

    case = Case(op, "search", {"examples": examples}, torch.float32, level, make=make, check=check)
    return case


class Wrong(Exception):
    """The provider fails at a problem."""


class Hunt:
    """One search: which problems were tried, which failed, and how close the others came."""

    def __init__(self, target: Target, case: Case, seed: int):
        self.target, self.case, self.seed = target, case, seed
        self.failed: dict[str, Result] = {}
        self.smallest: Problem | None = None  # the last that failed
        self.closest: dict[str, Finding] = {}
        self.refusals: list[str] = []
        self.tried = 0
        self.deadline = 0.0

    def findings(self, examples: int) -> list[Finding]:
        """The worst finding per output of all that passed; Ended with the smallest failure, if there is one."""
        try:
            import hypothesis

            from conformance.search.strategies import problems
        except ImportError as error:
            raise Ended("skip", "not_installed", f"{error.name} is not installed: pip install 'opshim[test]'") from None
        settings = hypothesis.settings(
            max_examples=examples,
            database=None,
            deadline=None,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.target, hypothesis.Phase.shrink),
            suppress_health_check=list(hypothesis.HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
            report_multiple_bugs=False,
        )

        @hypothesis.seed(self.seed)
        @settings
        @hypothesis.given(problems(self.case.op, PLANS[self.case.op]))
        def attempt(problem):
            ratio = self.attempt(problem)
            if ratio > 0:
                hypothesis.target(ratio, label="error over budget")

        try:
            attempt()
        except Wrong:
            raise self.convicted() from None
        replay.forget(self.case, self.target)
        if self.refusals and not self.closest:
            raise Ended("skip", "refused", self.refusals[0])
        return list(self.closest.values())

    def attempt(self, problem: Problem) -> float:
        """Tries a problem: its worst error over budget, or Wrong. Smaller ones are tried with other contents, too, as the
        fault need not show in the first that come. Once shrinking has taken too long, only what is known to fail still
        does, so that it ends; on a device that is lost, everything would."""
        ratio = self.judged(problem)
        for seed in CONTENTS if self.failed else ():
            ratio = max(ratio, self.judged(replace(problem, seed=seed)))
        return ratio

    def judged(self, problem: Problem) -> float:
        key = str(problem)
        if key not in self.failed:
            if self.failed and time.monotonic() > self.deadline:
                return 0.0
            self.kept(problem)
            result = run(problem.case(), self.target)
            self.tried += 1
            if result.status != "fail":
                return self.passed(result, problem)
            if not self.failed:
                self.deadline = time.monotonic() + SHRINKING
            if is_sticky(Exception(result.message)):
                self.deadline = 0.0
            self.failed[key] = result
        self.smallest = problem
        raise Wrong

    def passed(self, result: Result, problem: Problem) -> float:
        if result.status == "skip":
            self.refusals.append(result.message)
            return 0.0
        for one in result.findings:
            finding = Finding(**one)
            if finding.output not in self.closest or finding.ratio > self.closest[finding.output].ratio:
                self.closest[finding.output] = replace(finding, text=f"{finding.text} of {problem}")
        return min(result.ratio, 1.0)

    def kept(self, problem: Problem, result: Result | None = None) -> str:
        """The replay file, or "" where none can be written: no finding. Of a failure conftest.py says so."""
        with suppress(OSError):
            return replay.keep(self.case, self.target, problem, result)
        return ""

    def convicted(self) -> Ended:
        """The end of a search that found something; the file of its smallest problem is left for `replay`."""
        witness = self.failed[str(self.smallest)]
        witness.replay = self.kept(self.smallest, witness)
        call = self.smallest.call(self.target.provider, self.target.device, replay.run.provider_files)
        message = f"{witness.message}\nthe smallest of {len(self.failed)} failures in {self.tried} calls:\n{call}"
        return Ended("fail", witness.reason, message, witness)
