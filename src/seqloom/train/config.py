"""A training run as one value: sections read from TOML, overridden by dotted keys.

    config = Config.load("recipes/tiny-cpu.toml", overrides=["optimiser.lr=1e-4", "plan.planner=flex"])

An unknown key, a wrong type and an impossible value are refused with the way out. Only `Config.load` opens files.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import field, fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from pydantic import Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from seqloom.cost import Profile
from seqloom.data.hub import HUB
from seqloom.data.mixture import WeighBy
from seqloom.data.records import RecordFields
from seqloom.data.source import SYNTHETIC
from seqloom.data.tokenizers import BYTES
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError, import_extra, unknown_name
from seqloom.plan import Sharding
from seqloom.planners.pipeline.planner import SCHEDULES
from seqloom.planners.registry import parse_planner
from seqloom.reader import build, is_file_name, read_mapping, validation_error

T = TypeVar("T")

Count = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]
Length = Annotated[int, Field(strict=True, ge=2)]
"""Tokens of a document: one, and the one that it predicts."""
Real = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
PositiveReal = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Decay = Annotated[float, Field(strict=True, ge=0, lt=1)]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _checked(cls: type[T]) -> type[T]:
    """Make a frozen dataclass that refuses what its types do not allow, read from a file or made in Python."""
    checked: Any = pydantic_dataclass(frozen=True, slots=True, config={"extra": "forbid"})(cls)
    validate = checked.__init__

    @wraps(validate)
    def initialise(self: T, *arguments: Any, **keys: Any) -> None:
        try:
            validate(self, *arguments, **keys)
        except ValidationError as error:
            raise validation_error(checked, error, cls.__name__) from None

    checked.__init__ = initialise
    return checked


def _require_one(section: object, name: str, *keys: str) -> None:
    """Refuse a section in which none or several of the keys are given."""
    given = [key for key in keys if getattr(section, key) is not None]
    if len(given) != 1:
        problem = "both are given" if given else "neither is given"
        raise SeqloomError(f"{' and '.join(f'{name}.{key}' for key in keys)}: {problem}; give exactly one of them")


@_checked
class Run:
    """How long, with which seed, where to."""

    output: Path
    """Folder of checkpoints and metrics; created when it does not exist."""
    steps: Positive | None = None
    """Optimiser steps. Either this or `epochs`."""
    epochs: Positive | None = None
    """Times that every document is seen; of a mixture, every document of the source that is gone through first."""
    seed: Count = 0
    """Of the order of documents and of planners."""
    ranks: Positive = 1
    """Processes to start on this machine. Under torchrun its own number counts."""
    timeout_s: Positive = 600
    """Seconds after which a rank that waits for another gives up: more than the longest step takes."""
    callbacks: tuple[str, ...] = ()
    """Classes of your own code that the first rank calls, `module:Class` or `file.py:Class`: see `Callback`."""

    def __post_init__(self) -> None:
        _require_one(self, "run", "steps", "epochs")
        for name in self.callbacks:
            place, _, attribute = name.rpartition(":")
            if not place or not attribute.isidentifier():
                raise SeqloomError(f"run.callbacks: {name!r}; spell it module:Class or file.py:Class")


@_checked
class Lora:
    """Low-rank adapters on linear layers, which are trained instead of the model's own parameters."""

    rank: Positive = 16
    """Width of an adapter."""
    alpha: PositiveReal = 32.0
    """What an adapter adds is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of linear layers, such as q_proj; none: all of the model's layers, not its head."""
    dropout: Decay = 0.0
    """Share of an adapter's inputs that are dropped, the same ones under any plan."""


