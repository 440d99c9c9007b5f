"""Datasets that are curated, through the task: which documents are left, what is made again, and
what others see of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import Project
from tests.data.fetch_server import serve
from tests.stages.curation_project import (
    below,
    crawled,
    curated,
    funnel,
    write_project,
    write_rows,
    write_shards,
)
from trainkit.data.curate.funnel import counts_of
from trainkit.data.curate.step_files import language_model

PREPARE = ("prep-data", "--dataset", "crawl")
FRESHNESS = """
[datasets.crawl.curate]
steps = [
    { step = "length", min_characters = 2 },
    { step = "exact" },
    { step = "decontaminate", benchmarks = ["exam*.jsonl"] },
    { step = "exact", unit = "line", min_characters = 20 },
    { step = "length", max_characters = 3000 },
    { step = "function", function = "own.py:keep" },
]
"""
QUESTION = "which of these seventeen rivers is said to be the longest in all of the north"


def survivors(project: Project) -> list[str]:
    """Text and metadata of what is left, sorted."""
    rows = [{k: v for k, v in row.items() if k != "trainkit_origin"} for row in curated(project)]
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def test_survivors_are_the_same_however_the_text_lies(project: Project) -> None:
    """In 1, 3 or 7 shards, in another order, with 1 or 7 workers."""
    write_project(project, shards=1)
    rows = crawled()
    found = []
    for shards, workers in ((1, 1), (3, 7), (7, 1)):
        random.Random(shards + workers).shuffle(rows)
        write_shards(project, rows, shards)
        project.invoke(*PREPARE, "--force", "--workers", str(workers))
        found.append(survivors(project))
    assert found[0] == found[1] == found[2]
    steps = funnel(project)["steps"]
    assert [step["step"] for step in steps] == ["c4", "exact", "exact", "minhash", "pii", "sample"]
    assert all(step["reasons"] for step in steps[:4]), steps
    text = "".join(found[0])
    assert "corp.example.net" not in text and "8.8.8.8" not in text
    assert len(set(found[0])) < len(found[0]) == steps[-1]["documents_out"]


def texts(rows: Iterable[Mapping[str, object]]) -> set[str]:
    """Those that are not blank."""
    return {text for row in rows if (text := str(row["text"])).strip()}


def stamps(project: Project) -> dict[str, int]:
    return {
        path.stem: path.stat().st_mtime_ns
        for path in (project.path / "stamps/prep-data/crawl.curated.units").glob("*.json")
        if not path.name.endswith(".spec.json")
    }


def ran(project: Project) -> set[str]:
    """The kinds of units of curation that ran: "curate1", "keys0"; one shard's: "curate0 1"."""
    before = stamps(project)
    project.invoke(*PREPARE)
    made = [name for name, time in stamps(project).items() if before.get(name) != time]
    shards = len(list((project.path / "crawl").iterdir()))
    kinds: dict[str, int] = {}
    for name in made:
        kinds[name.partition("-")[0]] = kinds.get(name.partition("-")[0], 0) + 1
    manifest = json.loads((project.path / "data/crawl/words/dataset.json").read_text())
    curation = project.path / "data/crawl/curated/curation.json"
    assert manifest["curation"] == counts_of(curation)
    return {
        f"{kind} {count}" if kind.startswith(("curate", "keys")) and count < shards else kind
        for kind, count in kinds.items()
    }


COMPARED = {"keys1", "number1", "join1", "curate2", "summary"}


