"""Stages as Indexed Jobs of Kubernetes, by the real kubectl: the same bytes as on one machine,
whatever becomes of pods and of who waits for them."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import HANGS, wait_for
from tests.kubernetes.cluster import NAMESPACE, KubernetesCluster
from tests.kubernetes.kube_project import KubeProject, make_kube_project

TEXT = """
[clusters.pods.stages.prep-data]
nodes = 3
[tokenizers.bpe]
type = "bpe"
vocab_size = 300
training_bytes = 1000
[datasets.lines]
source = "files"
paths = ["corpus/*.jsonl"]
tokenizer = "bpe"
split = "80,20,0"
[models.text]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 16
[jobs.text]
cluster = "pods"
model = "text"
dataset = "lines"
training = { micro_batch_size = 2, global_batch_size = 8, train_iters = 4, lr = 1e-2 }
"""
# in pods: units of shards wait while there is a file `hold`
WAITS = 'while [[ -e {path}/hold && " $* " == *"/tokens-"* ]]; do sleep 0.05; done\n'


class TextProject(KubeProject):
    """A project whose job has its text prepared by three texts."""

    def prepare(self) -> subprocess.Popen[str]:
        return self.start("prep-data", "--job", "text")

    def hold(self) -> None:
        (self.path / "hold").touch()

    def let_go(self) -> None:
        (self.path / "hold").unlink()

    def running(self) -> list[str]:
        """Pods at work."""
        return [
            str(pod["metadata"]["name"])
            for pod in self.cluster.pods()
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]

    def wait_running(self, level: int = 1, pods: int = 3) -> list[str]:
        """The pods of a level, once so many run."""
        wait_for(
            lambda: len([pod for pod in self.running() if f"-bpe-{level}-" in pod]) >= pods,
            f"{pods} pods of level {level}",
        )
        return [pod for pod in self.running() if f"-bpe-{level}-" in pod]

    def made(self) -> dict[str, str]:
        """{name: SHA-256} of what the dataset is."""
        kinds = (".bin", ".idx", "tokenizer.json")
        return {
            str(path.relative_to(self.path / "data")): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (self.path / "data").rglob("*")
            if path.name.endswith(kinds)
        }

    def same_here(self) -> bool:
        """Whether this machine makes the same bytes."""
        by_pods = self.made()
        self.edit_jobs('cluster = "pods"\nmodel = "text"', 'cluster = "here"\nmodel = "text"')
        self.invoke("prep-data", "--job", "text", "--force")
        return by_pods == self.made() and len(by_pods) >= 3

    def records(self) -> list[Path]:
        return list((self.path / "stamps/prep-data").glob("*.making.json"))

    def jobs(self) -> list[str]:
        return self.cluster.kubectl("get", "jobs", "-n", NAMESPACE, "-o", "name").split()


def started(said: str) -> list[str]:
    """What each Job that was made is of; lines besides say why one waits, where that takes long."""
    lines = [line for line in said.splitlines() if line.startswith("Job ") and " unit" in line]
    return [line.partition(": ")[2] for line in lines]


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """What a process has printed, up to the line with these words."""
    assert process.stdout is not None
    said = ""
    while words not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    return said


@pytest.fixture
def texts(kubernetes: KubernetesCluster, tmp_path: Path) -> Iterator[TextProject]:
    path = kubernetes.root / tmp_path.name
    make_kube_project(path, kubernetes)
    project = TextProject(path, cluster=kubernetes)
    project.edit_jobs("grace = 120\n", "grace = 5\n")
    project.add_to_jobs(TEXT)
    (path / "corpus").mkdir()
    for shard in range(5):
        lines = [
            json.dumps({"text": f"the quick brown fox number {i} of shard {shard}, and rests"})
            for i in range(60)
        ]
        (path / "corpus" / f"part-{shard:02d}.jsonl").write_text("\n".join(lines) + "\n")
    first, _, rest = (path / "python").read_text().partition("\n")
    (path / "python").write_text(f"{first}\n{WAITS.format(path=path)}{rest}")
    yield project
    (path / "hold").unlink(missing_ok=True)


def test_pods_prepare_the_same_bytes(texts: TextProject) -> None:
    dry = texts.invoke("prep-data", "--job", "text", "--dry-run").stdout
    manifest, _ = json.JSONDecoder().raw_decode(dry[dry.index("{") :])
    assert manifest["kind"] == "Job" and "5 units in 3 pods when the one before" in dry
    assert not texts.jobs() and not texts.records()
    said = texts.invoke("prep-data", "--job", "text").stdout
    assert started(said) == ["1 unit in 1 pod", "5 units in 3 pods", "1 unit in 1 pod"]
    assert not texts.jobs() and not texts.records()
    assert "is fresh" in texts.invoke("prep-data", "--job", "text").stdout
    assert texts.same_here()


@pytest.mark.slow
def test_a_run_begins_when_pods_have_made_its_stages(texts: TextProject) -> None:
    texts.ranks_do("beat(4); done()")
    said = texts.invoke("train", "text").stdout
    assert "5 units in 3 pods" in said.partition("is JobSet")[0], said
    (run,) = texts.runs()
    assert texts.document("status", run.name)["state"] == "succeeded"
    texts.cluster.kubectl("delete", "jobset", texts.jobset(run), "-n", NAMESPACE)


def test_pods_that_are_lost_are_made_again(texts: TextProject) -> None:
    """One is killed, one evicted, and one is on a node that is gone for good: nobody confirms its
    end. What it had begun is done by another."""
    texts.hold()
    process = texts.prepare()
    killed, evicted, lost = texts.wait_running()
    node = texts.cluster.pod(lost)["spec"]["nodeName"]
    texts.cluster.lose_node(node)
    texts.cluster.kill_pod(killed)
    texts.cluster.evict(evicted)
    wait_for(
        lambda: len({*texts.wait_running(pods=2)} - {killed, evicted, lost}) == 2, "two new pods"
    )
    texts.let_go()
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, out + err
    assert f"pod {lost} is given up: its node {node} does not answer" in out + err
    assert texts.same_here()


def test_one_that_fails_is_named(texts: TextProject) -> None:
    """The others of its level are made, and only it and what comes after it is made again."""
    broken = texts.path / "corpus" / "part-03.jsonl"
    text = broken.read_text()
    broken.write_text(text.replace("\n", "\nno JSON at all\n", 1))
    failed = texts.invoke("prep-data", "--job", "text", exit=6)
    assert "part-03.jsonl:2: tokens-00003 on node" in failed.stderr, failed.stderr
    assert not texts.jobs() and not texts.records()
    broken.write_text(text)
    said = texts.invoke("prep-data", "--job", "text").stdout
    assert said.count("1 unit in 1 pod") == 2 and "Job prep-data-lines-bpe-1-" in said
    assert texts.same_here()


@pytest.mark.slow
def test_the_last_words_of_a_pod(texts: TextProject) -> None:
    """One whose program never begins tells so in no file."""
    texts.edit_jobs(f'python = "{texts.path}', 'python = "/nowhere')
    failed = texts.invoke("prep-data", "--job", "text", exit=6)
    assert "tokenizer did not end: pod prep-data-lines-bpe-0-" in failed.stderr, failed.stderr
    assert "exit code 12" in failed.stderr and "/nowhere" in failed.stderr


@pytest.mark.slow
def test_a_unit_that_takes_the_memory_of_its_pod(texts: TextProject) -> None:
    """Again and again: after two retries it is given up, by name."""
    texts.hold()
    process = texts.prepare()
    texts.wait_running()
    killed: set[str] = set()
    while len(killed) < 3:
        found = {pod for pod in texts.running() if "-0-" in pod[-8:]} - killed
        for pod in found:
            texts.cluster.mark_oom(pod)
        killed |= found
    texts.let_go()
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 6 and "OOMKilled, exit code 137" in err, out + err


def test_ctrl_c_leaves_no_job_and_no_pod(texts: TextProject) -> None:
    texts.hold()
    process = texts.prepare()
    texts.wait_running()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130, out + err
    assert not texts.jobs() and not texts.running() and not texts.records()
    wait_for(lambda: not texts.cluster.pods(), "no pod")


@pytest.mark.slow
def test_a_caller_that_is_killed(texts: TextProject) -> None:
    """Its Job goes on; the next to come waits for it, and does the rest."""
    texts.hold()
    first = texts.prepare()
    before = texts.wait_running()
    first.kill()
    first.communicate()
    (job,) = texts.jobs()
    second = texts.prepare()
    said = read_until(second, "waiting for")
    assert f"Kubernetes' jobs {job.partition('/')[2]} of pid {first.pid} on" in said, said
    assert texts.running() == before and texts.jobs() == [job]
    texts.let_go()
    out, err = second.communicate(timeout=HANGS)
    assert second.returncode == 0, said + out + err
    assert "-1-" not in "".join(line for line in out.splitlines() if line.startswith("Job "))
    assert not texts.jobs() and not texts.records()
    assert texts.same_here()


def test_kueue_takes_pods_back(texts: TextProject) -> None:
    """It suspends the Job while its pods are at work, and admits it again."""
    texts.edit_jobs("grace = 5", 'grace = 5\nqueue = "queue"')
    texts.hold()
    process = texts.prepare()
    before = set(texts.wait_running())
    (job,) = texts.jobs()
    texts.cluster.preempt(job.partition("/")[2], plural="jobs")
    wait_for(lambda: not before & set(texts.running()), "the pods' end")
    texts.wait_running()
    texts.let_go()
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0 and len(started(out)) == 3, out + err
    assert not texts.jobs() and not texts.records()


@pytest.mark.slow
def test_a_server_that_stumbles(texts: TextProject) -> None:
    """The answer to the creation is lost, watches have expired, and nobody is served for a while:
    pods go on, and one Job is made of each level."""
    texts.hold()
    texts.cluster.server.faults.lose_reply("POST")
    process = texts.prepare()
    texts.wait_running()
    texts.cluster.server.expire()
    texts.cluster.server.faults.throttle(3.0)
    texts.let_go()
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0 and len(started(out)) == 3, out + err
    assert not texts.jobs() and not texts.records()


@pytest.mark.slow
def test_a_job_that_somebody_deletes(texts: TextProject) -> None:
    texts.hold()
    process = texts.prepare()
    texts.wait_running()
    (job,) = texts.jobs()
    texts.cluster.kubectl("delete", job, "-n", NAMESPACE)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 6 and "was deleted before its units had ended" in err, out + err


@pytest.mark.slow
def test_a_right_that_is_missing(texts: TextProject) -> None:
    nobody = texts.cluster.user("intern")
    failed = texts.invoke("prep-data", "--job", "text", exit=8, KUBECONFIG=str(nobody))
    assert 'cannot create resource "jobs"' in failed.stderr and "--verb=create" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.slow
def test_why_pods_wait_is_said(texts: TextProject) -> None:
    """Quota that refuses pods may still come."""
    texts.cluster.quota("few", pods="0")
    process = texts.prepare()
    said = read_until(process, "waits: ")
    assert "the namespace's quota is used up" in said and "exceeded quota: few" in said
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130, said + out + err
    assert not texts.jobs() and not texts.records()
