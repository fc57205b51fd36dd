"""Runs one case on one provider and says what came of it. Whatever a provider does, the answer is a `Result`.

    target = Target.find("topk_softmax", "native", "cpu")
    result = run(case, target)
    result.status, result.reason       # "fail", "row_error_budget"

What is checked in every case, besides the numbers (`compare.py`): outputs have the reference's count, layout, shape,
dtype and device and are memory of their own; arguments stay the tensors that they were and keep their bits, in-place
arguments outside their own elements (the rest of the buffer that they are a view of) too; memory that torch hands to
the provider holds NaN (integers: the largest), so that an element nobody wrote shows.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shim
from conformance import compare
from conformance.accelerator import first_configurations, settled
from conformance.case import DTYPE_NAMES, Case
from conformance.compare import Evaluation, Finding
from conformance.memory import Watch, named_outputs, unlike_memory
from shim.candidates import bind
from shim.device import host_memory, human

judge_device: str | None = None  # where references run and results are compared; None: where the case runs


@dataclass(frozen=True)
class Target:
    """A provider's function for one op on one device: what a case is run on.

    supports     (**arguments) -> True, or words: the provider refuses the call, which is no failure
    missing      words: the provider offers nothing for this op here, which is no failure
    unavailable  words: it is native code that does not load or build, which is one
    """

    op: shim.Op
    provider: str
    device: str
    function: Callable | None = None
    supports: Callable | None = None
    missing: str = ""
    unavailable: str = ""
    build: dict[str, str] = field(default_factory=dict)  # what identifies its code (shim/certificates.py)
    calls: list[dict[str, Any] | None] = field(default_factory=list)  # of a case's own check: notes on the last one

    @classmethod
    def find(cls, op: str, provider: str, device: str) -> Target:
        """The provider's function as the chain would load it, called without the chain."""
        one = shim.get(op)
        name = "native" if provider.startswith("native:") else provider
        if name != "reference" and not any(i.provider == name and i.serves(device) for i in one.implementations):
            return cls(one, provider, device, missing=f"provider '{provider}' has no {op} for {device}")
        try:
            bound = bind(one, device, provider)
        except shim.OpUnavailableError as error:
            return cls(one, provider, device, **{"unavailable" if name == "native" else "missing": str(error)})
        return cls(one, provider, device, bound.function, bound.supports, build=bound.build)

    def refusal(self, arguments: dict[str, Any]) -> str:
        """Why this call is not for this provider; empty when it is. TypeError for an answer that is neither."""
        with settled(self.device):
            answer = True if self.supports is None else self.supports(**arguments)
        if answer is True:
            return ""
        if not (isinstance(answer, str) and answer):
            raise TypeError(f"answered {answer!r}, where True or the reason in words is expected")
        outside = self.op.in_domain(**arguments)
        return str(answer) if outside is True else f"outside the op's domain: {outside}"


@dataclass
class Result:
    """One case on one provider. status: pass, fail or skip; reason: the kind of the failure, or of the skip."""

    case: str
    op: str
    kind: str
    sizes: dict[str, Any]
    dtype: str
    level: str
    provider: str
    device: str
    seed: int
    status: str = "pass"
    reason: str = ""
    message: str = ""
    ratio: float = 0.0  # worst error over budget; above 1 is a failure
    findings: list[dict[str, Any]] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)  # of a failure: each argument in words
    provider_ms: float | None = None
    reference_ms: float | None = None
    seconds: float | None = None  # that the whole case took; None where its process did not live to tell
    replay: str = ""  # of a failure: the file from which `runner.py replay` runs it again
    build: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, provider: str, device: str, base_seed: int) -> Result:
        """What is known before the case is run."""
        sizes = {name: _plain(value) for name, value in case.sizes.items()}
        dtype = DTYPE_NAMES.get(case.dtype, str(case.dtype))
        seed = case.seed(base_seed)
        return cls(case.id, case.op, case.kind, sizes, dtype, case.level, provider, device, seed)

    def failed(self, reason: str, message: str) -> Result:
        self.status, self.reason, self.message = "fail", reason, message
        return self

    def skipped(self, reason: str, message: str) -> Result:
        self.status, self.reason, self.message = "skip", reason, message
        return self

    def judged(self, findings: list[Finding]) -> Result:
        """Takes the verdict over from the findings: the first that convicts gives the reason."""
        self.findings = [asdict(finding) for finding in findings]
        self.ratio = max((finding.ratio for finding in findings), default=0.0)
        wrong = next((finding for finding in findings if finding.kind), None)
        return self.failed(wrong.kind, describe(wrong)) if wrong else self

    def __str__(self) -> str:
        """The verdict, and of a failure its arguments."""
        why = f": {self.reason}: {self.message}" if self.reason else f": worst error {compare.of_budget(self.ratio)}"
        inputs = "".join(f"\n  {name}: {value}" for name, value in self.arguments.items())
        return f"{self.status.upper()}  {self.case} on {self.provider} ({self.device}){why}{inputs}"


