"""recipes/launch, started in small; tests/cluster runs torchrun.sh, and tests/plugins ray_train.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import parse_args

from seqloom.train.logging import read_steps
from seqloom.train.run_folder import Manifest, latest_checkpoint
from support.runs import small_run
from support.scripts import run_script

pytestmark = pytest.mark.distributed
RECIPES = Path(__file__).parents[2] / "recipes"
LAUNCH, RECIPE = RECIPES / "launch", str(RECIPES / "tiny-cpu.toml")

SRUN = """#!/usr/bin/env bash
# Slurm's srun on two nodes of one task, both of which are this machine.
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost,other SLURM_STEP_TASKS_PER_NODE="1(x2)"
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_NODEID=$rank SLURM_LOCALID=0 "$@" &
done
wait -n && wait -n
"""

GUEST = """
import os, threading
import torch.distributed as dist
from seqloom.errors import SeqloomError
from seqloom.train.config import Config
from seqloom.train.launch import train_in_process_group

os.environ |= {{"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": "2"}}
dist.init_process_group("gloo")
said = []

def be_a_rank():
    try:
        train_in_process_group(Config.load({recipe!r}, {refused!r}), show=False)
    except SeqloomError as error:
        said.append(str(error))
    said.append(train_in_process_group(Config.load({recipe!r}, {overrides!r}), show=False))

thread = threading.Thread(target=be_a_rank)
thread.start()
thread.join()
print(*said, dist.is_initialized(), sep="\\n")
"""


def losses(output: Path) -> list[float]:
    return [record.loss for record in read_steps(output / "metrics.jsonl")]


@pytest.fixture(scope="module")
def on_two_ranks(seqloom_here, tmp_path_factory) -> list[float]:
    """Losses of the small run, started by Seqloom itself."""
    output = tmp_path_factory.mktemp("runs") / "here"
    done = seqloom_here("train", RECIPE, *small_run(output), "--ranks", "2")
    assert done.returncode == 0, done.stderr
    return losses(output)


@pytest.mark.slow
def test_slurm_runs_the_script(on_two_ranks, tmp_path):
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    script = ["bash", str(LAUNCH / "slurm.sbatch"), RECIPE, *small_run(tmp_path / "run")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(on_two_ranks, rel=1e-12)
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert Manifest.read(checkpoint).extra["config"]["plan"]["cluster"] == "2x1xCPU", "the nodes of Slurm"


def test_a_thread_trains_in_a_process_group_of_its_host(fork_server, on_two_ranks, tmp_path):
    """As Ray Train does it: the group is the host's and stays, and errors are raised."""
    overrides, refused = (small_run(tmp_path / "run", *changes)[1::2] for changes in ((), ("plan.cluster=1x3xCPU",)))
    script = tmp_path / "guest.py"
    script.write_text(GUEST.format(recipe=RECIPE, overrides=overrides, refused=refused))
    error, summary, initialised = run_script(script, 2, tmp_path).splitlines()
    assert error.startswith("plan.cluster = '1x3xCPU' has 3 ranks, the run has 2")
    assert f"'final_loss': {on_two_ranks[-1]}" in summary and initialised == "True"
    assert losses(tmp_path / "run") == on_two_ranks


# ---- Kubernetes

PYTORCHJOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "nprocPerNode": str,
        "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int},
        "pytorchReplicaSpecs": {
            kind: {
                "replicas": int,
                "restartPolicy": str,
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": str,
                                "image": str,
                                "command": [str],
                                "args": [str],
                                "env": [{"name": str, "value": str}],
                                "resources": {"limits": {"nvidia.com/gpu": int}},
                                "volumeMounts": [{"name": str, "mountPath": str}],
                            }
                        ],
                        "volumes": [
                            {
                                "name": str,
                                "persistentVolumeClaim": {"claimName": str},
                                "emptyDir": {"medium": str},
                            }
                        ],
                    }
                },
            }
            for kind in ("Master", "Worker")
        },
    },
}
"""Fields of the PyTorchJob of kubeflow.org/v1 that the recipe uses, with their types."""


def check_fields(content: object, schema: object, where: str = "") -> None:
    """Refuse a field that the schema does not have, or of another type."""
    if isinstance(schema, dict):
        assert isinstance(content, dict) and content.keys() <= schema.keys(), f"{where}: {content}"
        for name, value in content.items():
            check_fields(value, schema[name], f"{where}.{name}")
    elif isinstance(schema, list):
        assert isinstance(content, list) and content, f"{where}: {content}"
        for value in content:
            check_fields(value, schema[0], f"{where}[]")
    else:
        assert type(content) is schema, f"{where} = {content!r}, not {schema}"


@pytest.fixture(scope="module")
def job():
    return yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())


def test_the_job_of_kubernetes_has_the_fields_of_a_pytorchjob(job):
    check_fields(job, PYTORCHJOB)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1 <= replicas["Worker"]["replicas"], "what the operator demands"
    for replica in replicas.values():
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod = replica["template"]["spec"]
        container = next(each for each in pod["containers"] if each["name"] == "pytorch")
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
        volumes = [volume["name"] for volume in pod["volumes"]]
        assert [mount["name"] for mount in container["volumeMounts"]] == volumes


def test_torchrun_understands_the_variables_of_the_operator(job, monkeypatch):
    replicas = job["spec"]["pytorchReplicaSpecs"]
    nodes = sum(replica["replicas"] for replica in replicas.values())
    told = {"NNODES": nodes, "NPROC_PER_NODE": job["spec"]["nprocPerNode"], "NODE_RANK": 1}
    for name, value in {**told, "MASTER_ADDR": "seqloom-master-0", "MASTER_PORT": 23456}.items():
        monkeypatch.setenv(f"PET_{name}", str(value))
    container = replicas["Worker"]["template"]["spec"]["containers"][0]
    command, *words = [*container["command"], *container["args"]]
    found = parse_args(words)
    assert command == "torchrun" and found.module and found.training_script == "seqloom"
    assert found.training_script_args[0] == "train"
    assert (found.nnodes, found.nproc_per_node, found.node_rank) == (str(nodes), "8", 1)
    assert (found.rdzv_backend, found.master_addr, found.master_port) == ("static", "seqloom-master-0", 23456)
    assert f"plan.cluster={nodes}x8xH200" in found.training_script_args
