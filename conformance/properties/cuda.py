"""Rule 8: on the current stream, without host synchronisation, in a graph."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor

from conformance.case import Case
from conformance.compare import Finding
from conformance.memory import WRONG
from conformance.properties.roles import Arguments, Roles
from conformance.properties.trial import Trial, case, clones, differences
from conformance.run import Ended, results_of, told

BUSY = 50_000_000  # clock cycles, some 30 ms


def cases(roles: Roles) -> list[Case]:
    return [
        case(roles, kind, check, roles.sizes[0], dtype, device="cuda")
        for dtype in roles.dtypes
        for kind, check in (("graph_replay", replayed(roles, dtype)), ("stream", stream), ("no_sync", no_sync))
    ]


def replayed(roles: Roles, dtype: torch.dtype):
    def other():
        return roles.make()(torch.Generator().manual_seed(1), "cuda", dtype, **roles.sizes[0])

    return lambda trial: graph_replay(trial, other)


def graph_replay(trial: Trial, other) -> list[Finding]:
    """Captured once, and replayed on inputs copied into the captured ones: the results of an eager call on those."""
    excuse_references(trial)
    function, op = trial.target.function, trial.target.op
    arguments = trial.fresh()
    trial.call(trial.fresh())  # refusals; and whatever a first call sets up
    graph = torch.cuda.CUDAGraph()
    with telling("under graph capture"), torch.cuda.graph(graph):
        returned = function(**arguments)
    for fresh, name in ((other, "other inputs"), (trial.fresh, "the first inputs")):
        copy_into(arguments, fresh())
        graph.replay()
        torch.cuda.synchronize()
        found = differences(results_of(op, returned, arguments), trial.call(fresh()), "changes", f"replay with {name}")
        if found:
            return found
    return []


def stream(trial: Trial) -> list[Finding]:
    """Work goes to the current stream: it waits for what that stream does to the inputs before, and for nothing else."""
    expected = clones(trial.call(trial.fresh()))
    arguments, values = trial.fresh(), trial.fresh()
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            value.fill_(torch.nan)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY)
        copy_into(arguments, values)
        with telling("on another stream"):
            returned = trial.target.function(**arguments)
    torch.cuda.synchronize()
    return differences(results_of(trial.target.op, returned, arguments), expected, "order", "not on the current stream")


def no_sync(trial: Trial) -> list[Finding]:
    """The host does not wait for the device. (torch tells; a kernel library's own waiting shows as a busy stream.)"""
    excuse_references(trial)
    trial.call(trial.fresh())
    arguments = trial.fresh()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(BUSY)
        trial.target.function(**arguments)
        waited = torch.cuda.current_stream().query()
    except RuntimeError as error:
        return [Finding("call", "synchronises", WRONG, text=told(error))]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return [Finding("call", "synchronises", WRONG, text="returned when its stream was idle")] if waited else []


def excuse_references(trial: Trial) -> None:
    """They define values, and may read sizes on the host to do so."""
    if trial.target.provider == "reference":
        raise Ended("skip", "not_asked", "rule 8 is for implementations: references may synchronise")


def copy_into(arguments: Arguments, values: Arguments) -> None:
    for name, value in values.items():
        if isinstance(value, Tensor):
            arguments[name].copy_(value)


@contextmanager
def telling(what: str):
    try:
        yield
    except Exception as error:  # whatever it is, it is the provider's failure
        raise Ended("fail", "raised", f"{what}: {told(error)}") from error
