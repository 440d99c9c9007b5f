"""Lines of bash that look at an image file on a node before anything starts of it, and copy it to
the node's own disk where containers.X.stage_to asks for that."""

from __future__ import annotations

import shlex
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.images.contract import read_record, record_path
from trainkit.images.importers.published import file_problem, other_image
from trainkit.images.squashfs import (
    BYTES_USED_AT,
    HEAD_BYTES,
    KNOWN_AGAIN,
    MAGIC,
    SUFFIXES,
    TAIL_BYTES,
    fingerprint,
)
from trainkit.jobs.containers import Container

NOT_MADE = "not-made-yet"  # in place of the fingerprint in the name of a copy, in dry runs
FAILED = f"exit {int(Exit.START)}"
# A copy that was asked for a while ago may be about to be entered by a step of Slurm's, which
# holds no lock on it meanwhile
KEPT_MINUTES = 60
LOCK = 8  # file descriptors of node.sh
HELD = 9


@dataclass(frozen=True)
class ImageFile:
    """An image file as the nodes are to find it.

    Args:
        label: how messages name the container's table.
        path: the file that all nodes share.
        size: in bytes; None where it is not there yet, or not to be seen from here.
        fingerprint: of squashfs.py; None likewise.
        local: where each node has its own copy; None without stage_to.
    """

    label: str
    path: Path
    size: int | None
    fingerprint: str | None
    local: Path | None

    @property
    def started(self) -> str:
        """What the runtime gets."""
        return str(self.local or self.path)


def image_file(container: Container) -> ImageFile | None:
    """What is known here of a container's image file: by its record, else by the file itself.
    None where its image is not a file."""
    endings = container.runtime_traits.files
    if not (container.image.startswith("/") and container.image.endswith(endings)):
        return None
    path = Path(container.image)
    size: int | None = None
    known: str | None = None
    record = read_record(record_path(path))
    if record is not None and record.fingerprint:
        size = record.size
        known = record.fingerprint
    elif container.stage_to:
        try:
            size = path.stat().st_size
            known = fingerprint(path)
        except OSError:
            known = None
    local: Path | None = None
    if container.stage_to:
        name = f"{container.name}-{(known or NOT_MADE)[:KNOWN_AGAIN]}{path.suffix}"
        local = Path(container.stage_to) / name
    return ImageFile(f"containers.{container.name}", path, size, known, local)


def refuse_bad_file(container: Container) -> None:
    """Before anything is submitted or started: raise TrainkitError (exit 8) for an image file that
    can be seen from here and is not whole, or not the one of its record. One that is made here
    is made again instead; of one that only nodes see they tell themselves."""
    image = image_file(container)
    if image is None or container.is_made or not image.path.exists():
        return
    record = read_record(record_path(image.path))
    problem = file_problem(image.path)
    if not problem and record is not None and record.fingerprint:
        problem = other_image(image.path, record)
    if problem:
        raise TrainkitError(
            f"{problem} ({image.label}.image)",
            exit=Exit.START,
            hint="make or copy it again; with source or dockerfile in that table trainkit makes it",
        )


def image_lines(image: ImageFile) -> list[str]:
    """Lines that end the script with a message unless the shared file is whole and the one that
    is meant, and then those of the node's own copy."""
    return [*_functions(image), *_look(image), *(_stage(image) if image.local else ())]


def _functions(image: ImageFile) -> list[str]:
    """What the lines below call."""
    return [
        f'fail() {{ echo "$HOSTNAME: $*" >&2; {FAILED}; }}',
        'size() { stat --dereference --format=%s "$1"; }',
        (
            f'known() {{ {{ head -c {HEAD_BYTES} "$1"; tail -c {TAIL_BYTES} "$1"; }} | sha256sum |'
            " cut -d ' ' -f 1; }"
        ),
        f"image={shlex.quote(str(image.path))}",
    ]


