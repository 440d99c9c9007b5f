"""A container's scripts run for real, with a runtime that only records its words; what a node says
that lacks something."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import trainkit
from tests.images.made_files import pretend_squashfs
from tests.launch.containers.container_jobs import IMAGES, session
from tests.launch.supervised import DONE, Program, make_run, supervised
from trainkit.images.squashfs import fingerprint
from trainkit.launch.agent.host_report import extension_error
from trainkit.launch.containers.scripts import HOME_LINE
from trainkit.launch.protocol.frames import HostFacts
from trainkit.launch.supervise.agent_pool import JoinedAgent
from trainkit.launch.supervise.host_consistency import host_inconsistencies, python_is_old
from trainkit.runs.folder import RunFolder

# Runtimes that enter no container: they record their words and run what follows the image, with the
# environment that the real one would give it
# (apptainer-exec(1), enroot's start: all of the host's unless --cleanenv; none but what --env
# names). Home is one that is not there.
FAKE = """#!/bin/bash
printf '%s\\n' "$@" > {folder}/words
env=()
for word in "$@"; do
    [ "$word" != --cleanenv ] || {{ env=(-i PATH=/usr/bin:/bin)
        for name in ${{!APPTAINERENV_@}}; do env+=("${{name#APPTAINERENV_}}=${{!name}}"); done; }}
done
[ "$1" != start ] || env=(-i PATH=/usr/bin:/bin)
while [ "$1" != {image} ]; do
    if [ "$1" = --env ]; then case "$2" in *=*) env+=("$2") ;; *) env+=("$2=${{!2}}") ;; esac; fi
    shift
done
shift
exec env "${{env[@]}}" HOME=/no/such/home "$@"
"""


def run_in(
    tmp_path: Path,
    runtime: str,
    more: str = "",
    *,
    python: str = sys.executable,
    sets: Sequence[str] = (),
) -> RunFolder:
    """A run whose agent the fake runtime starts."""
    program = tmp_path / "bin" / runtime
    program.parent.mkdir()
    image = pretend_squashfs(tmp_path / Path(IMAGES[runtime]).name)
    program.write_text(FAKE.format(folder=tmp_path, image=image))
    program.chmod(0o755)
    table = (
        f'image = "{image}"\nruntime = "{runtime}"\npython = "{python}"\nenv = {{ IN ='
        f' "the box" }}\n{more}'
    )
    prolog = [
        f"export PATH={program.parent}:$PATH",
        "export LD_AUDIT= CONDA_PREFIX=/host CUDA_VISIBLE_DEVICES=3 APPTAINERENV_SITE=own",
    ]
    return make_run(tmp_path, [f"cluster.prolog={json.dumps(prolog)}", *sets], container=table)


@pytest.mark.parametrize("runtime", ["apptainer", "enroot"])
def test_ranks_run_where_the_runtime_leads(tmp_path: Path, runtime: str) -> None:
    """The environment is the image's and the job's, not the host's; what the job sets is there
    before the agent is, which the prolog sees."""
    run = run_in(tmp_path, runtime, 'prolog = ["export SEEN=$IN"]')
    names = ("HOME", "IN", "SEEN", "CONDA_PREFIX", "LD_AUDIT", "A_SECRET", "SITE")
    outcome, _ = supervised(
        run, Program(DONE + f"print([os.environ.get(name) for name in {names}])")
    )
    assert outcome.exit == 0, outcome.root_cause
    site = "own" if runtime == "apptainer" else None
    home = f"/tmp/home-{os.getuid()}"
    assert ast.literal_eval(run.attempt(1).log(0).read_text().strip()) == [
        home,
        "the box",
        "the box",
        None,
        None,
        None,
        site,
    ]
    words = (tmp_path / "words").read_text().splitlines()
    assert words[0] == ("exec" if runtime == "apptainer" else "start") and words[-3:] == [
        "/bin/bash",
        f"{run.session(1)}/inside.sh",
        "0",
    ]


@pytest.mark.parametrize("runtime", ["apptainer", "enroot"])
def test_ranks_run_of_the_copy_on_their_node(tmp_path: Path, runtime: str) -> None:
    """It is made before the first start and used by the second."""
    disk = tmp_path / "nvme"
    disk.mkdir()
    run = run_in(tmp_path, runtime, f'stage_to = "{disk}"')
    shared = tmp_path / Path(IMAGES[runtime]).name
    copy = disk / f"box-{fingerprint(shared)[:12]}{shared.suffix}"
    program = tmp_path / "bin" / runtime
    program.write_text(FAKE.format(folder=tmp_path, image=copy))
    outcome, _ = supervised(run, Program(DONE))
    assert outcome.exit == 0, outcome.root_cause
    words = (tmp_path / "words").read_text().splitlines()
    assert str(copy) in words and str(shared) not in words
    assert copy.read_bytes() == shared.read_bytes()


def test_a_node_without_room_for_the_copy_is_named(tmp_path: Path) -> None:
    run = run_in(tmp_path, "enroot", 'stage_to = "/no/such/disk"')
    outcome, told = supervised(run, Program(DONE))
    cause = outcome.root_cause
    assert outcome.exit == 8 and cause is not None
    assert "there is no folder /no/such/disk (containers.box.stage_to)" in cause["message"]
    assert not any(event["event"] == "rank_started" for event in told)


def test_an_image_that_is_truncated_starts_no_rank(tmp_path: Path) -> None:
    run = run_in(tmp_path, "enroot")
    os.truncate(tmp_path / "app.sqsh", 1000)
    outcome, told = supervised(run, Program(DONE))
    cause = outcome.root_cause
    assert outcome.exit == 8 and cause is not None
    assert "is truncated: it has 1000 bytes" in cause["message"], cause
    assert not any(event["event"] == "rank_started" for event in told)


def test_secrets_are_no_variables_of_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They reach ranks as always, and no script or word has them."""
    monkeypatch.setenv("A_SECRET", "hush-hush")
    run = run_in(
        tmp_path,
        "apptainer",
        'prolog = ["export SEEN=$(printenv A_SECRET || echo nothing)"]',
        sets=['cluster.secrets=["A_SECRET"]'],
    )
    outcome, _ = supervised(
        run,
        Program(DONE + "print(os.environ.get('SEEN'), len(os.environ['A_SECRET']))"),
        secrets={"A_SECRET": "hush-hush"},
    )
    assert outcome.exit == 0, outcome.root_cause
    assert run.attempt(1).log(0).read_text().strip() == "nothing 9"
    texts = [path.read_text() for path in (*run.session(1).glob("*.sh"), tmp_path / "words")]
    assert len(texts) == 3 and not any("hush-hush" in text or "A_SECRET=" in text for text in texts)


