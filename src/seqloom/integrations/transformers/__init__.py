"""Hugging Face models on the engine. Needs the extra `hf`: pip install 'seqloom[train,hf]'."""

from __future__ import annotations

from importlib import import_module

from seqloom.errors import SeqloomError

try:
    for package in ("torch", "transformers"):
        import_module(package)
except ImportError as error:
    raise SeqloomError(
        f"seqloom.integrations.transformers runs Hugging Face models and needs torch and transformers ({error}); "
        "pip install 'seqloom[train,hf]'"
    ) from None

from seqloom.integrations.transformers.attach import Head, attach, head, hidden_states, inputs, model_adapter
from seqloom.integrations.transformers.checks import REFUSALS, check

__all__ = ["REFUSALS", "Head", "attach", "check", "head", "hidden_states", "inputs", "model_adapter"]