class Ended(Exception):
    """Raised in a case's own check: the case fails, or is skipped, for a reason known by its kind and in words."""

    def __init__(self, status: str, reason: str, message: str, witness: Result | None = None):
        """witness: the one call that says it all."""
        super().__init__(message)
        self.status, self.reason, self.message, self.witness = status, reason, message, witness


def run(case: Case, target: Target, base_seed: int = 0) -> Result:
    """Runs the case; never raises for what the provider does, only for a broken case or reference."""
    result = Result.of(case, target.provider, target.device, base_seed)
    result.build = target.build
    if target.missing:
        return result.skipped("not_offered", target.missing)
    if target.unavailable:
        return result.failed("unavailable", target.unavailable)
    if target.device == "cuda":
        first_configurations()
    target = replace(target, calls=[])
    judgement = _must_refuse if case.raises else _must_hold if case.check else _must_be_right
    with much_memory(target.device) if case.memory else nullcontext():
        lacking = case.memory and lacks_memory(target.device, case.memory)
        if lacking:
            return result.skipped("no_memory", lacking)
        judgement(case, target, result)
    if result.status == "fail" and not result.arguments:
        last = target.calls[-1] if target.calls else noted(case.arguments(target.device, result.seed))
        result.arguments = in_words(last)
    return result


def _must_be_right(case: Case, target: Target, result: Result) -> Result:
    """The provider refuses the call, or does what the reference does."""

    def fresh() -> dict[str, Any]:
        return case.arguments(target.device, result.seed)

    arguments = fresh()
    target.op.check(**arguments)
    try:
        refusal = target.refusal(arguments)
    except Exception as error:  # noqa: BLE001 - the guard is the provider's too
        return result.failed("raised", f"supports: {told(error)}")
    if refusal:
        return result.skipped("refused", refusal)

    watch = Watch(arguments, target.op.mutates)
    try:
        with poisoned_memory():
            returned, result.provider_ms = _timed(target.function, arguments, target.device)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the provider's failure
        return result.failed("raised", told(error))
    plain_arguments = fresh()
    plain, result.reference_ms = _timed(reference_of(target.op), plain_arguments, target.device)
    wrong = watch.findings(returned) or _structure(returned, plain)
    if wrong:
        return result.judged(wrong)
    evaluation = Evaluation(
        op=case.op,
        arguments=fresh(),
        actual=results_of(target.op, returned, arguments),
        exact=exact_results(target.op, fresh(), double),
        plain=results_of(target.op, plain, plain_arguments),
        move=lambda draw: exact_results(target.op, fresh(), compare.moved(draw)),
    )
    return result.judged((case.compare or compare.by_budget)(evaluation.on(judge_device)))


def _must_hold(case: Case, target: Target, result: Result) -> Result:
    """The case's own check finds no fault with the provider."""
    try:
        return result.judged(case.check(target, lambda: case.arguments(target.device, result.seed)))
    except Ended as end:
        for name in ("findings", "ratio", "arguments", "replay") if end.witness else ():
            setattr(result, name, getattr(end.witness, name))
        return result.failed(end.reason, end.message) if end.status == "fail" else result.skipped(end.reason, end.message)
    except Exception as error:  # noqa: BLE001 - what a provider returns may be anything
        wrong = []
        with suppress(Exception):
            wrong = _structure_of_one_call(case, target, result)
        return result.judged(wrong) if wrong else result.failed("broken_case", told(error))


def _structure_of_one_call(case: Case, target: Target, result: Result) -> list[Finding]:
    """Findings on the outputs of the case's example: a check reckons with outputs like the reference's, and may break
    on others."""
    given, same = (case.arguments(target.device, result.seed) for _ in range(2))
    if target.refusal(given):
        return []
    return _structure(_timed(target.function, given, target.device)[0], reference_of(target.op)(**same))


def _must_refuse(case: Case, target: Target, result: Result) -> Result:
    """The call is wrong: an OpArgumentError must name the argument before anything is written."""
    arguments = case.arguments(target.device, result.seed)
    watch = Watch({k: v for k, v in arguments.items() if isinstance(v, Tensor)}, ())
    try:
        target.op.check(**arguments)
    except shim.OpArgumentError as error:
        if error.argument != case.raises:
            return result.failed("not_refused", f"expected an error about '{case.raises}', got: {error}")
        return result.judged(watch.findings(None))
    except Exception as error:  # noqa: BLE001 - any other error is the wrong one
        return result.failed("not_refused", f"expected an OpArgumentError about '{case.raises}', got {told(error)}")
    return result.failed("not_refused", f"the call was accepted; argument '{case.raises}' is wrong")


def lacks_memory(device: str, size: int) -> str:
    """Why so many bytes cannot be had on the device now; empty where they can."""
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = host_memory().free
    return f"needs {human(size)}, {human(free)} are free" if free < size else ""


@contextmanager
def much_memory(device: str):
    """One process of this machine's user at a time is inside per device, so that what is free is free for it; what its
    tensors leave in torch's cache is given back at the end."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "all") if device == "cuda" else ""
    path = Path(tempfile.gettempdir()) / f"opshim-memory-{os.getuid()}-{device}{gpu.replace('/', '_')}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if device == "cuda":
                torch.cuda.empty_cache()


@contextmanager
def poisoned_memory():
    """torch.empty gives NaN (integers: their largest value) inside, so that unwritten elements show."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)  # the switch that the filling hangs on
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filling


