"""The fused loss in Triton's interpreter, against torch's cross entropy in float64; `test_loss.py` runs this file."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from seqloom.models import triton_loss
from seqloom.models.loss import IGNORED, plain_losses

torch.set_num_threads(1)


def draw(rows, vocabulary, dtype, scale=3.0):
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = (scale * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    labels[1::3] = IGNORED
    return logits, labels


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(2, torch.float32), (64, torch.float32), (257, torch.float32), (19, torch.bfloat16), (100, torch.float16)],
)
def test_losses_and_slopes_equal_cross_entropy(vocabulary, dtype, monkeypatch):
    monkeypatch.setattr(triton_loss, "_BLOCK", 32)
    logits, labels = draw(13, vocabulary, dtype)
    exact = logits.double().requires_grad_()
    wanted = cross_entropy(exact, labels, reduction="none", ignore_index=IGNORED)
    wanted.sum().backward()
    found = triton_loss.fused_losses(logits, labels, IGNORED, True)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    rounding = max(torch.finfo(dtype).eps / 2, 1e-6)  # the interpreter cuts bf16 off instead of rounding it
    assert (logits.double() - exact.grad).norm() < rounding * exact.grad.norm()
    assert not logits[labels == IGNORED].any()


def test_logits_stay_where_no_gradient_is_wanted():
    logits, labels = draw(5, 40, torch.float32)
    kept = logits.clone()
    found = triton_loss.fused_losses(logits, labels, IGNORED, False)
    assert torch.equal(logits, kept)
    torch.testing.assert_close(found, plain_losses(kept, labels, IGNORED, False))


def test_large_logits_and_sure_tokens():
    logits, labels = draw(6, 50, torch.float32, scale=1e4)
    labels[0], logits[0, 7] = 7, 1e6
    exact = logits.double()
    found = triton_loss.fused_losses(logits, labels, IGNORED, True)
    wanted = cross_entropy(exact, labels, reduction="none", ignore_index=IGNORED)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert found[0] == 0 and logits.isfinite().all()


def test_a_label_outside_the_vocabulary_is_refused():
    logits, labels = draw(4, 10, torch.float32)
    for wrong in (10, -1):
        labels[0] = wrong
        with pytest.raises(RuntimeError):
            triton_loss.fused_losses(logits, labels, IGNORED, True)


def test_no_rows():
    logits, labels = draw(0, 10, torch.float32)
    assert triton_loss.fused_losses(logits, labels, IGNORED, True).shape == (0,)
