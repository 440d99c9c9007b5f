"""The stages of a job as a graph: states, what comes after what, and its pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

from tests.conftest import Project
from trainkit.experiment.graph import graph_of_job
from trainkit.jobs.load import load
from trainkit.reports.graph import JobGraph, StageNode

HOSTILE = '"]; click n0 "javascript:alert(1)" <script>#quot;</script>'


def test_stages_before_and_after_they_are_made(project: Project) -> None:
    """Stale because of what, then fresh, then stale because a setting changed."""
    said = project.invoke("graph", "text").stdout
    assert "stale because it was never made here" in said
    assert "waits because prep-data lines--bpe comes first" in said
    project.invoke("prep-data", "--job", "text")
    jobs = load(project.path)
    made = graph_of_job(jobs.resolve("text").job)
    assert {node.state for node in made.nodes} == {"fresh"}
    stages = ["build index", "build kernels", "prep-data lines--bpe"]
    assert made.node("train text").after == stages
    makes = made.node("prep-data lines--bpe").makes
    assert all((project.path / name).is_file() for name in makes) and len(makes) == 4
    megatron = graph_of_job(jobs.resolve("text", ["sample_order=megatron"]).job)
    assert megatron.node("index lines--bpe").after == ["prep-data lines--bpe"]
    assert megatron.node("train text").state == "waits"
    (project.path / "corpus" / "more.jsonl").write_text('{"text": "more"}\n')
    stale = project.document("graph", "text", "--svg", "g.svg")
    node = next(each for each in stale["nodes"] if each["name"].startswith("prep-data"))
    assert node["state"] == "stale" and "more.jsonl" in node["because"]
    assert 0 < node["missing"] <= node["units"]
    drawn = ET.parse(project.path / "g.svg").getroot()
    assert drawn.get("aria-label") == "stages of text"
    assert project.invoke("graph", "text", "--mermaid").stdout.startswith("flowchart LR\n")
    wrong = project.invoke("graph", "text", "--svg", "g.png", exit=3)
    assert "g.png does not end in .svg" in wrong.stderr


def test_a_dataset_whose_servers_do_not_answer_is_unknown(project: Project) -> None:
    text = (project.path / "jobs.toml").read_text()
    source = 'source = "web"\nurls = ["http://127.0.0.1:9/a.jsonl"]\n'
    text = text.replace('source = "files"\npaths = ["corpus/*.jsonl"]\n', source)
    (project.path / "jobs.toml").write_text(text)
    found = graph_of_job(load(project.path).resolve("text").job)
    states = {node.name.split()[0]: node.state for node in found.nodes}
    assert states["prep-data"] in ("unknown", "stale") and states["train"] == "waits"


def test_no_text_of_a_job_is_read_as_markup() -> None:
    nodes = [
        StageNode("a", "stale", HOSTILE, [HOSTILE] * 5, (), 3, 2),
        StageNode("b", "unknown", "x\ny", (), ["a"]),
    ]
    graph = JobGraph(HOSTILE, nodes)
    svg = graph.to_svg()
    assert "<script" not in svg and ET.fromstring(svg) is not None
    mermaid = graph.to_mermaid()
    assert "<script" not in mermaid and "  n0 --> n1" in mermaid
    labels = [line for line in mermaid.splitlines() if line.startswith("  n0[")]
    assert len(labels) == 1 and labels[0].count('"') == 2
    assert json.dumps(graph.to_json())
