"""torchtitan's `Trainer` whose steps run under plans: documents of very different lengths, on all ranks of the job.

    config = planned(llama3_8b(), cluster="2x8xH100")      # a function of your config registry returns it
    config.build().train()                                 # what torchtitan.train does

torchtitan shards parameters over all ranks and normalises the loss by the labels of a step. A plan takes the documents
out of the rows of its data loader, and gives each the ranks that suit its length; only attention knows about it. The
rows of a step are `local_batch_size` x ranks x gradient accumulation, as ever; one row may be longer than a GPU holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, fields
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
import torch.distributed as dist

from seqloom.api import cost_model
from seqloom.attention import attention
from seqloom.cost import CostModel
from seqloom.describe import ModelSpec
from seqloom.dist import Communicators, Context, SingleRankTransport, TorchTransport, bind
from seqloom.errors import SeqloomError
from seqloom.models.loss import IGNORED
from seqloom.plan import Plan
from seqloom.planners.registry import PlannerChoice

try:
    from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.models.common.attention import FlexAttention, GQAttention, VarlenAttention
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.protocols.module import Module
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise SeqloomError(f"seqloom.integrations.torchtitan needs torchtitan 0.3 ({error})") from None


class PlannedAttention(Module):
    """Attention of a rank's tokens over whole documents, in the place of `FlexAttention` and `VarlenAttention`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Nothing to set: the context of a micro-batch says everything."""

    def __init__(self, config: Config) -> None:
        """Take the config, as every module of torchtitan does."""
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,  # noqa: N803 - torchtitan's sharding finds arguments by these names
        k_BLNH: torch.Tensor,  # noqa: N803
        v_BLNH: torch.Tensor,  # noqa: N803
        *,
        attention_masks: Context,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Return [1, tokens, heads, dim]; padding at the end of the row attends to nothing and is 0.

        Args:
            q_BLNH, k_BLNH, v_BLNH: [1, tokens, heads, dim].
            attention_masks: the context of the micro-batch, which the data loader passes in the place of a mask.
            scale: softmax scale; None: dim ** -0.5.
            enable_gqa: whether there are fewer heads of keys; their number says it.
        """
        tokens = attention_masks.tokens
        q, k, v = (each[0, :tokens].contiguous() for each in (q_BLNH, k_BLNH, v_BLNH))
        out = attention(q, k, v, attention_masks, scale=scale)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q_BLNH.shape[1] - tokens))[None]


class PlannedDataLoader(BaseDataLoader):
    """Reads the rows of another data loader for all ranks, and yields this rank's tokens, round after round."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """The data loader whose rows are read."""

        rows: BaseDataLoader.Config

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **options: Any) -> None:
        """Build the other data loader as the one of a single rank, and wait for `open`."""
        self._rows = config.rows.build(dp_world_size=1, dp_rank=0, **options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="seqloom-planner")
        self._rounds: deque[tuple[dict[str, Any], torch.Tensor]] = deque()
        self._coming: Future[tuple[Plan, _Rows]] | None = None
        self._batches: Iterator[Any] | None = None

    def open(self, cost: CostModel, planner: PlannerChoice, batches: int, multiple: int, device: torch.device) -> None:
        """Make the communicators; all ranks call it.

        Args:
            batches: of the other data loader in a step.
            multiple: a rank's tokens of a round are padded to a multiple of it.
        """
        self._cost, self._planner, self._count, self._multiple, self._device = cost, planner, batches, multiple, device
        family = cost.limits().family
        self._transport = TorchTransport(Communicators(family)) if cost.ranks > 1 else SingleRankTransport()
        self._state = self._rows.state_dict()

    def next_step(self) -> int:
        """Return the rounds of the next step, which iteration yields then; meanwhile the one after it is planned.

        Every rank makes the same plan: the same lengths have the same plan anywhere.
        """
        if self._batches is None:
            self._batches = iter(self._rows)
            self._coming = self._read()
        if self._coming is None:
            raise DataloaderExhaustedError()
        plan, rows = self._coming.result()
        self._state = self._rows.state_dict()
        self._coming = self._read()
        node_size = self._cost.cluster.gpus_per_node
        for current in plan.pipelines[0].rounds:
            context = bind(current.by_stage[0], self._transport, device=self._device, node_size=node_size)
            self._rounds.append(rows.of_rank(context, self._multiple))
        return len(plan.pipelines[0].rounds)

    def _read(self) -> Future[tuple[Plan, _Rows]] | None:
        """Read the rows of a step and have it planned; None: there are fewer than a step has."""
        assert self._batches is not None
        batches = list(islice(self._batches, self._count))
        if len(batches) < self._count:
            return None
        rows = _Rows.of(batches)
        return self._thread.submit(lambda: (self._planner.plan(rows.lengths, self._cost), rows))

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Yield (input, labels) of the rounds of `next_step`."""
        while self._rounds:
            yield self._rounds.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the other data loader after the latest step, not after the rows that were read ahead."""
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint was written, with any number of ranks."""
        self._rows.load_state_dict(state_dict)
        self._state = state_dict


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The documents of a step, one after the other.

    Attributes:
        ids, positions, labels: int64[tokens].
        lengths: tokens of every document: where positions are 0, and where a row begins, one begins.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, batches: list[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> _Rows:
        """Join batches of ({"input", "positions"}, labels), [rows, tokens] each."""
        if wrong := {name for inputs, _ in batches for name in inputs} ^ {"input", "positions"}:
            raise SeqloomError(
                f"batches of the data loader with {', '.join(sorted(wrong))} beside or instead of input and positions: "
                "a plan divides tokens, with their positions and labels; use a data loader of texts"
            )
        begins = torch.cat(
            [(inputs["positions"] == 0).index_fill(1, torch.tensor(0), True).flatten() for inputs, _ in batches]
        )
        places = [*begins.nonzero().flatten().tolist(), begins.numel()]
        ids, positions = (
            torch.cat([inputs[name].flatten() for inputs, _ in batches]) for name in ("input", "positions")
        )
        labels = torch.cat([labels.flatten() for _, labels in batches])
        return cls(ids, positions, labels, tuple(b - a for a, b in pairwise(places)))

    def of_rank(self, context: Context, multiple: int) -> tuple[dict[str, Any], torch.Tensor]:
        """Return what the model is called with on a rank, [1, tokens], and its labels; padded at the end."""
        starts = torch.tensor([0, *accumulate(self.lengths)])
        places = starts[context.documents.cpu()] + context.positions.cpu()
        padding = max(-(-len(places) // multiple), 1) * multiple - len(places)

        def padded(values: torch.Tensor, fill: int) -> torch.Tensor:
            return torch.nn.functional.pad(values[places], (0, padding), value=fill)[None]

        inputs = {"input": padded(self.ids, 0), "positions": padded(self.positions, 0), "attention_masks": context}
        return inputs, padded(self.labels, IGNORED)


class SeqloomTrainer(Trainer):
    """`torchtitan.trainer.Trainer` whose steps run under plans; `planned` makes its config."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Fields beyond torchtitan's say how to plan: see `seqloom.plan`."""

        cluster: str
        planner: str = "auto"
        profile: str | None = None
        budget_gib: float | None = None

    def __init__(self, config: Config) -> None:
        """Build torchtitan's trainer, then the cost model; all ranks call it."""
        check_config(config)
        super().__init__(config)
        assert config.model_spec is not None
        cost = cost_model(
            config.cluster,
            model_spec_of(config.model_spec.model, config.model_spec.name),
            profile=config.profile,
            budget_gib=config.budget_gib,
            max_length=config.training.seq_len,
            offload=False,
        )
        if cost.ranks != dist.get_world_size():
            raise SeqloomError(
                f"cluster {cost.cluster.spelling} has {cost.ranks} ranks, the job has {dist.get_world_size()}; name "
                f"a cluster of {dist.get_world_size()}, or start {cost.ranks} processes"
            )
        batches = cost.ranks * self.gradient_accumulation_steps
        chunks = config.loss.num_chunks if isinstance(config.loss, ChunkedLossWrapper.Config) else 1
        options = {"pieces": False} if config.planner == "auto" else {}  # rounds go forward and backward one by one
        planner = PlannerChoice(config.planner, options, config.debug.seed or 0)
        self.dataloader.open(cost, planner, batches, chunks, self.device)

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """Run the rounds of a plan as torchtitan's accumulation of gradients."""
        self.gradient_accumulation_steps = self.dataloader.next_step()
        super().train_step(data_iterator)


