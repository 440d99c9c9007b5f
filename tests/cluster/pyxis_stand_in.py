"""A stand-in for NVIDIA's pyxis: a program `srun` that takes pyxis's options out of the line and
has each task begin in the image, by bwrap.

Rules: pyxis 0.20, README and args.c: the options --container-*, an image file is unpacked once a
node for a name, later steps of that name find it; the root is read-only unless
--container-writable; variables of the image lie over those of the task but for --container-env.
Mount points are made as enroot makes them. Without hooks, remapped users and home mounts.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SRUN = "TRAINKIT_TESTS_SRUN"  # the real one
STATE = "TRAINKIT_TESTS_PYXIS"  # a folder; of each node one below it
SWITCHES = {
    "container-writable",
    "container-readonly",
    "container-mount-home",
    "container-entrypoint",
    "container-remap-root",
}
VALUES = {
    "container-image",
    "container-mounts",
    "container-workdir",
    "container-name",
    "container-env",
}
# what enroot mounts in every container
SYSTEM = (
    *("--dev-bind", "/dev", "/dev", "--bind", "/proc", "/proc", "--ro-bind", "/sys", "/sys"),
    *("--tmpfs", "/tmp", "--tmpfs", "/run"),
)
WITH_VALUES = {"-N", "-n", "-w", "-p", "-t", "-J", "-o", "-e", "-c", "-D", "-A"}


def install(folder: Path, state: Path) -> Path:
    """Put the program `srun` into a folder, for PATH."""
    real = shutil.which("srun")
    assert real is not None
    folder.mkdir(parents=True, exist_ok=True)
    state.mkdir(parents=True, exist_ok=True)
    program = folder / "srun"
    program.write_text(
        f"#!/bin/sh\nexport {SRUN}={shlex.quote(real)} {STATE}={shlex.quote(str(state))}\n"
        f'exec {shlex.quote(sys.executable)} -I {shlex.quote(__file__)} srun "$@"\n'
    )
    program.chmod(0o755)
    return folder


def split_line(words: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """(srun's own options, pyxis's, the command)."""
    own: list[str] = []
    given: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word in WITH_VALUES:
            own += [word, rest.pop(0)]
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if name in VALUES:
            given[name] = value if equals else rest.pop(0)
        elif name in SWITCHES or name.removeprefix("no-") in SWITCHES:
            given[name] = ""
        elif "container" in name:
            sys.exit(f"srun: unrecognized option '{word}'")
        else:
            own.append(word)
    return own, given, rest


def srun(words: Sequence[str]) -> None:
    """The program that a batch script calls."""
    own, given, command = split_line(words)
    if given:
        with open(Path(os.environ[STATE]) / "options", "a") as file:
            file.write(json.dumps(given) + "\n")
    if "container-image" in given:
        # srun --export may keep variables of ours from the task
        told = json.dumps({**given, STATE: os.environ[STATE]})
        enter_it = [sys.executable, "-I", __file__, "enter", told]
        command = [*enter_it, *command]
    real = os.environ.pop(SRUN)
    os.execv(real, [real, *own, *command])


def enter(given: dict[str, str], command: list[str]) -> None:
    """A task on its node: it becomes bwrap."""
    from tests.images.enroot_stand_in import CONFIG, environment, make_target, mount_words

    root = unpacked(given)
    texts = given.get("container-mounts", "").split(",")
    mounts = [mount_words(text) for text in texts if text]
    mounts += [("--ro-bind", path, path) for path in CONFIG if Path(path).exists()]
    for kind, target, source in mounts:
        make_target(root, target, kind == "--tmpfs" or Path(source).is_dir())
    names = [name for name in given.get("container-env", "").split(",") if name in os.environ]
    image = environment(root, [])
    variables = {**os.environ, **image, **{name: os.environ[name] for name in names}}
    kind = "--bind" if "container-writable" in given else "--ro-bind"
    argv = ["bwrap", kind, str(root), "/", "--die-with-parent", *SYSTEM]
    argv += [word for option, target, source in mounts for word in (option, source, target) if word]
    argv += ["--chdir", given.get("container-workdir", "/")]
    os.execvpe("bwrap", [*argv, *command], variables)


def unpacked(given: dict[str, str]) -> Path:
    """The image's root on this node."""
    image = Path(given["container-image"])
    name = given.get("container-name") or f"{os.environ['SLURM_JOB_ID']}.{os.getpid()}"
    here = Path(given[STATE]) / os.environ["SLURMD_NODENAME"]
    here.mkdir(parents=True, exist_ok=True)
    root = here / name
    # tasks of one step on one node share it
    with open(here / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if root.is_dir():
            return root
        if not image.is_file():
            sys.exit(f"pyxis: failed to import image: {image}: No such file or directory")
        argv = ["unsquashfs", "-no-progress", "-quiet", "-d", f"{root}.new", str(image)]
        done = subprocess.run(argv, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            sys.exit(f"pyxis: failed to import image: {image}")
        os.rename(f"{root}.new", root)
    return root


def main() -> None:
    """srun WORDS..., or enter OPTIONS COMMAND..."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    if sys.argv[1] == "srun":
        srun(sys.argv[2:])
    enter(json.loads(sys.argv[2]), sys.argv[3:])


if __name__ == "__main__":
    main()
