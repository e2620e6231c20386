"""The sequences a verb works on: a source, cut into batches, with a count of what was dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    import numpy as np

    from seqloom.describe import Batch

MOST_DRAWN = 10_000_000
"""Sequences that are drawn from a sampler at most; more than that is a slip of the finger."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where lengths come from, and how they are read."""

    name: str
    seed: int = 0
    max_length: int | None = None
    column: str | None = None
    tokenizer: str | None = None

    def read(self, count: int) -> tuple[np.ndarray, int]:
        """Lengths in order without those above the maximum, and how many these were.

        A file is read whole; a sampler is drawn from until ``count`` lengths are kept.
        """
        from seqloom.describe import drop_longer, lengths_from

        if count > MOST_DRAWN and self.sampled:
            raise SeqloomError(
                f"{count:,} sequences of sampler {self.name} are wanted, at most {MOST_DRAWN:,} are drawn; "
                "take fewer or smaller batches"
            )
        lengths = lengths_from(
            self.name,
            seed=self.seed,
            count=max(1, count),
            max_length=self.max_length,
            column=self.column,
            tokenizer=self.tokenizer,
        )
        return drop_longer(lengths, self.max_length)

    @property
    def sampled(self) -> bool:
        """Whether the name is a sampler's."""
        from seqloom.describe import SAMPLERS

        return self.name in SAMPLERS

    @property
    def note(self) -> str | None:
        """What a sampler says of itself, stand-ins included; None for a file."""
        from seqloom.describe import sampler

        return sampler(self.name).note if self.sampled else None

    def described(self, dropped: int) -> dict[str, Any]:
        """The source for a report in JSON; of so many sequences above the maximum length."""
        return {
            "lengths": self.name,
            "sampler": self.note,
            "max_length": self.max_length,
            "dropped": dropped,
            "seed": self.seed,
        }

    def notes(self, dropped: int) -> list[str]:
        """What a reader of the tables must know: where the lengths come from, and what was dropped."""
        lines = []
        if self.note:
            lines.append(f"sampler {self.name}: {self.note}")
        if dropped:
            lines.append(f"{dropped:,} sequences above {self.max_length:,} tokens dropped first")
        return lines


@dataclass(frozen=True, slots=True)
class Workload:
    """Batches of a source."""

    source: Source
    batches: tuple[Batch, ...]
    dropped: int
    """Sequences above the maximum length."""

    @classmethod
    def by_count(cls, source: Source, size: int, *, skip: int = 0, count: int = 1) -> Workload:
        """Runs of ``size`` sequences in file order, after ``skip`` of them."""
        from seqloom.describe import batches_by_count

        lengths, dropped = source.read((skip + count) * size)
        return cls(source, tuple(batches_by_count(lengths, size, skip=skip, count=count)), dropped)

    @classmethod
    def by_tokens(cls, source: Source, budget: int, *, skip: int = 0) -> Workload:
        """One run of at most ``budget`` tokens in file order, after ``skip`` of them; nothing is cut."""
        from seqloom.describe import batches_by_tokens

        wanted = 1024
        lengths, dropped = source.read(wanted)
        while source.sampled and lengths.sum() <= (skip + 1) * max(budget, int(lengths.max())):
            wanted *= 2
            lengths, dropped = source.read(wanted)
        return cls(source, tuple(batches_by_tokens(lengths, budget, skip=skip, count=1)), dropped)

    def described(self) -> dict[str, Any]:
        """The source for a report in JSON."""
        return self.source.described(self.dropped)

    def notes(self) -> list[str]:
        """What a reader of the tables must know: where the lengths come from, and what was dropped."""
        return self.source.notes(self.dropped)
