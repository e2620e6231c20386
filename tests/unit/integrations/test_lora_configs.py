"""LoRA configs as tutorials and model cards publish them: each is exact under a plan, or refused by name."""

import copy

import peft
import pytest
import torch
from peft.tuners.lora import Embedding
from torch.nn.functional import cross_entropy

from seqloom.dist import bind, run_ranks
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, inputs
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, StageMicroBatch
from support.dropout import with_expected_dropout
from support.tiny_models import VOCABULARY, documents, gradients, one_by_one, randomised, targets, tiny_model

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # peft's, about tied heads and drawn parameters
LENGTHS, SEED = (9, 1, 14), 77
SPANS = tuple(Span(document, 0, length) for document, length in enumerate(LENGTHS))
WORK = StageMicroBatch((Group((0, 1, 2, 3), 2, 2, SPANS[:2]), Group((1,), 1, 1, SPANS[2:])), Checkpoint.NONE)
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*QKVO, "gate_proj", "up_proj", "down_proj"]
EXACT = {
    "the paper's": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"},
    "alpaca-lora": {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": QKVO, "bias": "none"},
    "QLoRA's": {"r": 64, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": "all-linear", "bias": "none"},
    "a list of all projections": {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": EVERY},
    "a pattern": {"r": 4, "target_modules": r".*self_attn\.(q|k)_proj"},
    "usual targets of the model": {"r": 8, "lora_alpha": 32, "lora_dropout": 0.1},
    "rank-stabilised": {"r": 32, "lora_alpha": 64, "use_rslora": True, "target_modules": "all-linear"},
    "gaussian": {"r": 8, "init_lora_weights": "gaussian", "target_modules": QKVO},
    "pissa": {"r": 4, "init_lora_weights": "pissa", "target_modules": QKVO},
    "olora": {"r": 4, "init_lora_weights": "olora", "target_modules": QKVO},
    "biases of adapted layers": {"r": 8, "bias": "lora_only", "target_modules": QKVO, "lora_dropout": 0.1},
    "all biases": {"r": 8, "bias": "all", "target_modules": QKVO},
    "a bias of its own": {"r": 8, "lora_bias": True, "target_modules": QKVO},
    "some layers": {"r": 8, "target_modules": QKVO, "layers_to_transform": [1], "layers_pattern": "layers"},
    "ranks by layer": {"r": 8, "target_modules": EVERY, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "DoRA": {"r": 8, "lora_alpha": 16, "use_dora": True, "target_modules": EVERY},
    "DoRA with dropout": {"r": 8, "lora_alpha": 16, "use_dora": True, "lora_dropout": 0.1, "target_modules": EVERY},
    "head and embedding saved": {"r": 8, "target_modules": QKVO, "modules_to_save": ["lm_head", "embed_tokens"]},
    "norms saved": {"r": 8, "target_modules": QKVO, "modules_to_save": ["norm"]},
    "new tokens": {"r": 8, "target_modules": QKVO, "trainable_token_indices": [3, 5]},
    "adapted embedding": {"r": 8, "target_modules": ["embed_tokens", *QKVO]},
    "adapted embedding, with dropout": {"r": 8, "lora_dropout": 0.1, "target_modules": ["embed_tokens", *QKVO]},
}


OTHERS = {
    "IA3": peft.IA3Config(task_type="CAUSAL_LM"),
    "LoHa": peft.LoHaConfig(r=4, target_modules=QKVO),
    "LoKr": peft.LoKrConfig(r=4, target_modules=QKVO),
    "VeRA": peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "AdaLoRA": peft.AdaLoraConfig(init_r=6, target_r=4, total_step=10, tinit=1, tfinal=2, target_modules=QKVO),
}
QUICK = ("QLoRA's", "DoRA with dropout", "head and embedding saved", "adapted embedding, with dropout")
REFUSED = {
    "adapted head": (
        peft.LoraConfig(r=8, target_modules=["lm_head", *QKVO]),
        r"logits altered after the head \(the head is a Linear\).* train all of it \(modules_to_save\)",
    ),
    "prompt tuning": (peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), r"virtual tokens"),
    "prefix tuning": (peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), r"virtual tokens"),
    "p-tuning": (peft.PromptEncoderConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), r"virtual tokens"),
}


def wrapped(settings):
    model = tiny_model("llama", attention_bias=True, dtype=torch.float32)  # peft decomposes weights of no other dtype
    config = settings if isinstance(settings, peft.PeftConfig) else peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    return randomised(peft.get_peft_model(model, config), 1).double().train()


def assert_exact(model):
    ids, attached = documents(LENGTHS), model
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Embedding):  # of which peft drops nothing
            module.lora_dropout["default"] = torch.nn.Identity()
    drops = any(type(each) is torch.nn.Dropout and each.p for each in model.modules())
    plain = with_expected_dropout(model, SEED) if drops else copy.deepcopy(model)
    wanted = one_by_one(plain.base_model.model, ids)
    models = [attach(copy.deepcopy(attached)) for _ in range(4)]

    def body(transport):
        own, context = models[transport.rank], bind(WORK, transport, dropout_seed=SEED)
        none = [torch.empty(0, dtype=torch.int64)]
        parts = (ids, [targets(each) for each in ids])
        rows, labels = (torch.cat([each[d][a:b] for d, a, b in context.spans] or none) for each in parts)
        logits = own(**inputs(rows, context.positions, context)).logits[0, : context.tokens]
        cross_entropy(logits, labels, reduction="sum", ignore_index=-100).backward()
        return context.spans, logits.detach()

    found = [torch.full((length, VOCABULARY), torch.nan, dtype=torch.float64) for length in LENGTHS]
    for spans, logits in run_ranks(4, body, strict=True):
        for (document, start, stop), part in zip(spans, logits.split([span.tokens for span in spans]), strict=True):
            found[document][start:stop] = part
    for got, right in zip(found, wanted, strict=True):
        assert float((got - right).norm()) <= 1e-9 * float(right.norm())
    each = [gradients(own) for own in models]
    for name, right in gradients(plain).items():
        got = sum(one[name] for one in each)
        assert float((got - right).norm()) <= 1e-9 * max(float(right.norm()), 1e-3), name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in (*EXACT, *OTHERS)]
)
def test_published_configs_are_exact(name):
    assert_exact(wrapped(EXACT.get(name) or OTHERS[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name):
    config, words = REFUSED[name]
    with pytest.raises(SeqloomError, match=rf"LlamaForCausalLM is refused:\n  - {words}"):
        attach(peft.get_peft_model(tiny_model("llama"), config))
