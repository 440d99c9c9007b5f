"""efa.sh run really, with programs that record what they are asked for in place of the network's
and the compiler's, and folders of its own in place of /opt, /etc and /var."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.container.dockerfiles import CONTAINER, arguments

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
        assert BWRAP is not None
        binds: list[str] = []
        for name in ("opt", "etc", "var"):
            binds += ["--bind", str(self.folder / name), f"/{name}"]
        return subprocess.run(
            [
                *(BWRAP, *USR, "--dev", "/dev", "--tmpfs", "/tmp", *binds),
                *("--bind", str(self.folder), str(self.folder)),
                *("--ro-bind", str(CONTAINER), str(CONTAINER)),
                *("bash", str(CONTAINER / "efa.sh"), part),
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
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
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
