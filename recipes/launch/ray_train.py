"""Trains on the nodes of a Ray cluster: Ray Train starts and connects the ranks, Seqloom trains in them.

    pip install "ray[default,train]"
    python recipes/launch/ray_train.py recipes/qwen3-8xh200.toml --workers 16 --gpu --set plan.cluster=2x8xH200

All nodes need the same installation, and config, data and run.output at the same paths of a shared file system.
"""

import argparse
import os
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train_rank(options: dict[str, Any]) -> None:
    """Train as a rank: a worker of Ray, which has chosen the GPU and made the process group."""
    from seqloom.train import model_family_of
    from seqloom.train.config import Config
    from seqloom.train.launch import train_in_process_group

    os.chdir(options["folder"])  # to which paths on the command line are relative
    config = Config.load(options["config"], options["overrides"])
    train_in_process_group(config, model_family=model_family_of(config))


def main() -> None:
    """Start the ranks and wait for them."""
    parser = argparse.ArgumentParser(description="Train on a Ray cluster.")
    parser.add_argument("config", help="a training config, .toml")
    parser.add_argument("--workers", type=int, required=True, help="ranks, over all nodes")
    parser.add_argument("--gpu", action="store_true", help="give every rank a GPU")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="section.key=value")
    given = parser.parse_args()
    # plans change the sizes of buffers from step to step, which fragments fixed segments of GPU memory
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    ray.init(runtime_env={"env_vars": {"PYTORCH_ALLOC_CONF": allocator}})
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={"config": given.config, "overrides": given.overrides, "folder": os.getcwd()},
        # tensors on GPUs travel by NCCL, those of the host by gloo; Ray alone would choose one of the two
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if given.gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpu),
        # after a failure Ray starts all ranks again, which go on from the latest checkpoint in run.output
        run_config=RunConfig(failure_config=FailureConfig(max_failures=2)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
