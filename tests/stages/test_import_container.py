"""The units that make an image file, and what makes one stale; programs that record their words
stand in for enroot and lfs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project
from tests.images.made_files import pretend_squashfs, real_squashfs
from trainkit.base.errors import TrainkitError
from trainkit.images.contract import ImagePlan, read_record, record_path
from trainkit.jobs.containers import Container
from trainkit.jobs.load import load
from trainkit.stages.build_container import image_plan
from trainkit.stages.import_container import import_units, stale_import, work

REPOSITORY = Path(__file__).parents[2]
SOURCE = "docker://nvcr.io#nvidia/pytorch:25.03-py3"
ENROOT = """#!/bin/bash
echo "enroot $*" >> {words}
[ ! -e {folder}/fail ] || {{ cat {folder}/fail >&2; exit 1; }}
cp {image} "$3"
"""
LFS = """#!/bin/bash
echo "lfs $*" >> {words}
[ ! -e {folder}/no-lustre ] || {{ echo 'Inappropriate ioctl for device (25)' >&2; exit 25; }}
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where enroot and lfs note how they were called."""
    image = real_squashfs(tmp_path / "real.sqsh")
    path = tmp_path / "words"
    (tmp_path / "bin").mkdir()
    for name, text in (("enroot", ENROOT), ("lfs", LFS)):
        program = tmp_path / "bin" / name
        program.write_text(text.format(words=path, folder=tmp_path, image=image))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return path


def plan(root: Path, **keys: Any) -> ImagePlan:
    given = {"name": "box", "image": str(root / "images/box.sqsh"), "source": SOURCE, **keys}
    return ImagePlan(Container.model_validate(given), root, "")


def make(given: ImagePlan) -> None:
    """Run its units here."""
    for unit in import_units(given):
        work(json.loads(json.dumps(dict(unit.spec))), lambda done, of: None)


def test_what_makes_an_image_file_stale(tmp_path: Path, words: Path) -> None:
    given = plan(tmp_path)
    file = given.image_file
    assert file is not None and stale_import(given) == f"{file} was never made"
    make(given)
    assert stale_import(given) == ""
    record = read_record(record_path(file))
    assert record is not None and record.tag == SOURCE and record.builder == "enroot"
    assert record.size == file.stat().st_size and record.fingerprint
    other = plan(tmp_path, source="docker://nvcr.io#nvidia/pytorch:26.05-py3")
    assert stale_import(other) == f"containers.box.source was {SOURCE}"
    packed = plan(tmp_path, squashfs={"compression": "zstd"})
    assert stale_import(packed) == f"compression of {file} was not set and is to be zstd"
    os.truncate(file, 1000)
    assert "is truncated: it has 1000 bytes" in stale_import(given)
    pretend_squashfs(file)
    assert stale_import(given) == f"{file} is another image than box.sqsh.json beside it records"
    record_path(file).unlink()
    assert "box.sqsh.json is not there" in stale_import(given)


def test_a_striped_file(tmp_path: Path, words: Path) -> None:
    given = plan(tmp_path, stripe={"size": "1M", "count": -1})
    make(given)
    assert stale_import(given) == "" and stale_import(plan(tmp_path)) == ""
    first, second = words.read_text().splitlines()
    assert first.startswith("enroot import --output ") and "-S 1M -E -1 -c -1" in second
    wider = plan(tmp_path, stripe={"size": "4M", "count": 8})
    assert "was 1M over -1 and is to be 4M over 8" in stale_import(wider)
    names = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert names == ["box.sqsh", "box.sqsh.json"]


def test_stripes_that_failed_cost_no_second_import(tmp_path: Path, words: Path) -> None:
    given = plan(tmp_path, stripe={"size": "1M", "count": -1})
    (tmp_path / "no-lustre").touch()
    with pytest.raises(TrainkitError, match="could not be striped"):
        make(given)
    assert "stripe of" in stale_import(given) and stale_import(plan(tmp_path)) == ""
    (tmp_path / "no-lustre").unlink()
    make(given)
    assert stale_import(given) == ""
    assert [line.split()[0] for line in words.read_text().splitlines()] == ["enroot", "lfs", "lfs"]


def test_an_import_that_fails_leaves_what_was_there(tmp_path: Path, words: Path) -> None:
    given = plan(tmp_path)
    make(given)
    before = {path: path.read_bytes() for path in (tmp_path / "images").iterdir()}
    (tmp_path / "fail").write_text("[ERROR] URL https://nvcr.io/v2/ returned error code: 404\n")
    with pytest.raises(TrainkitError, match="the registry has no such image"):
        make(given)
    assert {path: path.read_bytes() for path in (tmp_path / "images").iterdir()} == before


def test_two_at_once(tmp_path: Path, words: Path) -> None:
    """One after the other, whatever the projects are called that name the same file."""
    given = plan(tmp_path)
    (unit,) = import_units(given)
    slow = tmp_path / "bin/enroot"
    slow.write_text(
        f"#!/bin/bash\necho begin >> {words}\nsleep 0.5\ncp {tmp_path}/real.sqsh $3\n"
        f"echo end >> {words}\n"
    )
    spec = tmp_path / "import.spec.json"
    spec.write_text(json.dumps(dict(unit.spec)))
    argv = [sys.executable, "-m", "trainkit.stages.import_container", str(spec)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    children = [subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    assert words.read_text().split() == ["begin", "end"] * 2
    assert stale_import(given) == ""


def test_the_task(project: Project, words: Path) -> None:
    """A dry run prints the commands; the second call runs nothing; a truncated file is made anew,
    because of that."""
    path = project.path / "jobs.toml"
    text = f'\n[containers.box]\nsource = "{SOURCE}"\nruntime = "enroot"\n'
    table = text + 'stripe = { size = "1M", count = -1 }\n'
    boxed = '[jobs.boxed]\nextends = "random"\ncontainer = "box"\n'
    path.write_text(path.read_text() + table + boxed)
    file = project.path / "images/box.sqsh"
    shown = project.invoke("build-container", "boxed", "--dry-run").stdout
    assert f"    enroot import --output {file} '{SOURCE}'" in shown
    assert f"    lfs setstripe -S 1M -E -1 -c -1 {file.parent}/.box.sqsh.tmp-striped" in shown
    assert not words.exists() and not file.exists()
    project.invoke("build-container", "boxed")
    assert len(words.read_text().splitlines()) == 2 and file.is_file()
    again = project.invoke("build-container", "boxed")
    assert "fresh" in again.stdout + again.stderr and len(words.read_text().splitlines()) == 2
    os.truncate(file, 1000)
    stale = project.invoke("build-container", "boxed", "--dry-run").stdout
    assert f"stale because {file} is truncated: it has 1000 bytes" in stale
    project.invoke("build-container", "boxed")
    assert len(words.read_text().splitlines()) == 4 and file.stat().st_size > 1000


def commands(name: str, *sets: str) -> list[str]:
    """What a reference job's container is made with."""
    found = image_plan(load(REPOSITORY).resolve(name, list(sets)).job)
    assert found is not None
    units = import_units(found)
    return [shlex.join(argv) for unit in units for argv in (unit.commands or tuple)()]


