"""Which documents a step works on: a shuffle per epoch, cut into batches at one global cursor; or batches as given.

The cursor (epoch, position) is all the state there is. It counts documents, not steps of a rank, so a run goes on
where it stopped on any number of ranks, and also with another batch size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from seqloom.data.source import Source, frozen
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    import torch

    from seqloom.dist import Context


Steps = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""steps(epoch) -> int64[n] the documents of an epoch, each once, batch after batch, and int64[m + 1] where batches
begin among them; the last one is n. The same for an epoch whenever it is asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The documents of one optimiser step. A plan is made of `lengths`; its document numbers are indices into them.

    Attributes:
        documents: int64[n], numbers in the source, each once.
        lengths: int64[n], tokens.
        valid: int64[n], labels that count.
    """

    documents: np.ndarray
    lengths: np.ndarray
    valid: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    @property
    def valid_tokens(self) -> int:
        """Labels that count in the whole step: what the loss is divided by."""
        return int(self.valid.sum())

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.documents)

    def __eq__(self, other: object) -> bool:
        """Same columns."""
        if not isinstance(other, Batch):
            return NotImplemented
        mine, theirs = (self.documents, self.lengths, self.valid), (other.documents, other.lengths, other.valid)
        return all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def __hash__(self) -> int:
        """Hash of the documents."""
        return hash(self.documents.tobytes())

    def __repr__(self) -> str:
        """Say how much there is, not all of it."""
        return f"Batch({len(self):,} documents, {self.tokens:,} tokens, {self.valid_tokens:,} valid)"


