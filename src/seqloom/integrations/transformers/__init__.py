"""Hugging Face models on the engine. Needs the extra `hf`: pip install 'seqloom[train,hf]'."""

from __future__ import annotations

from seqloom.errors import import_extra

for package in ("torch", "transformers"):
    import_extra("seqloom.integrations.transformers, which runs Hugging Face models,", "train,hf", package)

from seqloom.integrations.transformers.attach import Head, attach, head, hidden_states, inputs, model_adapter  # noqa: E402
from seqloom.integrations.transformers.checks import REFUSALS, check  # noqa: E402
from seqloom.integrations.transformers.describe import describe_model  # noqa: E402

__all__ = [
    "REFUSALS",
    "Head",
    "attach",
    "check",
    "describe_model",
    "head",
    "hidden_states",
    "inputs",
    "model_adapter",
]
