"""`invoke import`: files of other engines become jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml

from tests.conftest import Project
from trainkit.base.extras import MissingExtra
from trainkit.cli.config.import_job import ImportOptions, import_job
from trainkit.cli.wrapper import TaskContext

SCRIPT = (
    "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --hidden-size 32"
    " --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --global-batch-size 8"
    " --train-iters 20 --lr 1e-2 --mock-data --vocab-size 128 --tokenizer-type NullTokenizer\n"
)


def test_a_script_is_written_checked_and_planned(project: Project) -> None:
    (project.path / "run_me.sh").write_text(SCRIPT)
    text = (project.path / "jobs.toml").read_text()
    (project.path / "jobs.toml").write_text('include = ["imported.toml"]\n' + text)
    (project.path / "imported.toml").unlink(missing_ok=True)
    said = project.invoke(
        "import", "run_me.sh", "--out", "imported.toml", "--cluster", "here", "--name", "mine"
    )
    assert "wrote" in said.stdout and "nproc_per_node" in said.stdout
    tables = tomli.loads((project.path / "imported.toml").read_text())
    assert tables["jobs"]["mine"]["engine"] == "megatron-lm"
    assert project.document("check")["problems"] == []
    assert project.document("plan", "mine")["feasible"]
    project.invoke("import", "run_me.sh", "--out", "imported.toml", exit=3)


def test_a_file_is_printed_and_what_is_not_taken_with_it(project: Project) -> None:
    (project.path / "Run 1.sh").write_text(SCRIPT.replace("--mock-data", "--mock-data --odd 1"))
    said = project.invoke("import", "Run 1.sh").stdout
    assert "[jobs.run-1]" in said
    assert "# not taken: --odd" in said
    found = project.document("import", "Run 1.sh")
    assert tomli.loads(found["toml"]) == tomli.loads(said)
    assert any("--odd" in each for each in found["not_taken"])


def test_what_cannot_be_imported_is_said(project: Project, tmp_path: Path) -> None:
    assert "cannot be read" in project.invoke("import", "no.sh", exit=3).stderr
    (project.path / "x.sh").write_text("echo\n")
    assert "nothing in it runs" in project.invoke("import", "x.sh", exit=3).stderr
    version = project.invoke("import", "x.sh", "--version", "core-0.12", exit=3).stderr
    assert "core-0.12.0" in version
    (project.path / "y.sh").write_text(SCRIPT)
    nearest = project.document("import", "y.sh", "--version", "core-0.15.3")["not_taken"]
    assert any(
        "core-0.15.3; engine_args are checked against core-0.15.0" in line for line in nearest
    )
    engine = project.invoke("import", "x.sh", "--engine", "megatron", exit=3).stderr
    assert "megatron-lm" in engine


def test_a_file_whose_tables_are_too_deep(project: Project) -> None:
    (project.path / "deep.yml").write_text("num_layers: 2\nx: " + "[" * 5000)
    assert "tables are too deep" in project.invoke("import", "deep.yml", exit=3).stderr


def test_a_configuration_of_nemo(project: Project) -> None:
    """The engine is seen by the file; words after it are the launcher's."""
    text = "trainer: {num_nodes: 2, max_steps: 20, val_check_interval: 10, limit_val_batches: 2,\n"
    text += "  precision: bf16}\nmodel:\n  micro_batch_size: 2\n  global_batch_size: 32\n"
    text += "  tensor_model_parallel_size: 1\n  pipeline_model_parallel_size: 1\n"
    text += "  encoder_seq_length: 16\n  max_position_embeddings: 16\n  num_layers: 2\n"
    text += "  hidden_size: 32\n  num_attention_heads: 2\n  optim: {name: distributed_fused_adam,\n"
    text += "    lr: 1e-4, betas: [0.9, 0.95], sched: {name: CosineAnnealing}}\n"
    text += "  data: {data_prefix: [1.0, '${data_dir}/a_text_document']}\n"
    (project.path / "gpt3_hydra.yaml").write_text(text)
    refused = project.invoke("import", "gpt3_hydra.yaml", exit=3).stderr
    assert "data_dir, which is not there" in refused and "FILE,data_dir=VALUE" in refused
    betas = "model.optim.betas=[0.8,0.9]"  # the comma of a list parts nothing
    found = project.document("import", f"gpt3_hydra.yaml,+data_dir=/fs,{betas},model.num_layers=4")
    tables = tomli.loads(found["toml"])
    assert found["engine"] == "nemo" and found["job"] == "gpt3"
    assert tables["datasets"]["gpt3"]["prefixes"] == ["/fs/a_text_document"]
    assert tables["models"]["gpt3"]["num_layers"] == 4
    training = tables["jobs"]["gpt3"]["training"]
    assert (training["adam_beta1"], training["adam_beta2"]) == (0.8, 0.9)


