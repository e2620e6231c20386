"""The additive model: a published system's own constants, exactly as they are, and no further terms.

    T(group) = (1/d) sum_k (a1 s_k^2 + a2 s_k) + b1 + [d > 1] c L h sum_k s_k / (d v_d)

with ``c`` = 16 bytes (4 all-to-alls, forward and backward, 2 bytes each), ``L`` layers, ``h`` hidden width
and ``v_d`` the effective bandwidth of degree ``d``. Degree 1 communicates nothing; there is no ``(d-1)/d``,
nothing overlaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from seqloom.cost.communication import Flow, GroupTraffic
from seqloom.cost.profile import AdditiveModel, AdditiveProfile
from seqloom.cost.shapes import GroupShape, MemoryPolicy
from seqloom.errors import SeqloomError, unknown_name
from seqloom.plan import Checkpoint, Reduce

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.communication import RemapTimes
    from seqloom.describe import Cluster, ModelSpec
    from seqloom.layout import Layout, Route
    from seqloom.plan import GroupFamily, Remap, StageMicroBatch

MIB = 1024 * 1024
GI = 1024 * MIB
DEFAULT_CONTEXT = 384 * 1024  # the largest published one, so that the capacity is never overstated


@dataclass(frozen=True, slots=True)
class AdditiveEngine:
    """Time and memory under an additive profile. Parts: linear, attention, ulysses, fixed (all in lane 0)."""

    profile: AdditiveProfile
    constants: AdditiveModel
    budget_bytes: int
    state_bytes: int  # parameters, gradients and optimiser of one rank
    shapes: tuple[GroupShape, ...]

    @classmethod
    def build(
        cls,
        profile: AdditiveProfile,
        cluster: Cluster,
        model: ModelSpec,
        shard_ranks: int,
        family: GroupFamily,
        budget_gib: float | None,
        max_length: int | None,
    ) -> AdditiveEngine:
        """Check that the constants hold here, and size the state.

        Parameters are interpolated (and beyond the ends extrapolated) linearly between the published
        contexts at ``max_length``; without it the largest published context, 384K, is taken.
        """
        constants = _constants(profile, model)
        _check_cluster(profile, cluster)
        parameters = interpolate(constants.parameters_gi, max_length or DEFAULT_CONTEXT)
        budget = profile.budget_gib if budget_gib is None else budget_gib
        listed = (1, *profile.bandwidth_mib_per_ms)
        degrees = [size for size in family.sizes if size in listed and size <= constants.heads]
        return cls(
            profile,
            constants,
            budget_bytes=math.floor(budget * 1024 * MIB),
            state_bytes=math.ceil(profile.state_bytes_per_parameter * parameters * GI / shard_ranks),
            shapes=tuple(GroupShape(degree, 1) for degree in degrees),
        )

    @property
    def matmul_share(self) -> float:
        """Share of ``linear`` that is matrix products; the constants do not tell, so all of it."""
        return 1.0

    @property
    def pad_multiple(self) -> int:
        """Lengths are rounded up to a multiple of this many tokens."""
        return self.profile.granule

    @property
    def policies(self) -> tuple[MemoryPolicy, ...]:
        """One: measured with one checkpointing setting, gradients reduced every round."""
        return (MemoryPolicy(Checkpoint.PROFILE, Reduce.ROUND),)

    def fixed_bytes(self, policy: MemoryPolicy) -> int:
        """Bytes of a rank before any token."""
        return self.state_bytes

    def token_bytes(self, policy: MemoryPolicy) -> float:
        """Activation bytes per token on a rank."""
        return self.constants.mib_per_token * MIB

    def fixed_ns(self, shape: GroupShape, policy: MemoryPolicy, reach: GroupTraffic) -> dict[str, float]:
        """ns of a group before any document."""
        return {"fixed": self.constants.fixed_ms * 1e6}

    def token_ns(self, shape: GroupShape, policy: MemoryPolicy, reach: GroupTraffic) -> dict[str, float]:
        """ns per token, part by part, attention apart."""
        model, degree = self.constants, shape.degree
        exchange = 0.0
        if degree > 1:
            volume = self.profile.exchange_bytes * model.layers * model.hidden
            exchange = volume / MIB / (degree * self._bandwidth(shape, reach)) * 1e6  # ms -> ns
        return {"linear": model.linear_ms * 1e6 / degree, "ulysses": exchange}

    def prefix_token_ns(self, shape: GroupShape, policy: MemoryPolicy, reach: GroupTraffic) -> dict[str, float]:
        """ns per token in front of a piece: nothing, since the published groups have no ring."""
        return {}

    def flows(self, shape: GroupShape, policy: MemoryPolicy, reach: GroupTraffic) -> tuple[Flow, Flow, Flow]:
        """Occupancy of cards and links: the published model has none."""
        return Flow(), Flow(), Flow()

    def layout_token_ns(self, policy: MemoryPolicy, remap: Remap) -> dict[str, tuple[float, float]]:
        """ns per token of a rank, by part: (in the linear layout, in the attention layout)."""
        raise self._no_layouts()

    def remap_times(self, work: StageMicroBatch, attention: Layout, linear: Layout) -> RemapTimes:
        """Price the change between the two layouts of a round."""
        raise self._no_layouts()

    def _no_layouts(self) -> SeqloomError:
        return SeqloomError(
            f"profile {self.profile.name} has no constants for a second layout of tokens; "
            "plan without remapping, or leave the profile out"
        )

    def route(self, shape: GroupShape, ranks: Sequence[int], tokens: int) -> Route | None:
        """No route: the published model has no links to spread over."""
        return None

    def _bandwidth(self, shape: GroupShape, reach: GroupTraffic) -> float:
        """MiB/ms of the degree; a small group astride two nodes gets that of the least degree that crosses."""
        table = self.profile.bandwidth_mib_per_ms
        if shape.ring > 1 or shape.degree not in table:
            legal = ", ".join(str(degree) for degree in (1, *table))
            raise SeqloomError(
                f"profile {self.profile.name} has no constants for a group of ulysses {shape.ulysses} x ring "
                f"{shape.ring}; use Ulysses of degree {legal}, or leave the profile out"
            )
        crossing = [degree for degree in table if degree > self.profile.node_size]
        astride = reach.ulysses.left > 0 and shape.degree <= self.profile.node_size
        return table[min(crossing)] if astride and crossing else table[shape.degree]

    def attention_ns(self, lengths: np.ndarray, ring: int, policy: MemoryPolicy) -> np.ndarray:
        """float64[n] ns of all heads of each document on one rank."""
        return self.constants.quadratic_ms * 1e6 * (lengths * lengths)

    def kernel_call_ns(self, lengths: np.ndarray, ring: int, policy: MemoryPolicy) -> np.ndarray:
        """float64[n] ns per document however short: the published model has none."""
        return np.zeros(len(lengths))

    def prefix_ns(self, prefix: np.ndarray, shape: GroupShape, policy: MemoryPolicy) -> np.ndarray:
        """float64[n] ns of a piece because tokens are in front of it: the published model has none."""
        return np.zeros(len(prefix))

    @property
    def solo_time_ratio(self) -> float:
        """A rank's time while all others wait, of that while all are busy: published ranks share nothing."""
        return 1.0

    def split_overhead_ns(self, layers: int) -> int:
        """ns of splitting a unit's backward: the published model has no halves."""
        return 0

    def attention_share(self, shape: GroupShape) -> float:
        """The share of ``attention`` that falls on one rank of the group."""
        return 1.0 / shape.degree

    def step_overhead(self, policy: MemoryPolicy) -> float:
        """ns once per step: the published model has none."""
        return 0.0

    def step_communication(self, policy: MemoryPolicy) -> float:
        """ns of that on the links."""
        return 0.0


