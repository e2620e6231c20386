"""Hugging Face models on any ulysses x ring: logits and gradients of plain transformers, document by document."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from seqloom.dist import bind, run_ranks
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, head, hidden_states, inputs, model_adapter
from seqloom.layout import Layout, Span
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.models.loss import summed_loss
from seqloom.plan import Checkpoint, Group, Remap, StageMicroBatch
from support.dropout import expected_attention_dropout, with_expected_dropout
from support.model_kinds import (
    WINDOWED,
    dynamic_frequencies,
    eurobert,
    gemma2,
    gpt2_with_dropout,
    hrm,
    llama4,
    llama_dynamic,
    longrope_frequencies,
    phi3_longrope,
    with_frequencies,
)
from support.model_steps import assert_near, run_step, steps, summed
from support.oracle import visible
from support.tiny_models import (
    MODELS,
    SIZES,
    VOCABULARY,
    documents,
    gradients,
    one_by_one,
    randomised,
    targets,
    tiny_model,
)

torch.set_num_threads(1)
SHAPES = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@st.composite
def works(draw):
    """(lengths, groups): one group on all ranks, or two groups side by side on halves of them."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(lengths))))
    spans = tuple(Span(k, 0, lengths[k]) for k in order)
    ulysses, ring = draw(st.sampled_from(SHAPES))
    degree = ulysses * ring
    if degree < 4 and len(spans) > 1 and draw(st.booleans()):
        cut = draw(st.integers(1, len(spans) - 1))
        groups = [
            Group(tuple(range(first, first + degree)), ulysses, ring, part)
            for first, part in ((0, spans[:cut]), (degree, spans[cut:]))
        ]
    else:
        groups = [Group(tuple(range(degree)), ulysses, ring, spans)]
    return lengths, tuple(groups)


def local(ids, context):
    """This rank's part of the documents."""
    return torch.cat([ids[d][a:b] for d, a, b in context.spans] or [torch.empty(0, dtype=torch.int64)])


def spread(model, ids, groups, *, by_logits=True, keep=None, linear=None, seed=None, longest=None, prefixes=()):
    """Run on the strict transport. Returns the logits of every document, and gradients summed over ranks.

    Args:
        by_logits: take the logits from the model call, not from hidden states and head.
        keep: checkpointing by the runtime, or None.
        linear: who holds which tokens for the MLP; None: those of attention.
        seed: of dropout.
        longest: document of the run, for models that have to know.
        prefixes: how many of its first tokens see each other, of every document; none: 0.
    """
    ranks = 1 + max(rank for group in groups for rank in group.ranks)
    models = [attach(copy.deepcopy(model), longest=longest) for _ in range(ranks)]
    work = StageMicroBatch(groups, keep or Checkpoint.NONE)
    if linear is not None:
        work = replace(work, linear=linear, remap=Remap.MLP)
    if keep or linear is not None:
        for own in models:
            recompute_layers(model_adapter(own).layers)

    def body(transport):
        shown = dict(enumerate(prefixes))
        own, context = models[transport.rank], bind(work, transport, dropout_seed=seed, prefixes=shown)
        rows, labels = local(ids, context), local([targets(each) for each in ids], context)
        if by_logits:
            logits = own(**inputs(rows, context.positions, context)).logits[0, : context.tokens]
            loss = cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        else:
            hidden = hidden_states(own, rows, context.positions, context)
            weight, _, made, bias = head(own)
            loss = summed_loss(hidden, weight, labels, bias=bias, logits=made)
            logits, _ = made.apply(torch.nn.functional.linear(hidden, weight, bias), needs_slope=False)
        loss.backward()
        return context.spans, logits.detach()

    whole = [torch.full((len(each), VOCABULARY), torch.nan, dtype=model.dtype) for each in ids]
    for spans, logits in run_ranks(ranks, body, strict=True):
        row = 0
        for document, start, stop in spans:
            whole[document][start:stop] = logits[row : row + stop - start]
            row += stop - start
    each = [gradients(own) for own in models]
    return whole, {name: sum(found[name] for found in each) for name in each[0]}


