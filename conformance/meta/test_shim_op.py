"""Declaring ops and registering implementations: what is wrong is said at once, with file and line."""

import pytest
import torch
from torch import Tensor

import shim
from conformance.meta.scratch import double_op, provider
from shim.op import temporary


def test_op_declared_twice_names_both_places(scratch):
    double_op()
    with pytest.raises(shim.RegistrationError, match=r"declared twice, first at .*scratch.py:\d+, again at .*:\d+"):
        double_op()


def test_op_takes_plain_parameters_only(scratch):
    def keyword_only(x: Tensor, *, n: int = 1) -> Tensor:
        return x

    with pytest.raises(shim.RegistrationError, match=r"\['n'\] must be plain parameters; at .*test_shim_op.py:\d+"):
        shim.op()(keyword_only)


def test_wrong_signature_is_refused_with_both_signatures_and_the_line(scratch):
    double_op()

    def function(x, count=1):
        return x

    line = function.__code__.co_firstlineno
    with pytest.raises(shim.RegistrationError) as error:
        shim.implementation("double", provider="p")(function)
    assert "(x, count=1), the op's is (x, times=1)" in str(error.value)
    assert str(error.value).endswith(f"{__file__}:{line}")


def test_wrong_default_is_a_wrong_signature(scratch):
    double_op()
    with pytest.raises(shim.RegistrationError, match=r"\(x, times=2\)"):
        shim.implementation("double", provider="p")(lambda x, times=2: x)


def test_wrong_signature_of_supports_is_refused(scratch):
    double_op()
    with pytest.raises(shim.RegistrationError, match="supports of provider 'p'"):
        shim.implementation("double", provider="p", supports=lambda x: True)(lambda x, times=1: x)


def test_supports_may_take_anything(scratch):
    op = double_op()
    provider(op, "p", supports=lambda *args, **kwargs: True)
    assert op.providers() == ["p", "native", "reference"]


def test_duplicate_provider_is_refused_but_not_on_another_device(scratch):
    op = double_op()
    provider(op, "p", device="cpu")
    provider(op, "p", device="cuda")
    with pytest.raises(shim.RegistrationError, match="for device cpu registered twice, first at"):
        provider(op, "p", device="cpu")


@pytest.mark.parametrize("name", ["native", "reference", "native:jit"])
def test_the_shims_own_provider_names_are_reserved(scratch, name):
    op = double_op()
    with pytest.raises(shim.RegistrationError, match="is the shim's own"):
        provider(op, name)


def test_unknown_op_names_the_known_ones(scratch):
    double_op()
    with pytest.raises(shim.UnknownNameError, match="unknown op 'duble'; known: .*double"):
        shim.get("duble")
    with pytest.raises(shim.RegistrationError, match=r"unknown op 'duble'; known: .*; at .*:\d+"):
        shim.implementation("duble", provider="p")(lambda x: x)


def test_temporary_forgets_ops_and_implementations():
    with temporary():
        op = double_op()
        with temporary():
            provider(op, "p")
            double_op("double_again")
        assert "double" in shim.names()
        assert "double_again" not in shim.names()
        assert op.providers() == ["native", "reference"]
    assert "double" not in shim.names()


def test_first_argument_that_is_no_tensor_is_a_wrong_argument(scratch):
    op = double_op()
    with pytest.raises(shim.OpArgumentError, match="double: argument 'x': expected a tensor, got int"):
        op(3)
    with pytest.raises(TypeError, match="double.*'x'"):
        op()
    with pytest.raises(TypeError, match="double.*'wrong'"):
        op(torch.ones(2), wrong=1)


def test_call_by_keyword_equals_call_by_position(scratch):
    op = double_op()
    provider(op, "p", result=3.0)
    x = torch.ones(2)
    for call in (lambda: op(x, 2), lambda: op(x, times=2), lambda: op(x=x, times=2), lambda: op(times=2, x=x)):
        assert call().tolist() == [3.0, 3.0]


def test_torch_compile_sees_one_op(scratch):
    op = double_op()
    op.fakes(lambda x, times=1: torch.empty_like(x))
    seen = []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(lambda x: op(x, times=2), backend=backend, fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
    assert seen == [op.torch_op]