def test_what_is_made_again(project: Project) -> None:
    """What changed, and what comes after it; nothing else."""
    (project.path / "own.py").write_text("def keep(text, fields):\n    return True\n")
    write_rows(project.path / "exam.jsonl", [{"question": QUESTION}])
    write_project(project, FRESHNESS)
    project.invoke(*PREPARE)
    assert ran(project) == set()
    project.edit_jobs("max_characters = 3000", "max_characters = 500")
    why = project.document(*PREPARE, "--dry-run")["stages"][1]["because"]
    assert why == "datasets.crawl.curate.steps.4.max_characters changed from 3000 to 500"
    assert ran(project) == {"curate2", "summary"}
    project.edit_jobs("min_characters = 20", "min_characters = 30")
    assert ran(project) == COMPARED
    for name in ("crawl/1.jsonl", "own.py", "exam.jsonl"):
        os.utime(project.path / name)
    assert ran(project) == set(), "the same bytes"
    (project.path / "own.py").write_text("def keep(text, fields):\n    return len(text) > 9\n")
    assert ran(project) == {"curate2", "summary"}
    write_rows(project.path / "exam2.jsonl", [{"question": f"{QUESTION} and east"}])
    assert ran(project) == {"curate1", *COMPARED}
    write_rows(project.path / "crawl/9.jsonl", crawled(5))
    assert ran(project) == {
        *("curate0 1", "keys0 1", "number0", "join0", "curate1", *COMPARED),
    }
    (project.path / "crawl/0.jsonl").unlink()
    assert ran(project) == {"number0", "join0", "curate1", *COMPARED}
    assert not [name for name in below(project) if "00000." in name], "its files are gone"


LISTS = """
[datasets.crawl.curate]
steps = [
    { step = "url", domains = ["sites.txt"] },
    { step = "exact" },
    { step = "language", model = "model.ftz", min_score = 0 },
    { step = "exact", unit = "line", min_characters = 20 },
    { step = "length", min_characters = 1 },
]
"""


def test_a_changed_list_or_model_redoes_its_pass(project: Project) -> None:
    """And what comes after it; nothing before."""
    write_project(project, LISTS)
    rows = [{**row, "url": "http://a.org/"} for row in crawled()]
    write_shards(project, rows, 2)
    (project.path / "sites.txt").write_text("b.org\n")
    model = language_model().read_bytes()
    (project.path / "model.ftz").write_bytes(model)
    project.invoke(*PREPARE)
    for name in ("sites.txt", "model.ftz"):
        os.utime(project.path / name)
    assert ran(project) == set(), "the same bytes"
    (project.path / "model.ftz").write_bytes(model + b" ")
    assert ran(project) == {"curate1", *COMPARED}
    (project.path / "sites.txt").write_text("b.org\nc.org\n")
    assert ran(project) == {"curate0", "keys0", "number0", "join0", "curate1", *COMPARED}


def test_steps_that_are_taken_out_leave_no_files(project: Project) -> None:
    """The folder is that of a dataset that was always like this."""
    write_project(
        project,
        FRESHNESS.replace('{ step = "function", function = "own.py:keep" },', "").replace(
            '{ step = "decontaminate", benchmarks = ["exam*.jsonl"] },', ""
        ),
    )
    project.invoke(*PREPARE)
    project.edit_jobs('    { step = "exact", unit = "line", min_characters = 20 },\n', "")
    project.edit_jobs("[datasets.crawl.curate]", '[datasets.crawl.curate]\noutput = "parquet"')
    project.invoke(*PREPARE)
    found = below(project)
    assert "curated/00000.parquet" in found and "curated/00000.jsonl.zst" not in found
    project.invoke(*PREPARE, "--force")
    assert below(project) == found
    (project.path / "data/crawl").rename(project.path / "former")
    project.invoke(*PREPARE)
    assert below(project) == found


AGAINST = """
[datasets.first]
source = "files"
paths = ["first/*.jsonl"]
tokenizer = "words"
[datasets.first.curate]
steps = [{ step = "exact" }, { step = "minhash" }]

[datasets.crawl.curate]
steps = [
    { step = "exact", against = ["first"] },
    { step = "minhash", against = ["first"] },
]
"""


