"""Native implementations; importing this package declares the ops and registers them all."""

import ops_reference  # noqa: F401  declares the ops
from ops_native import attention, gated_delta_net, linear, moe, router

__all__ = ["attention", "gated_delta_net", "linear", "moe", "router"]
