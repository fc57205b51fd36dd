"""The native libraries, and what their C functions call the dtypes."""

import torch

from ops_native.build import cpu_spec
from shim.device import cpu_isa
from shim.loading import NativeLibrary

CPU = NativeLibrary("cpu", cpu_spec(), suffix=lambda: f"_{cpu_isa()}")
DTYPE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum Dtype of cpu/opshim.h
