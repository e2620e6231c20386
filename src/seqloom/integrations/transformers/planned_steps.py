"""Steps of a training loop that belongs to another library: batches as its collators make them, run under plans.

    steps = PlannedSteps(model)                    # attaches the model; all ranks of the job
    for batch in whole_batches(loader):            # the same batch on every rank
        loss = steps.backward(batch).loss          # plan, forward, backward; gradients are those of the whole batch
        optimizer.step()

Loss and gradients are those of one process that is given the batch: the sum of the losses of its tokens, divided by the
labels that count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from seqloom.api import cost_model
from seqloom.cost import CostModel, Profile
from seqloom.describe import Cluster, ModelSpec, model_from_config
from seqloom.describe.huggingface import has_known_type
from seqloom.dist import Communicators, Context, SingleRankTransport, TorchTransport, Transport, launched_rank
from seqloom.engine import RankPlan, StepResult, bind_plan, run_step
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.attach import attach, model_adapter
from seqloom.integrations.transformers.checks import unwrap
from seqloom.integrations.transformers.describe import describe_model
from seqloom.integrations.transformers.plain_calls import FLATTEN, one_run_each, packed_lengths
from seqloom.models import ModelAdapter
from seqloom.models.adapter import DeferredParameters
from seqloom.models.layer_wrapper import LayerWrapper, recompute_layers
from seqloom.models.loss import IGNORED
from seqloom.params import FSDPParameters, Parameters, ReplicatedParameters
from seqloom.params.placement import move_buffers, pop_values
from seqloom.plan import Sharding
from seqloom.planners.plan_ahead import StepPlan
from seqloom.planners.registry import PlannerChoice
from seqloom.simulate import predicted_ns
from seqloom.train.launch import described_device
from seqloom.train.plan_broadcast import PlanBroadcast
from seqloom.train.trainer import step_seed


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The documents of a batch, packed one after the other.

    Attributes:
        ids: int64[tokens].
        labels: int64[tokens], those of the next token of the same document; `IGNORED` where the loss does not count.
        lengths: tokens of every document.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any]) -> Documents:
        """Read a batch of a collator: documents packed in rows, or one per row, padded on either side or not.

        Args:
            batch: `input_ids` and `labels` [rows, tokens], or `shift_labels` instead; with `cu_seq_lens_q` or
                `position_ids` that begin again at 0 where documents are packed, `attention_mask` where rows are padded.
        """
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        shifted = batch.get("shift_labels")
        labels = batch.get("labels") if shifted is None else shifted
        if labels is None or labels.shape != ids.shape:
            found = "no labels" if labels is None else f"labels {list(labels.shape)}"
            raise SeqloomError(
                f"a batch with input_ids {list(ids.shape)} and {found}: the loss needs a label for every token; use a "
                "collator that makes them, such as DataCollatorWithFlattening or DataCollatorForLanguageModeling"
            )
        padded = mask is not None and not bool(mask.all())
        lengths = packed_lengths(dict(batch), ids.shape, mask if padded else None)
        if padded and (lengths is not None or mask.ndim != 2 or not one_run_each(mask.bool())):
            raise SeqloomError(f"documents packed beside padding, or a mask with holes, in a batch: {FLATTEN}")
        if lengths is None:
            lengths = mask.sum(1).tolist() if padded else [ids.shape[1]] * ids.shape[0]
        ids, labels = ids.flatten(), labels.flatten()
        if padded:
            ids, labels = ids[mask.flatten().bool()], labels[mask.flatten().bool()]
        lengths = tuple(each for each in lengths if each)
        if shifted is None:
            ends = torch.tensor([*accumulate(lengths)], device=labels.device) - 1
            labels = labels.roll(-1).index_fill(0, ends, IGNORED)
        return cls(ids, labels, lengths)

    @classmethod
    def join(cls, parts: Sequence[Documents]) -> Documents:
        """Put batches together."""
        ids, labels = (torch.cat([getattr(each, name) for each in parts]) for name in ("ids", "labels"))
        return cls(ids, labels, tuple(length for each in parts for length in each.lengths))

    @property
    def valid(self) -> int:
        """Labels that count."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Documents:
        """Return the documents on a device."""
        return Documents(self.ids.to(device), self.labels.to(device), self.lengths)

    def rows(self, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and labels of a rank's tokens, in the order of `context.spans`."""
        rows = self.indices(context)
        return self.ids[rows], self.labels[rows]

    def indices(self, context: Context) -> torch.Tensor:
        """Return the places of a rank's tokens among those of the batch, in the order of `context.spans`."""
        starts = torch.tensor([0, *accumulate(self.lengths)], device=self.ids.device)
        return starts[context.documents] + context.positions


class ThreadPlanner:
    """Plans coming steps in a thread of this process, while it computes.

    Another process (`PlanAhead`) would import the user's script once more, which may begin to train there.
    """

    def __init__(self, cost: CostModel, planner: PlannerChoice) -> None:
        """Take the cost model of the run and its planner."""
        self._cost, self._planner = cost, planner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="seqloom-planner")
        self._plans: dict[int, Future[StepPlan]] = {}

    def submit(self, step: int, lengths: Sequence[int] | np.ndarray) -> None:
        """Have the plan of a step made; returns at once."""
        self._plans[step] = self._thread.submit(self._plan, step, lengths)

    def take(self, step: int, lengths: Sequence[int] | np.ndarray) -> StepPlan:
        """Return the plan of a step, waiting for it if need be; a step that was not submitted is planned now."""
        if step not in self._plans:
            self.submit(step, lengths)
        plan = self._plans[step].result()
        self._plans = {other: planned for other, planned in self._plans.items() if other > step}
        return plan

    def _plan(self, step: int, lengths: Sequence[int] | np.ndarray) -> StepPlan:
        begin = time.monotonic_ns()
        plan = self._planner.plan(np.asarray(lengths, dtype=np.int64), self._cost)
        took = time.monotonic_ns() - begin
        return StepPlan(step, plan.to_json(), plan.hash, predicted_ns(plan, self._cost), plan_ns=took)


