"""The chain: who serves under which policy, what a failure or a refusal leads to, and what is said about it."""

import itertools
import logging
import re
import time
import weakref

import pytest
import torch

import shim
from conformance.meta.scratch import Clock, double_op, provider
from shim import dispatch, errors, health
from shim.dispatch import Chain
from shim.policy import Policy, using

X = torch.ones(3)
numbers = itertools.count()


def states(chain):
    return {one.label: one.state for one in chain.candidates}


def counts(op):
    return {row.candidate: row[2:6] for row in health.summary() if row.op == op.name}


@pytest.fixture
def op(scratch):
    """An op of its own name, so that its counters start at zero."""
    return double_op(f"double_{next(numbers)}")


# ---- who serves -----------------------------------------------------------------------------------------------------


def test_auto_takes_providers_in_order_then_the_reference(op):
    provider(op, "p", available=lambda: "libp.so has no symbol p")
    provider(op, "q", result=8.0)
    chain = Chain(op, "cpu")
    assert [(one.label, one.state) for one in chain.candidates] == [
        ("p", "unavailable"),
        ("q", "selected"),
        ("native", "unavailable"),
        ("reference", "ready"),
    ]
    assert chain.candidates[0].reason == "libp.so has no symbol p"
    assert chain.call(X)[0].item() == 8.0


def test_choice_comes_first_and_others_stand_behind_it_under_auto(op):
    provider(op, "p")
    provider(op, "q", result=8.0)
    chain = Chain(op, "cpu", Policy("auto", {op.name: "q"}))
    assert [one.label for one in chain.candidates] == ["q", "p", "native", "reference"]
    assert chain.selected.label == "q"


@pytest.mark.parametrize("mode", ["strict", "reference"])
def test_choice_serves_alone_under_strict_and_reference(op, mode):
    provider(op, "p")
    provider(op, "q", result=8.0)
    chain = Chain(op, "cpu", Policy(mode, {op.name: "q"}))
    assert states(chain) == {"q": "selected", "p": "not chosen", "native": "unavailable", "reference": "ready"}
    assert [one.label for one in chain.order] == ["q"]


def test_explicit_provider_serves_only_where_it_is_chosen(op):
    provider(op, "p", explicit=True)
    assert states(Chain(op, "cpu"))["p"] == "not chosen"
    assert states(Chain(op, "cpu", Policy("auto", {op.name: "p"})))["p"] == "selected"


def test_provider_of_another_device_is_no_candidate(op):
    provider(op, "p", device="cuda")
    assert "p" not in states(Chain(op, "cpu"))


def test_reference_policy_serves_the_reference_everywhere(op):
    provider(op, "p")
    chain = Chain(op, "cpu", Policy("reference"))
    assert states(chain)["reference"] == "selected"
    assert chain.call(X)[0].item() == 2.0


@pytest.mark.parametrize("mode", ["strict", "auto", "reference"])
def test_reference_may_be_chosen_for_one_op_under_every_policy(op, mode):
    provider(op, "p")
    chain = Chain(op, "cpu", Policy(mode, {op.name: "reference"}))
    assert chain.selected.label == "reference"
    assert chain.call(X)[0].item() == 2.0
    assert counts(op)["reference"] == (1, 0, 0, 0)


def test_strict_without_native_raises_with_the_table(op):
    provider(op, "p", available=lambda: "libp.so is missing")
    with using(Policy("strict")), pytest.raises(shim.OpUnavailableError) as error:
        op(X)
    assert "libp.so is missing" in str(error.value)
    assert "no native implementation for cpu" in str(error.value)
    assert "x: [3] float32 strides [1] cpu" in str(error.value)


def test_require_lists_every_unserved_op_with_its_table(op):
    served = double_op("served")
    provider(served, "p")
    with pytest.raises(shim.OpUnavailableError) as error:
        dispatch.require([op.name, "served"], "cpu", Policy("strict"))
    told = f"policy strict leaves {op.name} without an implementation: no native implementation for cpu"
    assert str(error.value).startswith(f"{told}\n{op.name}   cpu\n")
    assert [chain.selected.label for chain in dispatch.require([op.name, "served"])] == ["reference", "p"]


