"""The linear part of a layer on one GPU, predicted beside measured: how far the analytic profile is off.

Needs torch and a CUDA device; without them it says so and stops. Forward and backward of everything in a Llama layer
but the attention kernel: norms, projections, gated feed-forward, residuals, in bf16, as plain PyTorch modules.

    python benchmarks/gpu_layer.py --cluster 1x8xH200 --out benchmarks/results/gpu_layer.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from record import commit

from seqloom.cost import Profile
from seqloom.cost.compute import Compute
from seqloom.describe import Cluster, ModelSpec
from seqloom.plan import Checkpoint

TOKENS = (2_048, 8_192, 16_384, 32_768, 65_536)


def build_layer(model: ModelSpec):
    import torch
    from torch import nn

    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.RMSNorm(model.hidden), nn.RMSNorm(model.hidden)
            self.qkv = nn.Linear(model.hidden, query + 2 * kv, bias=False)
            self.out = nn.Linear(query, model.hidden, bias=False)
            self.up = nn.Linear(model.hidden, 2 * model.ffn, bias=False)
            self.down = nn.Linear(model.ffn, model.hidden, bias=False)

        def forward(self, x):
            x = x + self.out(self.qkv(self.first(x))[..., :query])
            gate, up = self.up(self.second(x)).chunk(2, dim=-1)
            return x + self.down(nn.functional.silu(gate) * up)

    return Layer().to("cuda", torch.bfloat16)


def measure(layer, tokens: int, hidden: int, repeats: int = 12) -> float:
    """Median ns per token of one forward and backward."""
    import torch

    x = torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        layer(x).sum().backward()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e6 / tokens)
        layer.zero_grad(set_to_none=True)
        x.grad = None
    return statistics.median(times[2:])


def compare(name: str, cluster: Cluster) -> list[dict[str, float]]:
    """Measured and predicted ns per token of one layer of a model, for every number of tokens."""
    model = ModelSpec.load(name)
    compute = Compute.build(Profile.for_device(cluster.device.name), cluster, model, float8=False)
    predicted = compute.linear(Checkpoint.NONE) / model.layers
    layer, rows = build_layer(model), []
    for tokens in TOKENS:
        measured = measure(layer, tokens, model.hidden)
        error = predicted / measured - 1
        rows.append({"tokens": tokens, "measured_ns": measured, "predicted_ns": predicted, "error": error})
        print(f"{name} {tokens:>7} tokens: {measured:8.1f} ns per token, predicted {predicted:8.1f} ({error:+.1%})")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama3-8b,qwen3-4b,llama3-70b", help="presets with commas between")
    parser.add_argument("--cluster", default="1x8xH200", help="names the device")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if find_spec("torch") is None:
        sys.exit("torch is not installed; this benchmark needs it and a CUDA device")
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA device; this benchmark needs one")
    layers = {name: compare(name, Cluster.parse(arguments.cluster)) for name in arguments.models.split(",")}
    if arguments.out:
        result = {
            "benchmark": "gpu_layer",
            "command": f"python benchmarks/gpu_layer.py --models {arguments.models} --cluster {arguments.cluster}",
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit(),
            "hardware": torch.cuda.get_device_name(),
            "libraries": {"torch": torch.__version__},
            "figures": layers,
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
