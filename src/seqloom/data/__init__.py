"""Documents for training: from text files to token stores, batches at one global cursor, and the rows a rank reads."""

from seqloom.data.lengths import DocumentLengths, document_lengths
from seqloom.data.megatron import MegatronSource
from seqloom.data.mixture import JoinedSource, Mixture
from seqloom.data.prepare import PrepareCounts, PrepareResult, prepare
from seqloom.data.records import RecordFields
from seqloom.data.rows import RowReader, rank_rows
from seqloom.data.sampler import Batch, Sampler
from seqloom.data.source import IGNORE_INDEX, DocumentSubset, LengthLimitedSource, Source, split_source
from seqloom.data.store import StoreWriter, TokenStore, open_source
from seqloom.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "DocumentLengths",
    "DocumentSubset",
    "JoinedSource",
    "LengthLimitedSource",
    "MegatronSource",
    "Mixture",
    "PrepareCounts",
    "PrepareResult",
    "RecordFields",
    "RowReader",
    "Sampler",
    "Source",
    "StoreWriter",
    "TokenStore",
    "Tokenizer",
    "document_lengths",
    "load_tokenizer",
    "open_source",
    "prepare",
    "rank_rows",
    "split_source",
]
