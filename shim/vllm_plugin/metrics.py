"""What the ops did, on vLLM's /metrics: read from the counters that every process of the server keeps in one folder,
where those of other machines are put as well (nodes.py).

    opshim_calls_total{op,candidate}             calls that a candidate answered
    opshim_fallbacks_total{op}                   calls inside the op's domain that another than the selected one answered
    opshim_failures_total{op,candidate}          calls that it raised on
    opshim_refusals_total{op,candidate}          calls inside the op's domain that its guard refused
    opshim_outside_domain_total{op,candidate}    calls outside the op's domain, answered in the selected one's place
    opshim_non_finite_total{op,candidate}        answers with NaN or infinity (counted where OPSHIM_WATCH_NON_FINITE=1)
    opshim_breaker_open{op,candidate}            processes in which it is left out after failures in a row
    opshim_selected{op,candidate}                processes whose chain selected it
    opshim_certified{op,candidate}               and of these, in which a certificate holds for it

A call that a CUDA graph replays is counted once, when it is captured: replays do not pass through Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shim.health import standings, summary

COUNTERS = {
    "calls": "Calls that a candidate answered.",
    "failures": "Calls that a candidate raised on.",
    "refusals": "Calls inside the domain that a candidate's guard refused.",
    "outside_domain": "Calls outside the op's domain that a candidate answered in the place of the selected one.",
    "non_finite": "Answers with NaN or infinity, where they are watched.",
}
LABELS = ("op", "candidate")


class Collector:
    """For prometheus_client's registry: the counters under a run's folder."""

    def __init__(self, run_dir: str | Path):
        self.run_dir = run_dir

    def collect(self) -> Iterator:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        rows, chosen = summary(self.run_dir), standings(self.run_dir)
        selected = {(one.op, one.candidate) for one in chosen}
        for name, words in COUNTERS.items():
            family = CounterMetricFamily(f"opshim_{name}", words, labels=LABELS)
            for row in rows:
                family.add_metric(row[:2], getattr(row, name))
            yield family
        fallbacks = CounterMetricFamily("opshim_fallbacks", "Calls inside the domain that another than the selected answered.", labels=("op",))
        for op in dict.fromkeys(row.op for row in rows):
            others = (row for row in rows if row.op == op and row[:2] not in selected)
            fallbacks.add_metric((op,), sum(row.calls - row.outside_domain for row in others))
        yield fallbacks
        breakers = GaugeMetricFamily("opshim_breaker_open", "Processes in which it is left out.", labels=LABELS)
        for row in rows:
            breakers.add_metric(row[:2], row.breaker_open)
        yield breakers
        for name, words in (("selected", "Processes that selected it."), ("certified", "Of these, with a certificate.")):
            family = GaugeMetricFamily(f"opshim_{name}", words, labels=LABELS)
            for one in chosen:
                family.add_metric(one[:2], getattr(one, name))
            yield family


def install(run_dir: str | Path) -> None:
    """Puts the collector where this process's /metrics looks: the registry, or, of a server that shares its metrics with
    others (PROMETHEUS_MULTIPROC_DIR: several API servers), a new one that only reads what all wrote into files."""
    from prometheus_client import REGISTRY, multiprocess

    ours = Collector(run_dir)

    class Shared(multiprocess.MultiProcessCollector):
        def collect(self) -> Iterator:
            yield from super().collect()
            yield from ours.collect()

    multiprocess.MultiProcessCollector = Shared
    REGISTRY.register(ours)
