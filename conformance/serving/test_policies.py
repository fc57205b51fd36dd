"""vLLM on native ops, on the references, and without opshim makes the same of the bundled model."""

from pathlib import Path

import pytest

from conformance.serving import engines
from conformance.serving.agreement import WITHIN, disagreements

RUNS = [("strict", "float32"), ("reference", "float32"), ("strict", "bfloat16"), (engines.STOCK, "bfloat16")]
ALWAYS = {"topk_softmax", "fused_moe", "gdn_prefill", "gdn_decode", "reshape_and_cache", "paged_prefill"}


CPU = Path("/proc/cpuinfo")


def granted(run: tuple[str, str]) -> float:
    """Nats. Where the CPU has no AVX512-BF16, stock vLLM's kernels truncate to bfloat16 instead of rounding: its experts
    come out 0.56% small (docs/results/vllm-cpu-0.32.md), which shows in the log-probabilities."""
    truncates = run[0] == engines.STOCK and not (CPU.exists() and "avx512_bf16" in CPU.read_text())
    return 2 * WITHIN if truncates else WITHIN


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    return engines.scores(RUNS, tmp_path_factory.mktemp("scores"))


@pytest.fixture(scope="module")
def exact(scores):
    """The references in float32: what every other run is an approximation of."""
    return scores["reference", "float32"]


@pytest.mark.parametrize("run", [run for run in RUNS if run[0] != "reference"], ids="-".join)
def test_teacher_forced_log_probabilities_agree_with_the_references(scores, exact, run):
    assert disagreements(exact["texts"], scores[run]["texts"], granted(run)) == []


def test_greedy_tokens_of_native_and_reference_are_identical_in_float32(scores, exact):
    assert scores["strict", "float32"]["greedy"] == exact["greedy"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_under_strict_every_call_within_a_domain_is_native(scores, dtype):
    calls = scores["strict", dtype]["calls"]
    native = {op for op, candidate, *_ in calls if candidate.startswith("native")}
    assert native >= ALWAYS
    for op, candidate, count, failures, refusals, outside in calls:
        assert failures == refusals == 0
        assert candidate.startswith("native") or count == outside, (op, candidate)


def test_under_the_reference_policy_every_call_is_the_references(exact):
    assert {candidate for _, candidate, *_ in exact["calls"]} == {"reference"}


def test_without_the_plugin_no_call_is_opshims(scores):
    assert scores[engines.STOCK, "bfloat16"]["calls"] == []


def test_a_sequence_that_is_preempted_goes_on_as_if_it_had_not_been(tmp_path):
    found = engines.result_of("preemption", "strict", tmp_path / "answers.json", 17)
    assert found["preempted"] > 0
    assert found["together"] == found["alone"]
