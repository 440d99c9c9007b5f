"""From an image in buildah's store to a .sqsh file, without a daemon: as enroot imports it.

What `enroot import` puts into an image is written by docker::configure in src/docker.sh of
github.com/NVIDIA/enroot: /etc/fstab from its volumes, /etc/environment from its variables, /etc/rc
from its labels, working folder, entry point and command, and an empty /etc/rc.local.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.images.contract import Argv, FailureHint, ImagePlan, OnStep
from trainkit.images.importers.published import published
from trainkit.images.importers.squash_options import SUFFIX, squash_options
from trainkit.images.programs import read_program, run_program
from trainkit.jobs.containers import Squashfs

# docker::daemon::import leaves them out too
LEFT_OUT_WORDS = ("-wildcards", "-e", "dev/*", ".dockerenv")
DEPTH = 15  # common::fixperms looks no deeper for folders that may not be written to
RC_LOCAL = """\
# This file is sourced by /etc/rc when the container starts.
# It can be used to manipulate the entrypoint or the command of the container.
"""
ROOTLESS = "buildah mounts images for root only: type it below `buildah unshare`"


@dataclass(frozen=True)
class ImageConfig:
    """What an image says of how it is started: the "config" of the image specification
    (opencontainers/image-spec, config.md).

    Args:
        env: NAME=VALUE each.
        entrypoint: words before the command.
        cmd: the command where none is given.
        workdir: where it starts.
        volumes: folders that are not the image's own.
        labels: by name.
    """

    env: tuple[str, ...]
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    workdir: str
    volumes: tuple[str, ...]
    labels: Mapping[str, str]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ImageConfig:
        """Of the config's own JSON, where null and a missing key are the same."""
        return cls(
            tuple(value.get("Env") or ()),
            tuple(value.get("Entrypoint") or ()),
            tuple(value.get("Cmd") or ()),
            value.get("WorkingDir") or "",
            tuple(sorted(value.get("Volumes") or ())),
            dict(value.get("Labels") or {}),
        )


def quoted(word: str) -> str:
    """A word as bash's ${word@Q} writes it."""
    if word.isprintable():
        return "'" + word.replace("'", "'\\''") + "'"
    escapes = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}
    return f"$'{''.join(escapes.get(sign) or _escaped(sign) for sign in word)}'"


def _escaped(sign: str) -> str:
    """A character inside of bash's $'...', where \\NNN is a byte."""
    if sign.isprintable():
        return sign
    return "".join(f"\\{byte:03o}" for byte in sign.encode("utf-8", "surrogateescape"))


def enroot_files(config: ImageConfig, source: str) -> dict[str, str]:
    """The files that enroot's import writes, by their path in the image.

    Args:
        config: the image's.
        source: where it came from, for the first line of /etc/rc.
    """
    cmd = config.cmd
    if not config.entrypoint and not cmd:
        cmd = ("/bin/sh",)
    entry = " ".join(map(quoted, config.entrypoint))
    command = " ".join(map(quoted, cmd))
    labels = [f"# {name} {text}".replace("\n", " ") for name, text in config.labels.items()]
    folder = config.workdir or "/"
    rc = [
        f"# enroot-provenance: {source}",
        *labels,
        "",
        f'mkdir -p "{folder}" 2> /dev/null',
        f'cd "{folder}" && unset OLDPWD || exit 1',
        "",
        "if [ -s /etc/rc.local ]; then",
        "    . /etc/rc.local",
        "fi",
        "",
        "if [ $# -gt 0 ]; then",
        f'    exec {entry} "$@"',
        "else",
        f"    exec {entry} {command}",
        "fi",
    ]
    binds = [
        f"${{ENROOT_ROOTFS}}{place} {place} none x-create=dir,bind,rw,nosuid,nodev"
        for place in config.volumes
    ]
    return {
        "etc/fstab": "".join(f"{line}\n" for line in binds),
        "etc/environment": "".join(f"{line}\n" for line in config.env),
        "etc/rc": "".join(f"{line}\n" for line in rc),
        "etc/rc.local": RC_LOCAL,
    }


def configure(rootfs: Path, config: ImageConfig, source: str, made: int) -> None:
    """Write enroot's files into an unpacked image, and make its working folder. A link of the
    image's in their place is replaced, never followed out of it.

    Args:
        rootfs: the image.
        config: how it is started.
        source: where it came from.
        made: when the image was made, in seconds since 1970: the time of what is written, so that
            the same image gives the same file.

    Raises OSError as the disk does.
    """
    work = Path(config.workdir.strip("/"))
    folders = {rootfs, *(rootfs / each for each in (Path("etc"), work, *work.parents))}
    times = {folder: folder.stat().st_mtime_ns for folder in folders if folder.is_dir()}
    for name, text in enroot_files(config, source).items():
        path = _inside(rootfs, name)
        path.unlink(missing_ok=True)
        path.write_text(text)
        os.utime(path, (made, made))
    if work.parts:  # without one it starts in /
        _inside(rootfs, str(work)).mkdir(exist_ok=True)
    for folder in folders:
        then = times.get(folder, made * 10**9)
        os.utime(folder, ns=(then, then))


