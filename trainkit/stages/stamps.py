"""Freshness: stamps/<stage>/<name>.json says what an output was made from, and every verdict
says because of what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.documents import canonical_json, document, utc_now
from trainkit.base.files import read_json, write_json
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.data.sums import file_sum
from trainkit.stages.contract import Need, Unit

SCHEMA = "stamp/1"
# programs by the names that stamps know: a module that moved has not changed what it makes
FORMER_MODULES = {
    "trainkit.data.fetch.worker": "trainkit.data.fetch",
    "trainkit.data.tokenize.check_worker": "trainkit.data.ready",
    "trainkit.data.tokenize.merge_worker": "trainkit.data.merge",
    "trainkit.data.tokenize.shard_worker": "trainkit.data.shard",
    "trainkit.data.order.megatron_worker": "trainkit.data.megatron_order",
}


@dataclass(frozen=True)
class Freshness:
    """Fresh or stale, and why."""

    stage: str
    name: str
    fresh: bool
    because: str

    def __str__(self) -> str:
        return (
            f"{self.stage} {self.name}: {'fresh' if self.fresh else 'stale'} because {self.because}"
        )


def stamp_path(stamps: Path, need: Need) -> Path:
    """The stage's stamp below `stamps` (<root>/stamps/<stage>)."""
    return stamps / f"{need.name}.json"


def unit_folder(stamps: Path, name: str) -> Path:
    """Specs, stamps and logs of the units of stage output `name`."""
    return stamps / f"{name}.units"


def unit_stamp_path(stamps: Path, name: str, unit: str) -> Path:
    """Where a unit's result is kept."""
    return unit_folder(stamps, name) / f"{unit}.json"


def file_identity(path: Path) -> list[Any] | None:
    """[path, size, mtime in ns], or None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [str(path), status.st_size, status.st_mtime_ns]


def file_identities(paths: Iterable[Path]) -> list[list[Any] | None]:
    """As `file_identity`, of each."""
    return [file_identity(p) for p in paths]


def read_stamp(path: Path) -> dict[str, Any] | None:
    """A stamp, or None where there is none that can be trusted."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return None
    if isinstance(value, dict) and value.get("schema") == SCHEMA:
        return value
    return None


def _same_file(old: list[Any] | None, new: list[Any] | None, digest: str | None) -> bool:
    """Whether a file is what it was: same size and time, or another time and the sum that was
    taken then."""
    if new is None or old is None or new[:2] != old[:2]:
        return False
    return new[2] == old[2] or (digest is not None and file_sum(Path(new[0])) == digest)


