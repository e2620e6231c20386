"""Dropout by counters on a GPU: the masks of the CPU, also in compiled layers."""

import pytest
import torch
from torch import nn

from seqloom.attention import attention
from seqloom.attention.dropout import keep_mask, mixed32, module_keys, token_keys
from seqloom.attention.kernels.cpu import Reference
from seqloom.attention.kernels.triton_attention import TritonSegments
from seqloom.dist import bind_single_rank
from seqloom.models.compile import compile_layers
from seqloom.models.dropout import plan_dropout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_masks_are_those_of_the_cpu():
    documents, positions = torch.randint(0, 1 << 20, (2, 700), generator=torch.Generator().manual_seed(0))
    masks = []
    for device in ("cpu", "cuda"):
        keys = module_keys(token_keys(1 << 40, documents.to(device), positions.to(device)), 7)
        masks.append(keep_mask(keys, mixed32(torch.arange(515, device=device)), 0.3, torch.float32).cpu())
    assert torch.equal(*masks)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout, self.inner = nn.Dropout(0.4), nn.Linear(64, 64)

    def forward(self, x, context):
        return x + self.inner(self.dropout(x))


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiled_layers_drop_the_same():
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layers = nn.ModuleList([Layer(), Layer()]).cuda()
        plan_dropout(layers)
        if compiled:
            compile_layers(layers)
        found = []
        for lengths in ((300, 41), (77,)):
            context = bind_single_rank(lengths, device="cuda", dropout_seed=3)
            x = torch.randn(sum(lengths), 64, generator=torch.Generator().manual_seed(1)).cuda().requires_grad_()
            out = layers[1](layers[0](x, context), context)
            out.square().sum().backward()
            found += [out.detach(), x.grad]
        results.append(found)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_triton_drops_the_attention_weights_that_the_reference_drops_on_the_cpu():
    lengths, draw = (300, 41, 513), torch.Generator().manual_seed(2)
    q, k, v, dout = (torch.randn(sum(lengths), heads, 64, generator=draw) for heads in (4, 2, 2, 4))
    found = []
    for device, kernel in (("cpu", Reference()), ("cuda", TritonSegments())):
        leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
        context = bind_single_rank(lengths, device=device, dropout_seed=3)
        out = attention(*leaves, context, dropout=0.3, layer=5, kernels=kernel)
        found.append([x.detach().cpu() for x in (out, *torch.autograd.grad(out, leaves, dout.to(device)))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