def _look(image: ImageFile) -> list[str]:
    """Whether the shared file is there, whole, and the image that is meant."""
    lines = [
        f'[ -r "$image" ] || fail "there is no image $image ({image.label}.image)"',
    ]
    if image.path.name.endswith(SUFFIXES):
        used = f"od -An -v -t u8 -j {BYTES_USED_AT} -N 8 \"$image\" | tr -d ' '"
        lines += [
            f"""[ "$(head -c {len(MAGIC)} "$image" | tr -d '\\0')" = {MAGIC.decode()} ] ||"""
            f' fail "$image is not a squashfs image ({image.label}.image)"',
            f"used=$({used})",
            '[ "$(size "$image")" -ge "${used:-0}" ] || fail "$image is truncated: it has'
            ' $(size "$image") bytes, and its superblock says $used"',
        ]
    if image.fingerprint:
        lines.append(
            f'[ "$(size "$image")" = {image.size} ] && [ "$(known "$image")" ='
            f' {image.fingerprint} ] || fail "$image is another image than the one that'
            f" {record_path(image.path).name} records, or that this run began with: make it again"
            ' with invoke build-container, or begin a new run"'
        )
    return lines


def _stage(image: ImageFile) -> list[str]:
    """The node's own copy: made under a lock and a temporary name, unless it is there whole."""
    assert image.local is not None
    folder = shlex.quote(str(image.local.parent))
    name = image.local.name.rpartition("-")[0]
    key = f"{image.label}.stage_to"
    trusted = '{ [ -O "$copy" ] || [ "$(stat --format=%u "$copy")" = 0 ]; }'
    whole = (
        f'whole() {{ [ -f "$copy" ] && {trusted} && [ "$(size "$copy")" = "$(size "$image")" ] &&'
        ' [ "$(known "$copy")" = "$(known "$image")" ]; }'
    )
    needed = "$((need / 1000000)) MB"
    there = "$((free / 1000000)) MB"
    return [
        f"folder={folder}",
        f"copy={shlex.quote(str(image.local))}",
        whole,
        f'[ -d "$folder" ] || fail "there is no folder $folder ({key})"',
        f'lock="$folder/.{name}.lock"',
        # opened without O_CREAT: in a sticky folder that is refused for another user's file
        '[ -e "$lock" ] || (umask 0; : >> "$lock") 2> /dev/null || true',
        f'exec {LOCK}< "$lock" || fail "$folder cannot be written to ({key})"',
        f'flock {LOCK} || fail "$lock cannot be locked ({key})"',
        "if ! whole; then",
        f'    [ ! -e "$copy" ] || {trusted} || fail "$copy is another user\'s: set {key} to a'
        ' folder of your own"',
        f'    rm -f "$folder/.{name}@"*.part "$copy"',
        *(f"    {line}" for line in _remove_older(name, image.local.suffix)),
        '    need=$(size "$image")',
        '    free=$(df --output=avail -B1 "$folder" | tail -n 1)',
        f'    [ "$free" -ge "$need" ] || fail "$folder has {there} free, and $image has'
        f' {needed}: make room there, or set {key} to another folder"',
        f'    part="$folder/.{name}@$$.part"',
        '    said=$(cp --sparse=never "$image" "$part" 2>&1) && sync "$part" && mv "$part" "$copy"'
        f' || {{ rm -f "$part"; fail "$image could not be copied to $folder ({key}): $said"; }}',
        '    whole || { rm -f "$copy"; fail "the copy $copy has other bytes than $image"; }',
        "fi",
        'touch "$copy" 2> /dev/null || true',
        # what runs of it holds it: it is not removed for a newer one
        f'exec {HELD}< "$copy"',
        f"flock --shared {HELD}",
        f"exec {LOCK}<&-",
    ]


def _remove_older(name: str, suffix: str) -> list[str]:
    """Copies of the same table's former images, unless something runs of them or is about to."""
    digits = "[0-9a-f]" * KNOWN_AGAIN
    return [
        f'for old in "$folder/{name}-"{digits}{suffix}; do',
        f'    [ -O "$old" ] && [ -z "$(find "$old" -mmin -{KEPT_MINUTES})" ] || continue',
        '    ! grep -qsxF "$old" /sys/block/loop*/loop/backing_file || continue',
        '    flock --nonblock "$old" rm -f "$old" || true',
        "done",
    ]