def test_against_another_dataset(project: Project) -> None:
    """Its documents are kept; when there are more or others of them, the second is stale."""
    write_project(project, AGAINST)
    first = crawled(2)[:30]
    write_rows(project.path / "first/0.jsonl", [{**row, "theirs": 1} for row in first])
    near = [
        {"text": f"{row['text']} and then some more"}
        for row in first
        if len(str(row["text"])) > 900
    ]
    own = crawled(3)[:20]
    write_shards(project, [*first[:10], *near, *own], 2)
    error = project.invoke(*PREPARE, exit=6).stderr
    assert "exact against 'first'" in error and "prep-data --dataset first" in error
    project.invoke("prep-data", "--dataset", "first")
    kept = len(curated(project, "first"))
    project.invoke(*PREPARE)
    assert len(near) > 3 and texts(curated(project)) == texts(own)
    assert all("theirs" in row for row in curated(project, "first"))
    assert len(curated(project, "first")) == kept

    for path, seen in (("first/0.jsonl", own[:5]), ("first/1.jsonl", own[5:10])):
        write_rows(project.path / path, [*(first if path == "first/0.jsonl" else ()), *seen])
        assert "is fresh" in project.invoke(*PREPARE, "--dry-run").stdout
        project.invoke("prep-data", "--dataset", "first")
        before = len(curated(project))
        assert "compared-0" in project.document(*PREPARE, "--dry-run")["stages"][1]["because"]
        project.invoke(*PREPARE)
        assert len(curated(project)) == before - len({row["text"] for row in seen})

    project.edit_jobs('steps = [{ step = "exact" }, { step = "minhash" }]', 'recipe = "c4"')
    project.invoke("prep-data", "--dataset", "first")
    error = project.invoke(*PREPARE, exit=6).stderr
    assert "does not say that this step was done there" in error
    project.edit_jobs('against = ["first"]', 'against = ["crawl"]')
    assert "exact against 'crawl', the dataset itself" in project.invoke(*PREPARE, exit=3).stderr


OTHERS = """
[tokenizers.more]
type = "file"
path = "more.json"

[datasets.pieces]
source = "files"
paths = ["crawl/*.jsonl"]
tokenizer = "words"
merge = false
[datasets.pieces.curate]
steps = [{ step = "exact" }]

[datasets.mixed]
source = "blend"
blend = { crawl = 1, pieces = 2 }

[models.small]
num_layers = 1
hidden_size = 32
num_attention_heads = 2
seq_length = 16

[jobs.curated]
cluster = "here"
model = "small"
dataset = "mixed"
training = { micro_batch_size = 2, global_batch_size = 4, train_iters = 2, lr = 1e-2 }
"""


def test_other_tasks_know_curated_datasets(project: Project) -> None:
    """Parts of a blend, one of them shuffled and one in pieces, from check to training."""
    write_project(project, '[datasets.crawl.curate]\nsteps = [{ step = "exact" }]\n', shards=2)
    project.edit_jobs(
        'paths = ["crawl/*.jsonl"]\n', 'paths = ["crawl/*.jsonl"]\nshuffle_documents = true\n'
    )
    project.add_to_jobs(OTHERS)
    (project.path / "more.json").write_bytes((project.path / "words.json").read_bytes())
    project.invoke("check")
    for task in ("show", "graph", "plan"):
        project.invoke(task, "curated")
    assert "crawl.curated" in project.invoke("prep-data", "--job", "curated", "--dry-run").stdout
    project.invoke("prep-data", "--job", "curated")
    for name in ("crawl", "pieces"):
        assert "is sound" in project.invoke("data-verify", name).stdout
        project.invoke("data-stats", name)
    (first, second) = (
        sorted(row["text"] for row in curated(project, name)) for name in ("crawl", "pieces")
    )
    assert first == second
    project.invoke("train", "--job", "curated")
    project.edit_jobs(
        'shuffle_documents = true\ntokenizer = "words"',
        'shuffle_documents = true\ntokenizer = "more"',
    )
    before = stamps(project)
    project.invoke(*PREPARE)
    assert stamps(project) == before, "curated once for all tokenizers"
    assert (project.path / "data/crawl/more/dataset.json").is_file()