def test_a_script_for_neuron(project: Project) -> None:
    """It is seen by what the script calls beside it."""
    words = "trainer.num_nodes=$SLURM_NTASKS trainer.max_steps=10 model.global_batch_size=32"
    words += " model.hidden_size=$HS model.num_layers=2 model.tensor_model_parallel_size=8"
    words += " model.encoder_seq_length=64 model.max_position_embeddings=64 model.optim.name=adamw"
    (project.path / "test.sh").write_text(
        f": ${{HS:=64}}\ntorchrun megatron_gpt_pretraining.py {words} 2>&1 | tee log\n"
    )
    (project.path / "gpt_1b.sh").write_text("export HS=128\n./test.sh\n")
    found = project.document("import", "gpt_1b.sh,SLURM_NNODES=2,SLURM_NTASKS=2")
    tables = tomli.loads(found["toml"])
    assert (found["engine"], found["job"]) == ("neuronx-nemo", "gpt_1b")
    assert (
        tables["models"]["gpt_1b"]["hidden_size"] == 128 and tables["jobs"]["gpt_1b"]["nodes"] == 2
    )
    llama = (project.path / "test.sh").read_text().replace("py t", "py --config-name=llama t")
    (project.path / "test_llama.sh").write_text(llama)
    (project.path / "llama_1b.sh").write_text("export HS=128\n./test_llama.sh\n")
    refused = project.invoke("import", "llama_1b.sh", exit=3).stderr
    assert "--config-name=llama: trainkit drives neuronx-nemo with megatron_gpt_config" in refused
    (project.path / "x.sh").write_text(SCRIPT)
    assert "takes no KEY=VALUE" in project.invoke("import", "x.sh,A=1", exit=3).stderr
    assert "names no file" in project.invoke("import", "A=1", exit=3).stderr


POD = """
nodeSelector: {pool: h100}
tolerations: [{key: gpu, operator: Exists, effect: NoSchedule}, {key: n, operator: Gt, value: "3"}]
volumes:
- {name: data, persistentVolumeClaim: {claimName: shared}}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}
- {name: tmp, emptyDir: {}}
"""
CONTAINER = """
image: r.io/megatron:1
env:
- {name: NCCL_DEBUG, value: WARN}
- {name: LAYERS, value: "3"}
- {name: RANK, value: "0"}
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}
- {name: HOST, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}
volumeMounts:
- {name: data, mountPath: /shared}
- {name: shm, mountPath: /dev/shm}
- {name: tmp, mountPath: /tmp}
"""
RESOURCES = {"limits": {"nvidia.com/gpu": 4, "memory": "64Gi"}}
COMMAND = ["bash", "-c", SCRIPT.strip().replace("--num-layers 2", "--num-layers $(LAYERS)")]


def jobset() -> dict[str, Any]:
    pod = yaml.safe_load(POD)
    container = {**yaml.safe_load(CONTAINER), "name": "a", "resources": RESOURCES}
    pod["containers"] = [{**container, "command": COMMAND[:2], "args": COMMAND[2:]}]
    workers = {"completions": 4, "parallelism": 4, "template": {"spec": pod}, "backoffLimit": 0}
    small = {"template": {"spec": {"containers": [{"image": "busybox"}]}}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "gpt", "labels": {"kueue.x-k8s.io/queue-name": "team"}},
        "spec": {
            "replicatedJobs": [
                {"name": "driver", "template": {"spec": small}},
                {"name": "workers", "template": {"spec": workers}},
            ]
        },
    }


def train_job() -> dict[str, Any]:
    container = yaml.safe_load(CONTAINER)
    mounts = [{"name": "a", "volumeMounts": container.pop("volumeMounts")}]
    node = {"template": {"spec": {**yaml.safe_load(POD), "containers": mounts}}}
    jobs = [{"name": "node", "template": {"spec": node}}]
    runtime = {"template": {"spec": {"replicatedJobs": jobs}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "gpt", "namespace": "lab"},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                **container,
                "numNodes": 4,
                "numProcPerNode": 2,
                "resourcesPerNode": RESOURCES,
                "command": COMMAND,
            },
            "runtimePatches": [{"manager": "me", "trainingRuntimeSpec": runtime}],
        },
    }


