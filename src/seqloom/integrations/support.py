"""The table of the documentation: what a model may have, and what is refused, from the code itself."""

from __future__ import annotations

from seqloom.integrations.refusals import REFUSALS

SUPPORTED = (
    ("full causal attention, grouped or single key/value heads", "computed by the engine, heads unrepeated"),
    ("sliding windows, one per layer", "taken from the layer's own call"),
    ("biases, QK norm, any scaling, RoPE of all kinds but two, learned positions", "the model's own code"),
    ("experts (router loss 0)", "the model's own code; routing is by token"),
    ("tied and untied heads", "`head(model)` says which"),
    ("LoRA through peft (dropout 0)", "attach the wrapped model"),
    ("gradient checkpointing", "`gradient_checkpointing_enable()`, or torch.utils.checkpoint"),
)
"""What is supported, and how; every row is under test."""


def support_table() -> str:
    """Return the table in Markdown: supported features, then refused ones with reason and way out."""
    lines = ["| a model with | | why, and the way out |", "|---|---|---|"]
    lines += [f"| {feature} | supported | {how} |" for feature, how in SUPPORTED]
    lines += [f"| {each.name} | refused | {each.why}; {each.way_out} |" for each in REFUSALS]
    return "\n".join(lines) + "\n"