@_checked
class Model:
    """The model to train: a reference model, or a Hugging Face folder."""

    spec: str | None = None
    """Shapes of a reference model: a preset's name, or a .json or .toml file. Either this or `huggingface`."""
    parameters: Path | None = None
    """Of a reference model, .safetensors with Llama's names, such as a run saves; None: random ones."""
    huggingface: Path | None = None
    """Folder with config.json and, unless parameters are random, safetensors; or the name of a published model."""
    seed: Count = 0
    """Of random parameters."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """What layers compute in. With bfloat16 the optimiser's parameters and all sums are float32."""
    compile: Annotated[bool, Strict()] = False
    """Compile the bodies of layers with torch.compile: slow first steps, then faster ones and less memory."""
    float8: Annotated[bool, Strict()] = False
    """Linear layers multiply in float8, but for the gradients of weights; needs bfloat16, gains where compiled."""

    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by parts of their names with dots: `embed_tokens`, `layers.0-3` (a range),
    `layers.*.mlp` (* and ? as in names of files, within a part)."""
    lora: Lora | None = None
    """Train adapters of this kind on a Hugging Face model, and nothing else; None: all parameters."""

    def __post_init__(self) -> None:
        _require_one(self, "model", "spec", "huggingface")
        if self.lora is not None and self.huggingface is None:
            raise SeqloomError(
                "model.lora with model.spec: adapters are for Hugging Face models; name a folder, or take it out"
            )
        if self.lora is not None and self.freeze:
            raise SeqloomError(
                f"model.freeze = {list(self.freeze)} with model.lora, which freezes all but its adapters; leave one of "
                "them out"
            )
        if self.lora is not None and self.float8:
            raise SeqloomError(
                "model.lora with model.float8 = true: products of adapters are too narrow; set it to false"
            )
        if self.float8 and self.dtype != "bfloat16":
            raise SeqloomError(
                f"model.float8 = true with model.dtype = {self.dtype!r}: products in float8 return bfloat16; set dtype "
                "to 'bfloat16', or float8 to false"
            )
        if self.parameters is not None and self.spec is None:
            raise SeqloomError(
                f"model.parameters = {str(self.parameters)!r} beside model.huggingface, whose folder has parameters of "
                "its own; leave it out, or name the model's shapes in model.spec"
            )


Documents = Path | tuple[Path, ...]
"""Where documents are: see `Data.source`."""


@_checked
class WeightedSource:
    """A source of a mixture."""

    path: Documents
    """In any form of `data.source`."""
    weight: Real = 1.0
    """Its share beside the weights of the others, above 0; all weights need not add up to 1."""


@_checked
class Data:
    """Which documents, and how many of them make a step."""

    source: Documents | None = None
    """A token store (folder), the prefix of a Megatron .bin / .idx pair, or a synthetic corpus such as toy:600; or
    documents, which are prepared once: files as of `seqloom data prepare`, a folder or glob of them, a list of these,
    or a data set of Hugging Face (hf:org/name, hf:org/name:split, hf:org/name/config:split). Or give `sources`."""
    sources: tuple[WeightedSource, ...] | None = None
    """A mixture of such sources, each with a weight."""
    weigh_by: WeighBy = "tokens"
    """What weights are shares of, tokens or documents."""
    validation: Documents | None = None
    """Documents for evaluation, in any form of `source`."""
    validation_share: Decay = 0.0
    """Instead: this share of the documents of `source` is for evaluation, and not trained on. By `run.seed`."""
    sequences: Positive | None = None
    """Documents in a step. Either this or `tokens`."""
    tokens: Length | None = None
    """Tokens in a step, at most."""
    batches: Literal["shuffled", "hbp"] = "shuffled"
    """Which documents make a step: the next ones of a shuffle; or, by hierarchical balance packing of all documents
    ahead, packs of one length and of like attention work. The latter needs `tokens`."""
    max_length: Length | None = None
    """Longest document, tokens; None: as long as they are."""
    too_long: Literal["refuse", "truncate", "drop"] = "refuse"
    """What happens to longer ones; they are counted and reported."""
    tokenizer: str | None = None
    """Of documents that are prepared: bytes, a tokenizer.json, or a Hugging Face tokenizer folder; None: that of
    `model.huggingface`."""
    chat_template: Path | None = None
    """Jinja file with the template of chats, instead of the tokenizer's own."""
    fields: RecordFields | None = None
    """Names of the fields that are read of a record, where they are not the usual ones: `text`; `prompt` and `answer`;
    `messages`; or `ids`."""
    cache: Path | None = None
    """Folder of the stores that documents are prepared into; None: `data` in the run's folder."""

    @property
    def evaluates(self) -> bool:
        """Whether there are documents for evaluation."""
        return self.validation is not None or self.validation_share > 0

    def __post_init__(self) -> None:
        _require_one(self, "data", "source", "sources")
        self._check_mixture()
        _require_one(self, "data", "sequences", "tokens")
        if self.validation is not None and self.validation_share:
            raise SeqloomError(
                f"data.validation_share = {self.validation_share} beside data.validation, which names the documents of "
                "evaluation; leave one of them out"
            )
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

    def _check_mixture(self) -> None:
        """Refuse a mixture without sources, with weights of nothing, or beside what knows one source only."""
        if self.sources is None:
            if self.weigh_by != "tokens":
                raise SeqloomError(
                    f"data.weigh_by = {self.weigh_by!r} without data.sources, so nothing is weighed; leave it out, or "
                    "give sources with weights"
                )
            return
        if not self.sources:
            raise SeqloomError("data.sources = [] names no source; name some, or one in data.source")
        paths = [
            str(each.path) if isinstance(each.path, Path) else str([*map(str, each.path)]) for each in self.sources
        ]
        for number, each in enumerate(self.sources):
            if each.weight == 0:
                raise SeqloomError(
                    f"data.sources: {paths[number]!r} has weight 0, so none of its documents would come; take it out, "
                    "or give a weight above 0"
                )
            if paths.index(paths[number]) < number:
                raise SeqloomError(
                    f"data.sources names {paths[number]!r} twice; name it once, with the sum of both weights"
                )
        if self.batches == "hbp":
            raise SeqloomError(
                "data.batches = 'hbp' with data.sources: packs are made of all documents, whatever the weights; leave "
                "batches out, or name one data.source"
            )