def assert_equal(got, wanted, tolerance, *, single=None):
    """Logits and gradients are those wanted, up to `tolerance` and twice the error that `single` makes, one process."""
    logits, grads = got
    assert sorted(grads) == sorted(wanted[1])
    alone = single or wanted
    for a, b, one in zip(logits, wanted[0], alone[0], strict=True):
        assert float((a - b).norm()) <= tolerance * float(b.norm()) + 2 * float((one - b).norm())
    floor = 1e-3 * max(float(x.norm()) for x in wanted[1].values())
    for name, b in wanted[1].items():
        error = 2 * float((alone[1][name] - b).norm())
        assert float((grads[name] - b).norm()) <= tolerance * max(float(b.norm()), floor) + error, name


def reference(model, ids):
    plain = copy.deepcopy(model)
    return one_by_one(plain, ids), gradients(plain)


def under_masks(name):
    """The keywords that show a prompt to itself in plain transformers: HRM takes token types, others a mask."""

    def keywords(length, prefix):
        if name == "hrm":
            return {"token_type_ids": (torch.arange(length) < prefix).long()[None]}
        return {"attention_mask": visible(length, True, 4 if name == "mistral" else None, prefix=prefix)[None, None]}

    return keywords


@pytest.mark.parametrize("name", ["llama", "mistral", "hrm"])
@settings(max_examples=8)
@given(case=works(), data=st.data(), seed=st.integers(0, 99))
def test_prompts_that_see_themselves_equal_plain_transformers(name, case, data, seed):
    """Prefix language models: Mistral's window holds for the tokens behind a prompt alone."""
    lengths, groups = case
    prefixes = [data.draw(st.integers(0, length)) for length in lengths]
    model = hrm() if name == "hrm" else tiny_model(name, seed=seed)
    ids, plain = documents(lengths, seed), copy.deepcopy(model)
    shown = [under_masks(name)(*each) for each in zip(lengths, prefixes, strict=True)]
    wanted = one_by_one(plain, ids, keywords=shown)
    got = spread(model, ids, groups, by_logits=False, prefixes=prefixes)
    assert_equal(got, (wanted, gradients(plain)), 1e-9)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12)
@given(
    case=works(),
    dtype=st.sampled_from(list(TOLERANCE)),
    keep=st.sampled_from([None, "transformers", Checkpoint.SELECTIVE, Checkpoint.FULL]),
    by_logits=st.booleans(),
)
def test_logits_and_gradients_equal_those_of_plain_transformers(name, case, dtype, keep, by_logits):
    lengths, groups = case
    model, ids = tiny_model(name, dtype=dtype), documents(lengths)
    single, wanted = reference(model, ids), reference(model.double(), ids)
    model.to(dtype)
    if keep == "transformers":
        model.gradient_checkpointing_enable()
        keep = None
    assert_equal(spread(model, ids, groups, by_logits=by_logits, keep=keep), wanted, TOLERANCE[dtype], single=single)


@settings(max_examples=12)
@given(case=works(), by_logits=st.booleans())
def test_gradients_of_lora_adapters_equal_those_of_plain_transformers(case, by_logits):
    from peft import LoraConfig, get_peft_model

    lengths, groups = case
    adapters = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(tiny_model("llama"), adapters)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    ids = documents(lengths)
    wanted = reference(model, ids)
    assert wanted[1] and all("lora_" in name for name in wanted[1])
    assert_equal(spread(model, ids, groups, by_logits=by_logits), wanted, 1e-9)


def lora_with_dropout():
    from peft import LoraConfig, get_peft_model

    targets_of = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, lora_dropout=0.3, target_modules=targets_of))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


