"""Every reader of files, with valid files to begin from: what users, other programs and broken disks may hand in."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save

from fuzz.mutations import mutate_bytes, mutate_json, mutate_lines, mutate_text_file
from seqloom.api import cost_model
from seqloom.attention.kernels.dispatch import KernelTable, built_in_table
from seqloom.cost import CostModel, Profile
from seqloom.cost.profile import parse_profile
from seqloom.data import StoreWriter, open_source
from seqloom.data.prepare import prepare
from seqloom.data.tokenizers import load_tokenizer
from seqloom.describe import Cluster, ModelSpec
from seqloom.describe.lengths import read_lengths
from seqloom.models import Transformer
from seqloom.models.files import parameter_reader
from seqloom.plan import Plan
from seqloom.planners import make_plan
from seqloom.planners.hydraulis import (
    ParallelConfig,
    PipelineConfig,
    Strategy,
    strategies_from_json,
    strategies_to_json,
)
from seqloom.profiling.replay import dumped_step, load_dump
from seqloom.schedules import build_schedule
from seqloom.schedules.schedule import Schedule, to_csv
from seqloom.train.checkpoint import TensorReader, UnreadableMetadata
from seqloom.train.config import Config
from seqloom.train.logging import read_steps
from seqloom.train.run_folder import Manifest
from seqloom.train.step_checks import Dump
from support.tiny_specs import TINY

ROOT = Path(__file__).parents[2]
Mutate = Callable[[bytes, random.Random], bytes]
Files = dict[str, bytes]
as_json, as_lines = mutate_text_file(mutate_json), mutate_text_file(mutate_lines)


@dataclass(frozen=True)
class Reader:
    """A reader of some files in a folder, one of which is changed at a time.

    Attributes:
        seeds: valid sets of files by name.
        mutate: how each file is changed, by its suffix; others as bytes.
        read: reads what is in a folder, given the seed's number.
    """

    name: str
    seeds: tuple[Files, ...]
    mutate: dict[str, Mutate]
    read: Callable[[Path, int], Any]

    def case(self, draw: random.Random, folder: Path) -> int:
        """Write a changed set of files; return the number of the seed."""
        number = draw.randrange(len(self.seeds))
        seed = self.seeds[number]
        changed = draw.choice([*seed])
        for name, data in seed.items():
            path = folder / name
            path.write_bytes(self.mutate.get(path.suffix, mutate_bytes)(data, draw) if name == changed else data)
        return number


def readers(folder: Path) -> list[Reader]:
    """Return all readers; valid files are made in a folder."""
    makers = (_lengths, _configs, _plans, _profiles, _clusters, _models, _schedules, _strategies, _stores, _megatron)
    makers += (_safetensors, _checkpoints, _dumps, _metrics, _kernel_tables, _records)
    return [make(folder) for make in makers]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def _lengths(folder: Path) -> Reader:
    numbers = [5, 700, 33, 1, 4_096]
    npy, npz, parquet = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(npy, np.array(numbers))
    np.savez(npz, length=np.array(numbers), other=np.ones(3))
    pq.write_table(pa.table({"length": numbers, "text": [str(n) for n in numbers]}), parquet)
    seeds = (
        {"lengths.txt": "".join(f"{n}\n" for n in numbers).encode()},
        {"lengths.jsonl": "".join(json.dumps({"length": n, "text": "ab c"}) + "\n" for n in numbers).encode()},
        {"lengths.csv": ("length,name\n" + "".join(f"{n},x\n" for n in numbers)).encode()},
        {"lengths.npy": npy.getvalue()},
        {"lengths.npz": npz.getvalue()},
        {"lengths.parquet": parquet.getvalue()},
    )

    def read(at: Path, number: int) -> Any:
        name = next(iter(seeds[number]))
        return read_lengths(at / name, column=None if name.endswith((".txt", ".npy")) else "length")

    return Reader("lengths", seeds, {".txt": as_lines, ".jsonl": as_lines, ".csv": as_lines}, read)


def _configs(folder: Path) -> Reader:
    recipes = [path for path in sorted((ROOT / "recipes").glob("*.toml")) if "\nhuggingface" not in path.read_text()]
    seeds = tuple({"run.toml": path.read_bytes()} for path in recipes)

    def read(at: Path, number: int) -> None:
        (at / "models").mkdir(exist_ok=True)
        (at / "models" / "tiny.toml").write_text(TINY)
        (at / "models" / "tiny-moe.toml").write_bytes((ROOT / "recipes/models/tiny-moe.toml").read_bytes())
        Config.load(at / "run.toml", [])

    return Reader("configs", seeds, {".toml": as_lines}, read)


def _drawn_plans() -> list[Plan]:
    cost, staged = cost_model("2x4xH200", "qwen3-0.6b"), cost_model("1x4xH200", "qwen3-0.6b", stages=2)
    lengths = np.array([900, 40_000, 7, 2_000, 512, 6_000])
    return [
        make_plan("flex", lengths, cost),
        make_plan("zones", lengths, cost),
        make_plan("pipeline:2", lengths, staged),
    ]


def _plans(folder: Path) -> Reader:
    plans = _drawn_plans()
    texts = [plan.to_text() for plan in plans]
    seeds = tuple({"plan.json": plan.to_json().encode()} for plan in plans)
    seeds += tuple({"plan.txt": text.encode()} for text in texts)

    def read(at: Path, number: int) -> None:
        is_json = number < len(plans)
        text = _text(at / ("plan.json" if is_json else "plan.txt"))
        (Plan.from_json(text) if is_json else Plan.from_text(text)).validate()

    return Reader("plans", seeds, {".json": as_json, ".txt": as_lines}, read)


def _profiles(folder: Path) -> Reader:
    names = ("h200", "cpu", "flexsp-a100")
    folder_of = Path(Profile.__module__.replace(".", "/")).parent
    files = [(ROOT / "src" / folder_of / "profiles" / f"{name}.json").read_bytes() for name in names]
    models = [("1x8xH200", "qwen3-0.6b"), ("1x4xCPU", "qwen3-0.6b"), ("8x8xA100-40G", "gpt-7b")]

    def read(at: Path, number: int) -> None:
        profile = parse_profile(_text(at / "profile.json"), "profile")
        cluster, model = models[number]
        CostModel(Cluster.parse(cluster), ModelSpec.load(model), profile)

    return Reader("profiles", tuple({"profile.json": each} for each in files), {".json": as_json}, read)


def _clusters(folder: Path) -> Reader:
    short = {"nodes": 2, "gpus_per_node": 4, "device": "H200", "nics_per_node": 2, "host_gib": 512.0}
    link = {"name": "link", "gb_s": 100.0, "latency_us": 2.0}
    device = {"name": "H200", "memory_gib": 139.0, "peak_tflops": 989.0, "hbm_gb_s": 4800.0}
    long = short | {"device": device, "intra": link, "nic": link, "nic_of_gpu": [0, 0, 1, 1], "name": "own"}
    seeds = tuple({"cluster.json": json.dumps(each).encode()} for each in (short, long))
    model = ModelSpec.load("qwen3-0.6b")

    def read(at: Path, number: int) -> None:
        cluster = Cluster.parse(str(at / "cluster.json"))
        if cluster.ranks <= 64:
            CostModel(cluster, model, "h200")

    return Reader("clusters", seeds, {".json": as_json}, read)


def _models(folder: Path) -> Reader:
    llama = {"model_type": "llama", "vocab_size": 257, "hidden_size": 64, "intermediate_size": 128}
    llama |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    qwen = llama | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    qwen |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 16, "sliding_window": None}
    deepseek = json.loads((ROOT / "recipes" / "models" / "tiny-deepseek" / "config.json").read_text())
    seeds = tuple({"config.json": json.dumps(each).encode()} for each in (llama, qwen, deepseek))
    seeds += ({"model.toml": TINY.encode()},)

    def read(at: Path, number: int) -> None:
        spec = ModelSpec.load(str(at / ("config.json" if number < 3 else "model.toml")))
        if spec.layers <= 128:
            CostModel(Cluster.parse("1x4xH200"), spec)

    return Reader("models", seeds, {".json": as_json, ".toml": as_lines}, read)


def _schedules(folder: Path) -> Reader:
    texts = [to_csv(build_schedule(name, 4, 4).rows) for name in ("1f1b", "zb-h1")]
    seeds = tuple({"schedule.csv": text.encode()} for text in texts)
    return Reader(
        "schedules",
        seeds,
        {".csv": as_lines},
        lambda at, _: Schedule.from_csv(_text(at / "schedule.csv")),
    )


def _strategies(folder: Path) -> Reader:
    mixed = Strategy(
        (
            PipelineConfig(ParallelConfig(stages=2, tensor=2), ranks=(0, 1, 2, 3), max_tokens=32768),
            PipelineConfig(ParallelConfig(stages=1, tensor=1, ulysses=2), ranks=(4, 5), max_tokens=8192),
        )
    )
    seeds = ({"strategies.json": strategies_to_json((mixed,)).encode()},)

    def read(at: Path, number: int) -> Any:
        return strategies_from_json(_text(at / "strategies.json"))

    return Reader("strategies", seeds, {".json": as_json}, read)


def _stores(folder: Path) -> Reader:
    with StoreWriter(folder / "store", vocabulary=257) as writer:
        for length in (5, 30, 2, 64):
            writer.add(np.arange(length) % 257)
    files = {path.name: path.read_bytes() for path in (folder / "store").iterdir()}

    def read(at: Path, number: int) -> None:
        _read_documents(open_source(at, vocabulary=257))

    return Reader("stores", (files,), {".json": as_json}, read)


def _read_documents(source: Any) -> None:
    for document in range(min(len(source), 4)):
        source.rows(document, 0, min(int(source.lengths[document]), 64))


def _megatron(folder: Path) -> Reader:
    lengths = np.array([5, 3, 8], dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) * 4
    head = b"MMIDIDX\x00\x00" + np.int64(1).tobytes() + np.uint8(4).tobytes()
    counts = np.int64(len(lengths)).tobytes() + np.int64(len(lengths) + 1).tobytes()
    index = head + counts + lengths.tobytes() + starts.tobytes() + np.arange(4, dtype=np.int64).tobytes()
    files = {"data.idx": index, "data.bin": np.arange(16, dtype=np.int32).tobytes()}
    return Reader("megatron", (files,), {}, lambda at, _: _read_documents(open_source(at / "data", vocabulary=257)))


def _safetensors(folder: Path) -> Reader:
    (folder / "tiny.toml").write_text(TINY)
    model = Transformer(ModelSpec.load(str(folder / "tiny.toml")), device="meta")
    tensors = {name: torch.zeros(each.shape) for name, each in model.named_parameters()}
    data = save(tensors)
    head = 8 + int.from_bytes(data[:8], "little")

    def mutate(whole: bytes, draw: random.Random) -> bytes:
        """Change the header: the values are any bytes."""
        return mutate_bytes(whole[:head], draw) + whole[head:]

    def read(at: Path, number: int) -> None:
        rows = parameter_reader(model, at / "model.safetensors")
        for name in tensors:
            rows(name, slice(0, 2))

    return Reader("safetensors", ({"model.safetensors": data},), {".safetensors": mutate}, read)


def _checkpoints(folder: Path) -> Reader:
    dcp.save({"model": {"weight": torch.ones(4, 2)}}, checkpoint_id=folder / "checkpoint", no_dist=True)
    manifest = Manifest(3, {"weight": "float32[4, 2]"}, {}, {"sampler": {}}, "2.13.0").to_json()
    files = {".metadata": (folder / "checkpoint" / ".metadata").read_bytes(), "seqloom.json": manifest.encode()}

    def read(at: Path, number: int) -> None:
        Manifest.read(at).check(at, {"model": {"weight": "float32[4, 2]"}})
        with suppress(UnreadableMetadata):  # `Checkpoints.load` makes a SeqloomError of it
            TensorReader(at).read_metadata()

    return Reader("checkpoints", (files,), {".json": as_json}, read)


def _dumps(folder: Path) -> Reader:
    lengths = [5, 30]
    plan = make_plan("static:1", np.array(lengths), cost_model("1x2xH200", "qwen3-0.6b"))
    ids = [[*range(length)] for length in lengths]
    labels = [[*each[1:], -100] for each in ids]
    config = Config.load(ROOT / "recipes" / "tiny-cpu.toml", []).as_dict()
    dump = Dump(3, "the loss is nan", plan.hash, plan.to_json(), 7, [11, 4], ids, labels, config)
    manifest = Manifest(3, {}, {}, asdict(dump), "2.13.0").to_json()

    def read(at: Path, number: int) -> None:
        found, _ = load_dump(at)
        dumped_step(at, found, vocabulary=257)

    return Reader("dumps", ({"seqloom.json": manifest.encode()},), {".json": as_json}, read)


def _metrics(folder: Path) -> Reader:
    step = {"step": 1, "loss": 5.5, "tokens": 100, "lr": 1e-3, "grad_norm": 1.0, "measured_ms": 3.0}
    lines = [step | {"step": number} for number in (1, 2, 3)] + [{"step": 3, "note": "text"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return Reader(
        "metrics",
        ({"metrics.jsonl": text.encode()},),
        {".jsonl": as_lines},
        lambda at, _: read_steps(at / "metrics.jsonl"),
    )


def _kernel_tables(folder: Path) -> Reader:
    path = folder / "kernels.json"
    built_in_table().save(path)
    return Reader(
        "kernel tables",
        ({"kernels.json": path.read_bytes()},),
        {".json": as_json},
        lambda at, _: KernelTable.load(at / "kernels.json"),
    )


def _records(folder: Path) -> Reader:
    texts = [{"text": "ab c"}, {"text": "d é"}, {"text": ""}]
    chats = [{"prompt": "ab", "completion": "c"}, {"prompt": "d", "completion": "é"}]
    ids = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    parquet = io.BytesIO()
    pq.write_table(pa.table({"text": ["ab", "c"]}), parquet)
    seeds = tuple(
        {"records.jsonl": "".join(json.dumps(r) + "\n" for r in each).encode()} for each in (texts, chats, ids)
    )
    seeds += ({"records.txt": b"one\n\ntwo\n"}, {"records.parquet": parquet.getvalue()})

    tokenizer = load_tokenizer("bytes")

    def read(at: Path, number: int) -> None:
        shutil.rmtree(at / "out", ignore_errors=True)
        prepare(
            [at / next(iter(seeds[number]))], at / "out", tokenizer=None if number == 2 else tokenizer, vocabulary=257
        )

    return Reader("records", seeds, {".jsonl": as_lines, ".txt": as_lines}, read)