@pytest.mark.parametrize("manifest", [jobset, train_job])
def test_a_manifest_of_kubernetes(
    manifest: Callable[[], dict[str, object]], project: Project
) -> None:
    """Its pods become the cluster, its command the job; all else is named."""
    found = manifest()
    (project.path / "pods.yaml").write_text(yaml.safe_dump_all([{"kind": "ConfigMap"}, found]))
    said = project.document("import", "pods.yaml")
    tables = tomli.loads(said["toml"])
    assert (said["job"], said["engine"]) == ("gpt", "megatron-lm")
    assert tables["jobs"]["gpt"]["nodes"] == 4 and tables["jobs"]["gpt"]["cluster"] == "gpt"
    assert tables["models"]["gpt"]["num_layers"] == 3
    cluster = tables["clusters"]["gpt"]
    pods = cluster.pop("kubernetes")
    assert cluster.pop("ranks_per_node", 2) == 2
    assert cluster == {
        "launcher": "kubernetes",
        "device": "cuda",
        "gpus_per_node": 4,
        "secrets": ["HF_TOKEN"],
        "env": {"NCCL_DEBUG": "WARN", "LAYERS": "3"},
    }
    assert pods.pop("namespace", "lab") == "lab" and pods.pop("queue", "team") == "team"
    assert pods == {
        "image": "r.io/megatron:1",
        "node_selector": {"pool": "h100"},
        "tolerations": [{"key": "gpu", "effect": "NoSchedule"}],
        "resources": {"nvidia.com/gpu": 4, "memory": "64Gi"},
        "shm": "8Gi",
        "volumes": [{"claim": "shared", "mount": "/shared"}],
        "secrets": {"HF_TOKEN": "hub/token"},
    }
    left = "\n".join(said["not_taken"])
    for words in (
        "ConfigMap",
        "value = 3",
        "status.hostIP",
        "mountPath = /tmp",
        "clusters.gpt.root",
    ):
        assert words in left, words
    assert ("backoffLimit = 0" in left and "busybox" in left) or manifest is train_job
    text = (project.path / "jobs.toml").read_text()
    (project.path / "jobs.toml").write_text('include = ["pods.toml"]\n' + text)
    (project.path / "pods.toml").write_text(
        said["toml"].replace("[clusters.gpt]", '[clusters.gpt]\nroot = "/shared/me"')
    )
    assert project.document("check")["problems"] == []


def test_the_extra_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a script by itself and in a manifest, which else says what it does not take."""
    monkeypatch.setitem(sys.modules, "hydra.core.override_parser.overrides_parser", None)
    command = ["torchrun", "megatron_gpt_pretraining.py", "model.hidden_size=64"]
    found = train_job()
    found["spec"]["trainer"] |= {"command": command, "env": []}
    (tmp_path / "pods.yaml").write_text(yaml.safe_dump(found))
    (tmp_path / "run.sh").write_text(" ".join(command))
    for name in ("run.sh", "pods.yaml"):
        with pytest.raises(MissingExtra) as caught:
            import_job(TaskContext(False, False, tmp_path), ImportOptions(name, *[""] * 5))
        assert caught.value.extra == "hydra"


def test_a_manifest_whose_command_is_no_engines(project: Project) -> None:
    found = train_job()
    found["spec"]["trainer"] |= {"command": ["python", "own.py"], "env": []}
    (project.path / "pods.yaml").write_text(yaml.safe_dump(found))
    said = project.document("import", "pods.yaml", "--cluster", "lab")
    tables = tomli.loads(said["toml"])
    assert said["engine"] is None and set(tables) == {"clusters"} and "lab" in tables["clusters"]
    assert any("command: python own.py: nothing in it runs" in each for each in said["not_taken"])
    (project.path / "pods.yaml").write_text(yaml.safe_dump_all([found, found]))
    assert "has 2 of" in project.invoke("import", "pods.yaml", exit=3).stderr
    (project.path / "pods.yaml").write_text("kind: JobSet\nmetadata: {}\nspec: {}\n")
    refused = project.invoke("import", "pods.yaml", exit=3).stderr
    assert "is no JobSet as Kubernetes has it" in refused
