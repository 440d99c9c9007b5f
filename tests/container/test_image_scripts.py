"""efa.sh and apt.sh run really, with programs that record what they are asked for in place of the
network's and the compiler's, and folders of its own in place of /opt, /etc and /var."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.container.dockerfiles import CONTAINER, arguments
from tests.programs import put_program

BWRAP = shutil.which("bwrap")
# not all of /: folders that others mount and unmount there meanwhile would end bwrap
USR = ["--ro-bind", "/usr", "/usr"]
for _name in ("bin", "sbin", "lib", "lib64"):
    USR += ["--symlink", f"usr/{_name}", f"/{_name}"]
RECORD = '#!/bin/sh\necho "${0##*/} $*" >>"$RECORD"\n'
# a source archive unpacks to programs that are started by their path, and to what make would build
TAR = (
    RECORD
    + """
if [ "$4" = -C ] || [ "$5" = -C ]; then place=source; else place=aws-efa-installer; fi
mkdir -p $place/build/lib $place/build/include
for program in autogen.sh configure efa_installer.sh; do cp "$PROGRAM" $place/$program; done
echo library >$place/build/lib/libnccl.so.2
echo archive >$place/build/lib/libnccl_static.a
if [ $place = aws-efa-installer ]; then
    mkdir -p /opt/amazon/efa/bin
    cp "$PROGRAM" /opt/amazon/efa/bin/fi_info
fi
"""
)
CURL = RECORD + 'while [ "$1" != -o ]; do shift; done\necho downloaded >"$2"\n'


def _can() -> bool:
    """Whether bubblewrap can make its namespaces here."""
    if BWRAP is None:
        return False
    return subprocess.run([BWRAP, *USR, "true"], check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _can(), reason="bubblewrap is missing, or may not run here")


@dataclass
class Machine:
    """Folders that stand for parts of an image.

    Args:
        folder: holds them.
        variables: build arguments.
    """

    folder: Path
    variables: dict[str, str]

    def run(self, part: str) -> subprocess.CompletedProcess[str]:
        """One part of efa.sh."""
        return self.script("bash", "efa.sh", part)

    def script(self, shell: str, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """A script of container/."""
        assert BWRAP is not None
        binds: list[str] = []
        for place in ("opt", "etc", "var"):
            binds += ["--bind", str(self.folder / place), f"/{place}"]
        return subprocess.run(
            [
                *(BWRAP, *USR, "--dev", "/dev", "--tmpfs", "/tmp", *binds),
                *("--bind", str(self.folder), str(self.folder)),
                *("--ro-bind", str(CONTAINER), str(CONTAINER)),
                *(shell, str(CONTAINER / name), *words),
            ],
            capture_output=True,
            text=True,
            check=False,
            env={
                **self.variables,
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "RECORD": str(self.folder / "record"),
                "PROGRAM": str(self.folder / "bin" / "record"),
            },
        )

    def commands(self, part: str) -> list[str]:
        """What a part runs, without -j and the downloads' file names."""
        done = self.run(part)
        assert done.returncode == 0, done.stderr
        return self.recorded()

    def recorded(self) -> list[str]:
        """What was run since the beginning."""
        record = self.folder / "record"
        return record.read_text().splitlines() if record.exists() else []

    def file(self, name: str) -> str:
        return (self.folder / name).read_text().strip()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for name in ("opt", "etc/ld.so.conf.d", "var/cache/ldconfig", "var/log", "bin"):
        (tmp_path / name).mkdir(parents=True)
    programs = dict.fromkeys(["record", "ldconfig", "make", "apt-get", "dpkg-query"], RECORD)
    programs["nproc"] = "#!/bin/sh\necho 8\n"
    for name, text in {**programs, "tar": TAR, "curl": CURL}.items():
        put_program(tmp_path / "bin", name, text)
    return Machine(tmp_path, arguments(CONTAINER / "Dockerfile.efa"))


def test_installer(machine: Machine) -> None:
    commands = machine.commands("installer")
    url = "https://efa-installer.amazonaws.com/aws-efa-installer-1.37.0.tar.gz"
    assert f"curl -fsSL --retry 3 -o installer.tar.gz {url}" in commands
    assert "efa_installer.sh -y -g -d --skip-kmod --skip-limit-conf --no-verify" in commands
    assert commands[-1] == "fi_info --version"
    assert machine.file("etc/ld.so.conf.d/efa.conf") == "/opt/amazon/efa/lib"


def test_a_file_with_another_sum_is_not_run(machine: Machine) -> None:
    machine.variables["EFA_INSTALLER_SHA256"] = "0" * 64
    done = machine.run("installer")
    assert done.returncode == 3
    assert "is not the file with SHA-256 0000" in done.stderr
    assert "efa_installer.sh" not in machine.file("record")


def test_gdrcopy(machine: Machine) -> None:
    commands = machine.commands("gdrcopy")
    url = "https://github.com/NVIDIA/gdrcopy/archive/refs/tags/v2.4.1.tar.gz"
    assert any(command.endswith(url) for command in commands)
    assert "make -j 8 prefix=/opt/gdrcopy CUDA=/usr/local/cuda lib_install" in commands


