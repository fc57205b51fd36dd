"""The references, one module per op family: importing this package declares every op."""

from ops_reference import attention, gated_delta_net, linear, moe, router

__all__ = ["attention", "gated_delta_net", "linear", "moe", "router"]