def planned(
    config: Trainer.Config,
    *,
    cluster: str,
    planner: str = "auto",
    profile: str | None = None,
    budget_gib: float | None = None,
) -> SeqloomTrainer.Config:
    """Return a config of torchtitan as that of a trainer whose steps run under plans.

    Args:
        config: of a decoder with `FlexAttention` or `VarlenAttention`; it stays as it is.
        cluster, planner, profile, budget_gib: see `seqloom.plan`.
    """
    own: dict[str, Any] = {field.name: deepcopy(getattr(config, field.name)) for field in fields(Trainer.Config)}
    model = own["model_spec"].model
    model_spec_of(model, own["model_spec"].name)
    check_masks(model)
    for layer in model.layers:
        layer.attention.inner_attention = PlannedAttention.Config()
    own["dataloader"] = PlannedDataLoader.Config(rows=own["dataloader"])
    return SeqloomTrainer.Config(**own, cluster=cluster, planner=planner, profile=profile, budget_gib=budget_gib)


def check_config(config: SeqloomTrainer.Config) -> None:
    """Refuse settings under which the result would be another, each by name."""
    parallel, training = config.parallelism, config.training
    degrees = ("tensor", "context", "pipeline", "expert")
    refused = {
        **{f"{name}_parallel_degree": getattr(parallel, f"{name}_parallel_degree") > 1 for name in degrees},
        "data_parallel_replicate_degree": parallel.data_parallel_replicate_degree > 1,
    }
    for name, found in refused.items():
        if found:
            raise SeqloomError(
                f"parallelism.{name} = {getattr(parallel, name)}: parameters are sharded over all ranks, and plans "
                "decide how sequences are divided; set it to 1"
            )
    switches = {
        "compile with model": config.compile.enable and "model" in config.compile.components,
        "CUDA graphs (training.disable_cuda_graphs = False)": not training.disable_cuda_graphs,
        "validator": config.validator.enable,
        "debug.spmd_typechecking": config.debug.spmd_typechecking,
    }
    for name, found in switches.items():
        if found:
            raise SeqloomError(
                f"SeqloomTrainer with {name}: rounds differ in shape and in the ranks of a document; turn it off"
            )