@pytest.mark.parametrize("build", [lora_with_dropout, gpt2_with_dropout])
@settings(max_examples=12)
@given(
    case=works(),
    seed=st.integers(0, 2**40),
    keep=st.sampled_from([None, "transformers", Checkpoint.SELECTIVE, Checkpoint.FULL]),
    by_logits=st.booleans(),
    moves=st.booleans(),
)
def test_dropout_does_not_depend_on_the_plan(build, case, seed, keep, by_logits, moves):
    lengths, groups = case
    model, ids = build(), documents(lengths)
    plain = with_expected_dropout(model, seed)
    wanted = one_by_one(plain, ids), gradients(plain)
    linear = None
    if moves:  # the MLP runs on the tokens of the rank before
        layout = StageMicroBatch(groups, Checkpoint.NONE).attention_layout()
        ranks = 1 + max(rank for group in groups for rank in group.ranks)
        linear = Layout.of(((rank + 1) % ranks, *span) for rank in range(ranks) for span in layout.spans(rank))
    if keep == "transformers":
        model.gradient_checkpointing_enable()
        keep = None
    found = spread(model, ids, groups, by_logits=by_logits, keep=keep, linear=linear, seed=seed)
    assert_equal(found, wanted, 1e-9)


@pytest.mark.parametrize(
    "build",
    [partial(tiny_model, "llama", attention_dropout=0.3), partial(gpt2_with_dropout, attn_pdrop=0.3, resid_pdrop=0.0)],
    ids=["llama", "gpt2"],
)
@settings(max_examples=12)
@given(
    case=works(),
    seed=st.integers(0, 2**40),
    keep=st.sampled_from([None, "transformers", Checkpoint.SELECTIVE, Checkpoint.FULL]),
    training=st.booleans(),
)
def test_dropout_of_attention_weights_does_not_depend_on_the_plan(build, case, seed, keep, training):
    lengths, groups = case
    model, ids = build().train(training), documents(lengths)
    plain = copy.deepcopy(model)
    with expected_attention_dropout(plain, seed):
        wanted = one_by_one(plain, ids, eager=True), gradients(plain)
    if keep == "transformers":
        model.gradient_checkpointing_enable()
        keep = None
    assert_equal(spread(model, ids, groups, keep=keep, seed=seed), wanted, 1e-9)


@pytest.mark.parametrize(
    ("build", "frequencies"),
    [(phi3_longrope, longrope_frequencies), (llama_dynamic, dynamic_frequencies)],
    ids=["longrope", "dynamic"],
)
@settings(max_examples=12)
@given(case=works(), spare=st.sampled_from([0, 9, 40]), by_logits=st.booleans())
def test_rotary_embeddings_by_the_longest_document_of_the_run(build, frequencies, case, spare, by_logits):
    lengths, groups = case
    model, ids, longest = build(), documents(lengths), max(lengths) + spare
    plain = with_frequencies(copy.deepcopy(model), frequencies(longest))
    wanted = one_by_one(plain, ids), gradients(plain)
    with pytest.raises(SeqloomError, match=r"RoPE by the longest sequence.*attach\(model, longest=tokens\)"):
        attach(copy.deepcopy(model))
    assert_equal(spread(model, ids, groups, by_logits=by_logits, longest=longest), wanted, 1e-6)  # tables are float32


@settings(max_examples=15)
@given(
    case=works(),
    keep=st.sampled_from([None, "transformers", Checkpoint.SELECTIVE, Checkpoint.FULL]),
    logits=st.booleans(),
)
def test_chunked_attention_and_queries_scaled_by_position(case, keep, logits):
    lengths, groups = case
    model, ids = llama4(), documents(lengths)
    wanted = reference(model, ids)
    if keep == "transformers":
        model.gradient_checkpointing_enable()
        keep = None
    found = spread(model, ids, groups, by_logits=logits, keep=keep)
    assert_equal(found, wanted, 1e-5)  # RoPE and scales are float32


