"""Documents for training: token stores, batches at one global cursor, and the rows that a rank reads."""

from __future__ import annotations

from seqloom.data.limit import Limited
from seqloom.data.megatron import MegatronSource
from seqloom.data.opening import open_source
from seqloom.data.prepare import Counts, Prepared, prepare
from seqloom.data.records import Fields
from seqloom.data.rows import rank_rows
from seqloom.data.sampler import Batch, Sampler, Steps
from seqloom.data.source import IGNORED, Source
from seqloom.data.store import TokenStore
from seqloom.data.tokenizer import Tokenizer, load_tokenizer
from seqloom.data.writer import StoreWriter

__all__ = [
    "IGNORED",
    "Batch",
    "Counts",
    "Fields",
    "Limited",
    "MegatronSource",
    "Prepared",
    "Sampler",
    "Source",
    "Steps",
    "StoreWriter",
    "TokenStore",
    "Tokenizer",
    "load_tokenizer",
    "open_source",
    "prepare",
    "rank_rows",
]