def check_masks(model: Decoder.Config) -> None:
    """Refuse attention that sees anything but the tokens before it of its document."""
    if model._owner.get_attention_masks is not Decoder.get_attention_masks:
        raise SeqloomError(
            f"model {model._owner.__name__} with masks of its own: plans run attention to the tokens before one in its "
            "document; take a model that keeps Decoder's masks"
        )
    for layer in model.layers:
        inner = layer.attention.inner_attention
        window = getattr(inner, "window_size", (-1, 0))
        if not isinstance(inner, FlexAttention.Config | VarlenAttention.Config) or tuple(window) != (-1, 0):
            raise SeqloomError(
                f"attention {type(inner).__qualname__} with window_size {window} of a layer: plans run FlexAttention "
                "and VarlenAttention without a window; take one of these"
            )


def model_spec_of(model: Decoder.Config, name: str) -> ModelSpec:
    """Return the shapes of a decoder of torchtitan, all layers of which are dense and alike."""
    for layer in model.layers:
        if not isinstance(layer.attention, GQAttention.Config) or layer.moe is not None or layer.feed_forward is None:
            raise SeqloomError(
                f"model {name} has a layer with {type(layer.attention).__qualname__}, or with experts: plans of "
                "torchtitan's models have GQAttention and a dense feed-forward in every layer; take another model"
            )
    layer = model.layers[0]
    heads = layer.attention.n_heads
    return ModelSpec(
        name=name,
        layers=len(model.layers),
        hidden=model.dim,
        heads=heads,
        kv_heads=layer.attention.n_kv_heads or heads,
        head_dim=layer.attention.head_dim or model.dim // heads,
        ffn=layer.feed_forward.w1.out_features,
        gated=True,
        vocabulary=model.vocab_size,
        tied=model.enable_weight_tying,
    )