# ---- guards and the domain ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_outside_the_domain_the_reference_serves_and_it_is_counted(op, mode, caplog):
    provider(op, "p", supports=lambda x, times=1: x.dtype == torch.float32 or "needs float32")
    with using(Policy(mode)):
        assert op(X.double())[0].item() == 2.0
    assert counts(op) == {"reference": (1, 0, 0, 1)}
    assert not caplog.records


def test_a_call_outside_the_domain_counts_as_one_when_it_is_answered(scratch):
    """Else what counts calls inside the domain, as the one less the other, were below zero."""

    @shim.op()
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("reference broke")

    broken.domain(lambda x: "outside")
    with pytest.raises(shim.OpExecutionError):
        broken(X)
    assert counts(broken) == {"reference": (0, 1, 0, 0)}


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_outside_the_domain_a_candidate_whose_guard_takes_the_call_serves_it(op, mode, caplog):
    provider(op, "p", supports=lambda x, times=1: x.dtype == torch.float32 or "needs float32")
    provider(op, "q", result=8.0)
    with using(Policy(mode)):
        assert op(X.double())[0].item() == 8.0
    assert counts(op) == {"q": (1, 0, 0, 1)}  # to refuse it is nothing that counts, nor is to answer it a fallback
    assert not caplog.records


def test_raising_outside_the_domain_is_no_failure_of_the_provider(op, caplog):
    def run(x, times=1):
        raise KeyError(x.dtype)

    shim.implementation(op.name, provider="p")(run)
    with using(Policy("strict")):
        assert op(X.double())[0].item() == 2.0
    assert counts(op) == {"reference": (1, 0, 0, 1)}
    provider(op, "q", result=8.0)
    with using(Policy("strict")):
        assert op(X.double())[0].item() == 8.0
    assert counts(op) == {"reference": (1, 0, 0, 1), "q": (1, 0, 0, 1)}
    assert not caplog.records


def test_a_guard_that_raises_is_a_failure_of_its_provider(op):
    def supports(x, times=1):
        raise ZeroDivisionError

    provider(op, "p", supports=supports)
    with using(Policy("strict")), pytest.raises(shim.OpExecutionError, match="p failed on cpu: ZeroDivisionError"):
        op(X)
    assert Chain(op, "cpu", Policy("auto")).call(X)[0].item() == 2.0


def test_refusal_inside_the_domain_is_an_error_under_strict(op):
    provider(op, "p", supports=lambda x, times=1: "needs an even size")
    with using(Policy("strict")), pytest.raises(shim.OpUnavailableError, match="p: needs an even size"):
        op(X)


def test_refusal_inside_the_domain_falls_back_under_auto_with_one_warning(op, caplog):
    provider(op, "p", supports=lambda x, times=1: "needs an even size")
    for _ in range(3):
        assert op(X)[0].item() == 2.0
    assert counts(op) == {"p": (0, 0, 3, 0), "reference": (3, 0, 0, 0)}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "needs an even size" in caplog.text


def test_refused_call_goes_to_the_next_provider_even_under_strict(op):
    provider(op, "p", supports=lambda x, times=1: "needs an even size")
    provider(op, "q", result=8.0)
    with using(Policy("strict")):
        assert op(X)[0].item() == 8.0


def test_wrong_argument_is_raised_before_any_provider_and_counts_for_nobody(op):
    calls = provider(op, "p")
    for mode in ("strict", "auto", "reference"):
        with using(Policy(mode)), pytest.raises(shim.OpArgumentError, match="argument 'x': expected float32"):
            op(X.half())
    assert not calls
    assert counts(op) == {}


