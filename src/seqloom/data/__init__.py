"""Documents for training: token stores, batches at one global cursor, and the rows that a rank reads."""

from seqloom.data.megatron import MegatronSource
from seqloom.data.prepare import Counts, Fields, Prepared, prepare
from seqloom.data.sampler import Batch, Sampler, Steps, rank_rows
from seqloom.data.source import IGNORED, Limited, Source
from seqloom.data.store import StoreWriter, TokenStore, open_source
from seqloom.data.tokenizer import Tokenizer, load_tokenizer

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
