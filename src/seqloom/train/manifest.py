"""What a checkpoint says of itself in plain JSON: step, names and shapes, and the state that is not tensors."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from seqloom.describe.files import build, read_mapping
from seqloom.errors import SeqloomError
from seqloom.train.folders import MANIFEST

FORMAT, VERSION = "seqloom checkpoint", 1
Described = Mapping[str, str]
"""See `described`."""
_SHOWN = 4
"""Differences of each kind that a message lists."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of seqloom.json.

    Attributes:
        step: steps that were done.
        model, optimiser: for every tensor its dtype and global shape, `float32[4, 8]`.
        extra: what the run put in.
        torch: the version that wrote the tensors.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a plain dict is what pydantic looks for

    step: int
    model: dict[str, str]
    optimiser: dict[str, str]
    extra: dict[str, Any]
    torch: str
    format: str = FORMAT
    version: int = VERSION

    @classmethod
    def of(cls, step: int, model: Described, optimiser: Described, extra: Mapping[str, Any]) -> Manifest:
        """Say what is about to be written, by all ranks."""
        return cls(step, dict(model), dict(optimiser), dict(extra), str(torch.__version__))

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read the manifest of a checkpoint's folder."""
        file = path / MANIFEST
        if not file.is_file():
            raise SeqloomError(f"{str(path)!r} is not a checkpoint: it has no {MANIFEST}; name a folder step-...")
        content = read_mapping(file)
        if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise SeqloomError(
                f"{file}: format {content.get('format')!r}, version {content.get('version')!r}; this release reads "
                f"{FORMAT!r}, version {VERSION}"
            )
        return build(cls, content, str(file))

    def to_json(self) -> str:
        """Return the text of the file; what JSON cannot hold is refused."""
        try:
            return json.dumps(asdict(self), indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SeqloomError(
                f"the extra state of a checkpoint cannot be written as JSON ({error}); give numbers, texts, lists and "
                "dictionaries, and RNG states by rng_state()"
            ) from None

    def check(self, path: Path, model: Described, optimiser: Described) -> None:
        """Refuse a checkpoint whose tensors are not those that all ranks want to load, and list the differences."""
        for what, saved, wanted in (("model", self.model, model), ("optimiser", self.optimiser, optimiser)):
            differences = _differences(saved, wanted)
            if differences:
                raise SeqloomError(
                    f"{path} is a checkpoint of another {what}: {'; '.join(differences)}. Take the config that it was "
                    "made with, or begin anew (checkpoint.resume = 'never') in another folder"
                )


def rng_state() -> dict[str, str]:
    """Return torch's random states of this process, as JSON can hold them."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def set_rng_state(states: Mapping[str, str]) -> None:
    """Go on from random states that `rng_state` returned; one of a device that is not here is left out."""
    tensors = {name: torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8) for name, text in states.items()}
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the dtype and the global shape of every tensor, `float32[4, 8]`."""
    return {name: f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for name, each in tensors.items()}


def _differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Say in what two lists of tensors differ."""
    kinds = {
        "only in the checkpoint": [f"{name} {shape}" for name, shape in saved.items() if name not in wanted],
        "not in the checkpoint": [f"{name} {shape}" for name, shape in wanted.items() if name not in saved],
        "different": [
            f"{name} is {shape} there and {wanted[name]} here"
            for name, shape in saved.items()
            if name in wanted and wanted[name] != shape
        ],
    }
    return [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
