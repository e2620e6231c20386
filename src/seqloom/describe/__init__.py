"""Inputs of a plan: sequence lengths, cluster and model."""

from seqloom.describe.batch import Batch, BatchStatistics, Sequence, batches_by_count, batches_by_tokens, drop_longer
from seqloom.describe.cluster import CLUSTERS, DEVICES, Cluster, Device, Link
from seqloom.describe.huggingface import model_from_config
from seqloom.describe.lengths import MAX_LENGTH, lengths_from, read_lengths
from seqloom.describe.model import MODELS, Adapters, ModelSpec
from seqloom.describe.samplers import SAMPLERS, Sampler, sample, sampler

__all__ = [
    "CLUSTERS",
    "DEVICES",
    "MAX_LENGTH",
    "MODELS",
    "SAMPLERS",
    "Adapters",
    "Batch",
    "BatchStatistics",
    "Cluster",
    "Device",
    "Link",
    "ModelSpec",
    "Sampler",
    "Sequence",
    "batches_by_count",
    "batches_by_tokens",
    "drop_longer",
    "lengths_from",
    "model_from_config",
    "read_lengths",
    "sample",
    "sampler",
]
