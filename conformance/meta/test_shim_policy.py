"""Policies: from arguments and environment, unknown names refused, and a change of policy takes effect at once."""

import pytest
import torch

import shim
from conformance.meta.scratch import double_op, provider
from shim import policy
from shim.policy import Policy


def test_default_is_auto_without_choices(scratch):
    assert Policy.parse(environ={}) == Policy("auto", {})


def test_environment_is_read_and_arguments_win(scratch):
    environ = {"OPSHIM_POLICY": "strict", "OPSHIM_PROVIDER": "a=p, b=q"}
    assert Policy.parse(environ=environ) == Policy("strict", {"a": "p", "b": "q"})
    assert Policy.parse("reference", ["b=r"], environ) == Policy("reference", {"a": "p", "b": "r"})


def test_environment_round_trip(scratch):
    chosen = Policy("strict", {"a": "p", "b": "native"})
    assert Policy.parse(environ=chosen.environment()) == chosen


def test_unknown_policy_names_the_known_ones(scratch):
    with pytest.raises(shim.UnknownNameError, match="unknown policy 'lax'; known: auto, reference, strict"):
        Policy("lax")


@pytest.mark.parametrize("choice", ["double", "=p", "double="])
def test_choice_that_is_no_pair_is_refused(scratch, choice):
    with pytest.raises(shim.OpshimError, match="op=provider"):
        Policy.parse(choices=[choice])


def test_validate_names_known_ops_and_providers(scratch):
    provider(double_op(), "p")
    Policy(providers={"double": "p"}).validate()
    with pytest.raises(shim.UnknownNameError, match="unknown op 'duble'"):
        Policy(providers={"duble": "p"}).validate()
    with pytest.raises(shim.UnknownNameError, match="unknown provider of double 'q'; known: native, p, reference"):
        Policy(providers={"double": "q"}).validate()


def test_unknown_choice_stops_the_call_too(scratch):
    op = double_op()
    with policy.using(Policy(providers={"double": "q"})), pytest.raises(shim.UnknownNameError):
        op(torch.ones(1))


def test_change_of_policy_takes_effect_at_the_next_call_and_ends_with_its_block(scratch):
    op = double_op()
    provider(op, "p", result=7.0)
    x = torch.ones(1)
    assert op(x).item() == 7.0
    with policy.using(Policy("reference")):
        assert op(x).item() == 2.0
    assert op(x).item() == 7.0


def test_policy_comes_from_the_environment_on_first_use(scratch, monkeypatch):
    op = double_op()
    provider(op, "p", result=7.0)
    monkeypatch.setenv("OPSHIM_PROVIDER", "double=reference")
    assert op(torch.ones(1)).item() == 2.0