def double(value: Any) -> Any:
    """A floating-point tensor in float64; anything else as it is."""
    return value.double() if isinstance(value, Tensor) and value.dtype.is_floating_point else value


def exact_results(op: shim.Op, arguments: dict[str, Any], raised: Callable[[Any], Any]) -> dict[str, Tensor]:
    """What the reference computes from the arguments raised to float64 by `raised`."""
    arguments = {name: raised(value) for name, value in arguments.items()}
    return results_of(op, reference_of(op)(**arguments), arguments)


def reference_of(op: shim.Op) -> Callable:
    """The op's reference, evaluated on `judge_device`: like the function itself, its results are where its arguments
    are."""
    if judge_device is None:
        return op.reference

    def call(**arguments):
        device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
        there = compare.placed(arguments, judge_device)
        returned = op.reference(**there)
        for name in op.mutates:
            arguments[name].copy_(there[name])
        return compare.placed(returned, device)

    return call


def results_of(op: shim.Op, returned: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """All that a call produced, by name: its outputs, and the arguments it writes to."""
    return named_outputs(returned) | {name: arguments[name] for name in op.mutates}


def _structure(returned: Any, plain: Any) -> list[Finding]:
    """Findings on count, type, layout, shape, dtype and device of the outputs."""
    wrong = float("inf")
    given, wanted = named_outputs(returned), named_outputs(plain)
    if given.keys() != wanted.keys():
        names = [", ".join(outputs) or "nothing" for outputs in (given, wanted)]
        return [Finding("output", "wrong_count", wrong, text="returned {} instead of {}".format(*names))]
    for name, b in wanted.items():
        a = given[name]
        if not isinstance(a, Tensor):
            return [Finding(name, "wrong_type", wrong, text=f"a {type(a).__name__} instead of a tensor")]
        if unlike_memory(a):
            return [Finding(name, "wrong_layout", wrong, text=unlike_memory(a))]
        for what in ("shape", "dtype", "device"):
            if getattr(a, what) != getattr(b, what):
                got, expected = (str(getattr(t, what)).removeprefix("torch.") for t in (a, b))
                return [Finding(name, f"wrong_{what}", wrong, text=f"{what} {got} instead of {expected}")]
        if b.is_contiguous() and not a.is_contiguous():  # as the fake implementations promise
            return [Finding(name, "wrong_strides", wrong, text=f"strides {a.stride()} instead of {b.stride()}")]
    return []


def _timed(function: Callable, arguments: dict[str, Any], device: str) -> tuple[Any, float]:
    """What the call returned, and its milliseconds; an error of an asynchronous device is raised here."""
    start = time.perf_counter()
    with settled(device):
        returned = function(**arguments)
    return returned, 1e3 * (time.perf_counter() - start)


@dataclass(frozen=True)
class Note:
    """What is told of a tensor, taken before a call may change it, and without waiting for the device."""

    like: str
    some: Tensor
    count: int

    def __str__(self) -> str:
        shown = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in self.some.tolist())
        return f"{self.like} = [{shown}{', ...' if self.count > len(self.some) else ''}]"


def noted(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, for in_words()."""
    notes = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            at = f" offset {value.storage_offset()}" if value.storage_offset() else ""
            like = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} strides {list(value.stride())}{at}"
            notes[name] = Note(like, _first(value).clone(), value.numel())
    return notes


def in_words(notes: dict[str, Any]) -> dict[str, str]:
    """Each argument as text: shape, dtype and strides of a tensor and a few of its values, the value of others."""
    return {name: str(value) if isinstance(value, Note) else repr(value) for name, value in notes.items()}


def _first(tensor: Tensor, count: int = 8) -> Tensor:
    """The first elements, without a copy of all the others where the tensor is not contiguous."""
    while tensor.dim() > 1 and tensor[:1].numel() >= count:
        tensor = tensor[0]
    return tensor.reshape(-1)[:count] if tensor.dim() == 0 else tensor[:count].flatten()[:count]


def describe(finding: Finding) -> str:
    """A finding in one line, for people."""
    text = f"{finding.output}: {finding.text}"
    if finding.at:
        text += f" at {list(finding.at)}"
    if finding.actual is not None:
        text += f": got {finding.actual:.9g}"
    if finding.exact is not None:
        text += f", exact {finding.exact:.9g}"
    if finding.budget:
        text += f"; error {finding.error:.3g} is {compare.of_budget(finding.ratio)} ({finding.ulp:.3g} ulp there)"
        text += f"; its row errs by {finding.row_error:.3g} of its rms"
        if finding.worst_at != finding.at:
            text += f", the worst element by {finding.worst_ulp:.3g} ulp, at {list(finding.worst_at)}"
    return text


def told(error: BaseException) -> str:
    """The error and the line that raised it, without the suite's own frames."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value).removeprefix("torch.")
