"""Private operators of torch: the day torch changes one, this file fails and says which."""

import re
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from seqloom import compat
from seqloom.errors import SeqloomError

torch.set_num_threads(1)


def test_torch_still_has_the_operators_as_we_call_them():
    compat.check_operators()


@pytest.mark.parametrize("schema", compat.SCHEMAS)
def test_a_change_is_named_with_both_signatures(schema):
    first = re.search(r"Tensor \w+,", schema)[0]
    changed = schema.replace(first, "Tensor other,")
    with pytest.raises(SeqloomError) as error:
        compat.check_operators([changed])
    assert f"expected {changed}" in str(error.value)
    assert first in str(error.value).partition("got ")[2]
    assert torch.__version__ in str(error.value)


@pytest.mark.parametrize(
    ("expected", "found", "serves"),
    [
        ("a(int x, *, int y=0) -> int", "a(int x, *, int y=0) -> int", True),
        ("a(int x, *, int y=0) -> int", "a(int x, *, int y=0, int z=1) -> int", True),
        ("a(int x, *, int y=0) -> int", "a(int x, *, int y=0, int z) -> int", False),
        ("a(int x, *, int y=0) -> int", "a(int x, *, int y=00) -> int", False),
        ("a(int x, *, int y=0) -> int", "a(int x, *, int y=0) -> Tensor", False),
        ("a(int x, *, int y=0) -> int", "a(*, int y=0) -> int", False),
    ],
)
def test_added_keywords_with_defaults_do_no_harm(expected, found, serves):
    assert compat._serves(found, expected) is serves


def test_all_changes_are_reported_at_once():
    gone = ["aten::_no_such_operator(Tensor x) -> Tensor", "aten::_nor_this(Tensor x) -> Tensor"]
    with pytest.raises(SeqloomError, match=r"(?s)_no_such_operator is gone.*_nor_this is gone"):
        compat.check_operators(gone)


def test_the_cpu_mask_starts_at_the_first_query_and_key():
    """What `cpu_flash` builds on, and the sum that it must never see: that of a row without keys."""
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 5, 4)
    short, _ = compat.cpu_flash_forward(q, k[:, :, :1], k[:, :, :1], causal=False, mask=None, scale=1.0)
    out, _ = compat.cpu_flash_forward(q, k, k, causal=True, mask=None, scale=1.0)
    assert torch.allclose(out[:, :, 0], short[:, :, 0])
    hidden = torch.full((2, 5), -torch.inf)
    out, lse = compat.cpu_flash_forward(q, k, k, causal=False, mask=hidden, scale=1.0)
    assert not out.any() and not lse.any()


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 3)])
def test_the_gpu_operator_takes_our_arguments(causal, window):
    """On the meta device: shapes and argument types are checked, nothing is computed."""
    q, k = torch.empty(10, 4, 16, dtype=torch.bfloat16, device="meta"), torch.empty(12, 2, 16, device="meta")
    k = k.bfloat16()
    cumulative = torch.tensor([0, 10], dtype=torch.int32, device="meta")
    mask = compat.flash_mask(causal, window)
    arguments = compat.VarlenArguments(cumulative, cumulative, 10, 12, 0.25, *mask)
    out, lse = compat.flash_forward(q, k, k, arguments)
    assert out.shape == q.shape and lse.shape == (4, 10) and lse.dtype == torch.float32
    dq, dk, dv = compat.flash_backward(out, (q, k, k, out, lse), arguments)
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape


def test_a_group_can_have_the_timeout_of_the_job():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        group = dist.new_group([0])
        own = group._get_backend(torch.device("cpu")).options
        assert own._timeout != timedelta(seconds=77), "torch passes it on by itself; inherit_timeout can go"
        compat.inherit_timeout(group)
        assert own._timeout == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()


class Runtime:
    """CUDA's part in pinned memory: it knows what is pinned, and refuses what already is."""

    def __init__(self):
        self.pinned = {}

    def cudaHostRegister(self, address, size, flags):  # noqa: N802 - CUDA's name
        overlaps = any(address < other + its_size and other < address + size for other, its_size in self.pinned.items())
        self.pinned[address] = size
        return 712 if overlaps else 0

    def cudaHostUnregister(self, address):  # noqa: N802 - CUDA's name
        del self.pinned[address]


def test_pinned_memory_is_exactly_as_large_and_given_back(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    tensor = compat.pinned_empty((3, 1000), torch.float32)
    assert runtime.pinned == {tensor.data_ptr(): 12_000} and tensor.data_ptr() % 4096 == 0
    row = tensor.zero_()[1]
    del tensor
    assert len(runtime.pinned) == 1  # a view holds it
    row += 1
    del row
    assert not runtime.pinned
    for _ in range(100):  # memory is used again
        compat.pinned_empty((3, 1000), torch.bfloat16)
    assert not runtime.pinned
    assert compat.pinned_empty((0, 4), torch.float32).shape == (0, 4)


def test_memory_that_cannot_be_pinned_is_an_error_with_a_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    with pytest.raises(SeqloomError, match=r"cannot be pinned \(CUDA error 2\); set optimiser.offload = false"):
        compat.pinned_empty((1 << 20,), torch.float32)