def _some(paths: Sequence[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1:,} more" if len(paths) > 1 else "")


def _changed_file(
    kind: str, paths: Iterable[Path], recorded: object, digests: Mapping[str, str] | None = None
) -> str | None:
    """In what files differ from those recorded, by name: one more, one less, another content,
    another order. `digests`: sums of those recorded."""
    if not isinstance(recorded, list):
        return "its stamp cannot be read"
    before = {old[0]: old for old in recorded if old}
    names = dict.fromkeys(str(path) for path in paths)
    gone = [name for name in before if name not in names]
    more = [name for name in names if name not in before]
    changes = []
    if more:
        changes.append(f"{kind} {_some(more)} is new")
    if gone and kind == "input":
        changes.append(f"{kind} {_some(gone)} is gone")
    elif gone:
        changes.append(f"{kind} {_some(gone)} is not made any more")
    if changes:
        return ", ".join(changes)
    for name in names:
        new = file_identity(Path(name))
        if new is None:
            return f"{kind} {name} is missing"
        if not _same_file(before[name], new, (digests or {}).get(name)):
            return f"{kind} {name} changed"
    return None if list(names) == list(before) else f"the order of the {kind}s changed"


def _changed_setting(old: object, new: Mapping[str, Any]) -> str | None:
    if not isinstance(old, dict):
        return "its stamp cannot be read"
    for key in sorted({*old, *new}):
        if canonical_json(old.get(key)) != canonical_json(new.get(key)):
            return f"{key} changed from {_said(old, key)} to {_said(new, key)}"
    return None


def _said(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if settings.get(key) is not None else "nothing"


def check_freshness(need: Need, stamps: Path, *, force: bool = False) -> Freshness:
    """Whether the stage's outputs are those of the settings and inputs at hand."""
    if force:
        fresh = False
        because = "--force was given"
    elif need.evidence:
        fresh, because = need.evidence()
    else:
        fresh, because = judge_stamp(need, stamps)
    return Freshness(need.stage, need.name, fresh, because)


def judge_stamp(need: Need, stamps: Path) -> tuple[bool, str]:
    """What the stamp says, whatever evidence there is besides: (fresh, because)."""
    stamp = read_stamp(stamp_path(stamps, need))
    if stamp is None:
        return False, "it was never made here"
    if "unfinished" in stamp and stamp.get("failed"):
        return (
            False,
            (
                f"its last making failed: {str(stamp['failed']).partition(chr(10))[0]} (then it was"
                f" stale because {stamp['unfinished']})"
            ),
        )
    if "unfinished" in stamp:
        return (
            False,
            f"its making was interrupted (then it was stale because {stamp['unfinished']})",
        )
    if stamp.get("version") != need.version:
        return (
            False,
            f"trainkit's version of it changed from {stamp.get('version')} to {need.version}",
        )
    because = (
        _changed_setting(stamp.get("settings"), need.settings)
        or _changed_file("input", need.inputs, stamp.get("inputs"), stamp.get("digests"))
        or _changed_file("output", need.outputs, stamp.get("outputs"))
    )
    if because:
        return (False, because)
    return (True, f"nothing changed since {stamp.get('made')}")


def write_unfinished(need: Need, stamps: Path, because: str, failed: str = "") -> None:
    """Record that the stage's outputs are being made: until `write_stamp`, nothing there counts
    as fresh.

    What was made before is remembered ("made_before"): the identities of outputs that are still
    there, from which the new ones may be taken. `failed`: what ended the making, where it is
    known.
    """
    path = stamp_path(stamps, need)
    former = read_stamp(path) or {}
    before = former.get("outputs", former.get("made_before", []))
    words = {
        "unfinished": because,
        "memory": dict(need.memory),
        "made_before": before,
        **({"failed": failed} if failed else {}),
    }
    write_json(path, document(SCHEMA, stage=need.stage, name=need.name, **words))


def write_stamp(need: Need, stamps: Path, inputs: list[Any]) -> None:
    """Record success. `inputs` are the identities seen before the work began: a file changed
    meanwhile makes it stale."""
    value = document(
        SCHEMA,
        stage=need.stage,
        name=need.name,
        version=need.version,
        settings=dict(need.settings),
        inputs=inputs,
        digests=_digests(need, stamps),
        outputs=file_identities(need.outputs),
        memory=dict(need.memory),
        made=utc_now(),
    )
    write_json(stamp_path(stamps, need), value)


def write_times(need: Need, stamps: Path, inputs: list[Any]) -> None:
    """Record other times of inputs of a stage that is fresh, as `file_identities` saw them
    before it was judged: they need not be read again."""
    stamp = read_stamp(stamp_path(stamps, need))
    if stamp is not None and "outputs" in stamp and stamp.get("inputs") != inputs:
        write_json(stamp_path(stamps, need), {**stamp, "inputs": inputs})


def _digests(need: Need, stamps: Path) -> dict[str, str]:
    """The sums of inputs that units have read: {path: XXH128}."""
    found: dict[str, str] = {}
    for unit in need.units if need.inputs else ():
        stamp = read_stamp(unit_stamp_path(stamps, need.name, unit.name)) or {}
        found |= {
            path: digest for path, _, _, digest in stamp.get("result", {}).get("read", []) if digest
        }
    names = {str(path) for path in need.inputs}
    return {path: digest for path, digest in found.items() if path in names}


def spec_digest(need: Need, unit: Unit) -> str:
    """What a unit's freshness hangs on, besides its outputs: its words, and the trainkit version
    of the stage."""
    words = [FORMER_MODULES.get(word, word) for word in unit.argv[1:]]
    return hashlib.sha256(
        canonical_json([need.version, words, dict(unit.spec)]).encode()
    ).hexdigest()


def unit_is_fresh(need: Need, unit: Unit, stamps: Path) -> bool:
    """Whether the unit's last success was with this very spec and its outputs are untouched."""
    return stamp_holds(
        unit_stamp_path(stamps, need.name, unit.name),
        spec_digest(need, unit),
        () if unit.kept else unit.outputs,
        kept=unit.kept,
    )


def stamp_holds(path: Path, digest: str, outputs: tuple[Path, ...], *, kept: bool = False) -> bool:
    """The same where only these are known: on the node where the unit runs. `kept`: the outputs
    may be gone."""
    stamp = read_stamp(path)
    if stamp is None or stamp.get("spec") != digest:
        return False
    read = stamp.get("result", {}).get("read", [])
    if not all(
        _same_file([name, size, time], file_identity(Path(name)), digest)
        for name, size, time, digest in read
    ):
        return False
    return kept or _changed_file("output", outputs, stamp.get("outputs")) is None


def write_unit_stamp(need: Need, unit: Unit, stamps: Path, result: Mapping[str, object]) -> None:
    """Record a unit's success and what it reported."""
    stamp_unit(
        unit_stamp_path(stamps, need.name, unit.name),
        unit.name,
        spec_digest(need, unit),
        unit.outputs,
        result,
    )


def stamp_unit(
    path: Path, name: str, digest: str, outputs: Iterable[Path], result: Mapping[str, object]
) -> None:
    """The same where only these are known: on the node where the unit ran. `digest`: spec_digest
    of need and unit."""
    write_json(
        path,
        document(
            SCHEMA,
            unit=name,
            spec=digest,
            outputs=file_identities(outputs),
            result=result,
            made=utc_now(),
        ),
    )
