"""An image file over many storage targets of Lustre, so that many nodes can read it at once.

As Azure does it (ai-infrastructure-on-azure, storage_references/slurm/squashed_images): a folder
whose new files are striped, a copy of the file into it. 64 nodes started in 74 s instead of 200 s
from 23 GiB over 32 targets. Files keep their layout when they are renamed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import TEMPORARY, fsync_folder, remove, remove_leftovers, temporary_name
from trainkit.images.contract import Argv
from trainkit.images.squashfs import fingerprint
from trainkit.jobs.containers import Stripe

EVERYTHING = "-1"  # of --component-end: the layout goes to the end of the file
BLOCK = 2**22


def setstripe_argv(folder: Path, stripe: Stripe) -> Argv:
    """lfs-setstripe(1): the layout of files that will be made in a folder."""
    size = ("-S", stripe.size)
    return ("lfs", "setstripe", *size, "-E", EVERYTHING, "-c", str(stripe.count), str(folder))


def stripe_commands(path: Path, stripe: Stripe) -> tuple[Argv, ...]:
    """The commands of `stripe_file`, for a person; the folder's real name is a temporary one."""
    folder = path.with_name(f".{path.name}{TEMPORARY}striped")
    copy = folder / path.name
    return (
        ("mkdir", str(folder)),
        setstripe_argv(folder, stripe),
        ("cp", str(path), str(folder)),
        ("mv", str(copy), str(path)),
    )


def file_system(path: Path) -> str:
    """The name of a path's file system, as stat(1) has it; "" where it cannot be asked."""
    argv = ["stat", "--file-system", "--format=%T", str(path)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def stripe_file(path: Path, stripe: Stripe) -> None:
    """Put a file's bytes over the targets that `stripe` names, under its own name. The file is
    there as it was until the copy is whole. Call it under the lock of the file's writers.

    Raises:
        TrainkitError: (exit 6) lfs is missing or fails, or the file system is not Lustre; the file
            is as it was.
        OSError: as the disk does.
    """
    hidden = path.with_name(f".{path.name}")
    remove_leftovers(hidden)
    folder = temporary_name(hidden)
    folder.mkdir(mode=0o700)
    try:
        _set_layout(folder, stripe)
        copy = folder / path.name
        _copy(path, copy)
        if copy.stat().st_size != path.stat().st_size or fingerprint(copy) != fingerprint(path):
            raise TrainkitError(
                f"the striped copy of {path} has other bytes than the file itself",
                exit=Exit.STAGE_FAILED,
                hint="the file is as it was; look at the file system's servers, then try again",
            )
        os.replace(copy, path)
        fsync_folder(path.parent)
    finally:
        remove(folder)


def _copy(source: Path, target: Path) -> None:
    """Copy bytes, permissions and times, and have them on the disk."""
    with open(source, "rb") as reader, open(target, "xb") as writer:
        shutil.copyfileobj(reader, writer, BLOCK)
        writer.flush()
        os.fsync(writer.fileno())
    shutil.copystat(source, target)


def _set_layout(folder: Path, stripe: Stripe) -> None:
    try:
        done = subprocess.run(
            setstripe_argv(folder, stripe),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise _refusal(folder, "lfs, Lustre's own program, is not installed here") from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        said = words[-1] if words else f"exit {done.returncode}"
        raise _refusal(folder, f"lfs setstripe says: {said}")


def _refusal(folder: Path, why: str) -> TrainkitError:
    """The error of a layout that could not be set; the image is whole without one."""
    kind = file_system(folder)
    if kind == "lustre":
        hint = "install Lustre's client programs on this machine, or remove stripe"
    else:
        where = f"{folder.parent} is on {kind or 'another file system'}"
        hint = f"stripe is for Lustre, and {where}: remove stripe, or put root on Lustre"
    return TrainkitError(
        f"the image could not be striped: {why}", exit=Exit.STAGE_FAILED, hint=hint
    )
