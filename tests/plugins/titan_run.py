"""Three steps of torchtitan's trainer on CPUs, plain or planned; the first rank prints losses and gradient norms.

torchtitan takes an accelerator or "cuda". It reads its device from one place, which this script sets to the CPU.
Of its attentions only `ScaledDotProductAttention` has a backward there. It knows no documents, so the plain run has
each document in a row of its own.
"""

import argparse
import dataclasses
import json
import os
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torchtitan.tools.utils as device
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


class CPU:
    """What torchtitan asks of a module such as `torch.cuda`."""

    set_device, device_count, synchronize = torch.cpu.set_device, torch.cpu.device_count, torch.cpu.synchronize
    current_device = staticmethod(lambda: 0)
    get_device_name = staticmethod(lambda device: "CPU")
    get_device_properties = staticmethod(lambda device: SimpleNamespace(total_memory=2**30))
    memory_stats = staticmethod(lambda device: {})
    reset_peak_memory_stats = empty_cache = staticmethod(lambda: None)


device.device_type, device.device_module = "cpu", CPU

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from seqloom.errors import SeqloomError  # noqa: E402
from seqloom.integrations.torchtitan import PlannedDataLoader, _Rows, check_config, planned  # noqa: E402

ROWS = (
    ((256,), (200, 56), (10, 120, 126), (1, 2, 3, 250)),
    ((3, 253), (90, 166), (255, 1), (64, 64, 64, 64)),
    ((100, 100, 56), (256,), (8, 8, 240), (30, 200, 26)),
)
"""Documents of the rows of every step; ten in a step."""
STEPS, TOKENS, DOCUMENTS = len(ROWS), 256, 10


def document(step: int, number: int, length: int) -> torch.Tensor:
    """Return tokens of a document and the one after it."""
    generator = torch.Generator().manual_seed(1_000 * step + number)
    return torch.randint(2_048, (length + 1,), generator=generator)


class Documents(BaseDataLoader):
    """Rows of the table above, or each of their documents as a row."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        one_each: bool = False

    def __init__(self, config, **options):
        self.one_each, self.read = config.one_each, 0

    def __iter__(self):
        rows = []
        for step, packs in enumerate(ROWS):
            lengths = [each for pack in packs for each in pack]
            found = [document(step, number, length) for number, length in enumerate(lengths)]
            for pack in [[each] for each in lengths] if self.one_each else packs:
                mine, found = found[: len(pack)], found[len(pack) :]
                columns = [each[:-1] for each in mine], [torch.arange(len(each) - 1) for each in mine]
                labels = torch.cat([each[1:] for each in mine])
                rows.append(([torch.cat(each)[None] for each in columns], labels[None]))
        for (ids, positions), labels in rows[self.read :]:
            self.read += 1
            yield {"input": ids, "positions": positions}, labels

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state_dict):
        self.read = state_dict["read"]


class NoTokenizer(BaseTokenizer):
    """Nothing is to be tokenized."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **options):
        super().__init__()

    def encode(self, *args, **options):
        raise NotImplementedError

    decode = get_vocab_size = encode


def trainer_config(rows: int, *, one_each: bool = False, chunks: int = 0, recompute: bool = False) -> Trainer.Config:
    """Return a config of two layers, with so many rows in a step."""
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    loss = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    training = {"mixed_precision_param": "float32", "disable_cuda_graphs": True, "steps": STEPS, "seq_len": TOKENS}
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=loss) if chunks else loss,
        dataloader=Documents.Config(one_each=one_each),
        tokenizer=NoTokenizer.Config(),
        optimizer=default_adamw(lr=1e-2),
        training=TrainingConfig(local_batch_size=1, global_batch_size=rows, **training),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=FullAC.Config() if recompute else None,
        debug=DebugConfig(seed=0),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
    )


def set_weights(model: torch.nn.Module) -> None:
    """Give every parameter values that follow from its name, on any number of ranks."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name.replace("_checkpoint_wrapped_module.", ""))))
            values = 0.1 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1)
            if isinstance(parameter, DTensor):
                values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
            parameter.copy_(values)


def run(trainer: Trainer, stop_after: int | None) -> list[tuple[float, float]]:
    """Train as `Trainer.train` does, but for the time limits that it sets by a function of torch's next release."""
    model = trainer.model_parts[0]
    set_weights(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
    found = []
    trainer.metrics_processor.log = lambda step, loss, largest, norm, *rest, **more: found.append((loss, float(norm)))
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(1, STEPS + 1):
        trainer.step = step
        trainer.train_step(batches)
        if step == stop_after:
            trainer.dataloader = resumed(trainer.dataloader, trainer.config)
            batches = trainer.batch_generator(trainer.dataloader)
    return found


def resumed(before: PlannedDataLoader, config: Trainer.Config) -> PlannedDataLoader:
    """Return another data loader that has the state of this one."""
    loader = config.dataloader.build(dp_world_size=dist.get_world_size(), dp_rank=dist.get_rank())
    loader.open(before._cost, before._planner, before._count, before._multiple, before._device)
    loader.load_state_dict(before.state_dict())
    return loader


def print_refusals() -> None:
    """Print what is said about settings that would have another result."""
    for name, changes in {
        "parallelism": {"context_parallel_degree": 2},
        "compile": {"enable": True},
        "training": {"disable_cuda_graphs": False},
        "validator": {"enable": True},
        "model": {},
        "window": {},
        "data": {},
    }.items():
        config = trainer_config(4)
        try:
            if changes:
                setattr(config, name, dataclasses.replace(getattr(config, name), **changes))
            elif name == "model":
                config.model_spec.model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
            elif name == "window":
                layer = config.model_spec.model.layers[1]
                layer.attention.inner_attention = VarlenAttention.Config(window_size=(7, 0))
            else:
                _Rows.of([({"input": torch.zeros(1, 2), "image": torch.zeros(1)}, torch.zeros(1, 2))])
            check_config(planned(config, cluster="1x1xCPU"))
        except SeqloomError as error:
            print(error)


def main() -> None:
    """Print [[loss, norm], ..] of a run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", help="plain, refusals, or a planner")
    parser.add_argument("--chunks", type=int, default=0)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--stop-after", type=int)
    given = parser.parse_args()
    if given.kind == "refusals":
        return print_refusals()
    if given.kind == "plain":
        config = trainer_config(DOCUMENTS, one_each=True)
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    else:
        host = trainer_config(4, chunks=given.chunks, recompute=given.recompute)
        config = planned(host, cluster=f"1x{os.environ['WORLD_SIZE']}xCPU", planner=given.kind)
    found = run(config.build(), given.stop_after)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