@pytest.fixture
def small_disk(project: Project) -> Iterator[Path]:
    """The project's data on a file system of their own."""
    folder = project.path / "data"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    if subprocess.run(argv, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full_in_every_phase(project: Project, small_disk: Path) -> None:
    """What is finished is kept, and when there is room it goes on to the same bytes."""
    write_project(project, shards=2)
    places = set()
    for kilobytes in (8, 32, 64, 96, 128, 160, 192, 256):
        resize = ["mount", "-o", f"remount,size={kilobytes}k", str(small_disk)]
        subprocess.run(resize, check=True)
        process = project.start(*PREPARE)
        _, err = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == 6 and "No space left on device" in err, err
        assert "make room" in err and "Traceback" not in err
        places.add(err)
    subprocess.run([*resize[:2], "remount,size=64m", str(small_disk)], check=True)
    project.invoke(*PREPARE)
    found = below(project)
    assert len(places) > 2 and not [name for name in found if ".tmp-" in name]
    project.invoke(*PREPARE, "--force")
    assert below(project) == found


WEB = """
[datasets.many]
source = "web"
urls = ["URL/many/{0..1}.jsonl"]
keep_download = false
tokenizer = "words"
[datasets.many.curate]
steps = [{ step = "exact" }, { step = "length", min_characters = 9 }]
"""


def test_text_that_is_read_as_it_comes(project: Project) -> None:
    """Nothing of it is kept but what curation leaves: fresh without its server."""
    prepare = ("prep-data", "--dataset", "many")
    write_project(project, "")
    with serve({}) as site:
        for number in range(2):
            rows = "".join(json.dumps(row) + "\n" for row in crawled()[number::2])
            site.files[f"/many/{number}.jsonl"] = rows.encode()
        project.add_to_jobs(WEB.replace("URL", site.url))
        project.invoke(*prepare)
        kept = texts(curated(project, "many"))
        assert len(kept) > 40
        project.edit_jobs("min_characters = 9", "min_characters = 900")
        asked = len(site.asked)
        project.invoke(*prepare)
        fetched = [each for each in site.asked[asked:] if each.method == "GET"]
        assert not fetched, "the first pass has read it"
        assert 10 < len(texts(curated(project, "many"))) < len(kept)
    assert "fresh" in project.invoke(*prepare).stdout
    assert "is sound" in project.invoke("data-verify", "many").stdout


def test_what_steps_read_is_asked_of_fetched_text_too(project: Project) -> None:
    """It is fresh without its server, but not where a pattern of benchmarks matches more."""
    prepare = ("prep-data", "--dataset", "many")
    exam = {"text": "What would a benchmark of nothing but this one question ever be good for?"}
    write_rows(project.path / "exam-0.jsonl", [exam])
    write_project(project, "")
    with serve({}) as site:
        for number in range(2):
            rows = "".join(json.dumps(row) + "\n" for row in crawled()[number::2])
            site.files[f"/many/{number}.jsonl"] = rows.encode()
        length = '{ step = "length", min_characters = 9 }'
        reads = '{ step = "decontaminate", benchmarks = ["exam*.jsonl"] }'
        project.add_to_jobs(WEB.replace("URL", site.url).replace(length, reads))
        project.invoke(*prepare)
        assert "is fresh" in project.invoke(*prepare).stdout
        kept = curated(project, "many")
        leaked = max(kept, key=lambda row: len(str(row["text"]).split()))
        write_rows(project.path / "exam-1.jsonl", [{"text": leaked["text"]}])
        assert "exam-1.jsonl is new" in project.invoke(*prepare).stdout
        assert str(leaked["text"]) not in texts(curated(project, "many"))