def capped():
    """Logits capped in attention and after the head."""
    return gemma2(), None


def gpt_oss():
    """Attention sinks, in a window and without."""
    return tiny_model("gpt-oss", sliding_window=5), None


def inside_gemma3():
    """The language model, with the parameters that the whole model has for it; and the whole model."""
    from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration

    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={**SIZES, **WINDOWED, "query_pre_attn_scalar": 4, "pad_token_id": 0},
        vision_config={**tower, "image_size": 28, "patch_size": 14},
        image_token_index=VOCABULARY,
    )
    whole = randomised(Gemma3ForConditionalGeneration(config), 0).double().train()
    model = Gemma3ForCausalLM(whole.config.text_config).double().train()
    model.model.load_state_dict(whole.model.language_model.state_dict())
    return model, whole


@pytest.mark.parametrize(
    ("build", "tolerance"),
    [(capped, 1e-5), (gpt_oss, 1e-9), (inside_gemma3, 1e-6)],  # of Gemma norms, and the plain softmax, are float32
    ids=["capped", "sinks", "language model inside"],
)
@settings(max_examples=8)
@given(
    case=steps(),
    keep=st.sampled_from([Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL]),
    remap=st.sampled_from([None, *Remap]),
)
def test_kinds_of_attention_in_pieces_and_groups(build, tolerance, case, keep, remap):
    lengths, rounds, ranks = case
    (model, whole), ids = build(), documents(lengths)
    plain = copy.deepcopy(model) if whole is None else whole
    capped = getattr(model.config, "attn_logit_softcapping", None)
    logits = one_by_one(plain, ids, eager=capped is not None)
    part = plain if whole is None else whole.model.language_model
    names = {name: name if whole is None else name.removeprefix("model.") for name in gradients(model)}
    wanted = {name: gradients(part)[own] for name, own in names.items()}
    assert_near(run_step(model, ids, rounds, ranks, keep, remap), (summed(logits, ids), wanted), tolerance)


def llama_bidirectional():
    return tiny_model("llama", is_causal=False)


@pytest.mark.parametrize("build", [llama_bidirectional, eurobert])
@settings(max_examples=12)
@given(case=works(), keep=st.sampled_from([None, Checkpoint.SELECTIVE, Checkpoint.FULL]), by_logits=st.booleans())
def test_tokens_that_see_their_whole_document(build, case, keep, by_logits):
    """Any labels: the loss takes those of the positions themselves as it takes shifted ones."""
    lengths, groups = case
    model, ids = build(), documents(lengths)
    wanted = reference(model, ids)
    assert_equal(spread(model, ids, groups, by_logits=by_logits, keep=keep), wanted, 1e-9)
    changed = [torch.cat([each[:-1], (each[-1:] + 1) % VOCABULARY]) for each in ids]
    plain = one_by_one(copy.deepcopy(model), changed)
    first = [not torch.equal(a[0], b[0]) for a, b in zip(plain, wanted[0], strict=True)]
    assert first == [True] * len(ids), "the first token sees the last"


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8)
@given(case=works(), data=st.data())
def test_a_changed_token_changes_nothing_of_another_document(name, case, data):
    lengths, groups = case
    model, ids = tiny_model(name, dtype=torch.float32), documents(lengths)
    document = data.draw(st.integers(0, len(ids) - 1))
    place = data.draw(st.integers(0, lengths[document] - 1))
    other = [each.clone() for each in ids]
    other[document][place] = (other[document][place] + 1) % VOCABULARY
    before, after = (spread(model, each, groups)[0] for each in (ids, other))
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        same = a if number != document else a[:place]
        if name == "mixtral":  # an expert multiplies all its tokens at once, and a product's size changes its rounding
            assert torch.allclose(same, b[: len(same)], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(same, b[: len(same)])
    assert not torch.equal(before[document][place], after[document][place])