MEASURED = "measured"
"""The `plan.profile` that a run measures on its machine."""


@_checked
class Planning:
    """Which planner, for which machine, and within what memory."""

    planner: str = "auto"
    """static (static:4 fixes the degree), adaptive, flexsp, flex, zones, pieces, exact, hydraulis or auto."""
    cluster: str = "auto"
    """A preset, a spelling such as 2x8xH200, or a file; auto: the machine that the processes run on."""
    profile: str | None = None
    """Constants by name or file; measured: those of this machine, which a run measures in seconds unless it has done so
    before; None: those of the cluster's device, measured if none are shipped for it."""
    sharding: Literal["full", "hybrid", "none", "free"] = "full"
    """Parameters are sharded over all ranks, those of a node, or not; free: over all ranks, and every step moves them
    to where its plan computes, so that plans may have any stages."""
    tensor: Positive | Literal["auto"] = 1
    """Neighbouring ranks of a node that divide the matrices of every layer, for the whole run; auto: the fastest for
    the data."""
    expert: Positive | Literal["auto"] = 1
    """Neighbouring ranks that divide the experts of every layer, for the whole run; auto: the fastest for the data."""
    strategies: str = "auto"
    """What hydraulis, and auto under free sharding, choose from: a .json of `seqloom propose`; auto: proposed."""
    budget_gib: PositiveReal | None = None
    """Memory of a rank that a plan may use; None: the profile's, or 0.9 of the device's."""
    capacity: Positive | None = None
    """Tokens of a rank in a round, at most; None: as many as the memory holds."""
    offload: Annotated[bool, Strict()] | Literal["auto"] = "auto"
    """Whether layers may store activations in host memory: true, where that is predicted to be faster; auto, in steps
    that fit in no other way; false, never. Pipelines do it where recomputing is not enough, unless it is false."""
    host_gib: PositiveReal | None = None
    """Host memory of a rank that plans may use; None: its share of what the cluster says of a node, if it does."""
    ahead: Count = 2
    """Steps that are planned ahead in the background; 0: each when it is due."""
    feedback: Annotated[bool, Strict()] = True
    """Whether plans learn from measured steps: a few factors of the profile are refitted while the run goes on. False:
    plans depend on nothing but config and data, and are the same in every run."""

    def __post_init__(self) -> None:
        parse_planner(self.planner)
        if self.strategies != "auto" and not is_file_name(self.strategies):
            raise SeqloomError(f"plan.strategies = {self.strategies!r}; give a .json of seqloom propose, or 'auto'")


