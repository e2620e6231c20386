"""Measuring kernels: what is run, and what is kept."""

from dataclasses import replace

import pytest
import torch

from seqloom.attention.kernels.cpu import CpuFlash
from seqloom.attention.kernels.dispatch import device_name
from seqloom.attention.kernels.interface import AttentionShape
from seqloom.errors import SeqloomError
from seqloom.profiling.kernels import SMALLEST, TimingSettings, time_kernels

torch.set_num_threads(1)

SHAPE = AttentionShape(2, 1, 8, torch.float32, torch.device("cpu"), 1.0)


class Recording:
    """A kernel that notes what it is given."""

    capabilities = replace(CpuFlash.capabilities, name="recording")

    def __init__(self):
        self.packs = []

    def prepare(self, segments, shape):
        self.packs.append((segments.q_len.tolist(), segments.causal))
        return CpuFlash().prepare(segments, shape)


def test_documents_of_one_length_fill_a_pack():
    kernel, reported = Recording(), []
    effort = TimingSettings(lengths=(8, 20, 40), tokens=40, repeats=2)
    measurement = time_kernels([kernel], SHAPE, effort, lambda name, length: reported.append((name, length)))
    expected = [[8] * 5, [20] * 2, [40]]
    assert [pack for pack in kernel.packs if pack[0] != [SMALLEST]] == [
        (lengths, causal) for causal in (True, False) for lengths in expected
    ]
    assert reported == [("recording", length) for length in effort.lengths] * 2
    assert (measurement.device, measurement.torch) == (device_name(SHAPE.device), torch.__version__)
    [times] = measurement.times
    assert [point.length for point in times.causal] == [point.length for point in times.full] == [8, 20, 40]
    assert min(times.forward_call_ns, times.backward_call_ns) > 0


def test_a_kernel_that_refuses_the_shape_is_not_measured():
    with pytest.raises(SeqloomError, match="cpu_flash: device cuda; it runs on cpu"):
        time_kernels([CpuFlash()], replace(SHAPE, device=torch.device("cuda")), TimingSettings((8,), 8, 1))
