"""prep-data as Slurm arrays: the same bytes as here; one unit that fails is named, and only it and what comes after it is run again."""

from __future__ import annotations

import re

from tests.cluster.machines import HEAD
from tests.cluster.slurm_project import SlurmProject
from tests.cluster.test_stages import TEXT, made, replace_in_jobs, write_corpus

STAGES = """
[clusters.queue.stages.prep-data]
nodes = 2
tasks_per_node = 2
partition = "urgent"
[clusters.queue.slurm]
time = 5
"""


def arrays(project: SlurmProject, shards: int, lines: int) -> None:
    write_corpus(project, shards, lines)
    replace_in_jobs(project, 'cluster = "pair"\nmodel = "text"', 'cluster = "queue"\nmodel = "text"')
    replace_in_jobs(project, "vocab_size = 300", "vocab_size = 300\ntraining_bytes = 1000")  # the first shard alone
    replace_in_jobs(project, TEXT.partition("[tokenizers")[0], STAGES)


def test_arrays_prepare_the_same_bytes_and_one_that_fails_is_named(slurm: SlurmProject) -> None:
    arrays(slurm, 5, 60)
    before = set(slurm.cluster.on(HEAD, "squeue", "--noheader", "--states=all", "--format=%A").split())  # of other tests
    broken = slurm.path / "corpus" / "part-03.jsonl"
    text = broken.read_text()
    broken.write_text(text.replace("\n", "\nno JSON at all\n", 1))
    dry = slurm.invoke("prep-data", "--job", "text", "--dry-run").stdout
    assert "#SBATCH --partition=urgent" in dry and "#SBATCH --array=0-1" in dry and "#SBATCH --time=5" in dry and slurm.jobs() == []
    failed = slurm.invoke("prep-data", "--job", "text", exit=6)
    assert re.search(r"part-03.jsonl:2: tokens-00003 on node[123]: is not JSON", failed.stderr), failed.stderr
    graph = [line for line in failed.stdout.splitlines() if line.startswith("job ")]
    assert [line.partition(": ")[2].partition(": ")[2].partition(",")[0] for line in graph] == [
        "1 unit in 1 x 1 task",
        "5 units in 2 x 2 tasks",
        "1 unit in 1 x 1 task",
    ]
    assert "after job" not in graph[0] and all("has gone well" in line for line in graph[1:]), graph
    assert not slurm.jobs(), "what cannot run any more is taken out of the queue"
    broken.write_text(text)
    again = slurm.invoke("prep-data", "--job", "text").stdout
    graph = [line for line in again.splitlines() if line.startswith("job ")]
    assert len(graph) == 2 and all("1 unit in 1 x 1 task" in line for line in graph), again  # the broken shard alone, and what joins them
    ours = [
        line.split()[1]
        for line in slurm.cluster.on(HEAD, "squeue", "--noheader", "--states=all", "--format=%A %P").splitlines()
        if line.split()[0] not in before
    ]
    assert ours and set(ours) == {"urgent"}
    by_slurm = made(slurm)
    replace_in_jobs(slurm, 'cluster = "queue"\nmodel = "text"', 'cluster = "here"\nmodel = "text"')
    slurm.invoke("prep-data", "--job", "text", "--force")
    assert by_slurm == made(slurm) and len(by_slurm) >= 3