def test_errors_keep_their_type_through_torch_ops(op):
    provider(op, "p", result=ValueError("no luck"))
    with pytest.raises(shim.OpArgumentError):
        op.torch_op(X.half())
    with using(Policy("strict")), pytest.raises(shim.OpExecutionError):
        op.torch_op(X)


def test_argument_error_of_a_provider_is_not_a_failure(op):
    provider(op, "p", result=shim.OpArgumentError(op.name, "x", "a", "b"))
    with pytest.raises(shim.OpArgumentError):
        op(X)
    assert counts(op) == {}


@pytest.mark.parametrize("mode", ["strict", "auto"])
@pytest.mark.parametrize("wrong", [None, "two", 2.0])
def test_a_scalar_of_the_wrong_type_is_a_wrong_argument_and_no_failure(op, mode, wrong, caplog):
    provider(op, "p", result=TypeError("wrong type"))
    words = f"{op.name}: argument 'times': expected an int, got {type(wrong).__name__} {wrong!r}"
    with using(Policy(mode)), pytest.raises(shim.OpArgumentError, match=re.escape(words)):
        op(X, wrong)
    assert counts(op) == {}
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        ("gdn_decode", {"l2norm": None}, "True or False"),
        ("gdn_decode", {"null_index": 1.5}, "an int"),
        ("topk_softmax", {"renormalize": "yes"}, "True or False"),
        ("fused_moe", {"apply_router_weight_on_input": None}, "True or False"),
        ("paged_attention_v2", {"window": 3.5}, "an int"),
        ("paged_attention_v2", {"softcap": None}, "0 for none, or a positive number"),
        ("paged_prefill", {"window": "3"}, "0 for none, or a positive count of tokens"),
    ],
)
def test_ops_name_the_scalar_that_is_of_the_wrong_type(name, wrong, expected):
    op = shim.get(name)
    arguments = op.example(torch.Generator().manual_seed(0), "cpu", torch.float32) | wrong
    with pytest.raises(shim.OpArgumentError) as error:
        op(**arguments)
    assert (error.value.argument, error.value.expected) == (*wrong, expected)


# ---- failures -------------------------------------------------------------------------------------------------------


def test_strict_reraises_with_op_provider_and_every_argument(op):
    cause = ValueError("no luck")
    provider(op, "p", result=cause)
    with using(Policy("strict")), pytest.raises(shim.OpExecutionError) as error:
        op(torch.ones(4, 2).t(), times=3)
    assert error.value.__cause__ is cause
    for words in (
        f"{op.name}: p failed on cpu: ValueError: no luck",
        "x: [2, 4] float32 strides [1, 2] cpu",
        "times: 3",
    ):
        assert words in str(error.value)


def test_auto_answers_from_the_next_and_tries_again_on_a_later_call(op, caplog):
    provider(op, "p", result=lambda call: RuntimeError("once") if call == 1 else 7.0)
    provider(op, "q", result=8.0)
    assert [op(X)[0].item() for _ in range(3)] == [8.0, 7.0, 7.0]
    assert counts(op) == {"p": (2, 1, 0, 0), "q": (1, 0, 0, 0)}
    assert len(caplog.records) == 1
    assert "RuntimeError: once" in caplog.text


def test_second_failure_in_a_row_opens_the_breaker_for_a_minute(op):
    broken = [True]
    calls = provider(op, "p", result=lambda call: RuntimeError("no") if broken[0] else 7.0)
    clock = Clock()
    chain = Chain(op, "cpu", clock=clock)
    for _ in range(5):
        assert chain.call(X)[0].item() == 2.0
    assert len(calls) == 2
    assert states(chain)["p"] == "breaker open"
    clock.now += 59
    chain.call(X)
    assert len(calls) == 2
    clock.now += 1
    chain.call(X)  # tried again, fails again: open at once
    chain.call(X)
    assert len(calls) == 3
    clock.now += 60
    broken[0] = False
    assert chain.call(X)[0].item() == 7.0
    assert states(chain)["p"] == "selected"


