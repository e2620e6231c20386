"""Models of transformers of every kind on a GPU in bfloat16: packed documents by the engine beside one by one without.

The engine may err at most twice as much against float32 as plain transformers does.
"""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from seqloom.dist import bind_single_rank
from seqloom.integrations.transformers import attach, model_adapter
from seqloom.models.adapter import ModelWithLoss
from support.tiny_models import VOCABULARY, gradients, targets, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # transformers warns of missing kernels
]
LENGTHS = (300, 7, 129, 64, 1)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 32}
KINDS = {
    "qwen3": {"head_dim": 32},
    "qwen2-windows": {"sliding_window": 50},
    "phi": {},  # a head with a bias
    "lfm2": {},  # short convolutions
    "qwen3-next": {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32},  # gated delta rule
    "bamba": MAMBA,
    "falcon-h1": {**MAMBA, "mamba_d_ssm": 256},
    "minicpm3": {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32},  # latents
}


def errors(found, truth):
    """Relative errors of the loss and of all gradients together."""
    (loss, own), (wanted_loss, wanted) = found, truth
    difference = sum(float((own[name].float() - each.float()).square().sum()) for name, each in wanted.items())
    whole = sum(float(each.float().square().sum()) for each in wanted.values())
    return abs(loss / wanted_loss - 1), (difference / whole) ** 0.5


def plain(model, ids):
    model.set_attn_implementation("sdpa")
    total = 0.0
    for document in ids:
        logits = model(input_ids=document[None], use_cache=False).logits[0].float()
        loss = cross_entropy(logits, targets(document.cpu()).to(document.device), reduction="sum", ignore_index=-100)
        loss.backward()
        total += float(loss)
    return total, gradients(model)


def packed(model, ids):
    context = bind_single_rank([len(each) for each in ids], device=ids[0].device)
    labels = torch.cat([targets(each.cpu()) for each in ids]).to(ids[0].device)
    loss = ModelWithLoss(model_adapter(attach(model)))(torch.cat(ids), labels, context)
    loss.backward()
    return float(loss), gradients(model)


def compared(name, device):
    """Errors of plain transformers and of the engine in bfloat16."""
    exact = tiny_model(name, dtype=torch.float32, **SIZES, **KINDS[name]).to(device)
    with torch.no_grad():  # drawn for widths of 16: here the same values would amplify every rounding
        for parameter in exact.parameters():
            parameter *= 0.35 if parameter.ndim > 1 else 1
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(VOCABULARY, (length,), generator=generator).to(device) for length in LENGTHS]
    half, own = (copy.deepcopy(exact).to(torch.bfloat16) for _ in range(2))
    truth = plain(exact, ids)
    return errors(plain(half, ids), truth), errors(packed(own, ids), truth)


@pytest.mark.parametrize("name", KINDS)
def test_half_precision_errs_at_most_twice_as_much_as_plain_transformers(name):
    (loss, norm), (own_loss, own_norm) = compared(name, "cuda")
    assert own_norm <= 2 * norm and own_loss <= max(2 * loss, 0.005), (loss, norm, own_loss, own_norm)
