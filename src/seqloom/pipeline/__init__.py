"""What flows between the stages of a pipeline and what is kept of it: messages, units, the report of a hang."""

from __future__ import annotations

from seqloom.pipeline.borders import Share, ways_of
from seqloom.pipeline.handovers import Handovers
from seqloom.pipeline.kept import Kept
from seqloom.pipeline.mail import Arrival, Mail
from seqloom.pipeline.offload import Offload
from seqloom.pipeline.watch import Progress

__all__ = ["Arrival", "Handovers", "Kept", "Mail", "Offload", "Progress", "Share", "ways_of"]
