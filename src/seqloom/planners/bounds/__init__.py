"""A proven lower bound on the time of a step: one number for all planners.

Whatever the plan, three things hold, and the bound is the best of what follows from them.

*Work.* A document at degree ``d`` keeps ``d`` ranks busy for its cost, and only degrees that hold it and finish in time
are open to it. All ranks together have ``ranks x step`` rank-nanoseconds. Other ranks may take over the linear part of
it, but somebody has to do it.

*Rounds.* A round costs a rank something before its first document and holds only so many tokens, so every document also
pays for the part of a rank's memory that it fills. Dual feasible functions round these parts up without ever counting a
round twice: two documents that each fill more than half of a rank cannot share it.

*Lock step.* Where all ranks run all rounds together (full sharding), the longest round is at least as long as its
longest document, and holds only one round's worth of tokens; what it cannot hold takes further rounds. A long round is
cheap for long documents and idle for the rest, and the bound is the best compromise.
"""

from __future__ import annotations

from seqloom.planners.bounds.lower import lower_bound, variants_bound

__all__ = ["lower_bound", "variants_bound"]
