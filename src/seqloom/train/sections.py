"""The sections of a training config: what every key means, and what it may be.

All of them are plain values. A key that no section has, a wrong type and an impossible value are refused with the
way out; nothing here opens a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Strict

from seqloom.describe.files import is_file_name
from seqloom.errors import SeqloomError, unknown
from seqloom.planners.pipelines.orders import ALL_NAMES
from seqloom.planners.registry import parse_name
from seqloom.train.values import above, at_least, either

Whole = Annotated[int, Strict()]
"""A whole number; no text that looks like one, no 3.0."""
Real = Annotated[float, Strict()]
"""A number."""


@dataclass(frozen=True, slots=True)
class Run:
    """How long, with which seed, where to."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a plain dict is what pydantic looks for

    output: Path
    """Folder of checkpoints and metrics; made when it does not exist."""
    steps: Whole | None = None
    """Optimiser steps. Either this or `epochs`."""
    epochs: Whole | None = None
    """Times that every document is seen."""
    seed: Whole = 0
    """Of the order of documents and of planners."""
    ranks: Whole = 1
    """Processes to start on this machine. Under torchrun its own number counts."""
    timeout_s: Whole = 600
    """Seconds after which a rank that waits for another gives up: more than the longest step takes."""

    def __post_init__(self) -> None:
        """Check the values."""
        either("run", self, "steps", "epochs")
        for name in ("steps", "epochs"):
            if getattr(self, name) is not None:
                at_least("run", self, 1, name)
        at_least("run", self, 1, "ranks", "timeout_s")
        at_least("run", self, 0, "seed")


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained: a reference model, or a Hugging Face folder."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    spec: str | None = None
    """Shapes of a reference model: a preset's name, or a .json or .toml file. Either this or `huggingface`."""
    parameters: Path | None = None
    """Of a reference model, .safetensors with Llama's names, such as a run leaves behind; None: they are drawn."""
    huggingface: Path | None = None
    """Folder with config.json and, unless parameters are to be drawn, safetensors; or the name of a published model."""
    seed: Whole = 0
    """Of parameters that are drawn."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """What layers compute in. With bfloat16 the optimiser's parameters and all sums are float32."""
    compile: Annotated[bool, Strict()] = False
    """Compile the bodies of layers with torch.compile: slow first steps, then faster ones and less memory."""

    def __post_init__(self) -> None:
        """Check the values."""
        either("model", self, "spec", "huggingface")
        if self.parameters is not None and self.spec is None:
            raise SeqloomError(
                f"model.parameters = {str(self.parameters)!r} beside model.huggingface, whose folder has parameters of "
                "its own; leave it out, or name the model's shapes in model.spec"
            )
        at_least("model", self, 0, "seed")


@dataclass(frozen=True, slots=True)
class Data:
    """Which documents, and how many of them make a step."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    source: Path
    """A token store (folder), the prefix of a Megatron .bin / .idx pair, or a made-up corpus such as toy:600."""
    validation: Path | None = None
    """Documents for evaluation, in either form."""
    sequences: Whole | None = None
    """Documents in a step. Either this or `tokens`."""
    tokens: Whole | None = None
    """Tokens in a step, at most."""
    batches: Literal["shuffled", "hbp"] = "shuffled"
    """Which documents make a step: the next ones of a shuffle; or, by hierarchical balance packing of all documents
    ahead, packs of one length and of like attention work. The latter needs `tokens`."""
    max_length: Whole | None = None
    """Longest document, tokens; None: as long as they are."""
    too_long: Literal["refuse", "truncate", "drop"] = "refuse"
    """What happens to longer ones; they are counted and reported."""

    def __post_init__(self) -> None:
        """Check the values."""
        either("data", self, "sequences", "tokens")
        for name, least in (("sequences", 1), ("tokens", 2), ("max_length", 2)):
            if getattr(self, name) is not None:
                at_least("data", self, least, name)
        if self.batches == "hbp" and self.tokens is None:
            raise SeqloomError(
                "data.batches = 'hbp' without data.tokens: packs fill a step of so many tokens; give tokens instead of "
                "sequences, or leave batches out"
            )
        if self.too_long != "refuse" and self.max_length is None:
            raise SeqloomError(
                f"data.too_long = {self.too_long!r} without data.max_length, so no document is too long; "
                "give max_length, or leave too_long out"
            )
        if self.tokens is not None and self.max_length is not None and self.tokens < self.max_length:
            raise SeqloomError(
                f"data.tokens = {self.tokens} is less than data.max_length = {self.max_length}, so the longest "
                "document is in no step; raise tokens, or lower max_length"
            )


@dataclass(frozen=True, slots=True)
class Planning:
    """Who plans, for which machine, and within what memory."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    planner: str = "auto"
    """static (static:4 fixes the degree), adaptive, flexsp, flex, zones, exact, strategies or auto."""
    cluster: str = "auto"
    """A preset, a spelling such as 2x8xH200, or a file; auto: what the processes run on."""
    profile: str | None = None
    """Constants by name or file; None: those of the cluster's device."""
    sharding: Literal["full", "hybrid", "none", "free"] = "full"
    """Parameters are sharded over all ranks, those of a node, or not; free: over all ranks, and every step brings them
    to where its plan computes, so that plans may have any stages."""
    strategies: str = "auto"
    """What strategies, and auto under free sharding, choose from: a .json of `seqloom propose`; auto: proposed."""
    budget_gib: Real | None = None
    """Memory of a rank that a plan may use; None: the profile's, or 0.9 of the device's."""
    capacity: Whole | None = None
    """Tokens of a rank in a round, at most; None: as many as the memory holds."""
    ahead: Whole = 2
    """Steps that are planned ahead in the background; 0: each when it is due."""

    def __post_init__(self) -> None:
        """Check the values."""
        parse_name(self.planner)
        if self.strategies != "auto" and not is_file_name(self.strategies):
            raise SeqloomError(f"plan.strategies = {self.strategies!r}; give a .json of seqloom propose, or 'auto'")
        at_least("plan", self, 0, "ahead")
        if self.capacity is not None:
            at_least("plan", self, 1, "capacity")
        if self.budget_gib is not None:
            above("plan", self, 0, "budget_gib")


