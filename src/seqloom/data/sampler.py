"""Which documents make a step: an order per epoch, cut into batches at one global cursor; or batches packed ahead.

The cursor (epoch, position) is all the state there is. It counts documents of the whole run, not of a rank, so a run
resumes where it stopped on any number of ranks, and also with another batch size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from seqloom.data.mixture import Mixture
from seqloom.data.source import read_only
from seqloom.errors import SeqloomError

PackedBatches = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""packed(epoch) -> int64[n] the documents of an epoch, each once, batch after batch, and int64[m + 1] where batches
start among them; the last entry is n. Always the same for an epoch."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Documents of one optimiser step. A plan is made from `lengths`; its document numbers are indices into them."""

    documents: np.ndarray  # int64[n], numbers in the source, each once
    lengths: np.ndarray  # int64[n], tokens
    valid: np.ndarray  # int64[n], labels that the loss counts

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    @property
    def valid_tokens(self) -> int:
        """Labels of the whole step that the loss counts, and by which it is divided."""
        return int(self.valid.sum())

    def __len__(self) -> int:
        return len(self.documents)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Batch):
            return NotImplemented
        mine, theirs = (self.documents, self.lengths, self.valid), (other.documents, other.lengths, other.valid)
        return all(map(np.array_equal, mine, theirs))

    def __hash__(self) -> int:
        return hash(self.documents.tobytes())

    def __repr__(self) -> str:
        return f"Batch({len(self):,} documents, {self.tokens:,} tokens, {self.valid_tokens:,} valid)"


class Sampler:
    """Endless batches. An epoch is every document once, in an order of its own; its last batch may be smaller.

    Of a mixture an epoch is what `Mixture` says. Same lengths, seed and batch rule: same batches, on every rank and
    machine.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        valid: ArrayLike,
        *,
        seed: int = 0,
        documents: int | None = None,
        tokens: int | None = None,
        packed: PackedBatches | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        """Start at the first document of epoch 0, with `lengths` and `valid` of all documents, int64[n] each.

        A batch has so many `documents`; or as many, in their order, as fit in so many `tokens`; or is `packed` ahead.
        With a `mixture` the documents are those of its sources, one source after the other.
        """
        self._lengths, self._valid = read_only(lengths), read_only(valid)
        if not len(self._lengths) or self._lengths.min() < 1 or self._lengths.shape != self._valid.shape:
            raise SeqloomError("a sampler needs documents, each of at least 1 token and with a count of valid labels")
        if sum(rule is not None for rule in (documents, tokens, packed)) != 1:
            raise SeqloomError(
                "a batch has so many documents or so many tokens, or is packed ahead; give one of the three"
            )
        if mixture is not None and (packed is not None or sum(mixture.documents) != len(self._lengths)):
            raise SeqloomError(
                f"a mixture of {sum(mixture.documents):,} documents beside lengths of {len(self._lengths):,}, or "
                "batches that are packed ahead; give the lengths of its sources, and a size of batches"
            )
        size = next((size for size in (documents, tokens) if size is not None), 1)
        if size < 1 or seed < 0:
            raise SeqloomError(f"a batch of {size} with seed {seed}; the size must be at least 1, the seed at least 0")
        self._seed, self._size, self._by_tokens, self._packed = seed, size, tokens is not None, packed
        if self._by_tokens and self._lengths.max() > size:
            long = int((self._lengths > size).sum())
            raise SeqloomError(
                f"{long:,} documents are longer than a batch of {size:,} tokens, the longest has "
                f"{int(self._lengths.max()):,}; raise the budget, or truncate or drop long documents"
            )
        self._mixture = mixture
        self._lengths_sha256 = hashlib.sha256(self._lengths.astype("<i8").tobytes()).hexdigest()
        self._order: PackedBatches = lru_cache(maxsize=2)(packed or self._shuffle)
        self.epoch = 0  # of the next batch
        self.position = 0  # documents of this epoch that earlier batches had
        first_epoch = b"" if packed is None else b"".join(part.astype("<i8").tobytes() for part in self._order(0))
        self._packed_sha256 = hashlib.sha256(first_epoch).hexdigest()

    def next_batch(self) -> Batch:
        """Return the next batch and advance."""
        batch, self.epoch, self.position = self._batch_at(self.epoch, self.position)
        return batch

    def peek(self, count: int) -> list[Batch]:
        """Return the next `count` batches without advancing, for planning ahead."""
        batches, epoch, position = [], self.epoch, self.position
        for _ in range(count):
            batch, epoch, position = self._batch_at(epoch, position)
            batches.append(batch)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor and digests of the data it points into, ready for JSON."""
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self._seed,
            "documents": len(self._lengths),
            "lengths_sha256": self._lengths_sha256,
        }
        if self._packed is not None:
            state["steps_sha256"] = self._packed_sha256
        if self._mixture is not None:
            state["mixture"] = self._mixture.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a cursor. One into other data or another shuffle is refused: it would repeat and skip documents."""
        mine = self.state_dict()
        if state.get("steps_sha256") != mine.get("steps_sha256"):
            raise SeqloomError(
                "the sampler's state is of other batches: they were packed ahead, for another machine or limit, or "
                "only one of both was; resume with the ranks and limits of the run, or start a new one"
            )
        mixtures = state.get("mixture"), mine.pop("mixture", None)
        missing = [name for name in mine if name not in state]
        if missing:
            raise SeqloomError(f"the sampler's state has no {missing[0]!r}; it needs {', '.join(mine)}")
        for name in ("documents", "lengths_sha256", "seed"):
            if state[name] != mine[name]:
                raise SeqloomError(
                    f"the sampler's state has {name} {state[name]!r}, this sampler {mine[name]!r}; "
                    "resume with the data and the seed of the run, or start a new one"
                )
        if mixtures[0] != mixtures[1]:
            raise SeqloomError(
                "the sampler's state is of another mixture: other sources or weights, or only one of both is a "
                "mixture; resume with the sources and weights of the run, or start a new one"
            )
        epoch, position = state["epoch"], state["position"]
        whole = type(epoch) is int and type(position) is int and epoch >= 0
        documents = len(self._order(epoch)[0]) if whole and self._mixture is not None else len(self._lengths)
        if not whole or not 0 <= position < documents:
            raise SeqloomError(
                f"the sampler's state is at epoch {epoch!r}, position {position!r}; an epoch has positions "
                f"0 .. {documents - 1}"
            )
        self.epoch, self.position = epoch, position

    def _batch_at(self, epoch: int, position: int) -> tuple[Batch, int, int]:
        """Return the batch at a cursor, and the cursor after it."""
        order, ends = self._order(epoch)
        stop = position + self._size
        if self._packed is not None:
            stop = int(ends[np.searchsorted(ends, position, side="right")])
        elif self._by_tokens:
            before = ends[position - 1] if position else 0
            stop = int(np.searchsorted(ends, before + self._size, side="right"))
        documents = order[position:stop]
        batch = Batch(read_only(documents), read_only(self._lengths[documents]), read_only(self._valid[documents]))
        return (batch, epoch, stop) if stop < len(order) else (batch, epoch + 1, 0)

    def _shuffle(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents of an epoch in order, and their cumulative tokens.

        The shuffle sorts by random keys: that uses the raw stream of the generator only, which numpy promises to keep.
        """
        if self._mixture is not None:
            order = self._mixture.order(epoch)
        else:
            keys = np.random.Philox(np.random.SeedSequence([self._seed, epoch])).random_raw(len(self._lengths))
            order = np.argsort(keys, kind="stable")
        return order, np.cumsum(self._lengths[order])
