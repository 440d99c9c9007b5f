"""A pod's container as a real process: PID 1 of namespaces of its own, on a node's network."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.kubernetes.namespaces import END

# Starts a pod's first program as PID 1 of its namespaces, and ends as that one ends (unshare
# --fork does not know what to do after SIGKILL).
PARENT = """
defined(my $pid = fork) or die;
exec { $ARGV[0] } @ARGV or exit 127 if !$pid;
waitpid $pid, 0;
exit($? & 127 ? 128 + ($? & 127) : $? >> 8);
"""
# The first program of a pod; `set --` before it gives the words: file for its pid, host name,
# working folder; then mounts, each a kind, a place and two words more, up to "--"; then the
# command, which takes its place. /run is the pod's own, as an image's is.
SCRIPT = r"""
set -e
read -r pid _ < /proc/self/stat
file=$1; hostname "$2"; folder=$3; shift 3
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p "$HOME"
while [ "$1" != -- ]; do
    case $1 in
        memory) mount -t tmpfs -o "mode=1777,size=$3" tmpfs "$2" ;;
        bind) mount --rbind "$3" "$2"
            [ "$4" != ro ] || mount -o remount,bind,ro "$2" ;;
        token) mkdir -p "$2"; mount --bind "$3" "$2" ;;
    esac
    shift 4
done
shift
[ -z "$folder" ] || cd "$folder"
printf %s "$pid" > "$file.new"
mv "$file.new" "$file"
exec "$@"
"""


@dataclass(frozen=True)
class Mount:
    """kind: memory (source is its size), bind, or token (a folder that appears below /run)."""

    kind: str
    place: str
    source: str
    mode: str = "rw"


@dataclass
class Container:
    """What a kubelet starts."""

    uid: str
    hostname: str
    argv: list[str]
    environment: dict[str, str]
    folder: str = ""
    mounts: list[Mount] = field(default_factory=list)


class PodProcess:
    """A container that has been started.

    Args:
        network: pid of the process that keeps its node's network. log: what it writes goes
        there. place: a folder for the file with its pid. ended: called when it has ended.
    """

    def __init__(
        self, container: Container, network: int, log: Path, place: Path, ended: Callable[[], None]
    ) -> None:
        self._pid_file = place / "pid"
        self._pid_file.unlink(missing_ok=True)
        words = [word for each in container.mounts for word in _words(each)]
        argv = [
            *END,
            "nsenter",
            "-t",
            str(network),
            "-n",
            "--",
            "unshare",
            "--pid",
            "--mount",
            "--uts",
        ]
        argv += ["--ipc", "--propagation", "private", "--", "perl", "-e", PARENT, "--"]
        words = [str(self._pid_file), container.hostname, container.folder, *words, "--"]
        script = place / "start"  # a file: what looks for a run by words of processes finds PID 1
        script.write_text(f"set -- {shlex.join([*words, *container.argv])}\n{SCRIPT}")
        argv += [*END, "bash", str(script)]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                argv,
                env=container.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.code: int | None = None  # as a container's status has it: 137 for SIGKILL
        self._ended = ended
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        code = self._process.wait()
        self.code = code if code >= 0 else 128 - code
        self._ended()

    @property
    def started(self) -> bool:
        return self._pid_file.exists()

    @property
    def pid(self) -> int:
        """Of PID 1, as this machine counts; 0 where it has not got so far."""
        with contextlib.suppress(OSError, ValueError):
            return int(self._pid_file.read_text())
        return 0

    def signal(self, number: int) -> None:
        """To PID 1. One that ignores SIGTERM by having no handler ignores it here too."""
        if self.code is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
        elif self.code is None and number == signal.SIGKILL:
            self._process.kill()


def _words(mount: Mount) -> list[str]:
    return [mount.kind, mount.place, mount.source, mount.mode]