@_checked
class Pipelining:
    """Whether the model's layers are cut into stages, each on ranks of its own, through which documents flow."""

    stages: Annotated[int, Strict()] | str = 1
    """Groups of ranks that follow each other, for the whole run; 1: no pipeline; auto: the fastest for the data."""
    chunks: Positive | Literal["auto"] = 1
    """Stages of the model that each of them holds, for the whole run; auto: the fastest for the data."""
    schedule: str = "auto"
    """Order of forwards and backwards: a name of `seqloom schedule`; auto: the fastest for every step."""
    head: Literal["last", "all", "auto"] = "auto"
    """Which stages compute norm, vocabulary projection and loss, for the whole run: the last one, or all of them, each
    for a part of the tokens and with a copy of the weights; auto: the faster for the data, if memory holds it."""

    def __post_init__(self) -> None:
        if self.stages != "auto" and not (isinstance(self.stages, int) and self.stages >= 1):
            raise SeqloomError(f"pipeline.stages = {self.stages!r}; give 1 or more, or 'auto'")
        if self.schedule not in ("auto", *SCHEDULES):
            raise unknown_name("pipeline.schedule", self.schedule, ("auto", *SCHEDULES))
        for key, default in (("chunks", 1), ("schedule", "auto"), ("head", "auto")):
            if self.stages == 1 and getattr(self, key) != default:
                raise SeqloomError(
                    f"pipeline.{key} = {getattr(self, key)!r} with pipeline.stages = 1, which is no pipeline; "
                    f"set stages to 2 or more, or leave {key} out"
                )


@_checked
class Optimiser:
    """AdamW, also with moments of 8 bits, Muon or SGD. Matrices are decayed, norms and biases are not."""

    name: Literal["adamw", "adamw8bit", "muon", "sgd"] = "adamw"
    """adamw; adamw8bit: with moments of one byte; muon: torch's, for the matrices of layers, and AdamW for all else,
    with one learning rate; sgd."""
    lr: PositiveReal = 3e-4
    """The highest learning rate; `schedule` says what share of it a step has."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """How fast the means of gradients and of their squares forget."""
    eps: PositiveReal = 1e-8
    """Is added to the root of the mean square that an update is divided by."""
    weight_decay: Real = 0.1
    """Share of a matrix that an update takes away, times the learning rate."""
    momentum: Decay | None = None
    """Of muon (None: 0.95) and sgd (None: 0): how slowly the mean of gradients forgets."""
    clip: Real = 1.0
    """The gradient is scaled down to this norm where it is above; 0: never."""
    expert_bias_rate: Real = 0.0
    """How far a step moves the correction bias of an expert towards equal loads (DeepSeek V3); 0: it stays."""
    offload: Annotated[bool, Strict()] | Literal["auto"] = "auto"
    """Master weights and moments in host memory; auto: if the longest document, or the model, fits in no other way."""

    def __post_init__(self) -> None:
        defaults = {each.name: each.default for each in fields(Optimiser)}  # pyrefly: ignore
        unused = {"adamw": ("momentum",), "adamw8bit": ("momentum",), "muon": (), "sgd": ("betas", "eps")}[self.name]
        for key in unused:
            if getattr(self, key) != defaults[key]:
                raise SeqloomError(
                    f"optimiser.{key} = {getattr(self, key)} with optimiser.name = {self.name!r}, which has no such; "
                    "leave it out, or choose another optimiser"
                )
        if self.offload is True and self.name != "adamw":
            raise SeqloomError(
                f"optimiser.offload = true with optimiser.name = {self.name!r}: AdamW alone is updated in host memory; "
                "set offload to 'auto', or name to 'adamw'"
            )


@_checked
class Schedule:
    """How the learning rate moves: up during the warm-up, then down to `final` at the last step."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """How it moves down; constant: it stays."""
    warmup: Count = 0
    """Steps of rising rate; the last of them has all of it."""
    final: Share = 0.1
    """Share of the rate at the last step; constant has none."""


@_checked
class Evaluation:
    """Loss on the validation documents."""

    every: Count = 0
    """Steps from one to the next; 0: never."""
    batches: Positive = 8
    """Batches of an evaluation, always the same ones."""


@_checked
class Checkpointing:
    """When the state of a run is written, and where it begins from."""

    every: Count = 0
    """Steps from one checkpoint to the next; 0: only after the last step."""
    keep: Positive = 3
    """Complete checkpoints that stay; older ones are deleted."""
    best: Annotated[bool, Strict()] = False
    """Whether a step with the lowest validation loss so far is written too, and stays until a lower one comes."""
    resume: str = "auto"
    """auto: from the latest of this run's folder, if there is one; never; or the folder of a checkpoint elsewhere."""