def test_an_open_breaker_is_counted_until_its_pause_is_over(op, monkeypatch):
    provider(op, "p", result=RuntimeError("no"))
    chain = Chain(op, "cpu", clock=Clock())
    opened = time.time()

    def is_open():
        return [row.breaker_open for row in health.summary() if row[:2] == (op.name, "p")] == [1]

    for expected in (False, True):
        chain.call(X)
        assert is_open() is expected
    for later, expected in ((50, True), (61, False)):
        monkeypatch.setattr(time, "time", lambda later=later: opened + later)
        assert is_open() is expected


def test_memory_of_a_provider_that_failed_is_free_when_the_next_one_answers(op):
    held = []

    def greedy(x, times=1):
        space = torch.empty(10)
        held.append(weakref.ref(space))
        raise torch.OutOfMemoryError("CUDA out of memory")

    shim.implementation(op.name, provider="p")(greedy)
    provider(op, "q", result=lambda call: float(held[-1]() is None))
    chain = Chain(op, "cpu", clock=Clock())
    assert [chain.call(X)[0].item() for _ in range(2)] == [1.0, 1.0]  # on the direct way, and with care
    assert len(held) == 2


def test_failure_of_a_stand_in_does_not_slow_down_the_first_candidate_for_good(op):
    first = provider(op, "p", result=lambda call: RuntimeError("once") if call == 1 else 7.0)
    second = provider(op, "q", result=RuntimeError("never"))
    chain = Chain(op, "cpu", clock=Clock())
    direct = chain.call.__name__
    assert [chain.call(X)[0].item() for _ in range(3)] == [2.0, 7.0, 7.0]
    assert (chain.call.__name__, len(first), len(second)) == (direct, 3, 1)


def test_failures_that_are_not_in_a_row_do_not_open_the_breaker(op):
    calls = provider(op, "p", result=lambda call: RuntimeError("no") if call % 2 else 7.0)
    chain = Chain(op, "cpu", clock=Clock())
    for _ in range(10):
        chain.call(X)
    assert len(calls) == 10


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_sticky_device_error_is_never_retried(op, mode):
    calls = provider(op, "p", result=RuntimeError("CUDA error: an illegal memory access was encountered"))
    with using(Policy(mode)), pytest.raises(shim.OpExecutionError, match="illegal memory access.*the device is lost"):
        op(X)
    assert len(calls) == 1


def test_out_of_memory_is_not_sticky(op):
    assert not errors.is_sticky(RuntimeError("CUDA error: out of memory"))
    assert not errors.is_sticky(RuntimeError("CUDA error: invalid configuration argument"))
    hint = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    assert not errors.is_sticky(RuntimeError(f"CUDA error: invalid argument\n{hint}"))
    assert errors.is_sticky(RuntimeError(f"CUDA error: device-side assert triggered\n{hint}"))
    assert errors.is_sticky(RuntimeError("Triton Error [CUDA]: misaligned address"))
    assert errors.is_sticky(RuntimeError("CUDA driver error: an illegal memory access was encountered"))
    assert errors.is_sticky(RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution"))
    contained = "Invalid access of peer GPU memory over nvlink or a hardware error"  # what CUDA says of error 226
    assert errors.is_sticky(RuntimeError(f"opshim_moe_sum returned status 1226 (CUDA error 226: {contained})"))


def test_failing_reference_is_an_error_under_every_policy(scratch):
    @shim.op()
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("reference broke")

    for mode in ("auto", "reference"):
        with (
            using(Policy(mode)),
            pytest.raises(shim.OpExecutionError, match="broken: reference failed.*reference broke"),
        ):
            broken(X)


def test_call_with_unknown_parameter_is_no_failure_of_the_provider(op):
    provider(op, "p", result=lambda call: RuntimeError("no"))
    for _ in range(2):
        op(X)
    with pytest.raises(TypeError, match=f"{op.name}.*'twice'"):
        op(X, twice=True)
