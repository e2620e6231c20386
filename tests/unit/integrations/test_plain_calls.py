"""Calls without a context: what plain transformers computes, packed documents one by one, and `generate()`."""

from copy import deepcopy

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy

from seqloom.dist import bind_single_rank
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, inputs
from support.model_kinds import hrm
from support.tiny_models import (
    HYBRIDS,
    LATENTS,
    MODELS,
    SIZES,
    VOCABULARY,
    documents,
    one_by_one,
    targets,
    tiny_model,
)

torch.set_num_threads(1)
LENGTHS = [5, 1, 9]
EXACT = {"rtol": 1e-9, "atol": 1e-9}
ATTENTIVE = [*MODELS, "gpt-oss", "qwen3-moe", "gemma2", *LATENTS]
SOME = ["llama", "qwen2-windows", "mixtral", "gpt-oss", "gemma2", "llama4", "deepseek-v3"]


def model_of(name, **changes):
    if name == "gemma2":
        changes = {"head_dim": 4, "sliding_window": 4, "attn_logit_softcapping": 2.0, **changes}
        return hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, **changes)).double()
    if name == "llama4":
        kinds = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "head_dim": 4}
        experts = {"num_local_experts": 2, "intermediate_size_mlp": 24, "attention_chunk_size": 4, "floor_scale": 3}
        config = hf.Llama4TextConfig(**SIZES, **kinds, **experts, attn_temperature_tuning=False)
        return hf.Llama4ForCausalLM(config).double()
    return tiny_model(name, **changes)


def plain(model):
    """A copy with transformers' own attention; its eager one, for what sdpa has not, has a softmax in float32."""
    copied, capped = deepcopy(model), getattr(model.config, "attn_logit_softcapping", None)
    copied.set_attn_implementation("sdpa" if model._supports_sdpa and not capped else "eager")
    return copied


def close(found, wanted, name):
    within = 1e-5 if name in ("gemma2", "gpt-oss", "mixtral", *HYBRIDS) else 1e-9
    torch.testing.assert_close(found, wanted, rtol=within, atol=within)


def batch(side):
    ids = torch.full((len(LENGTHS), max(LENGTHS)), 3)
    mask = torch.zeros_like(ids)
    for row, document in enumerate(documents(LENGTHS)):
        where = slice(-len(document), None) if side == "left" else slice(len(document))
        ids[row, where], mask[row, where] = document, 1
    return ids, mask


def gradients(model):
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def packed():
    ids = torch.cat(documents(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return ids[None], positions[None]


@pytest.mark.parametrize("name", ATTENTIVE)
def test_packed_documents_are_told_apart_by_their_positions(name):
    model = model_of(name)
    wanted = torch.cat(one_by_one(model, documents(LENGTHS)))
    slopes = gradients(model)
    model.zero_grad()
    ids, positions = packed()
    found = attach(model)(input_ids=ids, position_ids=positions).logits[0]
    labels = torch.cat([targets(each) for each in documents(LENGTHS)])
    cross_entropy(found, labels, reduction="sum").backward()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    for key, slope in gradients(model).items():
        torch.testing.assert_close(slope, slopes[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["lfm2", "bamba"])
def test_states_of_packed_documents_begin_anew(name):
    model = model_of(name, dtype=torch.float32)
    wanted = torch.cat(one_by_one(model, documents(LENGTHS)))
    ids, positions = packed()
    found = attach(model)(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_borders_say_the_same_as_positions_and_a_mask_of_ones_changes_nothing():
    model, (ids, positions) = attach(tiny_model("llama")), packed()
    wanted = model(input_ids=ids, position_ids=positions).logits
    borders = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    flash = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 9, "max_length_k": 9}
    assert torch.equal(model(input_ids=ids, **flash).logits, wanted)
    assert torch.equal(model(input_ids=ids, position_ids=positions, **flash).logits, wanted)
    ones = torch.ones_like(ids)
    assert torch.equal(model(input_ids=ids, position_ids=positions, attention_mask=ones).logits, wanted)
    collator = hf.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    flattened = collator([{"input_ids": each.tolist()} for each in documents(LENGTHS)])
    assert torch.equal(model(**flattened).logits, wanted)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [name for name in SOME if name != "gemma2"])  # whose eager attention gives nan
def test_padded_batches_are_what_plain_transformers_computes(name, side):
    model = model_of(name).eval()
    other, (ids, mask) = plain(model), batch(side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model, wanted = attach(model), other(input_ids=ids, attention_mask=mask, position_ids=positions)
    found = model(input_ids=ids, attention_mask=mask, position_ids=positions)
    real = mask.bool()
    close(found.logits[real], wanted.logits[real], name)
    labels = ids.masked_fill(~real, -100)
    for each in (model, other):
        each(input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels).loss.backward()
    for key, slope in gradients(other).items():
        close(gradients(model)[key], slope, name)


def test_a_capped_model_gives_padded_documents_what_it_gives_them_alone():
    model, (ids, mask) = attach(model_of("gemma2").eval()), batch("left")
    found = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    other = plain(model)
    for row, document in enumerate(documents(LENGTHS)):
        close(found[row, -len(document) :], other(document[None]).logits[0], "gemma2")


@pytest.mark.parametrize("name", [*SOME, *HYBRIDS])
def test_a_batch_without_padding(name):
    model = model_of(name).eval()
    other, ids = plain(model), torch.stack(documents([7, 7, 7]))
    close(attach(model)(ids).logits, other(ids).logits, name)


@pytest.mark.parametrize("name", [*SOME, "lfm2", "bamba", "qwen3-next"])
@pytest.mark.parametrize("side", ["left", None])
def test_generate_gives_the_same_tokens_and_scores(name, side):
    side = None if name == "gemma2" else side
    model = model_of(name).eval()
    ids, mask = batch(side) if side else (torch.stack(documents([6, 6])), None)
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    options |= {"attention_mask": mask, "pad_token_id": 3, "eos_token_id": VOCABULARY}
    wanted = plain(model).generate(ids, **options)
    found = attach(model).generate(ids, **options)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.scores), torch.stack(wanted.scores), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"num_beams": 2}, {"use_cache": False}])