def test_a_home_that_is_another_users(tmp_path: Path) -> None:
    """Caches hold code: one that somebody else made is not taken."""
    line = HOME_LINE.replace("/tmp/home-", f"{tmp_path}/home-")
    home = tmp_path / f"home-{os.getuid()}"
    shown = subprocess.run(
        ["bash", "-ec", f'{line}\necho "$HOME"'],
        env={"HOME": "/no/such"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == str(home) and home.stat().st_mode & 0o777 == 0o700
    kept = subprocess.run(
        ["bash", "-ec", f'{line}\necho "$HOME"'],
        env={"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert kept.stdout.strip() == str(tmp_path)
    home.rmdir()
    home.symlink_to("/proc/1/nobody's")
    refused = subprocess.run(
        ["bash", "-ec", f"{line}\necho on"],
        env={"HOME": "/no/such"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        refused.returncode == 8 and "cannot be the home of" in refused.stderr and not refused.stdout
    )


def test_mounts_that_are_not_there_are_named_before_any_rank_starts(tmp_path: Path) -> None:
    run = run_in(
        tmp_path, "apptainer", f'mounts = ["/no/such:/x", "{tmp_path}:/y", "/not/there:/z:ro"]'
    )
    outcome, told = supervised(run, Program(DONE))
    cause = outcome.root_cause
    assert (
        outcome.exit == 8
        and cause is not None
        and "what containers.box mounts: /no/such /not/there" in cause["message"]
    ), cause
    assert os.uname().nodename in cause["message"] and "watch.connect" in cause["advice"]
    assert not any(e["event"] == "rank_started" for e in told) and not (tmp_path / "words").exists()


def test_a_python_that_is_not_in_the_image(tmp_path: Path) -> None:
    outcome, _ = supervised(run_in(tmp_path, "apptainer", python="/no/python3"), Program(DONE))
    assert outcome.exit == 8 and "the image has no /no/python3 (containers.box.python)" in str(
        outcome.root_cause
    )


def test_a_runtime_that_is_not_on_the_node(tmp_path: Path) -> None:
    run = make_run(tmp_path, container='image = "/images/app.sqsh"\nruntime = "enroot"')
    outcome, _ = supervised(run, Program(DONE))
    assert outcome.exit == 8 and "has no enroot, the runtime of containers.box" in str(
        outcome.root_cause
    )


def test_code_compiled_for_another_python(tmp_path: Path) -> None:
    assert extension_error(tmp_path) is None, "nothing is compiled"
    (tmp_path / "_index.cpython-38-x86_64-linux-gnu.so").write_bytes(b"")
    said = extension_error(tmp_path)
    assert (
        said is not None
        and "_index.cpython-38-x86_64-linux-gnu.so is for another Python than 3." in said
    )
    (tmp_path / f"_index{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    assert "_index" in str(extension_error(tmp_path)), "the linker's own words"
    given = session(tmp_path, "docker")
    facts = HostFacts(
        node=0,
        nonce=given.nonce,
        snapshot=given.code.name,
        extension=said,
        executable="/usr/bin/python3",
    )
    hellos = [JoinedAgent(0, "h", facts, 0.0)]
    assert host_inconsistencies(hellos, given, 0, own_code=False) == [], "other engines have none"
    (found,) = host_inconsistencies(hellos, given, 0, own_code=True)
    assert found.host == "h" and found.message.startswith(
        "its Python of reg/app:1 (/usr/bin/python3) cannot load the code's compiled part:"
        " _index.cpython-38"
    )


def test_a_python_that_is_too_old_says_so() -> None:
    """Told so by a newer one: the check must come before anything that an old one cannot read."""
    agent = Path(trainkit.__file__).parent / "launch" / "agent" / "main.py"
    code = (
        f"import runpy, sys; sys.version_info = (3, 7, 16); runpy.run_path({str(agent)!r},"
        " run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert (
        done.returncode != 0
        and "3.8 or newer is needed: clusters.X.python, containers.X.python" in done.stderr
        and "Traceback" not in done.stderr
    )
    ast.parse(agent.read_text(), feature_version=(3, 6))
    assert "from __future__ import annotations" not in agent.read_text().split("\n"), (
        "that is 3.7's"
    )


def test_a_python_or_a_torch_that_is_not_for_our_own_ranks(tmp_path: Path) -> None:
    """One message, and not that of the compiled part, which is for another Python too."""
    given = session(tmp_path, "docker")
    facts = HostFacts(
        node=0,
        nonce=given.nonce,
        snapshot=given.code.name,
        versions={"python": "3.8.10"},
        extension="for another Python",
        executable="/usr/bin/python3",
    )
    hellos = [JoinedAgent(0, "h", facts, 0.0)]
    assert host_inconsistencies(hellos, given, 0, own_code=False) == []
    (found,) = host_inconsistencies(hellos, given, 0, own_code=True)
    assert found.message == (
        "its Python of reg/app:1 (/usr/bin/python3) is 3.8.10; trainkit's own code needs 3.11 or"
        " newer: containers.box.python"
    )
    new = replace(facts, versions={"python": "3.12.1", "torch": "2.99.0"}, extension=None)
    hellos = [JoinedAgent(0, "h", new, 0.0)]
    assert host_inconsistencies(hellos, given, 0, own_code=False) == []
    (found,) = host_inconsistencies(hellos, given, 0, own_code=True)
    assert found.message.startswith(
        "its Python of reg/app:1 (/usr/bin/python3): torch 2.99.0 was not tried"
    )
    for version, old in (("3.10.13", True), ("3.11.0", False), ("3.14.0rc1", False), (None, False)):
        assert python_is_old(HostFacts(node=0, versions={"python": version})) is old


def test_another_engine_in_an_image_with_an_old_python(tmp_path: Path, old_python: str) -> None:
    """Agent, keeper and rank run with it; the code's compiled part is for another."""
    code = f"import sys; assert sys.version_info < (3, 11){DONE}"
    program = Program(argv=(old_python, "-c", code))
    outcome, told = supervised(run_in(tmp_path, "apptainer", python=old_python), program)
    assert outcome.exit == 0, outcome.root_cause
    assert any(event["event"] == "rank_started" for event in told)


def test_our_own_ranks_in_an_image_with_an_old_python(tmp_path: Path, old_python: str) -> None:
    """Refused before any rank starts."""
    program = Program(argv=(old_python, "-c", DONE), own_code=True)
    outcome, told = supervised(run_in(tmp_path, "apptainer", python=old_python), program)
    cause = outcome.root_cause
    assert outcome.exit == 7 and cause is not None, cause
    assert "trainkit's own code needs 3.11 or newer: containers.box.python" in cause["message"]
    assert "compiled part" not in cause["message"] and "interpreter" in cause["advice"]
    assert not any(event["event"] == "rank_started" for event in told)
