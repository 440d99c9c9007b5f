"""prep-data over two hosts: the same bytes as here, from the code snapshot, and what a host that
dies had not finished is done by the other."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from tests.cluster.machines import Cluster
from tests.cluster.on_head import ClusterProject
from tests.conftest import wait_for
from tests.stages.curation_project import below, crawled, funnel, write_rows

TEXT = """
[clusters.here]
[clusters.pair.stages.prep-data]
nodes = 2
tasks_per_node = 2
[tokenizers.bpe]
type = "bpe"
vocab_size = 300
[datasets.lines]
source = "files"
paths = ["corpus/*.jsonl"]
tokenizer = "bpe"
split = "80,20,0"
[jobs.text]
cluster = "pair"
model = "text"
dataset = "lines"
nodes = 2
training = { micro_batch_size = 2, global_batch_size = 8, train_iters = 4, lr = 1e-2 }
[models.text]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 16
"""


def write_corpus(project: ClusterProject, shards: int, lines: int) -> None:
    with open(project.path / "jobs.toml", "a") as file:
        file.write(TEXT)
    (project.path / "corpus").mkdir()
    for shard in range(shards):
        documents = [
            json.dumps(
                {
                    "text": (
                        f"the quick brown fox number {i} of shard {shard} jumps over the lazy dog"
                        " and then rests"
                    )
                }
            )
            for i in range(lines)
        ]
        (project.path / "corpus" / f"part-{shard:02d}.jsonl").write_text(
            "\n".join(documents) + "\n"
        )


CURATE = """
[datasets.lines.curate]
steps = [{ step = "exact" }, { step = "minhash" }]
"""


def write_crawl(project: ClusterProject, shards: int) -> None:
    """The same dataset, of text that is curated."""
    write_corpus(project, 0, 0)
    project.add_to_jobs(CURATE)
    for number in range(shards):
        write_rows(project.path / f"corpus/{number}.jsonl", crawled()[number::shards])


def made(project: ClusterProject) -> dict[str, str]:
    """{name: SHA-256} of what the dataset is: tokenizer, tokens, index."""
    kinds = (".bin", ".idx", "tokenizer.json")
    found = [path for path in (project.path / "data").rglob("*") if path.name.endswith(kinds)]
    return {
        str(path.relative_to(project.path / "data")): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
    }


def hosts_of_units(cluster: Cluster) -> set[str]:
    """Where units of the stage run at this moment, each from the code snapshot."""
    units = [p for p in cluster.processes() if p.argv[-1:] and p.argv[-1].endswith(".spec.json")]
    assert all("/code/" in " ".join(p.argv) for p in units if p.argv[0].endswith("python"))
    return {p.host for p in units}


def test_two_hosts_prepare_the_same_bytes_even_if_one_dies(
    head: ClusterProject, cluster: Cluster
) -> None:
    write_corpus(head, 8, 4000)
    process = head.start("prep-data", "--job", "text")
    seen: set[str] = set()
    while process.poll() is None:
        seen |= hosts_of_units(cluster)
        time.sleep(0.05)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert seen >= {"node1", "node2"} and not list((head.path / "sessions").iterdir())
    over_ssh = made(head)

    head.edit_jobs('launcher = "ssh"', 'launcher = "pdsh"')
    process = head.start("prep-data", "--job", "text", "--force")
    wait_for(
        lambda: process.poll() is not None or "node2" in hosts_of_units(cluster),
        "units on node2",
        timeout=600,
    )
    cluster.crash("node2")
    out, err = process.communicate(timeout=600)
    cluster.boot("node2")
    assert process.returncode == 0 and "node2 is lost" in out + err, out + err
    over_pdsh = made(head)

    head.edit_jobs('cluster = "pair"\nmodel = "text"', 'cluster = "here"\nmodel = "text"')
    head.invoke("prep-data", "--job", "text", "--force")
    assert over_ssh == over_pdsh == made(head) and len(over_ssh) >= 3


def test_two_hosts_curate_the_same_bytes(head: ClusterProject) -> None:
    write_crawl(head, 4)
    head.invoke("prep-data", "--job", "text")
    over_ssh = below(head, "lines")
    assert funnel(head, "lines")["documents"] < funnel(head, "lines")["lines"]
    head.edit_jobs('cluster = "pair"\nmodel = "text"', 'cluster = "here"\nmodel = "text"')
    assert "nothing changed" in head.invoke("prep-data", "--job", "text", "--dry-run").stdout
    head.invoke("prep-data", "--job", "text", "--force")
    assert below(head, "lines") == over_ssh


def test_one_that_fails_names_unit_and_host(head: ClusterProject) -> None:
    write_corpus(head, 2, 50)
    (head.path / "corpus" / "part-01.jsonl").write_text('{"text": "fine"}\nno JSON at all\n')
    failed = head.invoke("prep-data", "--job", "text", exit=6)
    assert "part-01.jsonl" in failed.stderr and (
        " on node1" in failed.stderr or " on node2" in failed.stderr
    ), failed.stderr


def test_fewer_hosts_than_asked_for(head: ClusterProject) -> None:
    write_corpus(head, 1, 5)
    assert "on one of node1, node2" in head.invoke("prep-data", "--job", "text", "--dry-run").stdout
    head.hosts("node1 slots=2")
    failed = head.invoke("prep-data", "--job", "text", exit=3)
    assert "stages.prep-data.nodes = 2" in failed.stderr and "has 1 hosts" in failed.stderr
    assert not Path(head.path / "data").exists()
