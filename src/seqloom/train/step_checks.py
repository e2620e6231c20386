"""Checks of a run while it trains, and the dump of a step that fails one.

Every step, at no cost of their own, ranks compare the plan's step, lengths and hash (`PlanBroadcast`), the labels that
the loss has counted (`run_step`), and whether loss and gradient norm are finite. Every `checks.every` steps:

    replicas     ranks that have the same part of a parameter have the same bits of it
    a document   has the loss alone on every rank that it has in the step's plan, among all others

A GPU or a link that computes or carries something else is found here, and named by its rank. A step that fails is
written to `run.output/failed`: a checkpoint of the parameters it ran with, whose manifest has plan and batch, so that
`seqloom replay` runs it again without the run's data.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field

from seqloom.cost.compute import forward_flops
from seqloom.data import IGNORE_INDEX, Batch, Source, rank_rows
from seqloom.data.source import check_ids
from seqloom.dist import Context, Transport
from seqloom.engine import RankPlan, evaluate, rank_losses
from seqloom.errors import SeqloomError
from seqloom.params import Parameters
from seqloom.params.interface import ParameterShard
from seqloom.plan import Plan, Sharding
from seqloom.planners.problem import fitting_problems
from seqloom.planners.uniform import rounds_in_order
from seqloom.reader import build
from seqloom.train.checkpoint import Checkpoints, Tensors
from seqloom.train.run_folder import Manifest, checkpoint_folder, complete_checkpoints
from seqloom.train.setup import RunSetup

if TYPE_CHECKING:
    from seqloom.planners.plan_ahead import StepPlan

FAILED = "failed"
"""Folder of dumps, in the run's."""
KEPT_DUMPS = 3
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest relative difference of a document's loss that another order of sums explains, by the dtype of layers."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

TokenId = Annotated[int, Field(ge=IGNORE_INDEX, lt=2**31)]
Gather = Callable[[torch.Tensor], torch.Tensor]
"""all-gathers an int64 or float64 vector of every rank: [n] -> [ranks, n]"""


class CheckFailedError(SeqloomError):
    """Ranks do not compute the same."""


# ---- Replicas


def checksums(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, tuple[int, int]]:
    """Return, by name, a key of the part that this rank has of a tensor, and the sum of its bits as integers.

    The sum does not depend on an order of additions, and changes with every single bit.
    """
    keys, sums = [], []
    for name, tensor in tensors.items():
        offset, values = ParameterShard.of(tensor, sends=True)[2:]
        if values is None:
            continue
        part = f"{name} {offset} {tuple(values.shape)}"
        keys.append((name, int.from_bytes(hashlib.sha256(part.encode()).digest()[:7], "little")))
        bits = values.contiguous().view(_BITS[values.element_size()])
        sums.append(bits.sum(dtype=torch.int64).to(device))
    found = torch.stack(sums).tolist() if sums else []
    return {name: (key, each) for (name, key), each in zip(keys, found, strict=True)}


def compare_replicas(tensors: Mapping[str, torch.Tensor], gather: Gather, device: torch.device) -> int:
    """Refuse parts of tensors that ranks hold together and that differ; return how many are compared. All ranks call.

    What only one rank has, as under full sharding, is compared with nothing.
    """
    mine = checksums(tensors, device)
    most = int(gather(torch.tensor([len(mine)], device=device)).max())
    rows = torch.zeros((most, 3), dtype=torch.int64, device=device)
    if mine:
        rows[: len(mine)] = torch.tensor([(1, *pair) for pair in mine.values()], dtype=torch.int64)
    names = {key: name for name, (key, _) in mine.items()}
    first: dict[int, tuple[int, int]] = {}
    compared = set()
    for rank, parts in enumerate(gather(rows.view(-1)).view(-1, most, 3).tolist()):
        for key, value in ((key, value) for there, key, value in parts if there):
            owner, expected = first.setdefault(key, (rank, value))
            if value != expected:
                raise CheckFailedError(
                    f"ranks {owner} and {rank} hold other values of {names.get(key, 'a parameter')}, of which they "
                    "have copies: the memory, GPU or link of one of them is at fault"
                )
            compared |= {key} if owner != rank else set()
    return len(compared)


# ---- One document


