"""torch's own pipelining runtime executes our schedules from their CSV files and gives the gradients of one process.

Every stage mixes what earlier pieces of a sequence left behind into the later ones, by hand, as attention does with
keys and values: a piece whose backward runs before that of a later piece gets a wrong gradient. torch either places
the messages itself or takes ours.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from seqloom.schedules import Unit, build_schedule
from seqloom.schedules.schedule import to_csv

HOSTS, HIDDEN, TOKENS, SEQUENCES = 4, 3, 2, 4
FORMS = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (1, 2),
    "breadth-first": (1, 2),
    "zb-h1": (1, 1),
    "zb-v": (1, 2),
    "v-half": (1, 2),
    "terapipe": (2, 1),
    "seq1f1b": (2, 1),
    "seq1f1b-i": (3, 2),
    "seq1f1b-zb": (2, 1),
}
"""Pieces and chunks of every schedule that is run."""


class Carry(torch.autograd.Function):
    """Add the sum of all earlier pieces' tokens; backward, hand earlier pieces what later ones owe them."""

    @staticmethod
    def forward(ctx, x, sums, owed, sequence):
        ctx.owed, ctx.sequence = owed, sequence
        before = sums.get(sequence, torch.zeros_like(x[:1]))
        sums[sequence] = before + x.sum(0, keepdim=True)
        return x + before

    @staticmethod
    def backward(ctx, gradient):
        later = ctx.owed.get(ctx.sequence, torch.zeros_like(gradient[:1]))
        ctx.owed[ctx.sequence] = later + gradient.sum(0, keepdim=True)
        return gradient + later, None, None, None


class Block(nn.Module):
    """One stage. It counts its forwards: they come in the order of the units."""

    def __init__(self, stage: int, units: tuple[Unit, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(numbers(stage, *parameter.shape))
        self.units, self.done, self.sums, self.owed = units, 0, {}, {}

    def forward(self, x):
        unit = self.units[self.done]
        self.done += 1
        return torch.tanh(Carry.apply(self.linear(x), self.sums, self.owed, unit.sequence))


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def batch(units: tuple[Unit, ...]) -> list[torch.Tensor]:
    return [numbers(100 + u, TOKENS, HIDDEN) for u in range(len(units))]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum()


def run_file(group, path: str, form: str, hosts: tuple[int, ...], units: tuple[Unit, ...]) -> dict[int, list]:
    """Let torch run one file; return the gradients of this rank's stages."""
    rank = dist.get_rank(group)
    given, like = (torch.zeros(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=grad) for grad in (False, True))
    blocks = {stage: Block(stage, units) for stage, host in enumerate(hosts) if host == rank}
    stages = []
    for number, block in blocks.items():
        shapes = {"input_args": like if number else given, "output_args": like}
        stages.append(PipelineStage(block, number, len(hosts), torch.device("cpu"), group=group, **shapes))
    runtime = _PipelineScheduleRuntime(stages, len(units), loss_fn=loss_of, scale_grads=False)
    runtime._load_csv(path, format=form)
    for stage in stages:
        stage.has_backward = True  # what `step` does before it splits a batch by rows
    inputs = batch(units)
    first = [(x,) for x in inputs] if 0 in blocks else [()] * len(units)
    losses: list[torch.Tensor] = []
    targets = inputs if len(hosts) - 1 in blocks else None
    runtime._step_microbatches(first, [{}] * len(units), targets, losses)
    return {stage: [p.grad for p in block.parameters()] for stage, block in blocks.items()}


def run_all(transport, files: list[tuple]) -> list[dict[int, list]]:
    group = transport._communicators.world
    return [run_file(group, *arguments) for arguments in files]


def one_process(stages: int, units: tuple[Unit, ...]) -> list[list]:
    """The same model without stages, pieces or hand-made backwards."""
    weights = [Block(stage, units).linear for stage in range(stages)]
    sums = [{} for _ in range(stages)]
    total = 0.0
    for unit, x in zip(units, batch(units), strict=True):
        hidden = x
        for linear, earlier in zip(weights, sums, strict=True):
            mixed = linear(hidden)
            before = earlier.get(unit.sequence, torch.zeros_like(mixed[:1]))
            earlier[unit.sequence] = before + mixed.sum(0, keepdim=True)
            hidden = torch.tanh(mixed + before)
        total = total + loss_of(hidden, x)
    total.backward()
    return [[p.grad for p in linear.parameters()] for linear in weights]


@pytest.fixture(scope="module")
def schedules():
    return {name: build_schedule(name, HOSTS, SEQUENCES, pieces, chunks) for name, (pieces, chunks) in FORMS.items()}


def test_torch_runs_our_files_and_gets_the_gradients_of_one_process(gloo_pool, schedules, tmp_path):
    files = []
    for name, made in schedules.items():
        for form, rows in (("compute_only", made.rows), ("compute_comms", made.pipeline_actions())):
            path = tmp_path / f"{name}.{form}.csv"
            path.write_text(to_csv(rows))
            files.append((str(path), form, made.pp_ranks, made.units))
    ranks = gloo_pool.run(run_all, files, ranks=HOSTS, timeout_s=150)
    for number, (path, _, hosts, units) in enumerate(files):
        found = {stage: gradients for rank in ranks for stage, gradients in rank[number].items()}
        expected = one_process(len(hosts), units)
        for stage, gradients in enumerate(expected):
            for mine, theirs in zip(gradients, found[stage], strict=True):
                torch.testing.assert_close(theirs, mine, rtol=1e-12, atol=1e-12, msg=f"{path} stage {stage}")
