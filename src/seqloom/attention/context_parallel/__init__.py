"""Context parallelism: attention whose keys and values come from other ranks or from earlier pieces of a document.

ulysses    all-to-all: some tokens of all heads become all tokens of some heads, and back
ring       keys and values go round a ring of ranks, partial results are merged step by step
gather     every rank receives the keys it can see in one exchange
routed     the exchanges of a ring or gather, sent through proxy ranks that use all NICs of a node
kv_cache   keys and values of earlier pieces of a document (Seq1F1B)
overlap    documents of one rank are computed while messages of its other groups are under way

scan_states    states of scans between the pieces of a document, and their gradients
"""

from seqloom.attention.context_parallel.kv_cache import KVCache

__all__ = [
    "KVCache",
]