def choose_document(batch: Batch, plan: Plan, setup: RunSetup, step: int) -> int | None:
    """Draw a document that every rank can compute alone in the time of its share of the step; None: there is none.

    The same on all ranks.
    """
    limits = plan.limits
    most = max(tokens for _, tokens in (*limits.capacity, *limits.offload_capacity))
    work = forward_flops(batch.lengths, setup.spec)
    able = (batch.valid > 0) & (batch.lengths <= most)
    if not able.any():
        return None
    share = max(float(work.sum()) / limits.ranks, float(work[able].min()))
    return random.Random(setup.config.run.seed << 32 | step).choice(np.flatnonzero(able & (work <= share)).tolist())


def plan_alone(length: int, setup: RunSetup) -> list[Plan]:
    """Plan copies of a document: one whole on every rank, or one in all where the run's stages have ranks of their own.

    Without a plan, where no rank holds it, the list is empty: all ranks learn of it.
    """
    cost = setup.cost
    try:
        if setup.planners.multi_stage and cost.sharding != Sharding.FREE:
            return [setup.planners.fallback.plan(np.array([length]), cost)]
        copies = len(cost.family.blocks(1))
        for problem in fitting_problems(np.full(copies, length), cost):
            shapes = np.flatnonzero(problem.tables.degree == 1).tolist()
            if shapes and int(problem.tables.tokens.max()) <= problem.tables.capacity:
                one_each = [[copy] for copy in range(copies)]
                return [problem.plan(rounds_in_order(problem, one_each, shapes[0]), "static")]
    except SeqloomError:
        pass
    return []


