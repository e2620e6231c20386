"""A training run as one value: read from TOML, overridden by dotted keys, written back.

config = Config.load("recipes/tiny-cpu.toml", overrides=["optimiser.lr=1e-4", "plan.planner=flex"])
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from seqloom.cost import Profile
from seqloom.data.toy import NAME as MADE_UP
from seqloom.describe import Cluster, ModelSpec
from seqloom.describe.files import build, is_file_name, read_mapping
from seqloom.errors import SeqloomError
from seqloom.plan import Sharding
from seqloom.planners.registry import chooses_strategies, makes_stages
from seqloom.train.hub import fetched, is_hub_name
from seqloom.train.overrides import merged, parse_overrides
from seqloom.train.sections import (
    Checkpointing,
    Data,
    Evaluation,
    Logging,
    Model,
    Optimiser,
    Pipelining,
    Planning,
    Run,
    Schedule,
)

_PATHS = (
    ("run", "output"),
    ("model", "parameters"),
    ("model", "huggingface"),
    ("data", "source"),
    ("data", "validation"),
    ("log", "jsonl"),
)
"""Keys that are always paths."""
_NAMES_OR_FILES = (("model", "spec"), ("plan", "cluster"), ("plan", "profile"), ("plan", "strategies"))
"""Keys that are a path when they end like a file, else a name."""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that a run depends on. Paths are absolute."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a plain dict is what pydantic looks for

    run: Run
    model: Model
    data: Data
    plan: Planning = field(default_factory=Planning)
    pipeline: Pipelining = field(default_factory=Pipelining)
    optimiser: Optimiser = field(default_factory=Optimiser)
    schedule: Schedule = field(default_factory=Schedule)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    log: Logging = field(default_factory=Logging)

    def __post_init__(self) -> None:
        """Check what several sections say together."""
        if self.evaluation.every and self.data.validation is None:
            raise SeqloomError(
                f"evaluation.every = {self.evaluation.every} without data.validation; name the documents to evaluate "
                "on, or set every to 0"
            )
        if self.run.steps is not None and self.schedule.warmup > self.run.steps:
            raise SeqloomError(
                f"schedule.warmup = {self.schedule.warmup} is more than run.steps = {self.run.steps}, so the rate "
                "never gets to optimiser.lr; lower warmup"
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
        stages, planner = self.pipeline.stages, self.plan.planner
        if makes_stages(planner) and self.plan.sharding != Sharding.FREE:
            raise SeqloomError(
                f"plan.planner = {planner!r} with plan.sharding = {self.plan.sharding!r}: the stages of a run are then "
                "set once for all its steps; set plan.sharding to 'free', or set pipeline.stages and leave "
                "plan.planner out"
            )
        if self.plan.strategies != Planning().strategies and not chooses_strategies(planner, self.plan.sharding):
            raise SeqloomError(
                f"plan.strategies = {self.plan.strategies!r} beside plan.planner = {planner!r}, which chooses from no "
                "list; leave it out, or set plan.planner to 'strategies' and plan.sharding to 'free'"
            )
        fixed = isinstance(stages, int) and stages > 1 and planner != Planning().planner
        if fixed or (makes_stages(planner) and stages != 1):
            raise SeqloomError(
                f"plan.planner = {planner!r} beside pipeline.stages = {stages!r}: it plans without it; leave "
                "plan.planner out, or set stages to 1"
            )

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Config:
        """Read a .toml file.

        Paths in the file are relative to its folder, those in overrides to the working folder. Presets and files that
        `model.spec`, `plan.cluster` and `plan.profile` name are looked up, so that a misspelt one is refused here.

        Args:
            path: the file.
            overrides: `section.key=value`, see `parse_overrides`.
        """
        path = Path(path)
        if path.suffix.lower() != ".toml":
            raise SeqloomError(f"{str(path)!r}: a training config is a .toml file; rename it, or give another")
        content = anchored(read_mapping(path), path.absolute().parent)
        given = anchored(parse_overrides(overrides), Path.cwd())
        config = build(cls, _with_model(merged(content, given)), str(path))
        try:
            config._look_up()
        except SeqloomError as error:
            raise SeqloomError(f"{path}: {error}") from None
        return config

    def _look_up(self) -> None:
        """Refuse names of models, clusters and profiles that do not exist."""
        if self.model.spec is not None:
            ModelSpec.load(self.model.spec)
        if self.plan.cluster != "auto":
            Cluster.parse(self.plan.cluster)
        if self.plan.profile is not None:
            Profile.load(self.plan.profile)

    @property
    def metrics(self) -> Path:
        """The file of metrics."""
        return self.log.jsonl or self.run.output / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.run.output / "checkpoints"

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return sections of keys with values that JSON and TOML have; keys that are None are left out."""
        sections = {section.name: getattr(self, section.name) for section in fields(self)}
        return {name: _plain(section) for name, section in sections.items()}

    def to_toml(self) -> str:
        """Return the whole config, defaults included, as text that `load` reads back as an equal one."""
        blocks = []
        for name, section in self.as_dict().items():
            lines = [f"{key} = {_spelled(value)}" for key, value in section.items()]
            blocks.append("\n".join([f"[{name}]", *lines]))
        return "\n\n".join(blocks) + "\n"


def anchored(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a copy of a config's mapping in which paths are absolute, those that were relative below `folder`."""
    result = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in content.items()}

    def anchor(section: str, key: str) -> None:
        keys = result.get(section)
        if isinstance(keys, dict) and isinstance(keys.get(key), str) and not keys[key].startswith(MADE_UP):
            keys[key] = str((folder / Path(keys[key]).expanduser()).resolve())

    for section, key in _PATHS:
        name = _model_of(result) if key == "huggingface" else None
        if name is None or not is_hub_name(name, folder):
            anchor(section, key)
    for section, key in _NAMES_OR_FILES:
        keys = result.get(section)
        if isinstance(keys, dict) and isinstance(keys.get(key), str) and is_file_name(keys[key]):
            anchor(section, key)
    checkpoint = result.get("checkpoint")
    if isinstance(checkpoint, dict) and checkpoint.get("resume") not in ("auto", "never"):
        anchor("checkpoint", "resume")
    return result


def _model_of(content: dict[str, Any]) -> str | None:
    """Return what `model.huggingface` says, where it is a text."""
    model = content.get("model")
    name = model.get("huggingface") if isinstance(model, dict) else None
    return name if isinstance(name, str) else None


def _with_model(content: dict[str, Any]) -> dict[str, Any]:
    """Return an anchored mapping with the folder of a model that it gives by its published name: not a path yet."""
    name = _model_of(content)
    if name is None or Path(name).is_absolute():
        return content
    return {**content, "model": {**content["model"], "huggingface": str(fetched(name))}}


def _plain(section: object) -> dict[str, Any]:
    """Return the keys of a section that are not None: paths as texts, tuples as lists."""
    plain: dict[str, Any] = {}
    for each in fields(section):  # type: ignore[arg-type]
        value = getattr(section, each.name)
        if value is not None:
            plain[each.name] = (
                str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            )
    return plain


def _spelled(value: Any) -> str:
    """Spell a value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(_spelled(each) for each in value)}]"
    return repr(value)
