"""A round: the groups that work side by side in one forward and backward, for every stage of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from seqloom.layout.layout import Layout, Span
from seqloom.plan.group import Group


class Checkpoint(StrEnum):
    """Activation checkpointing: what a round stores until its backward.

    none: everything. selective: inputs of layers, attention outputs and log-sum-exp. full: inputs of layers
    only. stage: the input of the whole stage only, which is run forward again as one. profile: whatever the
    profile's constants were measured with.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    STAGE = "stage"
    PROFILE = "profile"


class Remap(StrEnum):
    """Where tokens change between the attention and the linear layout, if these differ.

    attention: around it; everything else sees the linear layout. mlp: around it; only it sees the linear layout.
    """

    ATTENTION = "attention"
    MLP = "mlp"


@dataclass(frozen=True, slots=True)
class StageMicroBatch:
    """One stage's share of a round.

    A rank may be in several groups; it runs them in the order of `groups`, in which all ranks agree: slow links first.
    The layouts say who holds which tokens in attention and in linear layers; None means that every rank holds what its
    groups give it (`Group.token_layout`). With `offload`, the stored activations are in CPU memory from the end of the
    forward to the backward.
    """

    groups: tuple[Group, ...]
    checkpoint: Checkpoint
    attention: Layout | None = None
    linear: Layout | None = None
    remap: Remap = Remap.ATTENTION
    offload: bool = False

    def spans(self) -> Iterator[Span]:
        """Return the spans of all groups, in order."""
        for group in self.groups:
            yield from group.spans

    def attention_layout(self) -> Layout:
        """Return who holds which tokens when attention starts."""
        return self._derived() if self.attention is None else self.attention

    def linear_layout(self) -> Layout:
        """Return who holds which tokens in linear layers."""
        return self.attention_layout() if self.linear is None else self.linear

    def _derived(self) -> Layout:
        if not self.groups:
            return Layout.empty()
        parts = [group.token_columns() for group in self.groups]
        return Layout(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class Round:
    """One micro-batch: a `StageMicroBatch` for every stage, all on the same spans."""

    by_stage: tuple[StageMicroBatch, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of all stages."""
        return tuple(group for work in self.by_stage for group in work.groups)