@dataclass(slots=True, eq=False)
class PlannedSteps:
    """A model whose training steps run under plans, on all ranks of the job.

    Attributes:
        model: of transformers, or wrapped by peft, with the same values on all ranks; it is attached.
        planner: see `seqloom.plan`; one that makes no pipeline stages.
        cluster: to plan for, such as "2x8xH200"; None: the job's ranks, on the GPUs that were found.
        profile, budget_gib, max_length: see `seqloom.cost_model`.
        seed: of the planner and of dropout.
        recompute: whether plans decide which activations are recomputed; False where transformers does
            (`gradient_checkpointing_enable`).
        sharding: "none": every rank has all parameters. "full": FSDP2 shards them over all ranks, in the model itself;
            the optimiser is made afterwards.
        compute_dtype: of layers whose parameters are sharded; None: that of the parameters.
        shard_device: where shards go, as the model is read layer by layer; None: where it is.
    """

    model: nn.Module
    planner: str = "auto"
    cluster: Cluster | str | None = None
    profile: Profile | str | None = None
    budget_gib: float | None = None
    max_length: int | None = None
    seed: int = 0
    recompute: bool = True
    sharding: Literal["none", "full"] = "none"
    compute_dtype: torch.dtype | None = None
    shard_device: torch.device | None = None
    cost: CostModel = field(init=False)
    transport: Transport = field(init=False)
    parameters: Parameters = field(init=False)
    adapter: ModelAdapter = field(init=False)
    _plans: PlanBroadcast = field(init=False)
    _step: int = field(default=0, init=False)  # the latest

    def __post_init__(self) -> None:
        """Attach the model, make the communicators and the planner; all ranks call it."""
        if hasattr(self.model, "_original_forward"):
            raise SeqloomError(
                "a model that accelerate runs with mixed precision: plans call its layers, which compute in the dtype "
                "of their parameters; make the Accelerator without mixed_precision and load the model in bfloat16, or "
                "give sharding='full' and compute_dtype"
            )
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        deferred = self._defer_values() if self.sharding == "full" else None
        attach(self.model, longest=self.max_length)
        self.cost = cost_model(
            self.cluster or found_cluster(ranks),
            spec_of(self.model),
            profile=self.profile,
            sharding=self.sharding,
            budget_gib=self.budget_gib,
            max_length=self.max_length,
            offload="auto" if self.recompute else False,
        )
        if self.cost.cluster.ranks != ranks:
            raise SeqloomError(
                f"cluster {self.cost.cluster.spelling} has {self.cost.cluster.ranks} ranks, the job has {ranks}; name "
                f"a cluster of {ranks}, or start {self.cost.cluster.ranks} processes"
            )
        self.adapter = replace(model_adapter(self.model), deferred=deferred)
        if self.recompute and any(LayerWrapper.of(layer).layer is None for layer in self.adapter.layers):
            recompute_layers(self.adapter.layers)
        family = self.cost.limits().family
        self.transport = TorchTransport(Communicators(family)) if ranks > 1 else SingleRankTransport()
        self.parameters = self._place_parameters()
        planner = ThreadPlanner(self.cost, PlannerChoice(self.planner, seed=self.seed))
        self._plans = PlanBroadcast(self.transport, planner if self.transport.rank == 0 else None, self.device)

    def _place_parameters(self) -> Parameters:
        """Leave all parameters on this rank, or shard them layer by layer."""
        if self.sharding == "none":
            if self.compute_dtype is not None:
                raise SeqloomError(
                    f"compute_dtype {self.compute_dtype} of parameters that are not sharded: layers compute in the "
                    "dtype of their parameters; load the model in it, or give sharding='full'"
                )
            return ReplicatedParameters(self.adapter, self.transport)
        options = {"param_dtype": self.compute_dtype, "others_call": True}
        return FSDPParameters(self.adapter, self.transport, Sharding(self.sharding), **options)

    def _defer_values(self) -> DeferredParameters:
        """Take the values out of the model, to be read again one by one while they are cut into shards."""
        device = self.shard_device or next(self.model.parameters()).device
        deferred = DeferredParameters(pop_values(self.model), device)
        move_buffers(self.model, device)
        return deferred

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.adapter.head.weight.device  # pyrefly: ignore[bad-return]

    def submit(self, batches: Sequence[Documents], step: int) -> None:
        """Have a coming step planned while this one computes; `backward` is given the same batches later."""
        self._plans.submit(step, [length for each in batches for length in each.lengths])

    def backward(self, *batches: Mapping[str, Any] | Documents, step: int | None = None) -> StepResult:
        """Compute loss and gradients of a step; all ranks call it with the same batches.

        Gradients of an earlier step are dropped; then every rank has those of the whole step, for its optimiser.

        Args:
            batches: of collators, which together are the batch of one optimiser step.
            step: its number, from 1; None: the next one.
        """
        parts = [each if isinstance(each, Documents) else Documents.from_batch(each) for each in batches]
        documents = Documents.join(parts).to(self.device)
        return run_step(self.bind(documents.lengths, step), self.parameters, documents.rows, documents.valid)

    def bind(self, lengths: Sequence[int], step: int | None = None) -> RankPlan:
        """Plan a step, and return what this rank does in it; all ranks call it with the same lengths."""
        self._step = self._step + 1 if step is None else step
        plan = self._plans.take(self._step, lengths).plan
        dtype = self.compute_dtype or self.adapter.head.weight.dtype

        def prepare(context: Context) -> None:
            self.adapter.prepare(context, dtype)  # pyrefly: ignore[bad-argument-type]

        options = {"device": self.device, "check": False, "prepare": prepare}
        return bind_plan(plan, self.transport, **options, dropout_seed=step_seed(self.seed, self._step))


