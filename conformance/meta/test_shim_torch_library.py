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
