"""Models of transformers with compiled layers: what plain transformers gives, document by document."""

import pytest
import torch
import transformers as hf
from torch._dynamo.utils import counters

from seqloom.dist import SingleRankTransport, bind
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, model_adapter
from seqloom.layout import Span
from seqloom.models.adapter import ModelWithLoss
from seqloom.models.compile import compile_layers
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.plan import Checkpoint, Group, StageMicroBatch
from support.tiny_models import SIZES, documents, gradients, one_by_one, randomised, targets, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::Warning:torch")  # its compiler does what it warns others of
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh():
    """Every test compiles for itself."""
    torch._dynamo.reset()
    counters.clear()


def compiled(model):
    own = model_adapter(attach(model))
    compile_layers(own.layers, backend="aot_eager")
    recompute_layers(own.layers)
    return own


def round_of(lengths, checkpoint=Checkpoint.NONE, dropout_seed=None):
    spans = tuple(Span(document, 0, tokens) for document, tokens in enumerate(lengths))
    work = StageMicroBatch((Group((0,), 1, 1, spans),), checkpoint)
    return bind(work, SingleRankTransport(), dropout_seed=dropout_seed)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "graphs"), [("llama", 1), ("qwen2-windows", 2)])
def test_gradients_are_those_of_plain_transformers_and_fresh_lengths_compile_nothing(name, graphs):
    """One graph for every window that layers have, and the same for a single row."""
    plain, model = tiny_model(name), tiny_model(name)
    own = compiled(model)
    for lengths, checkpoint in zip(([5, 3], [16], [9, 1, 20]), ("none", "selective", "full"), strict=True):
        ids = documents(lengths)
        plain.zero_grad(), model.zero_grad()
        one_by_one(plain, ids)
        labels, context = torch.cat([targets(each) for each in ids]), round_of(lengths, Checkpoint(checkpoint))
        ModelWithLoss(own)(torch.cat(ids), labels, context).backward()
        for wanted, found in zip(gradients(plain).values(), gradients(model).values(), strict=True):
            assert float((found - wanted).norm()) <= 1e-9 * float(wanted.norm()), (checkpoint, lengths)
        assert counters["stats"]["unique_graphs"] == graphs
    nothing = torch.empty(0, dtype=torch.int64)
    for _ in range(2):
        model.zero_grad()
        ModelWithLoss(own)(nothing, nothing, round_of([])).backward()
        assert not any(each.any() for each in gradients(model).values())
        assert counters["stats"]["unique_graphs"] == 2 * graphs
    assert not counters["graph_break"] and list(model.state_dict()) == list(plain.state_dict())


def llama4(**keys):
    sizes = {**SIZES, "head_dim": 4, "attention_chunk_size": 6, "no_rope_layers": [1, 0], "moe_layers": []}
    config = hf.Llama4TextConfig(**sizes, intermediate_size_mlp=24, pad_token_id=0, **keys)
    return randomised(hf.Llama4ForCausalLM(config), 0).double().train()


@pytest.mark.slow
def test_chunked_attention():
    plain, model = (llama4(attn_temperature_tuning=False) for _ in range(2))
    own = compiled(model)
    for lengths in ([5, 3], [16], [9, 1, 20]):
        ids = documents(lengths)
        plain.zero_grad(), model.zero_grad()
        one_by_one(plain, ids)
        labels = torch.cat([targets(each) for each in ids])
        ModelWithLoss(own)(torch.cat(ids), labels, round_of(lengths)).backward()
        for wanted, found in zip(gradients(plain).values(), gradients(model).values(), strict=True):
            assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm()), lengths  # RoPE is float32
        assert counters["stats"]["unique_graphs"] == 2, "with chunks and without"


@pytest.mark.slow
def test_queries_that_are_scaled_by_their_rows_are_refused():
    with pytest.raises(SeqloomError, match=r"scales queries by their rows .* model.compile = false"):
        compiled(llama4()).hidden(torch.cat(documents([5, 3])), round_of([5, 3]))


@pytest.mark.slow  # test_transformers.py refuses it without a compiler
def test_a_window_that_a_layer_keeps_to_itself_is_refused():
    keys = {**SIZES, "sliding_window": 3, "num_local_experts": 2, "router_aux_loss_coef": 0.0, "lm_head_bias": False}
    quiet = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
    own = compiled(hf.PhimoeForCausalLM(hf.PhimoeConfig(**keys, **quiet)).double())
    ids = torch.cat(documents([5, 3]))
    with pytest.raises(SeqloomError, match="PhimoeAttention: the config says a sliding window of 3, but the layer"):
        own.hidden(ids, round_of([5, 3]))


@pytest.mark.slow
def test_attention_weights_are_dropped_as_without_a_compiler():
    plain, model = (tiny_model("llama", attention_dropout=0.3) for _ in range(2))
    own, alike = compiled(model), model_adapter(attach(plain))
    for lengths, checkpoint in zip(([5, 3], [16], [9, 1, 20]), ("none", "selective", "full"), strict=True):
        ids, seed = documents(lengths), len(lengths)
        labels = torch.cat([targets(each) for each in ids])
        plain.zero_grad(), model.zero_grad()
        ModelWithLoss(alike)(torch.cat(ids), labels, round_of(lengths, dropout_seed=seed)).backward()
        ModelWithLoss(own)(torch.cat(ids), labels, round_of(lengths, Checkpoint(checkpoint), seed)).backward()
        for wanted, found in zip(gradients(plain).values(), gradients(model).values(), strict=True):
            assert float((found - wanted).norm()) <= 1e-9 * float(wanted.norm()), (checkpoint, lengths)
    with pytest.raises(SeqloomError, match=r"dropout 0\.3 of attention weights in a context without a seed"):
        own.hidden(torch.cat(documents([5, 3])), round_of([5, 3]))
    with torch.no_grad():  # evaluation
        own.hidden(torch.cat(documents([5, 3])), round_of([5, 3]))
