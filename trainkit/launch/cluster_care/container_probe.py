"""The program that looks at a node's container runtime for `doctor`: one document on stdout.

`python -I -S container_probe.py REQUEST.json`, with the node's own Python, 3.8 or newer, and its
standard library alone. What it asks of a runtime is in the request: NodeQuestions of
trainkit/launch/containers/contract.py. Where a site's configuration names the runtime's folders it
is read as enroot does: a line "NAME VALUE" counts unless the environment says otherwise, and its
value is expanded by the shell (enroot 3.5, src/enroot.in).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Mapping

VERSION_SECONDS = 20.0
# kinds of file systems that other hosts see, too (mount(8), statfs(2))
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "afs", "wekafs")


class Request:
    """What is asked for.

    Args:
        value: of the file: what is asked about the runtime; the image, and whether that is a
            file; the script that starts a container, and its argument, none to start nothing;
            after how many seconds a start is given up.
    """

    def __init__(self, value: Mapping[str, Any]) -> None:
        self.program = str(value["program"])
        self.version = [str(word) for word in value["version"]]
        self.daemon = [str(word) for word in value["daemon"]]
        self.inspect = [str(word) for word in value["inspect"]]
        self.folders: dict[str, str] = value["folders"]
        self.config = str(value["config"])
        self.subordinate_ids = bool(value["subordinate_ids"])
        self.image = str(value["image"])
        self.is_file = bool(value["is_file"])
        self.start = str(value["start"])
        self.seconds = float(str(value["seconds"]))


def run(argv: list[str], seconds: float) -> tuple[int, str, str]:
    """(exit code, stdout, the last line of stderr); 124 where it took too long."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            code = 124
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode(errors="replace").strip())
    return code, said[0], (said[1].splitlines() or said[0].splitlines() or [""])[-1]


def version(request: Request) -> dict[str, object]:
    """Where the runtime's program is, what it says of itself, and why it does not."""
    program = request.program
    path = shutil.which(program)
    if path is None:
        return {"path": None, "version": None, "error": f"{program} is not installed"}
    code, out, last = run([path, *request.version], VERSION_SECONDS)
    if code:
        return {"path": path, "version": None, "error": f"{program} ends with {code}: {last}"}
    words = [word.strip(",") for word in out.split() if word[:1].isdigit()]
    error = None
    if request.daemon:  # which cannot be used from here, perhaps
        code, _, last = run(request.daemon, VERSION_SECONDS)
        error = last if code else None
    return {"path": path, "version": (words or [out])[0], "error": error}


def folder_values(request: Request) -> dict[str, str]:
    """The runtime's folders by variable: environment, site's configuration, default."""
    site: dict[str, str] = {}
    if request.config:
        with contextlib.suppress(OSError):
            for line in Path(expanded(request.config)).read_text().splitlines():
                name, _, value = line.strip().partition(" ")
                if name and not name.startswith("#"):
                    site[name] = value.strip()
    found = {}
    for name, default in request.folders.items():
        value = os.environ.get(name) or expanded(site.get(name) or default)
        found[name] = os.path.abspath(os.path.expanduser(value))
    return found


def expanded(text: str) -> str:
    """A value with its variables, as a shell sees them."""
    done = subprocess.run(
        ["/bin/bash", "-c", f'printf %s "{text}"'], stdout=subprocess.PIPE, check=False
    )
    return done.stdout.decode(errors="replace") or text


def file_system(path: str) -> tuple[str, str, list[str]]:
    """(kind, source, options) of the mount that holds a path (proc(5), mountinfo)."""
    best = ("", "", "", [""])
    real = os.path.realpath(path)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        place = left.split()[4].encode().decode("unicode_escape")
        kind, source = right.split()[:2]
        inside = place == "/" or real == place or real.startswith(place + "/")
        if inside and len(place) >= len(best[0]):
            best = (place, kind, source, left.split()[5].split(","))
    return best[1], best[2], best[3]


def there(path: str) -> str:
    """The path itself, or its nearest folder that is there."""
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    return path


def folder(path: str) -> dict[str, object]:
    """What a folder is like; where it is missing, the one that it would be made in."""
    place = there(path)
    kind, source, options = file_system(place)
    values = os.statvfs(place)
    return {
        "path": path,
        "exists": place == path,
        "kind": kind,
        "source": source,
        "shared": kind in SHARED or (kind.startswith("fuse.") and "overlay" not in kind),
        "noexec": "noexec" in options,
        "free": values.f_bavail * values.f_frsize,
        **rights(place),
    }


def rights(place: str) -> dict[str, str | None]:
    """Why one cannot write there, or lock a file; None where one can."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(file, fcntl.LOCK_UN)
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return {"unwritable": None, "unlockable": error.strerror or str(error)}
    except OSError as error:
        return {"unwritable": error.strerror or str(error), "unlockable": None}
    return {"unwritable": None, "unlockable": None}


def subordinate_ids() -> list[str]:
    """What rootless podman lacks: entries of /etc/subuid and /etc/subgid (subuid(5)), and the
    programs that use them."""
    if os.getuid() == 0:
        return []
    lacks = []
    names = {str(os.getuid()), os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
    for file in ("/etc/subuid", "/etc/subgid"):
        entries: list[str] = []
        with contextlib.suppress(OSError):
            entries = [line.partition(":")[0] for line in Path(file).read_text().splitlines()]
        if not names.intersection(entries):
            lacks.append(file)
    return lacks + [name for name in ("newuidmap", "newgidmap") if shutil.which(name) is None]


def image(request: Request) -> dict[str, object]:
    """Whether the image is there, how large it is, and by what it is compared with others'."""
    name = request.image
    if request.is_file:
        try:
            status = os.stat(name)
        except OSError as error:
            return {"error": error.strerror, "size": None, "id": None}
        readable = os.access(name, os.R_OK)
        refusal = None if readable else "may not be read"
        return {"error": refusal, "size": status.st_size, "id": str(status.st_size)}
    if not request.inspect:
        return {"error": None, "size": None, "id": None}
    code, out, last = run([*request.inspect, name], VERSION_SECONDS)
    id, _, size = out.partition(" ")
    if code or not size.isdigit():
        return {"error": last or "cannot be asked about", "size": None, "id": None}
    return {"error": None, "size": int(size), "id": id}


def forget_pages(path: str) -> None:
    """Drop what memory holds of a file, so that it is read again (posix_fadvise(2))."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def start(request: Request) -> dict[str, object]:
    """Seconds that a container takes to start and end, cold and warm; why it does not."""
    seconds: list[float] = []
    if request.is_file:
        forget_pages(request.image)
    for _ in range(2):
        began = time.monotonic()
        code, _, last = run(["/bin/bash", request.start, os.uname().nodename], request.seconds)
        if code == 124:
            last = f"no end within {request.seconds:g} s"
        if code:
            return {"error": last or f"it ends with {code}", "seconds": seconds}
        seconds.append(round(time.monotonic() - began, 3))
    return {"error": None, "seconds": seconds}


def main() -> None:
    """The program."""
    request = Request(json.loads(Path(sys.argv[1]).read_text()))
    said = version(request)
    folders = {name: folder(path) for name, path in folder_values(request).items()}
    seen = image(request)
    answer: dict[str, object] = {"runtime": said, "folders": folders, "image": seen}
    if request.subordinate_ids:
        answer["lacks"] = subordinate_ids()
    if request.start and said["error"] is None and seen["error"] is None:
        answer["start"] = start(request)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