def creation_time(text: str) -> int:
    """An image's "created" (image-spec, config.md: RFC 3339, section 5.6) in whole seconds since
    1970; 0 where it says none."""
    try:
        return int(datetime.datetime.fromisoformat(f"{text[:19]}+00:00").timestamp())
    except ValueError:
        return 0


def _inside(rootfs: Path, name: str) -> Path:
    """A path in an unpacked image, its folders made. Raises TrainkitError where a link of the
    image's leads out of it."""
    path = rootfs / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.resolve().is_relative_to(rootfs.resolve()):
        raise TrainkitError(
            f"the image's /{Path(name).parent} is a link out of the image",
            exit=Exit.STAGE_FAILED,
            hint="give it a folder of its own in the Dockerfile",
        )
    return path


def open_permissions(rootfs: Path) -> None:
    """What users other than root need to enter: as common::fixperms of enroot (u+rX, folders
    u+w)."""
    top = str(rootfs)
    for folder, _, files in os.walk(top):
        depth = folder[len(top) :].count(os.sep)
        _permit(folder, 0o700 if depth <= DEPTH else 0o500)
        for name in files:
            _permit(os.path.join(folder, name), 0o400)


def _permit(path: str, bits: int) -> None:
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return
    if stat.S_ISREG(mode) and mode & 0o111:
        bits |= 0o100
    if mode & bits != bits:
        os.chmod(path, stat.S_IMODE(mode) | bits)


def mksquashfs_argv(rootfs: Path, output: Path, squash: Squashfs | None, made: str) -> Argv:
    """mksquashfs(1), with the options that enroot gives it.

    Args:
        rootfs: what is packed.
        output: the file.
        squash: how.
        made: the time that the file system says it was made at, in seconds since 1970. Those of
            its files stay: Python's own caches hang on them.
    """
    fixed = ("-all-root", "-noappend", "-no-progress", "-mkfs-time", made)
    # -e ends the line: what follows it is left out
    packed = (*squash_options(squash), *LEFT_OUT_WORDS)
    return ("mksquashfs", str(rootfs), str(output), *fixed, *packed)


def image_name(plan: ImagePlan) -> str:
    """The image in buildah's store, or as `buildah from` fetches it: a registry ends with '/'
    there, with '#' for enroot."""
    if plan.container.source:
        return plan.container.source.replace("#", "/", 1)
    return plan.tag


def buildah_steps(image: str, name: str) -> dict[str, Argv]:
    """The commands around mksquashfs.

    Args:
        image: what it is made of.
        name: what the working container is called meanwhile.
    """
    if "://" in image:
        where = ("--pull-always", "--name", name, image)
    else:
        where = ("--pull-never", "--name", name, image)
    return {
        "from": ("buildah", "from", *where),
        "config": ("buildah", "inspect", name),
        "mount": ("buildah", "mount", name),
        "umount": ("buildah", "umount", name),
        "rm": ("buildah", "rm", name),
    }


def container_name(file: Path) -> str:
    """The working container of a file; the next import of it takes away what a killed one left."""
    return f"trainkit-import-{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"


class SquashfsImport:
    """buildah's image, mounted, and mksquashfs of that: no daemon, no enroot."""

    name = "mksquashfs"
    hints: Sequence[FailureHint] = ()

    def serves(self, plan: ImagePlan) -> bool:
        source = plan.container.source or "docker://"
        return (
            SUFFIX in plan.container.runtime_traits.files
            and plan.builder == "buildah"
            and source.startswith("docker://")
        )

    def commands(self, plan: ImagePlan, file: Path) -> tuple[Argv, ...]:
        """ROOTFS stands for what the mount prints, CREATED for the image's own time; enroot's files
        are written into it before it is packed."""
        steps = buildah_steps(image_name(plan), container_name(file))
        squash = mksquashfs_argv(Path("ROOTFS"), file, plan.container.squashfs, "CREATED")
        return (*(steps[name] for name in ("from", "mount")), squash, steps["umount"], steps["rm"])

    def run(self, plan: ImagePlan, file: Path, on_step: OnStep) -> None:
        image = image_name(plan)
        steps = buildah_steps(image, container_name(file))
        _remove(steps)
        try:
            on_step(0, 3)
            read_program(steps["from"])
            on_step(1, 3)
            found = json.loads(read_program(steps["config"]))
            config = ImageConfig.from_json(found["Docker"].get("config") or {})
            rootfs = Path(_mounted(steps["mount"]))
            created = creation_time((found.get("OCIv1") or {}).get("created") or "")
            configure(rootfs, config, f"containers-storage:{image}", created)
            open_permissions(rootfs)
            on_step(2, 3)
            with published(file) as made:
                argv = mksquashfs_argv(rootfs, made, plan.container.squashfs, str(created))
                run_program(argv, missing="install squashfs-tools on this machine")
            on_step(3, 3)
        finally:
            _remove(steps)


def _mounted(argv: Argv) -> str:
    try:
        return read_program(argv)
    except TrainkitError as error:
        if os.geteuid() == 0:
            raise
        raise TrainkitError(error.message, exit=error.exit, hint=ROOTLESS) from None


def _remove(steps: Mapping[str, Argv]) -> None:
    """Take the working container away, if there is one."""
    for step in ("umount", "rm"):
        with contextlib.suppress(TrainkitError):
            read_program(steps[step])
