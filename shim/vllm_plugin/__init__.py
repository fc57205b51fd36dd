"""opshim inside vLLM: `register()` is the plugin; `hooks()` and `ops_for_model()` tell what it does.

Importing this package does not import vLLM.
"""

from shim.vllm_plugin.models import ops_for_model
from shim.vllm_plugin.plugin import hooks, register

__all__ = ["hooks", "ops_for_model", "register"]
