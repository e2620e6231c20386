"""Memory that a rank holds between the passes of a step."""

from seqloom.attention import KVCache
from seqloom.models.split_backward import WeightGradients


def kv_cache_bytes(kv_cache: KVCache) -> int:
    """Memory of keys, values and gradients that are held now."""
    tensors = [each for cached in kv_cache._documents.values() for each in (cached.kv, cached.gradient)]
    return sum(each.numel() * each.itemsize for each in tensors if each is not None)


def waiting_units(weights: WeightGradients) -> tuple:
    """Units whose W has not run."""
    return tuple(weights._waiting)


def waiting_bytes(weights: WeightGradients) -> int:
    """Memory of what waits for W. An input that several layers share counts once."""
    calls = [call for waiting in weights._waiting.values() for call in waiting]
    storages = [each.untyped_storage() for call in calls for each in (call.input, call.grad_output)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