@dataclass(frozen=True, slots=True)
class Pipelining:
    """Whether the model's layers are cut into stages, each on ranks of its own, through which documents flow."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    stages: Whole | str = 1
    """Groups of ranks that follow each other, for the whole run; 1: no pipeline; auto: the fastest for the data."""
    chunks: Whole = 1
    """Stages of the model that each of them holds."""
    schedule: str = "auto"
    """Order of forwards and backwards: a name of `seqloom schedule`; auto: the fastest for every step."""

    def __post_init__(self) -> None:
        """Check the values."""
        if isinstance(self.stages, int):
            at_least("pipeline", self, 1, "stages")
        elif self.stages != "auto":
            raise SeqloomError(f"pipeline.stages = {self.stages!r}; give a number, or 'auto'")
        at_least("pipeline", self, 1, "chunks")
        if self.schedule not in ("auto", *ALL_NAMES):
            raise unknown("pipeline.schedule", self.schedule, ("auto", *ALL_NAMES))
        changed = [name for name, plain in (("chunks", 1), ("schedule", "auto")) if getattr(self, name) != plain]
        if self.stages == 1 and changed:
            name = changed[0]
            raise SeqloomError(
                f"pipeline.{name} = {getattr(self, name)!r} with pipeline.stages = 1, which is no pipeline; "
                f"set stages to 2 or more, or leave {name} out"
            )


@dataclass(frozen=True, slots=True)
class Optimiser:
    """AdamW. Matrices are decayed, norms and biases are not."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    lr: Real = 3e-4
    """The highest learning rate; `schedule` says what share of it a step has."""
    betas: tuple[Real, Real] = (0.9, 0.95)
    eps: Real = 1e-8
    weight_decay: Real = 0.1
    clip: Real = 1.0
    """The gradient is scaled down to this norm where it is above; 0: never."""

    def __post_init__(self) -> None:
        """Check the values."""
        above("optimiser", self, 0, "lr", "eps")
        at_least("optimiser", self, 0, "weight_decay", "clip")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise SeqloomError(f"optimiser.betas = {list(self.betas)}; both must be at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the learning rate moves: up during the warm-up, then down to `final` at the last step."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Whole = 0
    """Steps of rising rate; the last of them has all of it."""
    final: Real = 0.1
    """Share of the rate at the last step; constant has none."""

    def __post_init__(self) -> None:
        """Check the values."""
        at_least("schedule", self, 0, "warmup")
        if not 0 <= self.final <= 1:
            raise SeqloomError(f"schedule.final = {self.final}; it is a share of optimiser.lr, from 0 to 1")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss on the validation documents."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    every: Whole = 0
    """Steps from one to the next; 0: never."""
    batches: Whole = 8
    """Batches of an evaluation, always the same ones."""

    def __post_init__(self) -> None:
        """Check the values."""
        at_least("evaluation", self, 0, "every")
        at_least("evaluation", self, 1, "batches")


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """When the state of a run is written, and where it begins from."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    every: Whole = 0
    """Steps from one checkpoint to the next; 0: only after the last step."""
    keep: Whole = 3
    """Complete checkpoints that stay; older ones are deleted."""
    resume: str = "auto"
    """auto: from the latest of this run's folder, if there is one; never; or the folder of a checkpoint elsewhere."""

    def __post_init__(self) -> None:
        """Check the values."""
        at_least("checkpoint", self, 0, "every")
        at_least("checkpoint", self, 1, "keep")


@dataclass(frozen=True, slots=True)
class Logging:
    """What is written down of every step, and who else is told."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    every: Whole = 1
    """Steps from one line on the terminal, and in `sinks`, to the next. The .jsonl has all of them."""
    jsonl: Path | None = None
    """Metrics, one line per step; None: metrics.jsonl in the run's folder."""
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get the metrics as well; each must be installed."""

    def __post_init__(self) -> None:
        """Check the values."""
        at_least("log", self, 1, "every")
        if len(set(self.sinks)) < len(self.sinks):
            raise SeqloomError(f"log.sinks = {list(self.sinks)} names one twice; name each once")