def labels_of(document: int, source: Source, batch: Batch) -> Callable[[Context], tuple[torch.Tensor, torch.Tensor]]:
    """Return a reader of rows in which only the labels of one document of a batch count."""

    def rows(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        ids, labels = rank_rows(source, context, batch)
        own = [span.document == document for span in context.spans for _ in range(span.tokens)]
        return ids, torch.where(torch.tensor(own, device=labels.device), labels, IGNORE_INDEX)

    return rows


@dataclass(frozen=True, slots=True, eq=False)
class StepChecks:
    """The checks of one rank that are due at intervals.

    Attributes:
        bind: binds a plan to this rank, without dropout.
        broadcast: returns the plans of rank 0 on all ranks; others give None.
        dtype: that layers compute in.
    """

    setup: RunSetup
    transport: Transport
    parameters: Parameters
    bind: Callable[[Plan], RankPlan]
    broadcast: Callable[[Sequence[Plan] | None], list[Plan]]
    gather: Gather
    dtype: torch.dtype
    device: torch.device

    def due(self, step: int) -> bool:
        """Whether a check follows this step."""
        every = self.setup.config.checks.every
        return every > 0 and step % every == 0

    def run(self, step: int, plan: Plan, batch: Batch, buffers: Mapping[str, torch.Tensor]) -> str:
        """Compare replicas, `buffers` that steps change too, and a document; return what was compared. All ranks call.

        Raises CheckFailedError on all ranks.
        """
        tensors = {**self.parameters.device_shards(), **buffers}
        replicas = compare_replicas(tensors, self.gather, self.device)
        return f"{replicas} replicated tensors, {self._compare_document(step, plan, batch)}"

    def _compare_document(self, step: int, plan: Plan, batch: Batch) -> str:
        number = choose_document(batch, plan, self.setup, step)
        if number is None:
            return "no document, since none has labels and fits on one rank"
        document, length, valid = (int(each[number]) for each in (batch.documents, batch.lengths, batch.valid))
        among = evaluate(self.bind(plan), self.parameters, labels_of(number, self.setup.source, batch), valid)
        root = self.transport.rank == 0
        plans = self.broadcast(plan_alone(length, self.setup) if root else None)
        if not plans:
            return f"no document, since document {document} cannot be planned alone"
        alone = plans[0]
        copies = Batch(*(np.full(len(alone.documents), each) for each in (document, length, valid)))
        source = self.setup.source
        rows = lambda context: rank_rows(source, context, copies)  # noqa: E731 - as `evaluate` wants it
        found = self.gather(rank_losses(self.bind(alone), self.parameters, rows, copies.valid_tokens)).cpu().numpy()
        whole = (found[:, 1] > 0) & (found[:, 1] % valid == 0)
        if not whole.any():  # a pipeline with several ranks on its last stage
            found, whole = found.sum(axis=0, keepdims=True), np.array([True])
        for rank in np.flatnonzero(whole).tolist():
            self._compare_losses(document, rank, among, float(found[rank, 0] / found[rank, 1]))
        return f"document {document} of {length:,} tokens on {int(whole.sum())} ranks"

    def _compare_losses(self, document: int, rank: int, among: float, alone: float) -> None:
        difference = abs(alone - among) / max(abs(among), 1e-12)
        if not difference <= TOLERANCE[self.dtype]:
            raise CheckFailedError(
                f"document {document} has loss {among:.9g} in the step's plan and {alone:.9g} alone on rank {rank}; "
                f"sums in another order explain a difference of {TOLERANCE[self.dtype]:g} of it at most"
            )


# ---- Dumps


@dataclass(frozen=True, slots=True)
class Dump:
    """A step that failed, beside its parameters: what a manifest has under `extra`."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a plain dict is what pydantic looks for

    step: int
    reason: str
    plan_hash: str
    plan: str  # JSON
    seed: int  # of dropout
    documents: list[int]  # numbers in the run's source
    ids: list[list[TokenId]]
    labels: list[list[TokenId]]
    config: dict[str, Any]

    @classmethod
    def of(cls, step_plan: StepPlan, batch: Batch, setup: RunSetup, reason: str, seed: int) -> Dump:
        """Read the documents of a step."""
        rows = [
            setup.source.rows(document, 0, length)
            for document, length in zip(batch.documents.tolist(), batch.lengths.tolist(), strict=True)
        ]
        ids, labels = ([each[part].tolist() for each in rows] for part in (0, 1))
        plan = (step_plan.plan_hash, step_plan.plan_json)
        return cls(step_plan.step, reason, *plan, seed, batch.documents.tolist(), ids, labels, setup.config.as_dict())

    @classmethod
    def read(cls, path: Path) -> Dump:
        """Read the dump of a folder, or refuse it."""
        extra = Manifest.read(path).extra
        if "ids" not in extra:
            raise SeqloomError(f"{str(path)!r} is a checkpoint and no dump: name a folder of {FAILED}/ in a run's")
        dump = build(cls, extra, str(path))
        sizes = [[len(each) for each in part] for part in (dump.ids, dump.labels)]
        if sizes[0] != sizes[1] or len(sizes[0]) != len(dump.documents) or not all(sizes[0]):
            raise SeqloomError(f"{path}: documents, ids and labels are not of one batch; take another dump")
        return dump


class DumpedDocuments(Source):
    """The documents of a dump."""

    def __init__(self, dump: Dump, vocabulary: int) -> None:
        """Refuse ids that the model does not have."""
        self._rows = [
            tuple(np.array(each, dtype=np.int64) for each in pair) for pair in zip(dump.ids, dump.labels, strict=True)
        ]
        for number, (ids, labels) in zip(dump.documents, self._rows, strict=True):
            check_ids(ids, vocabulary, f"document {number}")
            check_ids(labels[labels != IGNORE_INDEX], vocabulary, f"labels of document {number}")
        lengths = [len(ids) for ids, _ in self._rows]
        valid = [int((labels != IGNORE_INDEX).sum()) for _, labels in self._rows]
        super().__init__(f"the dump of step {dump.step}", lengths, valid, vocabulary)

    @property
    def batch(self) -> Batch:
        """All documents."""
        return Batch(np.arange(len(self)), self.lengths, self.valid)

    def _read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self._rows[document][0][start:stop]

    def rows(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels as the step had them."""
        self._check_span(document, start, stop)
        ids, labels = self._rows[document]
        return ids[start:stop], labels[start:stop]


def write_dump(folder: Path, dump: Dump, model: Tensors, checkpoints: Checkpoints) -> str:
    """Write a step that failed, in place of one of the same step; return how to run it again. All ranks call it.

    `checkpoints` of the run have the communicator.
    """
    path = checkpoint_folder(folder, dump.step)
    try:
        checkpoints.wait()
        if checkpoints.leads:
            for step, left in complete_checkpoints(folder):
                if step >= dump.step:
                    shutil.rmtree(left)
        dumps = Checkpoints(folder, keep=KEPT_DUMPS, group=checkpoints.group)
        dumps.save(dump.step, model=model, optimiser={}, extra=asdict(dump))
        dumps.wait()
    except (SeqloomError, OSError) as error:
        return f"The step could not be saved for a replay ({error})"
    return f"`seqloom replay {path}` runs it again on CPU, in one process"
