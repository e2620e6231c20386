"""Constants from a Hugging Face config: the two spellings of rotary positions, and what is refused."""

import pytest

from seqloom.errors import SeqloomError
from seqloom.models import Llama3Scaling, Rope, TransformerOptions

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama"}, TransformerOptions()),
        ({"model_type": "mistral", "rms_norm_eps": 1e-5, "rope_theta": 1e6}, TransformerOptions(Rope(1e6), 1e-5)),
        ({"model_type": "qwen2", "rope_scaling": None}, TransformerOptions(qkv_bias=True)),
        ({"model_type": "qwen3", "attention_bias": False, "hidden_act": "silu"}, TransformerOptions(qk_norm=True)),
        (
            {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3},
            TransformerOptions(Rope(5e5, Llama3Scaling())),
        ),
        (
            {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5} | LLAMA3},
            TransformerOptions(Rope(5e5, Llama3Scaling())),
        ),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            TransformerOptions(Rope(7.0)),
        ),
    ],
)
def test_details_of_a_config(config, expected):
    assert TransformerOptions.from_config(config) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma2"}, "gemma2.*known: llama, mistral, qwen2, qwen3"),
        ({}, "model_type"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act = 'gelu'.*'silu' only"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'.*'llama3'"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "without low_freq_factor"),
    ],
)
def test_what_the_model_does_not_have_is_refused(config, words):
    with pytest.raises(SeqloomError, match=words):
        TransformerOptions.from_config(config)