@_checked
class Checks:
    """Whether the machines still compute what they should."""

    every: Count = 250
    """Steps from one check to the next; 0: never. A check compares the copies that ranks have of the same parameters,
    bit by bit, and the loss of a document in the step with its loss alone on every rank. It takes about as long as the
    forward of a step."""


@_checked
class Logging:
    """Where the metrics of steps go."""

    every: Positive = 1
    """Steps from one line on the terminal, and in trackers, to the next. The .jsonl has all of them."""
    jsonl: Path | None = None
    """Metrics, one line per step; None: metrics.jsonl in the run's folder."""
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get the metrics as well; each must be installed."""
    trace: tuple[Positive, ...] = ()
    """Steps whose timeline is written to trace-STEP.json in the run's folder, simulated and measured."""

    def __post_init__(self) -> None:
        if len(set(self.sinks)) < len(self.sinks):
            raise SeqloomError(f"log.sinks = {list(self.sinks)} names one twice; name each once")


@_checked
class Config:
    """Everything that a run depends on. Paths are absolute."""

    run: Run
    model: Model
    data: Data
    plan: Planning = field(default_factory=Planning)
    pipeline: Pipelining = field(default_factory=Pipelining)
    optimiser: Optimiser = field(default_factory=Optimiser)
    schedule: Schedule = field(default_factory=Schedule)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    checks: Checks = field(default_factory=Checks)
    log: Logging = field(default_factory=Logging)

    def __post_init__(self) -> None:
        if self.evaluation.every and not self.data.evaluates:
            raise SeqloomError(
                f"evaluation.every = {self.evaluation.every} without data.validation; name the documents to evaluate "
                "on, or a data.validation_share of the source, or set every to 0"
            )
        if self.checkpoint.best and not self.evaluation.every:
            raise SeqloomError(
                "checkpoint.best = true with evaluation.every = 0: the best checkpoint is the one with the lowest "
                "validation loss; set evaluation.every, or leave best out"
            )
        if self.run.steps is not None and self.schedule.warmup > self.run.steps:
            raise SeqloomError(
                f"schedule.warmup = {self.schedule.warmup} is more than run.steps = {self.run.steps}, so the rate "
                "never gets to optimiser.lr; lower warmup"
            )
        if self.optimiser.name == "adamw8bit" and self.plan.tensor != 1:
            raise SeqloomError(
                f"optimiser.name = 'adamw8bit' with plan.tensor = {self.plan.tensor!r}: rows of divided matrices are "
                "cut, and with them the blocks of its moments; set tensor to 1, or name to 'adamw'"
            )
        self._check_planner()
        resume = self.checkpoint.resume
        if resume not in ("auto", "never") and Path(resume).is_relative_to(self.run.output):
            raise SeqloomError(
                f"checkpoint.resume = {resume!r} lies in this run's own folder, where 'auto' goes on from the latest; "
                "to go back to an earlier one choose another run.output"
            )

    def _check_planner(self) -> None:
        """Refuse a planner that makes other stages than the run has, and a list that its planner does not read."""
        stages, planner, free = self.pipeline.stages, self.plan.planner, self.plan.sharding == Sharding.FREE
        spec = parse_planner(planner)[0]
        if spec.makes_stages and not free:
            raise SeqloomError(
                f"plan.planner = {planner!r} with plan.sharding = {self.plan.sharding!r}: the stages of a run are then "
                "set once for all its steps; set plan.sharding to 'free', or set pipeline.stages and leave "
                "plan.planner out"
            )
        if self.plan.strategies != Planning().strategies and not (spec.reads_strategies and free):
            raise SeqloomError(
                f"plan.strategies = {self.plan.strategies!r} beside plan.planner = {planner!r}, which chooses from no "
                "list; leave it out, or set plan.planner to 'hydraulis' and plan.sharding to 'free'"
            )
        fixed = isinstance(stages, int) and stages > 1 and planner != Planning().planner
        if fixed or (spec.makes_stages and stages != 1):
            raise SeqloomError(
                f"plan.planner = {planner!r} beside pipeline.stages = {stages!r}: it plans without it; leave "
                "plan.planner out, or set stages to 1"
            )

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Config:
        """Read a .toml file, with overrides `section.key=value`, see `parse_overrides`.

        Paths in the file are relative to its folder, those in overrides to the working folder. Presets and files that
        `model.spec`, `plan.cluster` and `plan.profile` name are looked up, so that a misspelt one is refused here.
        """
        path = Path(path)
        if path.suffix.lower() != ".toml":
            raise SeqloomError(f"{str(path)!r}: a training config is a .toml file; rename it, or give another")
        content = _absolute_paths(read_mapping(path), path.absolute().parent)
        content = merge_overrides(content, _absolute_paths(parse_overrides(overrides), Path.cwd()))
        config = build(cls, content, str(path))
        if config.model.huggingface is not None and not config.model.huggingface.is_absolute():  # a published model
            folder = fetch_model(str(config.model.huggingface))
            config = replace(config, model=replace(config.model, huggingface=folder))
        try:
            if config.model.spec is not None:
                ModelSpec.load(config.model.spec)
            if config.plan.cluster != "auto":
                Cluster.parse(config.plan.cluster)
            if config.plan.profile not in (None, MEASURED):
                Profile.load(config.plan.profile)
        except SeqloomError as error:
            raise SeqloomError(f"{path}: {error}") from None
        return config

    @classmethod
    def of_checkpoint(cls, content: dict[str, Any], where: str, overrides: Iterable[str] = ()) -> Config:
        """Make the config that a checkpoint holds, with overrides; `where` is for messages."""
        changes = _absolute_paths(parse_overrides(overrides), Path.cwd())
        return build(cls, merge_overrides(content, changes), f"{where}, config")

    @property
    def metrics(self) -> Path:
        """The file of metrics."""
        return self.log.jsonl or self.run.output / "metrics.jsonl"

    @property
    def stores(self) -> Path:
        """The folder of what documents are prepared into."""
        return self.data.cache or self.run.output / "data"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.run.output / "checkpoints"

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return sections of keys with values that JSON and TOML have; keys that are None are left out."""
        return TypeAdapter(Config).dump_python(self, mode="json", exclude_none=True)


# ---- Overrides

TABLES = ("model.lora", "data.fields")
"""Keys that hold keys of their own."""


def parse_overrides(overrides: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read `section.key=value` of a command line into a mapping of sections to keys; a later one wins.

    A table in a section is spelt out: `model.lora.rank=8`.

    A value is a number, true, false, "a text" or [a list], as in the file. What TOML cannot read is a text without
    quotes: `plan.planner=flex`. Nothing after the `=` means None: the key is as if the file did not have it.
    """
    sections: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        section, *keys = name.strip().split(".")
        in_table = len(keys) == 2 and f"{section}.{keys[0]}" in TABLES
        if not (equals and (len(keys) == 1 or in_table) and section and all(keys)):
            raise SeqloomError(f"override {override!r}: spell it section.key=value, for example optimiser.lr=1e-4")
        place = sections.setdefault(section, {})
        if in_table:
            if not isinstance(place.get(keys[0]), dict):
                place[keys[0]] = {}
            place = place[keys[0]]
        place[keys[-1]] = _parse_value(text.strip(), override)
    return sections


