"""What the references share: the width they compute in, and how they refuse wrong arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from shim.errors import OpArgumentError

ACT = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})  # float64 evaluates an op exactly
NATIVE_ACT = frozenset({torch.float16, torch.bfloat16, torch.float32})
INT32 = frozenset({torch.int32})
INT64 = frozenset({torch.int64})


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that an op computes in: float32, or float64 where its inputs are float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def names_of(dtypes) -> str:
    """Dtypes in words: "float16 or float32"."""
    return " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def describe(value) -> str:
    """An argument in words, for error messages: "float32 [3, 4] on cpu", or the value itself."""
    if isinstance(value, Tensor):
        return f"{names_of([value.dtype])} {list(value.shape)} on {value.device}"
    return f"{type(value).__name__} {value!r}"


def refuse(op: str, argument: str, expected: str, value) -> None:
    """Raises OpArgumentError for an argument that is not as expected."""
    raise OpArgumentError(op, argument, expected, describe(value))


def need_tensor(op: str, argument: str, value, dims: int, dtypes, device: int) -> torch.Size:
    """The shape of a tensor with that many dimensions, one of the dtypes, on the device `get_device()` names.

    Refuses anything else. Every call of an op passes here once per tensor: it has to stay well under a microsecond.
    """
    try:
        shape = value.shape
        if value.dtype in dtypes and value.get_device() == device and len(shape) == dims:
            return shape
    except AttributeError:  # no tensor at all
        pass
    place = "cpu" if device < 0 else f"device {device}"
    refuse(op, argument, f"a {dims}-dimensional tensor of {names_of(dtypes)} on {place}", value)


def need_act(op: str, argument: str, value, dims: int) -> torch.Size:
    """The shape of an op's leading argument: any activation dtype, any device."""
    return need_tensor(op, argument, value, dims, ACT, value.get_device() if isinstance(value, Tensor) else -1)
