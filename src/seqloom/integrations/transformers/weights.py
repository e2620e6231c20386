"""Where the files of a Hugging Face folder have the parameters of a model, and how rows of them are read.

Most parameters are a tensor of their own name. Others are stored under another name, or, of experts, one by one:

    model.layers.0.mlp.experts.gate_up_proj [experts, out, in]

        model.layers.0.mlp.experts.0.gate_proj.weight      joined by expert, and these one after the other;
        model.layers.0.mlp.experts.0.up_proj.weight        a rank reads those of its own experts alone
        model.layers.0.mlp.experts.1.gate_proj.weight
        ...

Transformers says which (`conversion_mapping`). What it does beyond renaming and joining, only it can do.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from seqloom.models.files import ReadRows

Shape = Sequence[int]


class StoredParameter(NamedTuple):
    """Where a parameter is.

    Attributes:
        tensors: a single name; or, for every expert, the names of tensors that are joined.
        axis: along which they are joined.
    """

    tensors: tuple[tuple[str, ...], ...]
    axis: int | None = None

    def read(self, read: ReadRows, rows: slice) -> torch.Tensor:
        """Return rows of the parameter; `read` does it of a tensor."""
        if self.axis is None:
            return read(self.tensors[0][0], rows)
        experts = ([read(name, slice(None)) for name in own] for own in self.tensors[rows])
        return torch.stack([torch.cat(tensors, self.axis) for tensors in experts])

    def fits(self, shapes: Mapping[str, Shape], wanted: Shape) -> bool:
        """Whether what is stored has the shape of a parameter."""
        if self.axis is None:
            return list(shapes[self.tensors[0][0]]) == list(wanted)
        if len(self.tensors) != wanted[0]:
            return False
        return all(_joined([shapes[name] for name in own], self.axis) == list(wanted[1:]) for own in self.tensors)


def _joined(shapes: Sequence[Shape], axis: int) -> list[int]:
    """Return the shape of tensors that are joined along an axis."""
    whole = list(shapes[0])
    whole[axis] = sum(shape[axis] for shape in shapes)
    return whole


class Renaming(NamedTuple):
    """A part of a stored name that stands for another, as a regular expression."""

    pattern: str
    target: str

    def __call__(self, name: str) -> str:
        """Return the name in the model."""
        return re.sub(self.pattern, self.target, name)


class ExpertJoin(NamedTuple):
    """Parameters of experts that are stored one by one: `sources` have a star for the number of the expert."""

    sources: tuple[str, ...]
    target: str
    axis: int

    def place(self, name: str) -> tuple[str, int, int] | None:
        """Return the parameter that a tensor belongs to, its expert, and its place among those that are joined."""
        for slot, source in enumerate(self.sources):
            match = re.search(re.escape(source).replace(r"\*", r"(\d+)"), name)
            if match is not None:
                return name[: match.start()] + self.target + name[match.end() :], int(match[1]), slot
        return None


Transforms = tuple[list[Renaming], list[ExpertJoin]]


def known_transforms(model_type: str) -> Transforms | None:
    """Return what transformers does with the tensors of a type; None: more than renaming them and joining experts."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:  # a release that does not say
        return None
    renamings, joins = [], []
    for each in get_checkpoint_conversion_mapping(model_type) or ():
        join = _expert_join(each)
        if join is not None:
            joins.append(join)
        elif getattr(each, "operations", None) or len(each.source_patterns) != 1 or len(each.target_patterns) != 1:
            return None
        else:
            renamings.append(Renaming(each.source_patterns[0], each.target_patterns[0]))
    return renamings, joins


def _expert_join(transform: Any) -> ExpertJoin | None:
    """Return a conversion of transformers that stacks the tensors of experts, and joins several of each."""
    operations = [(type(each).__name__, getattr(each, "dim", None)) for each in getattr(transform, "operations", ())]
    joined = [dim for name, dim in operations[1:] if name == "Concatenate"]
    stacked = operations[:1] == [("MergeModulelist", 0)] and len(operations) == 1 + len(joined) <= 2
    if not stacked or len(transform.target_patterns) != 1 or (len(transform.source_patterns) > 1 and not joined):
        return None
    axis = cast("int", joined[0]) - 1 if joined else 0
    return ExpertJoin(tuple(transform.source_patterns), transform.target_patterns[0], axis)


def locate(
    wanted: Mapping[str, Shape], names: Mapping[str, str], shapes: Mapping[str, Shape], transforms: Transforms
) -> dict[str, StoredParameter] | None:
    """Return where every wanted parameter is; None: one is missing, or has another shape.

    Args:
        wanted: names and shapes of parameters.
        names: of stored tensors, by what they are called in a causal model's own files.
        shapes: of stored tensors.
    """
    renamings, joins = transforms
    single: dict[str, str] = {}
    joined: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    axes: dict[str, int] = {}
    for own, stored in names.items():
        name = own if own in wanted else _renamed(own, renamings)
        place = next(((*found, join.axis) for join in joins if (found := join.place(name)) is not None), None)
        if name in wanted or place is None:
            single[name] = stored
        else:
            parameter, expert, slot, axes[place[0]] = place
            joined[parameter][expert, slot] = stored
    found = {name: StoredParameter(((single[name],),)) for name in wanted if name in single}
    for name, tensors in joined.items():
        experts, slots = (1 + max(numbers) for numbers in zip(*tensors, strict=True))
        if name in wanted and name not in found and len(tensors) == experts * slots:
            by_expert = tuple(tuple(tensors[expert, slot] for slot in range(slots)) for expert in range(experts))
            found[name] = StoredParameter(by_expert, axes[name])
    complete = found.keys() == wanted.keys() and all(each.fits(shapes, wanted[name]) for name, each in found.items())
    return found if complete else None


def _renamed(name: str, renamings: Iterable[Renaming]) -> str:
    for renaming in renamings:
        name = renaming(name)
    return name
