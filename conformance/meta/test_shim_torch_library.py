"""Every op is a torch.library op whose schema, fake implementation and traced behaviour agree with what it does."""

import pytest
import torch

import ops_reference  # noqa: F401  declares the ops
import shim
from shim.policy import Policy, using


@pytest.mark.parametrize("name", shim.names())
def test_opcheck_passes(name):
    op = shim.get(name)
    arguments = op.example(
        torch.Generator().manual_seed(0), "cpu", torch.bfloat16
    )  # outputs of act and of float32 differ
    with using(Policy("reference")):
        torch.library.opcheck(op.torch_op, (), arguments)


def test_under_a_mode_of_torch_a_call_is_one_opaque_op():
    """A trace that saw the shim's inside would record the output's allocation and nothing else."""
    from torch.fx.experimental.proxy_tensor import make_fx

    op = shim.get("moe_sum")
    y = torch.randn(3, 2, 8)
    traced = make_fx(lambda y: op(y))(y)
    assert "opshim.moe_sum" in traced.code
    torch.testing.assert_close(traced(y), y.sum(1))
    with torch._subclasses.FakeTensorMode() as mode:
        assert op(mode.from_tensor(y)).shape == (3, 8)