def test_azures_import_is_the_published_one() -> None:
    """ai-infrastructure-on-azure, 00-setup_environment.sh, below `srun`; and its striping."""
    given = ("cluster.root=/stage", "container.image=/stage/pytorch+25.03+py3.sqsh")
    assert commands("azure-gpt3-175b", *given) == [
        f"enroot import --output /stage/pytorch+25.03+py3.sqsh '{SOURCE}'"
    ]
    _, folder, layout, copy, rename = commands("azure-gpt3-175b", *given, "container.stripe={}")
    place = layout.split()[-1]
    assert layout == f"lfs setstripe -S 1M -E -1 -c -1 {place}"
    assert folder == f"mkdir {place}" and copy == f"cp /stage/pytorch+25.03+py3.sqsh {place}"
    assert rename == f"mv {place}/pytorch+25.03+py3.sqsh /stage/pytorch+25.03+py3.sqsh"


def test_aws_import_is_the_published_one() -> None:
    """nemo-aws; `-o` there is the same option (enroot.in)."""
    tag = (
        "111122223333.dkr.ecr.us-east-1.amazonaws.com/"
        "bignlp-training:22.09-py3-bcp-nsys-2022.5.1-v2-efa"
    )
    file = "/apps/bignlp-training_22.09-py3-bcp-nsys-2022.5.1-v2-efa.sqsh"
    assert commands("nemo-gpt3-175b16", "container.builder=docker") == [
        f"enroot import --output {file} dockerd://{tag}"
    ]
