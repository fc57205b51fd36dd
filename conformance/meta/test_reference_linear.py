"""The reference of matmul_fp16: float32 accumulation for float16, torch's own layer for the rest, refusals."""

import pytest
import torch

from ops_reference.linear import matmul_fp16
from shim import OpArgumentError


def example(dtype=torch.float16, **sizes):
    return matmul_fp16.example(torch.Generator().manual_seed(0), "cpu", dtype, **sizes)


def test_float16_accumulates_in_float32():
    """1024 and 4095 times 2^-10, each of which a half-precision sum would lose: 1027.999, rounded once."""
    a, b = torch.full((1, 4096), 2.0**-5).half(), torch.full((1, 4096), 2.0**-5).half()
    b[0, 0] = 2.0**15
    assert matmul_fp16.reference(a, b).item() == 1028


def test_bias_is_added_before_rounding():
    """2048 + 1 + 1: rounded before the bias, the first sum were 2048, and so were the second."""
    a, b, bias = torch.tensor([[1.0, 1.0]]).half(), torch.tensor([[2048.0, 1.0]]).half(), torch.tensor([1.0]).half()
    assert matmul_fp16.reference(a, b, bias).item() == 2050


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_other_dtypes_are_torchs_own_layer(dtype):
    arguments = example(dtype, bias=True)
    expected = torch.nn.functional.linear(*arguments.values())
    assert torch.equal(matmul_fp16.reference(**arguments), expected)
    assert matmul_fp16.in_domain(**arguments) is not True


def test_float16_is_the_domain():
    assert matmul_fp16.in_domain(**example()) is True


def test_leading_dimensions_are_kept():
    arguments = example(M=6, N=5)
    arguments["a"] = arguments["a"].view(2, 3, -1)
    assert matmul_fp16.reference(**arguments).shape == (2, 3, 5)
    assert matmul_fp16.reference(arguments["a"][0, 0], arguments["b"]).shape == (5,)


@pytest.mark.parametrize("sizes", [{"M": 0}, {"N": 0}, {"K": 0}])
def test_empty_problems(sizes):
    arguments = example(bias=True, **sizes)
    matmul_fp16.check(**arguments)
    y = matmul_fp16.reference(**arguments)
    assert y.shape == (arguments["a"].shape[0], arguments["b"].shape[0])
    if sizes == {"K": 0}:
        assert torch.equal(y, arguments["bias"].expand_as(y))


@pytest.mark.parametrize(
    ("name", "dtype"), [("b", torch.float32), ("b", torch.bfloat16), ("bias", torch.float32)], ids=str
)
def test_mixed_dtypes_name_the_argument(name, dtype):
    arguments = example(bias=True)
    arguments[name] = arguments[name].to(dtype)
    with pytest.raises(OpArgumentError) as error:
        matmul_fp16.check(**arguments)
    assert error.value.argument == name


def test_fake_has_the_shape_and_dtype_of_the_result():
    arguments = example(M=6, N=5, bias=True)
    real = matmul_fp16.reference(**arguments)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.opshim.matmul_fp16(*(mode.from_tensor(value) for value in arguments.values()))
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
