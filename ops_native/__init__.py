"""Native implementations; importing this package registers them all."""

from importlib import import_module
from importlib.util import find_spec

import ops_reference  # noqa: F401  declares the ops

for _family in ("router", "moe", "gated_delta_net", "attention", "linear"):
    if find_spec(f"ops_native.{_family}"):
        import_module(f"ops_native.{_family}")
