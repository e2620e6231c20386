"""A reference transformer on packed tokens, whose attention goes through the engine."""

from seqloom.models.details import Details
from seqloom.models.rope import Rope, Stretch
from seqloom.models.transformer import Transformer

__all__ = ["Details", "Rope", "Stretch", "Transformer"]
