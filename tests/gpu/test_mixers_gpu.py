"""Mixers on a GPU with the kernels of packages: one call for all whole documents gives what one call each does."""

import copy
import sys

import pytest
import torch

from seqloom.dist import bind_single_rank
from seqloom.integrations.transformers import attach, inputs, mixers
from support.tiny_models import VOCABULARY, gradients, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
LENGTHS = (300, 7, 129, 64, 1, 65)
KINDS = {
    "qwen3-next": (
        *("fla", "torch_chunk_gated_delta_rule"),
        {"head_dim": 32, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    ),
    "bamba": (
        *("mamba_ssm", "mamba2_chunk_scan"),
        {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 64},
    ),
}


def run(model, ids):
    context = bind_single_rank(LENGTHS, device="cuda")
    logits = model(**inputs(ids, context.positions, context)).logits[0].float()
    logits.square().mean().backward()
    return {"logits": logits.detach(), **gradients(model)}


@pytest.mark.parametrize("name", KINDS)
def test_a_pack_is_its_documents(name, monkeypatch):
    package, function, sizes = KINDS[name]
    pytest.importorskip(package)
    model = tiny_model(name, dtype=torch.bfloat16, hidden_size=128, **sizes).to("cuda")
    file = sys.modules[type(model).__module__]
    assert mixers._takes_packs(getattr(file, function)), f"transformers has not found {package}"
    ids = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)).to("cuda")
    packed = run(attach(copy.deepcopy(model)), ids)
    monkeypatch.setattr(mixers, "_takes_packs", lambda _: False)
    single = run(attach(model), ids)
    for key, each in single.items():
        assert float((packed[key] - each).float().norm()) <= 1e-2 * float(each.float().norm()) + 1e-6, key
