"""Real containers for tests: podman, or a dockerd of our own, and an image that is this
machine's /usr.

The image has folders and links only; /usr and the interpreter are mounted read-only, so that
torch need not be copied.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli

IMAGE = "localhost/this-machine:1"
FOLDERS = ("usr", "etc", "proc", "sys", "dev", "tmp", "run", "var", "root")
LIMITS = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
}
FEW = 4096  # processes: podman lowers its own limit before it starts anything


@dataclass(frozen=True)
class Oci:
    """One runtime with the image in it.

    Args:
        runtime: docker or podman.
        variables: by which its client finds its daemon or its store.
    """

    runtime: str
    variables: dict[str, str]

    def table(self, **more: object) -> str:
        """Lines of [containers.X]. Limits: a machine that may not raise its own (a container,
        say) can give only those."""
        limits = {name: resource.getrlimit(number)[1] for name, number in LIMITS.items()}
        limits["nproc"] = (
            FEW if limits["nproc"] == resource.RLIM_INFINITY else min(limits["nproc"], FEW)
        )
        args = [
            f"--ulimit={name}={hard}:{hard}"
            for name, hard in limits.items()
            if hard != resource.RLIM_INFINITY
        ]
        places = dict.fromkeys(["/usr", sys.base_prefix, sys.prefix])
        mounts = [
            f"{place}:{place}:ro"
            for place in places
            if place == "/usr" or not place.startswith("/usr/")
        ]
        values = {
            "image": IMAGE,
            "runtime": self.runtime,
            "python": sys.executable,
            "args": args,
            "mounts": mounts,
            **more,
        }
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())

    @property
    def prolog(self) -> str:
        """The cluster's, as TOML."""
        return json.dumps([f"export {name}={value}" for name, value in self.variables.items()])

    def call(self, *words: str, stdin: bytes = b"") -> str:
        """What the client prints; fails unless it succeeds."""
        env = {**os.environ, **self.variables}
        done = subprocess.run(
            [self.runtime, *words],
            env=env,
            input=stdin,
            capture_output=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"{self.runtime} {words}: {done.stderr.decode()}"
        return done.stdout.decode()

    def containers(self, run: str) -> list[str]:
        """Those of a run, ended ones too."""
        return self.call("ps", "--all", "--quiet", "--filter", f"label=trainkit.run={run}").split()


def rootfs() -> bytes:
    """A tar of the image."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        for name in ("bin", "sbin", "lib", "lib64"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
    return file.getvalue()


@contextlib.contextmanager
def podman(folder: Path, *, required: bool = False) -> Iterator[Oci]:
    """podman with a store of its own. Where it is not installed the test is skipped; `required`:
    fails. Skips where the kernel lets nobody run containers."""
    if shutil.which("podman") is None or shutil.which("runc") is None or os.getuid() != 0:
        (pytest.fail if required else pytest.skip)("needs podman and runc, as root")
    folder.mkdir(parents=True)
    store, state = folder / "store", folder / "state"
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{store}"\nrunroot = "{state}"\n'
    )
    (folder / "containers.conf").write_text(
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    oci = Oci(
        "podman",
        {
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_CONF": str(folder / "containers.conf"),
        },
    )
    try:
        try:
            oci.call("import", "-", IMAGE, stdin=rootfs())
            limits = tomli.loads(oci.table())["args"]
            oci.call(
                "run",
                "--rm",
                "--network=host",
                *limits,
                "--volume=/usr:/usr:ro",
                IMAGE,
                "/usr/bin/true",
            )
        except AssertionError as error:
            pytest.skip(f"containers do not run here: {error}")
        yield oci
    finally:
        subprocess.run(["umount", str(store / "overlay")], capture_output=True, check=False)


@contextlib.contextmanager
def docker(folder: Path) -> Iterator[Oci]:
    """docker with a daemon of its own. Skips where it is not installed."""
    if (
        any(
            shutil.which(program) is None for program in ("docker", "dockerd", "containerd", "runc")
        )
        or os.getuid() != 0
    ):
        pytest.skip("needs dockerd, containerd, runc and docker, as root")
    folder.mkdir(parents=True)
    socket = Path(f"/tmp/trainkit-docker-{os.getpid()}")  # a path of a socket has at most 107 bytes
    alone = ("--iptables=false", "--ip6tables=false", "--bridge=none", f"--pidfile={folder}/pid")
    argv = [
        "dockerd",
        f"--data-root={folder}/data",
        f"--exec-root={folder}/exec",
        f"--host=unix://{socket}",
        *alone,
    ]
    with open(folder / "log", "wb") as log:
        daemon = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    oci = Oci("docker", {"DOCKER_HOST": f"unix://{socket}"})
    try:
        deadline = time.monotonic() + 300
        while subprocess.run(
            ["docker", "version"],
            env={**os.environ, **oci.variables},
            capture_output=True,
            timeout=900,
            check=False,
        ).returncode:
            if daemon.poll() is not None or time.monotonic() > deadline:
                pytest.skip(
                    f"dockerd does not run here: {(folder / 'log').read_text().splitlines()[-1:]}"
                )
            time.sleep(0.2)
        oci.call("import", "-", IMAGE, stdin=rootfs())
        yield oci
    finally:
        daemon.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(timeout=900)
        daemon.kill()
        subprocess.run(
            ["umount", str(folder / "exec" / "netns" / "default")], capture_output=True, check=False
        )
        socket.unlink(missing_ok=True)