def test_other_ways_to_generate(options):
    model = tiny_model("mistral").eval()  # with a window
    ids, mask = batch("left")
    options = {**options, "max_new_tokens": 5, "do_sample": False, "attention_mask": mask, "pad_token_id": 3}
    options |= {"eos_token_id": VOCABULARY, "disable_compile": True}
    wanted = plain(model).generate(ids, **options)
    assert torch.equal(attach(model).generate(ids, **options), wanted)


def test_a_conversation_goes_on_from_its_cache():
    model = attach(tiny_model("qwen2-windows").eval())
    other, ids = plain(model), torch.stack(documents([12, 12]))
    first = model(ids[:, :7], use_cache=True)
    rest = model(ids[:, 7:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(torch.cat((first.logits, rest), dim=1), other(ids).logits, **EXACT)


def test_masks_with_holes_and_masks_of_one_s_own():
    model = attach(tiny_model("mistral").eval())
    other, ids = plain(model), torch.stack(documents([8, 8]))
    holes = torch.ones_like(ids)
    holes[0, 2:4] = 0
    found, wanted = (each(ids, attention_mask=holes).logits[holes.bool()] for each in (model, other))
    torch.testing.assert_close(found, wanted, **EXACT)
    tree = torch.eye(8, dtype=torch.float64)[None, None].log().expand(2, 1, 8, 8)  # every token sees itself
    torch.testing.assert_close(model(ids, attention_mask=tree).logits, other(ids, attention_mask=tree).logits, **EXACT)


def test_prompts_that_see_themselves():
    """By transformers' mask in a call without a context; the engine has them of `bind`."""
    model, (ids,) = attach(hrm().eval()), documents([9])
    other, prompts = plain(model), torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0, 0]])
    found, wanted = (each(ids[None], token_type_ids=prompts, use_cache=False).logits for each in (model, other))
    torch.testing.assert_close(found, wanted, **EXACT)
    assert not torch.allclose(found[:, 0], model(ids[None], use_cache=False).logits[:, 0]), "the first token sees more"
    context = bind_single_rank([9])
    with pytest.raises(
        SeqloomError, match=r"was given a mask of shape \[1, 1, 9, 9\]: who sees whom is in the context"
    ):
        model(**inputs(ids, context.positions, context), token_type_ids=prompts)


def test_lora_gradient_checkpointing_and_a_copy():
    lora = LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = attach(get_peft_model(tiny_model("llama", dtype=torch.float32), lora))
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter)
    ids, positions = packed()
    calls = {"packed": {"input_ids": ids, "position_ids": positions}, "rows": {"input_ids": ids}}
    for call in calls.values():
        torch.manual_seed(1)
        first = model(**call, labels=ids).loss
        torch.manual_seed(1)
        assert torch.equal(model(**call, labels=ids).loss, first)
        assert not torch.equal(model(**call, labels=ids).loss, first)  # other elements are dropped
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model(**calls["packed"], labels=ids).loss.backward()
    copied = deepcopy(model).eval()
    model.eval()
    assert torch.equal(copied(**calls["packed"]).logits, model(**calls["packed"]).logits)


# -- refused ----------------------------------------------------------------------------------------------------------


def test_what_is_not_clear_is_refused():
    model, (ids, positions) = attach(tiny_model("llama")), packed()
    with pytest.raises(SeqloomError, match="a batch of 2"):
        model(input_ids=ids.expand(2, -1), position_ids=positions.expand(2, -1))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    with pytest.raises(SeqloomError, match="with padding"):
        model(input_ids=ids, position_ids=positions, attention_mask=mask)
    zigzag = torch.tensor([[0, 1, 2, 9, 10, 11]])
    with pytest.raises(SeqloomError, match="another position than 0"):
        model(input_ids=ids[:, :6], position_ids=zigzag)
    with pytest.raises(SeqloomError, match="cu_seq_lens_q"):
        model(input_ids=ids, cu_seq_lens_q=torch.tensor([0, 5, 9]))
    with pytest.raises(SeqloomError, match="not the positions"):
        model(input_ids=ids, cu_seq_lens_q=torch.tensor([0, 15]), position_ids=positions)
    with pytest.raises(SeqloomError, match="a cache"):
        model(input_ids=ids, position_ids=positions, past_key_values=hf.DynamicCache(config=model.config))


def test_attention_weights_are_dropped_in_packed_calls_and_batches_are_refused():
    model, ids = attach(tiny_model("llama", attention_dropout=0.3)).train(), torch.arange(8)[None]
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    first, second = (model(input_ids=ids, position_ids=packed).logits for _ in range(2))
    assert not torch.equal(first, second), "another seed for every call"
    with pytest.raises(SeqloomError, match=r"dropout 0\.3 of attention weights .*model\.eval\(\)"):
        model(input_ids=ids)
    model.eval()
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
