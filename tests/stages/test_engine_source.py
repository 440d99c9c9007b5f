"""Trees of engines cloned from real repositories, and folders looked at."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.stages.engine_trees import (
    MEGATRON,
    Bringer,
    commit,
    everything_below,
    git,
    job_of,
    repository,
    write_files,
)
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.git import without_passwords
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.engines.sources import source_tree
from trainkit.jobs.containers import Container
from trainkit.stages.engine_source import EngineSourceStage, read_record


@pytest.fixture
def stage() -> Bringer:
    return Bringer(EngineSourceStage())


@pytest.fixture
def url(tmp_path: Path) -> str:
    return repository(tmp_path / "published tree's").as_uri()


def failure(stage: Bringer, root: Path, **source: str) -> TrainkitError:
    """How the stage fails; nothing is left, and it is stale afterwards."""
    job = job_of(root, dict(source))
    with pytest.raises(TrainkitError) as raised:
        stage.bring(job)
    assert raised.value.exit == Exit.STAGE_FAILED
    assert not list((root / "engines").glob("*")) if (root / "engines").exists() else True
    return raised.value


def test_a_tree_is_cloned_once_at_its_revision(stage: Bringer, tmp_path: Path, url: str) -> None:
    origin = tmp_path / "published tree's"
    first = git(origin, "rev-parse", "HEAD")
    git(origin, "tag", "core_v0.12.0")
    commit(origin, {"pretrain_gpt.py": "print('later')\n"})
    job = job_of(tmp_path / "root", {"source": url, "revision": "core_v0.12.0"})
    verdict = stage.bring(job)
    assert not verdict.fresh and verdict.because == "it was never cloned"
    tree = source_tree(job)
    assert git(tree, "rev-parse", "HEAD") == first
    assert (tree / "pretrain_gpt.py").read_text() == MEGATRON["pretrain_gpt.py"]
    record = read_record(tree)
    assert (record.source, record.revision, record.commit) == (url, "core_v0.12.0", first)
    stamp = stage.stamps(job) / f"{tree.name}.units" / "clone.json"
    assert json.loads(stamp.read_text())["result"]["commit"] == first
    time = (tree / "pretrain_gpt.py").stat().st_mtime_ns
    again = stage.bring(job)
    assert again.fresh and first[:12] in again.because
    assert (tree / "pretrain_gpt.py").stat().st_mtime_ns == time


def test_branches_tags_and_hashes_of_any_length_are_revisions(
    stage: Bringer, tmp_path: Path, url: str
) -> None:
    origin = tmp_path / "published tree's"
    first = git(origin, "rev-parse", "HEAD")
    git(origin, "tag", "-a", "annotated", "-m", "t")
    git(origin, "branch", "team/old-branch")
    commit(origin, {"README": "more\n"})
    commit(origin, {"README": "more still\n"})
    second = git(origin, "rev-parse", "main~1")
    job = job_of(tmp_path / "root", {"source": url, "revision": second[:8]})
    stage.bring(job)  # one that no branch or tag ends with
    assert git(source_tree(job), "rev-parse", "HEAD") == second
    assert git(source_tree(job), "rev-list", "--count", "HEAD") == "1"
    for revision in ("annotated", "team/old-branch", first, first[:7]):
        job = job_of(tmp_path / "root", {"source": url, "revision": revision})
        stage.bring(job)
        assert git(source_tree(job), "rev-parse", "HEAD") == first
    job = job_of(tmp_path / "root", {"source": url})
    stage.bring(job)
    assert git(source_tree(job), "rev-parse", "HEAD") == git(origin, "rev-parse", "HEAD")


def test_a_revision_that_is_not_there_is_named_with_the_nearest(
    stage: Bringer, tmp_path: Path, url: str
) -> None:
    git(tmp_path / "published tree's", "tag", "core_v0.12.0")
    error = failure(stage, tmp_path / "root", source=url, revision="core_v0.12")
    assert "has no revision 'core_v0.12'" in error.message
    assert "did you mean 'core_v0.12.0'?" in str(error)
    error = failure(stage, tmp_path / "root", source=url, revision="0123abcd")
    assert "has no revision '0123abcd'" in error.message


@pytest.mark.parametrize(
    "revision", ["--upload-pack=touch x", "-f", "a b", "HEAD~1", "a..b", "'; id", "@{-1}", "\n"]
)
def test_what_is_no_revision_is_refused_before_git_sees_it(
    stage: Bringer, tmp_path: Path, url: str, revision: str
) -> None:
    error = failure(stage, tmp_path / "root", source=url, revision=revision)
    assert json.dumps(revision) in str(error) and "names no commit, tag or branch" in str(error)


def test_no_such_repository_no_network_and_no_git(
    stage: Bringer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    error = failure(stage, tmp_path / "root", source=(tmp_path / "none").as_uri(), revision="v1")
    assert "there is no such repository" in error.message
    error = failure(stage, tmp_path / "root", source="http://127.0.0.1:1/tree", revision="v1")
    assert "cannot be reached" in error.message and "copy it here" in str(error)
    monkeypatch.setenv("PATH", str(tmp_path))
    error = failure(stage, tmp_path / "root", source=url, revision="main")
    assert "git is not on PATH" in error.message


def test_an_empty_or_another_repository_is_refused(stage: Bringer, tmp_path: Path) -> None:
    other = repository(tmp_path / "other", {"train.py": "", "deepy.py": ""})
    error = failure(stage, tmp_path / "root", source=other.as_uri(), revision="main")
    assert f"{other.as_uri()} at main is not a tree of megatron-lm" in error.message
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q")
    error = failure(stage, tmp_path / "root", source=empty.as_uri())
    assert "has no revision 'HEAD'" in error.message and "empty" in str(error)


def test_transports_that_run_programs_are_never_used(stage: Bringer, tmp_path: Path) -> None:
    source = f"ext://sh -c touch% {tmp_path}/ran"
    error = failure(stage, tmp_path / "root", source=source, revision="main")
    assert "cannot be cloned" in error.message
    assert not (tmp_path / "ran").exists()


def test_a_tree_of_another_url_is_never_taken_from_runs_that_use_it(
    stage: Bringer, tmp_path: Path, url: str
) -> None:
    root = tmp_path / "root"
    first = job_of(root, {"source": url, "revision": "main"})
    stage.bring(first)
    fork = repository(tmp_path / "fork", {**MEGATRON, "fork": "ours\n"})
    source = {"source": fork.as_uri(), "revision": "main"}
    job = job_of(root, source)
    assert "source changed from" in stage.verdict(job).because
    with pytest.raises(TrainkitError, match="was cloned from") as raised:
        stage.bring(job)
    assert raised.value.exit == Exit.STAGE_FAILED and "a name of its own" in str(raised.value)
    assert stage.verdict(first).fresh
    named = job_of(root, {**source, "name": "fork", "engine": "megatron-lm"})
    stage.bring(named)
    assert (source_tree(named) / "fork").is_file() and stage.verdict(first).fresh


def test_a_branch_moves_only_by_force(stage: Bringer, tmp_path: Path, url: str) -> None:
    job = job_of(tmp_path / "root", {"source": url, "revision": "main"})
    stage.bring(job)
    new = commit(tmp_path / "published tree's", {"README": "new\n"})
    assert stage.bring(job).fresh
    assert stage.bring(job, force=True).because == "--force was given"
    assert git(source_tree(job), "rev-parse", "HEAD") == new


def test_somebodys_work_in_a_clone_is_said_and_never_replaced(
    stage: Bringer, tmp_path: Path, url: str
) -> None:
    job = job_of(tmp_path / "root", {"source": url, "revision": "main"})
    stage.bring(job)
    tree = source_tree(job)
    write_files(tree, {"pretrain_gpt.py": "print('mine')\n", "megatron/helpers.so": "x"})
    verdict = stage.verdict(job)
    assert verdict.fresh and verdict.because.endswith("changed since: pretrain_gpt.py")
    with pytest.raises(TrainkitError, match="holds what somebody made") as raised:
        stage.bring(job, force=True)
    assert raised.value.exit == Exit.STAGE_FAILED and f'source = "{tree}"' in str(raised.value)
    assert (tree / "pretrain_gpt.py").read_text() == "print('mine')\n"
    commit(tree, {}, "of my own")
    assert "somebody checked out" in stage.verdict(job).because
    with pytest.raises(TrainkitError, match="holds what somebody made"):
        stage.bring(job)


def test_a_folder_in_the_way_is_left_alone(stage: Bringer, tmp_path: Path, url: str) -> None:
    job = job_of(tmp_path / "root", {"source": url, "revision": "main"})
    write_files(source_tree(job), {"mine": "x"})
    with pytest.raises(TrainkitError, match="trainkit has not cloned it"):
        stage.bring(job)
    assert [path.name for path in source_tree(job).iterdir()] == ["mine"]


def test_a_named_folder_is_only_looked_at(stage: Bringer, tmp_path: Path) -> None:
    tree = repository(tmp_path / "tree")
    head = git(tree, "rev-parse", "HEAD")
    job = job_of(tmp_path / "root", {"source": str(tree)})
    verdict = stage.bring(job)
    assert verdict.fresh
    assert verdict.because == f"{tree} is core-0.12.0, commit {head[:12]}"
    (tree / "pretrain_gpt.py").write_text("print('mine')\n")
    (tree / "new.py").write_text("")
    verdict = stage.bring(job, force=True)
    assert "with changes in pretrain_gpt.py and 1 more" in stage.verdict(job).because
    stamp = stage.stamps(job) / "megatron-lm.units" / "check.json"
    result = json.loads(stamp.read_text())["result"]
    assert result["commit"] == head and result["changed"] == ["pretrain_gpt.py", "new.py"]
    assert "+print('mine')" in result["diff"]
    assert not (tmp_path / "root" / "engines").exists()


def test_an_unpacked_archive_is_not_taken_for_the_repository_around_it(
    stage: Bringer, tmp_path: Path
) -> None:
    around = repository(tmp_path / "around")
    write_files(around / "tree", MEGATRON)
    (around / ".gitignore").write_text("tree\n")
    job = job_of(tmp_path / "root", {"source": str(around / "tree")})
    assert stage.verdict(job).because.endswith("is core-0.12.0, in no git repository")
    job = job_of(tmp_path / "root", {"source": str(around / "tree"), "revision": "main"})
    with pytest.raises(TrainkitError, match="cannot be checked"):
        stage.need(job)


def test_a_folder_that_is_not_what_it_should_be(stage: Bringer, tmp_path: Path) -> None:
    tree = repository(tmp_path / "tree")
    old = git(tree, "rev-parse", "HEAD")
    new = commit(tree, {"README": ""})
    stage.need(job_of(tmp_path, {"source": str(tree), "revision": new[:9]}))
    for source, said in (
        ({"source": str(tree), "revision": old}, f"is at commit {new[:12]}"),
        ({"source": str(tree), "revision": "v9"}, "a commit that is not there"),
        ({"source": str(tmp_path / "none")}, "is not at"),
        ({"source": str(tree), "engine": "gpt-neox"}, "is not a tree of gpt-neox"),
    ):
        with pytest.raises(TrainkitError, match=said) as raised:
            stage.need(job_of(tmp_path, source))
        assert raised.value.exit == Exit.STAGE_FAILED and raised.value.problems()[0]["hint"]


def test_a_tree_inside_the_image_needs_nothing(stage: Bringer, tmp_path: Path) -> None:
    image = Container(name="i", image="name", runtime="docker")
    job = job_of(tmp_path, {"source": "/opt/not/here"}, container=image)
    assert stage.stage.needs(job, stage.stamps(job)) == []


def test_a_hook_in_a_tree_is_never_run(stage: Bringer, tmp_path: Path, url: str) -> None:
    tree = repository(tmp_path / "tree")
    hook = tree / ".git" / "hooks" / "post-checkout"
    write_files(tree, {".git/hooks/post-checkout": f"#!/bin/sh\ntouch {tmp_path}/ran\n"})
    hook.chmod(hook.stat().st_mode | stat.S_IXUSR)
    git(tree, "config", "core.fsmonitor", str(hook))
    (tree / "new.py").write_text("")
    assert "new.py" in stage.verdict(job_of(tmp_path, {"source": str(tree)})).because
    assert not (tmp_path / "ran").exists()


def test_a_password_that_gits_own_settings_add_is_written_nowhere(
    stage: Bringer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "url.http://me:hunter22@127.0.0.1:1/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "http://example.invalid/")
    error = failure(stage, tmp_path / "root", source="http://example.invalid/t", revision="main")
    assert "hunter22" not in str(error)
    assert "hunter22" not in everything_below(tmp_path / "root")
    assert without_passwords("at https://a:b@c/d") == "at https://***@c/d"


def test_a_caller_that_git_runs_itself_does_not_lend_its_repository(
    stage: Bringer, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = repository(tmp_path / "other", {"x": ""})
    head = git(tmp_path / "published tree's", "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    job = job_of(tmp_path / "root", {"source": url, "revision": "main"})
    stage.bring(job)
    assert read_record(source_tree(job)).commit == head


def slow_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> Path:
    """A git on PATH that stays in `word` until the file that is returned is there."""
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True)
    goes_on = tmp_path / "goes on"
    script = tmp_path / "bin" / "git"
    text = (
        f'#!/bin/sh\ncase " $* " in *" {word} "*) touch "{tmp_path}/began";'
        f' while [ ! -e "{goes_on}" ]; do sleep 0.05; done;; esac\n'
        f'exec {real.stdout.strip()} "$@"\n'
    )
    write_files(tmp_path, {"bin/git": text})
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return goes_on


@pytest.mark.parametrize("word", ["fetch", "checkout"])
def test_a_killed_clone_leaves_nothing_that_counts_and_is_made_again(
    stage: Bringer, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    job = job_of(tmp_path / "root", {"source": url, "revision": "main"})
    goes_on = slow_git(tmp_path, monkeypatch, word)
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(dict(stage.need(job).units[0].spec)))
    unit = subprocess.Popen(
        [sys.executable, "-m", "trainkit.stages.engine_source", str(spec)],
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for((tmp_path / "began").exists, "git to be at work")
    os.kill(unit.pid, signal.SIGKILL)
    unit.wait()
    assert not stage.verdict(job).fresh and not source_tree(job).exists()
    assert [path for path in (tmp_path / "root" / "engines").iterdir() if ".tmp-" in path.name]
    goes_on.touch()
    stage.bring(job)
    assert stage.verdict(job).fresh
    assert [path.name for path in (tmp_path / "root" / "engines").iterdir()] == [
        source_tree(job).name
    ]


def test_two_at_once_clone_once(
    stage: Bringer, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path / "root", {"source": url, "revision": "main"})
    goes_on = slow_git(tmp_path, monkeypatch, "fetch")
    other = Bringer(EngineSourceStage())
    found: list[str] = []
    first = threading.Thread(target=lambda: found.append(stage.bring(job).because))
    second = threading.Thread(target=lambda: found.append(other.bring(job).because))
    first.start()
    wait_for((tmp_path / "began").exists, "git to be at work")
    second.start()
    wait_for(lambda: any("waiting for pid" in line for line in other.lines), "the second to wait")
    goes_on.touch()
    first.join()
    second.join()
    assert found[0] == "it was never cloned" and "when it was cloned" in found[1]


def test_a_submodule_that_the_engine_needs_is_fetched(
    stage: Bringer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-Bridge's Megatron-LM, and no other that its tree may have."""
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "protocol.file.allow")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "always")
    core = repository(tmp_path / "core")
    other = repository(tmp_path / "other")
    bridge = repository(
        tmp_path / "bridge",
        {
            "scripts/training/run_recipe.py": "",
            "src/megatron/bridge/package_info.py": "MAJOR = 0\nMINOR = 6\nPATCH = 1\n",
        },
    )
    for source, place in ((core, "3rdparty/Megatron-LM"), (other, "3rdparty/Other")):
        git(bridge, "submodule", "add", "-q", source.as_uri(), place)
    wanted = commit(bridge, {})
    job = job_of(tmp_path / "root", {"engine": "megatron-bridge", "source": bridge.as_uri()})
    stage.bring(job)
    tree = source_tree(job)
    assert git(tree, "rev-parse", "HEAD") == wanted
    assert (tree / "3rdparty/Megatron-LM/pretrain_gpt.py").is_file()
    assert not list((tree / "3rdparty/Other").iterdir())
    assert git(tree, "status", "--porcelain") == ""
    assert stage.verdict(job).fresh