def whole_batches(loader: Any) -> Any:
    """Make a data loader that accelerate has prepared yield whole batches on every rank, and return it.

    Its batch size is that of the whole job. Plans divide a batch by tokens, where accelerate would by documents.
    """
    from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard

    if isinstance(loader, DataLoaderDispatcher):
        raise SeqloomError(
            "a data loader whose batches rank 0 reads and cuts for the others: every rank reads whole batches; set "
            "dispatch_batches=False in the DataLoaderConfiguration or accelerator_config"
        )
    for shard in (loader.batch_sampler, loader.dataset):
        if isinstance(shard, BatchSamplerShard | IterableDatasetShard):
            shard.num_processes, shard.process_index = 1, 0
    # The last batch stays as short as it is: accelerate would fill it with documents that were there before.
    if isinstance(loader.batch_sampler, BatchSamplerShard):
        loader.batch_sampler.even_batches = False
    if isinstance(loader.dataset, IterableDatasetShard):
        loader.dataset.batch_size = 1
    return loader


def found_cluster(ranks: int) -> str:
    """Spell the cluster of a job: its nodes as the launcher says, and the GPUs of this machine."""
    job = launched_rank()
    local = ranks if job is None or ranks % job.local_ranks else job.local_ranks
    return f"{ranks // local}x{local}x{described_device()}"


def spec_of(model: nn.Module) -> ModelSpec:
    """Return the shapes of an attached model: by its type, or by its modules where no table has the type."""
    config = unwrap(model).config.to_dict()
    return model_from_config(config) if has_known_type(config) else describe_model(model, type(unwrap(model)).__name__)
