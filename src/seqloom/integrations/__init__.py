"""Models of other libraries on seqloom's engine. Needs the extra `hf`: pip install 'seqloom[train,hf]'."""

from __future__ import annotations

from importlib import import_module

from seqloom.errors import SeqloomError

try:
    for package in ("torch", "transformers"):
        import_module(package)
except ImportError as error:
    raise SeqloomError(
        f"seqloom.integrations runs Hugging Face models and needs torch and transformers ({error}); "
        "pip install 'seqloom[train,hf]'"
    ) from None

from seqloom.integrations.refusals import REFUSALS, check
from seqloom.integrations.support import support_table
from seqloom.integrations.transformers import Head, attach, head, hidden_states, inputs, network

__all__ = ["REFUSALS", "Head", "attach", "check", "head", "hidden_states", "inputs", "network", "support_table"]