def interpolate(points: tuple[tuple[int, float], ...], x: float) -> float:
    """Piecewise linear through ``points``; the end segments go on beyond the ends."""
    last = len(points) - 2
    i = min(max(sum(x >= knot for knot, _ in points) - 1, 0), last)
    (x0, y0), (x1, y1) = points[i], points[i + 1]
    return y0 + (y1 - y0) * ((x - x0) / (x1 - x0))


def _constants(profile: AdditiveProfile, model: ModelSpec) -> AdditiveModel:
    """The profile's entry for this model, provided that it is the same model."""
    if model.name not in profile.models:
        raise SeqloomError(
            f"{unknown_name(f'model for profile {profile.name}:', model.name, profile.models)} "
            f"(this profile holds published constants of {', '.join(profile.models)} only; "
            "leave the profile out to price another model)"
        )
    entry = profile.models[model.name]
    for field in ("layers", "hidden", "heads"):
        here, there = getattr(model, field), getattr(entry, field)
        if here != there:
            raise SeqloomError(
                f"profile {profile.name} holds constants of a {model.name} with {field} {there}, "
                f"this one has {here}; leave the profile out to price it"
            )
    return entry


def _check_cluster(profile: AdditiveProfile, cluster: Cluster) -> None:
    """Published bandwidths are by degree, so nodes must be like the authors'; a lone smaller node will do."""
    size = profile.node_size
    if not cluster.device.name.lower().startswith(profile.device.lower()):
        raise SeqloomError(
            f"profile {profile.name} was measured on {profile.device}, not {cluster.device.name}; "
            f"take a cluster such as 8x{size}x{profile.device}-40G, or leave the profile out"
        )
    if cluster.gpus_per_node != size and not (cluster.nodes == 1 and cluster.gpus_per_node < size):
        raise SeqloomError(
            f"profile {profile.name} was measured on nodes of {size} GPUs, this cluster has nodes of "
            f"{cluster.gpus_per_node}; take any number of nodes of {size}, one node of at most {size}, "
            "or leave the profile out"
        )