def test_plugin(machine: Machine) -> None:
    commands = machine.commands("plugin")
    url = "https://github.com/aws/aws-ofi-nccl/archive/refs/tags/v1.13.2-aws.tar.gz"
    assert any(command.endswith(url) for command in commands)
    assert commands[-5:-1] == [
        "autogen.sh ",
        "configure --prefix=/opt/aws-ofi-nccl --with-libfabric=/opt/amazon/efa"
        " --with-cuda=/usr/local/cuda --with-mpi=/opt/amazon/openmpi --enable-platform-aws",
        "make -j 8",
        "make install",
    ]
    assert machine.file("etc/ld.so.conf.d/aws-ofi-nccl.conf") == "/opt/aws-ofi-nccl/lib"


def test_the_bases_nccl_stays(machine: Machine) -> None:
    assert machine.commands("nccl") == []


def test_another_nccl_is_compiled_and_loaded_first(machine: Machine) -> None:
    machine.variables["NCCL_VERSION"] = "2.23.4-1"
    commands = machine.commands("nccl")
    url = "https://github.com/NVIDIA/nccl/archive/refs/tags/v2.23.4-1.tar.gz"
    assert any(command.endswith(url) for command in commands)
    gencode = machine.variables["NVCC_GENCODE"]
    make = f"make -j 8 src.build CUDA_HOME=/usr/local/cuda NVCC_GENCODE={gencode}"
    assert make in commands
    libraries = machine.folder / "opt" / "nccl" / "lib"
    assert [path.name for path in libraries.iterdir()] == ["libnccl.so.2"]
    assert machine.file("etc/ld.so.preload") == "/opt/nccl/lib/libnccl.so.2"


def test_the_bases_verbs_and_mpi_go(machine: Machine) -> None:
    (machine.folder / "opt/hpcx/ompi/lib").mkdir(parents=True)
    (machine.folder / "opt/hpcx/ucx/lib").mkdir(parents=True)
    commands = machine.commands("base")
    packages = "ibverbs-utils libibverbs-dev libibverbs1 libmlx5-1"
    assert commands[-1] == f"apt-get remove -q -y --allow-change-held-packages {packages}"
    assert [path.name for path in (machine.folder / "opt/hpcx").iterdir()] == ["ucx"]


def test_a_base_without_them(machine: Machine) -> None:
    (machine.folder / "bin" / "dpkg-query").write_text("#!/bin/sh\nexit 1\n")
    assert machine.commands("base") == []


def test_tests_are_built_with_the_nccl_that_is_there(machine: Machine) -> None:
    (machine.folder / "opt" / "nccl").mkdir()
    commands = machine.commands("tests")
    gencode = machine.variables["NVCC_GENCODE"]
    assert commands[-1] == (
        "make -j 8 MPI=1 MPI_HOME=/opt/amazon/openmpi CUDA_HOME=/usr/local/cuda"
        f" NCCL_HOME=/opt/nccl NVCC_GENCODE={gencode}"
    )
    assert (machine.folder / "opt" / "nccl-tests" / "build").is_dir()


def test_no_tests(machine: Machine) -> None:
    machine.variables["NCCL_TESTS_VERSION"] = "none"
    assert machine.commands("tests") == []


@pytest.mark.parametrize("part", ["installer", "gdrcopy", "nccl", "plugin", "tests"])
def test_a_version_without_a_value(machine: Machine, part: str) -> None:
    machine.variables = dict.fromkeys(machine.variables, "")
    done = machine.run(part)
    assert done.returncode == 3
    assert "has no value" in done.stderr
    assert not (machine.folder / "record").exists()


def test_no_such_part(machine: Machine) -> None:
    done = machine.run("all")
    assert done.returncode == 3
    assert "no part 'all'; base, installer," in done.stderr


INSTALLED = """#!/bin/sh
for last; do :; done
case $last in g++ | git) echo installed ;; old) echo config-files ;; *) exit 1 ;; esac
"""


def test_only_missing_packages_are_installed(machine: Machine) -> None:
    """And what was removed but for its configuration; lists, logs and times go."""
    (machine.folder / "bin" / "dpkg-query").write_text(INSTALLED)
    put_program(machine.folder / "bin", "python3", "#!/bin/sh\n")
    for name in ("lib/apt/lists/a", "log/apt/b", "lib/dpkg/status-old", "lib/dpkg/status"):
        (machine.folder / "var" / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.folder / "var" / name).touch()
    (machine.folder / "etc/machine-id").write_text("0123\n")
    done = machine.script("sh", "apt.sh", "--python", "g++", "pdsh", "old", "curl=7.88.1-10")
    assert done.returncode == 0, done.stderr
    assert machine.recorded() == [
        "apt-get update -q",
        "apt-get install -q -y --no-install-recommends pdsh old curl=7.88.1-10",
        "apt-get clean",
    ]
    left = sorted(path.name for path in (machine.folder / "var").rglob("*") if path.is_file())
    assert left == ["status"]
    assert (machine.folder / "etc/machine-id").read_text() == ""


def test_no_archive_is_asked_where_nothing_is_missing(machine: Machine) -> None:
    (machine.folder / "bin" / "dpkg-query").write_text(INSTALLED)
    assert machine.script("sh", "apt.sh", "git", "g++").returncode == 0
    assert machine.script("sh", "apt.sh").returncode == 0
    assert machine.recorded() == []


def test_a_base_without_python_gets_one(machine: Machine) -> None:
    (machine.folder / "bin" / "dpkg-query").write_text(INSTALLED)
    put_program(machine.folder / "bin", "python3", "#!/bin/sh\nexit 127\n")
    assert machine.script("sh", "apt.sh", "--python").returncode == 0
    packages = "python3 python3-pip python3-venv python3-dev"
    assert machine.recorded()[1].endswith(f"--no-install-recommends {packages}")
