"""Rule 8: on the current stream, without host synchronisation, in a graph."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor

from conformance.accelerator import settled
from conformance.case import Case
from conformance.compare import Finding
from conformance.memory import WRONG
from conformance.properties.roles import Arguments, Results, Roles, floats
from conformance.properties.trial import Trial, case, clones, differences
from conformance.run import Ended, results_of, told

BUSY = 50_000_000  # clock cycles, some 30 ms
CHAIN = (3, 50)  # calls: few, as by many a value may end as 0 or NaN


def cases(roles: Roles) -> list[Case]:
    return [
        case(roles, kind, check, roles.sizes[0], dtype, device="cuda")
        for dtype in roles.dtypes
        for kind, check in (("graph_replay", replayed(roles, dtype)), ("stream", stream), ("no_sync", no_sync))
    ] + [
        case(roles, "chain", check, sizes, dtype, {"by": by}, device="cuda")
        for sizes in (*roles.sizes, roles.busy)
        for dtype in roles.dtypes
        for by, check in (("calls", chain_of_calls), ("graph_replay", chain_in_graph))
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
        with telling("replayed"):
            graph.replay()
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
    return differences(results_of(trial.target.op, returned, arguments), expected, "order", "not on the current stream")


def no_sync(trial: Trial) -> list[Finding]:
    """The host does not wait for the device. (torch tells; a kernel library's own waiting shows as a busy stream.)"""
    excuse_references(trial)
    trial.call(trial.fresh())
    arguments = trial.fresh()
    torch.cuda.synchronize()
    with telling("on a busy stream"):
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(BUSY)
            trial.target.function(**arguments)
            waited = torch.cuda.current_stream().query()
        except RuntimeError as error:
            return [Finding("call", "synchronises", WRONG, text=told(error))]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [Finding("call", "synchronises", WRONG, text="returned when its stream was idle")] if waited else []


def chain_of_calls(trial: Trial) -> list[Finding]:
    """Call upon call without a pause, each on what the last one gave: the bits of calls that are waited for one by one.
    A kernel may be started while the one before it runs (programmatic dependent launch), and must wait for its results.
    """
    return chained(trial, lambda count, arguments: links(trial, count, arguments), "without a pause")


def chain_in_graph(trial: Trial) -> list[Finding]:
    def replayed_links(count, arguments):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = links(trial, count, arguments)
        graph.replay()
        torch.cuda.synchronize()  # while the graph is there
        return results

    return chained(trial, replayed_links, "in one graph")


def chained(trial: Trial, run, how: str) -> list[Finding]:
    excuse_references(trial)
    trial.call(trial.fresh())  # refusals; and whatever a first call sets up
    for count in CHAIN:
        with telling(f"{count} calls one by one"):
            expected = links(trial, count, trial.fresh(), torch.cuda.synchronize)
        arguments = trial.fresh()
        torch.cuda.synchronize()
        with telling(f"{count} calls {how}"):
            results = run(count, arguments)
        found = differences(results, expected, "order", f"{count} calls {how}")
        if found:
            return found
    return [Finding(name) for name in expected]


def links(trial: Trial, count: int, arguments: Arguments, after=lambda: None) -> Results:
    """Results of the last of so many calls. What the op writes in place is its next input, and so is its output, in place
    of the first argument of that dtype that is no larger; its memory is soon another's, as it is between layers.
    """
    function, op = trial.target.function, trial.target.op
    for _ in range(count):
        results = results_of(op, function(**arguments), arguments)
        after()
        first = next((value for name, value in results.items() if name not in op.mutates), None)
        for name in floats(arguments) if first is not None else ():
            old = arguments[name]
            if name not in op.mutates and old.dtype == first.dtype and 0 < old.numel() <= first.numel():
                arguments = arguments | {name: first.flatten()[: old.numel()].view(old.shape)}
                break
    return results


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
    """Around calls of the provider: waits for them at the end."""
    try:
        with settled("cuda"):
            yield
    except Exception as error:  # whatever it is, it is the provider's failure
        raise Ended("fail", "raised", f"{what}: {told(error)}") from error
