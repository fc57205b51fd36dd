"""opshim as one import: every op with its reference and native implementations, the shim's API, and vLLM's plugin.

    import opshim
    weights, ids = opshim.get("topk_softmax")(logits, 8)
"""

from __future__ import annotations

import sys

try:
    import ops_reference  # declares the ops, so it comes first  # noqa: I001
    import ops_native
except Exception as error:
    if "vllm.plugins" not in sys.modules:
        raise
    print(f"opshim does not import: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    raise SystemExit(1) from error  # vLLM would log an Exception, leave the plugin out and go on

import shim
from shim import *
from shim.vllm_plugin import hooks, ops_for_model, register

__all__ = shim.__all__ + ["hooks", "ops_for_model", "ops_native", "ops_reference", "register"]
