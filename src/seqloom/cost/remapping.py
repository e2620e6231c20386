"""What it costs to hold tokens in one layout for attention and in another for linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from seqloom.cost.activations import kv_width, query_width
from seqloom.cost.communication import ACTIVATION_BYTES, exchanged_values
from seqloom.plan import Checkpoint, Remap, move_between

if TYPE_CHECKING:
    from seqloom.cost.communication import Communication
    from seqloom.describe import ModelSpec
    from seqloom.plan import Layout, Work


@dataclass(frozen=True, slots=True, eq=False)
class Remapping:
    """ns of one round's remapping, all layers, forward and backward."""

    time: int  # of its exchanges, at the pace of the busiest rank or card
    card: np.ndarray  # int64[nodes, cards] how long each card is taken
    link: np.ndarray  # int64[ranks] how long each NVLink port is taken

    @classmethod
    def of(cls, work: Work, attention: Layout, linear: Layout, links: Communication) -> Remapping:
        """Price the move from the attention layout of a round to its linear layout, and back, in every layer.

        Half of the bytes go each way, so that a card is taken for the mean of what it sends and receives, and an
        exchange lasts as long as the larger of both at the busiest place.
        """
        cluster = links.cluster
        ranks, size = cluster.ranks, cluster.gpus_per_node
        move = move_between(attention, linear, node_size=size)
        ends, tokens = np.stack([move.sender, move.receiver]), move.sizes
        inside = move.remote & (move.sender // size == move.receiver // size)
        across = move.remote & ~inside
        card_of = ends // size * cluster.nics_per_node + np.asarray(cluster.nic_of_gpu)[ends % size]
        near = np.stack([np.bincount(end[inside], tokens[inside], ranks) for end in ends])
        cards = cluster.nodes * cluster.nics_per_node
        far = np.stack([np.bincount(end[across], tokens[across], cards) for end in card_of])
        values, calls = exchanges(links.model, work.remap, work.checkpoint)
        link, card = links.message_ns(values * links.model.layers * ACTIVATION_BYTES, "all_to_all")
        time = 0.0
        if move.remote.any():
            doublings = (len(np.unique(ends)) - 1).bit_length()
            latency = links.model.layers * calls * links.latency("all_to_all", bool(across.any()), doublings)
            time = max(float(near.max()) * link, float(far.max()) * card) + latency
        return cls(
            round(time),
            np.rint(far.mean(axis=0) * card).astype(np.int64).reshape(cluster.nodes, -1),
            np.rint(near.mean(axis=0) * link).astype(np.int64),
        )


def exchanges(model: ModelSpec, remap: Remap, checkpoint: Checkpoint) -> tuple[int, int]:
    """(values per moved token, calls) of a layer, forward and backward.

    Around attention: q, k, v in and the output out, like a head exchange. Around the feed-forward: the hidden state
    in and out; recomputing repeats the way in.
    """
    again = checkpoint in (Checkpoint.SELECTIVE, Checkpoint.FULL)
    if remap == Remap.MLP:
        return (4 + again) * model.hidden, 4 + again
    calls = {Checkpoint.SELECTIVE: 5, Checkpoint.FULL: 6}.get(checkpoint, 4)
    return exchanged_values(query_width(model), kv_width(model), checkpoint), calls