class Sampler:
    """Batches without end. An epoch is every document once, in its own order; its last batch may be smaller.

    Same lengths, seed and batch rule: same batches, anywhere.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        valid: ArrayLike,
        *,
        seed: int = 0,
        documents: int | None = None,
        tokens: int | None = None,
        steps: Steps | None = None,
    ) -> None:
        """Begin at the first document of epoch 0.

        Args:
            lengths: int64[n], tokens of every document of the source.
            valid: int64[n], labels of every document that count.
            seed: of the shuffles, 0 or more.
            documents: documents of a batch.
            tokens: instead: as many documents, in their order, as fit in so many tokens.
            steps: instead: the batches themselves.
        """
        self._lengths, self._valid = frozen(lengths), frozen(valid)
        if not len(self._lengths) or self._lengths.min() < 1 or self._lengths.shape != self._valid.shape:
            raise SeqloomError(
                "a sampler needs documents, each with a length of at least 1 and a count of valid labels"
            )
        if sum(each is not None for each in (documents, tokens, steps)) != 1:
            raise SeqloomError(
                "a batch ends after so many documents or so many tokens, or batches are given; give one of the three"
            )
        size = next((each for each in (documents, tokens) if each is not None), 1)
        if size < 1 or seed < 0:
            raise SeqloomError(f"a batch of {size} with seed {seed}; the size must be at least 1, the seed at least 0")
        self._seed, self._size, self._by_tokens, self._steps = seed, size, tokens is not None, steps
        if self._by_tokens and self._lengths.max() > size:
            long = int((self._lengths > size).sum())
            raise SeqloomError(
                f"{long:,} documents are longer than a batch of {size:,} tokens, the longest has "
                f"{int(self._lengths.max()):,}; raise the budget, or truncate or drop long documents"
            )
        self._digest = hashlib.sha256(self._lengths.astype("<i8").tobytes()).hexdigest()
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._epoch = self._position = 0
        given = b"" if steps is None else b"".join(each.astype("<i8").tobytes() for each in self._ordered(0))
        self._steps_digest = hashlib.sha256(given).hexdigest()

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Documents of this epoch that are behind."""
        return self._position

    def next_batch(self) -> Batch:
        """Return the next batch and move behind it."""
        batch, self._epoch, self._position = self._batch(self._epoch, self._position)
        for epoch in [epoch for epoch in self._epochs if epoch < self._epoch]:
            del self._epochs[epoch]
        return batch

    def peek(self, count: int) -> list[Batch]:
        """Return the next `count` batches without moving: what planning ahead looks at."""
        batches, epoch, position = [], self._epoch, self._position
        for _ in range(count):
            batch, epoch, position = self._batch(epoch, position)
            batches.append(batch)
        return batches

    def __iter__(self) -> Iterator[Batch]:
        """Return `next_batch()` again and again, without end."""
        while True:
            yield self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, and what it is a cursor into. Plain values, ready for JSON."""
        state = {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "documents": len(self._lengths),
            "lengths_sha256": self._digest,
        }
        if self._steps is not None:
            state["steps_sha256"] = self._steps_digest
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a cursor. One into other data or another shuffle is refused: it would repeat and skip documents."""
        own = self.state_dict()
        if state.get("steps_sha256") != own.get("steps_sha256"):
            raise SeqloomError(
                "the sampler's state is of other batches: they were packed ahead, for another machine or limit, or "
                "only one of both was; resume with the ranks and limits of the run, or start a new one"
            )
        missing = [name for name in own if name not in state]
        if missing:
            raise SeqloomError(f"the sampler's state has no {missing[0]!r}; it needs {', '.join(own)}")
        for name in ("documents", "lengths_sha256", "seed"):
            if state[name] != own[name]:
                raise SeqloomError(
                    f"the sampler's state has {name} {state[name]!r}, this sampler {own[name]!r}; "
                    "resume with the data and the seed of the run, or start a new one"
                )
        epoch, position = state["epoch"], state["position"]
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position < len(self._lengths):
            raise SeqloomError(
                f"the sampler's state is at epoch {epoch!r}, position {position!r}; an epoch has positions "
                f"0 .. {len(self._lengths) - 1}"
            )
        self._epoch, self._position = epoch, position

    def _batch(self, epoch: int, position: int) -> tuple[Batch, int, int]:
        """The batch at a cursor, and the cursor behind it."""
        order, ends = self._ordered(epoch)
        stop = position + self._size
        if self._steps is not None:
            stop = int(ends[np.searchsorted(ends, position, side="right")])
        elif self._by_tokens:
            behind = ends[position - 1] if position else 0
            stop = int(np.searchsorted(ends, behind + self._size, side="right"))
        chosen = order[position:stop]
        batch = Batch(frozen(chosen), frozen(self._lengths[chosen]), frozen(self._valid[chosen]))
        return (batch, epoch, stop) if stop < len(order) else (batch, epoch + 1, 0)

    def _ordered(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of an epoch, and the tokens up to and with each of its documents, or where its batches begin.

        Sorting by random keys uses the raw stream of the generator only, which numpy promises to keep.
        """
        if epoch not in self._epochs and self._steps is not None:
            self._epochs[epoch] = self._steps(epoch)
        elif epoch not in self._epochs:
            keys = np.random.Philox(np.random.SeedSequence([self._seed, epoch])).random_raw(len(self._lengths))
            order = np.argsort(keys, kind="stable")
            self._epochs[epoch] = order, np.cumsum(self._lengths[order])
        return self._epochs[epoch]


# ---- merged: data.rows
# A rank's rows of a round: ids and labels of its spans, and of nothing else.


def rank_rows(source: Source, context: Context, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Read what a rank holds in a round.

    Args:
        source: where the documents are.
        context: of this rank; document k of it is `batch.documents[k]` of the source.
        batch: the step's.

    Returns:
        ids and labels, int64[tokens] each, on the context's device, in the order of the local buffer.
    """
    from seqloom.dist.rows import on_device  # torch: preparing and sampling data do without it

    ids, labels = (np.empty(context.tokens, dtype=np.int64) for _ in range(2))
    row = 0
    for span in context.spans:
        _check(source, batch, span.document, span.stop)
        document, end = int(batch.documents[span.document]), row + span.tokens
        ids[row:end] = source.tokens(document, span.start, span.stop)
        labels[row:end] = source.labels(document, span.start, span.stop)
        row = end
    return on_device(ids, context.device), on_device(labels, context.device)


def _check(source: Source, batch: Batch, number: int, stop: int) -> None:
    """Refuse a plan made for another batch, and a batch drawn from another source."""
    if number >= len(batch) or stop > batch.lengths[number]:
        has = (
            f"document {number} has {batch.lengths[number]} tokens"
            if number < len(batch)
            else f"{len(batch)} documents"
        )
        raise SeqloomError(
            f"the plan reads document {number} up to token {stop}, but in this batch {has}; "
            "bind the plan that was made for this batch"
        )
    document = int(batch.documents[number])
    if document >= len(source.lengths) or source.lengths[document] != batch.lengths[number]:
        raise SeqloomError(
            f"document {document} of the batch has {batch.lengths[number]} tokens, and not so in the source; "
            "read from the source that the sampler was made for"
        )
