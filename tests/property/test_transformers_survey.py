"""Every causal or masked class of transformers is refused, or equals plain transformers: none is silently wrong."""

import warnings

import pytest
import torch
import transformers
from torch.nn.functional import linear
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from seqloom.dist import bind_single_rank
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, head, hidden_states, inputs
from support.tiny_models import randomised

torch.set_num_threads(1)
LENGTHS = [7, 1, 9]
NUMBERS = {
    32: "hidden_size n_embd d_model word_embed_proj_dim",
    48: "intermediate_size n_inner ffn_hidden_size ffn_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank v_head_dim",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim hidden_size_per_layer_input",
    4: "num_hidden_layers n_layer num_attention_heads n_head num_local_experts num_experts n_routed_experts rotary_dim",
    3: "sliding_window",
    2: "num_key_value_heads num_experts_per_tok eos_token_id",
    1: "n_group topk_group first_k_dense_replace bos_token_id logits_scaling logit_scale is_decoder use_sliding_window "
    "lm_head_bias",
    64: "vocab_size n_positions max_position_embeddings vocab_size_per_layer_input",
    0: "pad_token_id router_aux_loss_coef attention_dropout hidden_dropout embd_pdrop attn_pdrop resid_pdrop dropout "
    "hidden_dropout_prob attention_probs_dropout_prob residual_dropout embedding_dropout layerdrop router_jitter_noise "
    "input_jitter_noise",
}
TINY = {name: value for value, names in NUMBERS.items() for name in names.split()}
SWITCHES = ("is_decoder", "use_sliding_window", "lm_head_bias")
LARGEST = 10_000_000


def classes(mapping):
    for config, found in mapping.items():
        cls = found[0] if isinstance(found, tuple) else found
        if cls._supports_attention_backend and not {"text_config", "vision_config"} & set(config.sub_configs or ()):
            yield config, cls


def built(config, cls, **changes):
    """A tiny model, with two kinds of layers where the family has them; None if these sizes do not suit it."""
    defaults = config()
    keys = dict(changes)
    for name, value in TINY.items():
        kind = type(getattr(defaults, name, None)) if name in vars(defaults) else None
        if kind is not None:
            keys[name] = bool(value) if name in SWITCHES else float(value) if kind is float else value
    types = vars(defaults).get("layer_types")
    for layers in ({"layer_types": [*types[:3], types[-1]]} if types else {}, {}):
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in cls(config(**keys, **layers)).parameters())
            if size <= LARGEST:
                return randomised(cls(config(**keys, **layers)), seed=0).double().eval()
        except Exception:
            continue
    return None


def outcome(config, cls, **changes):
    try:
        model = built(config, cls, **changes)
    except Exception:
        model = None
    if model is None:
        return "not built"
    ids = [torch.arange(3, 3 + length) * 7 % 61 for length in LENGTHS]
    exact = cls._supports_sdpa and not getattr(model.config, "attn_logit_softcapping", None)  # sdpa leaves the cap out
    model.set_attn_implementation("sdpa" if exact else "eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    try:
        plain = [model(input_ids=x[None], use_cache=False).logits[0] for x in ids]
    except Exception:
        return "not run by transformers"
    try:
        attach(model)
        context, rows = bind_single_rank(LENGTHS), torch.cat(ids)
        logits = model(**inputs(rows, context.positions, context)).logits[0]
        weight, _, made, bias = head(model)
        products = linear(hidden_states(model, rows, context.positions, context), weight, bias)
        headed, _ = made.apply(products, needs_slope=False)
    except SeqloomError:
        return "refused"
    wanted = torch.cat(plain)
    far = max(float((found - wanted).norm() / wanted.norm()) for found in (logits, headed))
    # parts of some models are float32, and the softmax of transformers' own eager attention is
    return "equal" if far < (1e-6 if exact else 1e-5) else f"wrong by {far:.1e}"


@pytest.fixture
def quiet():
    """Models that are built from sizes of no published one are warned about."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@torch.no_grad()
def test_no_class_is_silently_wrong(quiet):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {cls.__name__: outcome(config, cls) for config, cls in classes(MODEL_FOR_CAUSAL_LM_MAPPING)}
    assert not {name: what for name, what in found.items() if what.startswith("wrong")}
    counts = {what: sum(each == what for each in found.values()) for what in sorted(set(found.values()))}
    assert counts["equal"] >= 75, (counts, found)
    assert counts["equal"] + counts["refused"] >= 95, (counts, found)


@torch.no_grad()
def test_no_masked_class_is_silently_wrong(quiet):
    """Encoders: their tokens see whole documents, many have windows on both sides or positions of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {cls.__name__: outcome(config, cls) for config, cls in classes(MODEL_FOR_MASKED_LM_MAPPING)}
    assert not {name: what for name, what in found.items() if what.startswith("wrong")}
    assert found["EuroBertForMaskedLM"] == "equal" and found["ModernBertForMaskedLM"] == "refused", found


@pytest.mark.slow
@torch.no_grad()
def test_no_causal_class_is_silently_wrong_when_it_is_made_bidirectional(quiet):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = classes(MODEL_FOR_CAUSAL_LM_MAPPING)
        found = {cls.__name__: outcome(config, cls, is_causal=False) for config, cls in every}
    assert not {name: what for name, what in found.items() if what.startswith("wrong")}
    assert sum(what == "equal" for what in found.values()) >= 50, found
    assert found["MistralForCausalLM"] == found["Llama4ForCausalLM"] == "refused", "windows on both sides, and chunks"