def merge_overrides(content: dict[str, Any], overrides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return `content` with the overrides in it; None takes a key away. Neither argument is changed."""
    result = dict(content)
    for section, keys in overrides.items():
        before = result.get(section, {})
        if isinstance(before, dict):  # otherwise the type check that follows says what is wrong with it
            tables = {key: value for key, value in keys.items() if isinstance(value, dict)}
            inner = {key: value for key, value in before.items() if isinstance(value, dict) and key in tables}
            own = before | keys | merge_overrides(inner, tables)
            result[section] = {key: value for key, value in own.items() if value is not None}
    return result


def _parse_value(text: str, override: str) -> Any:
    if not text:
        return None
    try:
        content = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text.startswith(('"', "'", "[", "{")):  # meant as TOML
            raise SeqloomError(f"override {override!r}: {text} is not a TOML value ({error}); correct it") from None
        return text
    value = content["value"]
    if len(content) > 1 or not isinstance(value, bool | int | float | str | list):
        return text  # a date is a good name for a folder, and no key holds one
    return value


# ---- Paths and published models

_DOCUMENTS = {"data.source", "data.validation"}
"""Keys that are paths or lists of them, unless they are the name of a synthetic corpus or a data set."""
_LISTS = {*_DOCUMENTS, "run.callbacks"}
"""Keys that may be lists of these."""
_PATHS = {"run.output", "model.parameters", "model.huggingface", "data.chat_template", "data.cache", "log.jsonl"}
"""Keys that are paths, unless they are the name of a published model."""
_NAMES_OR_FILES = {"model.spec", "plan.cluster", "plan.profile", "plan.strategies"}
"""Keys that are a path when they end like a file, else a name."""
_MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MODEL_FILES = ("*.json", "*.safetensors", "tokenizer*", "vocab*", "merges.txt", "*.model", "*.jinja")
"""Files of a published model that a run reads or copies; no code, and no parameters in other formats."""


def _absolute_paths(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a copy of a config's mapping in which paths are absolute, those that were relative below `folder`."""

    def absolute(name: str, value: Any) -> Any:
        if name == "data.sources" and isinstance(value, list):
            return [
                each | {"path": absolute("data.source", each["path"])}
                if isinstance(each, dict) and "path" in each
                else each
                for each in value
            ]
        if name in _LISTS and isinstance(value, list):
            return [absolute(name, each) for each in value]
        if not isinstance(value, str):
            return value
        if name in _DOCUMENTS:
            if value.startswith(HUB):
                wanted, colon, split = value.removeprefix(HUB).partition(":")
                saved = folder / Path(wanted).expanduser()
                return f"{HUB}{saved.resolve()}{colon}{split}" if saved.is_dir() else value
            is_path = not value.startswith(SYNTHETIC)
        elif name in _PATHS:
            is_path = not (name == "model.huggingface" and is_model_name(value, folder))
        elif name == "run.callbacks":
            is_path = value.rpartition(":")[0].endswith(".py")
        elif name == "checkpoint.resume":
            is_path = value not in ("auto", "never")
        elif name == "data.tokenizer":
            is_path = value != BYTES
        else:
            is_path = name in _NAMES_OR_FILES and is_file_name(value)
        return str((folder / Path(value).expanduser()).resolve()) if is_path else value

    return {
        section: {key: absolute(f"{section}.{key}", value) for key, value in keys.items()}
        if isinstance(keys, dict)
        else keys
        for section, keys in content.items()
    }


def is_model_name(text: str, folder: Path) -> bool:
    """Whether a text is a name such as `Qwen/Qwen3-1.7B`, and not a folder below `folder`."""
    return _MODEL_NAME.fullmatch(text) is not None and not (folder / text).exists()


def fetch_model(name: str) -> Path:
    """Return the folder of a model that Hugging Face publishes, with its parameters, downloaded if need be.

    What the cache of Hugging Face has is used as it is; HF_HOME says where that is, HF_HUB_OFFLINE that nothing may be
    downloaded. Several ranks may call it at the same time.
    """
    hub = import_extra(
        *(f"model.huggingface = {name!r}: a model by name", "hf", "huggingface_hub", "huggingface_hub.errors"),
        otherwise=", or give a folder",
    )

    def is_complete(folder: Path) -> bool:  # a config by itself would train random parameters
        return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))

    try:
        with suppress(hub.errors.LocalEntryNotFoundError):
            folder = Path(hub.snapshot_download(name, local_files_only=True))
            if is_complete(folder):
                return folder
        folder = Path(hub.snapshot_download(name, allow_patterns=list(MODEL_FILES)))
    except (hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SeqloomError(
            f"model.huggingface = {name!r} is no folder here, not whole in the cache of Hugging Face, and cannot be "
            f"fetched ({reason}); check the spelling, run `hf download {name}` where there is a network, or give a "
            "folder"
        ) from None
    if not is_complete(folder):
        raise SeqloomError(
            f"model.huggingface = {name!r} has no config.json with .safetensors in {folder}; run `hf download {name}` "
            "where there is a network, or convert the model with save_pretrained and give the folder"
        )
    return folder
