"""Weights are exchanged with Hugging Face's models, both ways, and both compute the same."""

import pytest
import torch

from seqloom.describe.huggingface import model_from_config
from seqloom.models import Transformer, TransformerOptions

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install seqloom[hf]")

LENGTHS = [9, 1, 30]
SHAPES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"tie_word_embeddings": False}),
        ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
        ("Mistral", {"sliding_window": 5}),
        ("Qwen3", {"tie_word_embeddings": False}),
    ],
)
def test_logits_and_gradients_equal_hugging_faces(kit, kind, changes):
    config = getattr(transformers, f"{kind}Config")(**SHAPES | changes)
    torch.manual_seed(1)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(12 if parameter.ndim == 2 else 1)
    ours = Transformer(model_from_config(config.to_dict()), TransformerOptions.from_config(config.to_dict()))
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())

    docs, weights = kit.documents(LENGTHS), kit.cotangents(LENGTHS)
    logits = [theirs(doc[None]).logits[0] for doc in docs]
    sum((x * w).sum() for x, w in zip(logits, weights, strict=True)).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    wanted = kit.result([x.detach() for x in logits], gradients, [gradients])
    found = kit.errors(kit.run(ours, docs, kit.one_group(LENGTHS, 2, 2)), wanted)
    assert max(found.values()) < 1e-5, found
