"""What a pod's volumes and variables come from."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tests.kubernetes.defaults import TOKENS
from tests.kubernetes.kinds import Object, quantity
from tests.kubernetes.pod_process import Mount


class CannotStart(Exception):
    """Why a container waits: `reason` of its state or of an event."""

    def __init__(self, reason: str, message: str, event: str = "Failed") -> None:
        super().__init__(message)
        self.reason, self.message, self.event = reason, message, event


class Sources(Protocol):
    """Where a kubelet finds things."""

    claims: dict[str, Path]  # "namespace/name": the folder

    def object(self, plural: str, namespace: str, name: str) -> Object | None: ...
    def token(self, namespace: str, account: str) -> dict[str, str]: ...


def _data(sources: Sources, plural: str, namespace: str, name: str) -> dict[str, str] | None:
    """The keys of a Secret or ConfigMap as text; None where there is none."""
    found = sources.object(plural, namespace, name)
    if found is None:
        return None
    data = dict(found.get("data") or {})
    if plural == "secrets":
        data = {key: base64.b64decode(value).decode() for key, value in data.items()}
    return {**data, **(found.get("stringData") or {})}


def variables(pod: Object, address: str, sources: Sources) -> dict[str, str]:
    """A container's own variables. Raises CannotStart."""
    found: dict[str, str] = {}
    for each in pod["spec"]["containers"][0].get("env") or []:
        source = each.get("valueFrom") or {}
        if "fieldRef" in source:
            found[each["name"]] = _field(pod, source["fieldRef"]["fieldPath"], address)
        elif source:
            value = _key(pod, source, sources)
            if value is not None:
                found[each["name"]] = value
        else:
            text = each.get("value", "")
            found[each["name"]] = re.sub(
                r"\$\((\w+)\)", lambda name: found.get(name[1], name[0]), text
            )
    return found


def _field(pod: Object, path: str, address: str) -> str:
    if path in ("status.podIP", "status.hostIP", "status.podIPs"):
        return address
    if part := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path):
        return str((pod["metadata"].get(part[1]) or {}).get(part[2], ""))
    value: object = pod
    for word in path.split("."):
        value = value.get(word, "") if isinstance(value, dict) else ""
    return str(value)


def _key(pod: Object, source: Object, sources: Sources) -> str | None:
    """Of a Secret or ConfigMap; None where an optional one is not there."""
    ref = source.get("secretKeyRef") or source["configMapKeyRef"]
    plural, kind = (
        ("secrets", "secret") if "secretKeyRef" in source else ("configmaps", "configmap")
    )
    namespace = pod["metadata"]["namespace"]
    data = _data(sources, plural, namespace, ref["name"])
    if data is not None and ref["key"] in data:
        return data[ref["key"]]
    if ref.get("optional"):
        return None
    text = f'{kind} "{ref["name"]}" not found'
    if data is not None:
        text = f"couldn't find key {ref['key']} in {kind.title()} {namespace}/{ref['name']}"
    raise CannotStart("CreateContainerConfigError", f"Error: {text}" if data is None else text)


def mounts(pod: Object, folder: Path, sources: Sources) -> Iterator[Mount]:
    """What is mounted where. folder: a pod's own. Raises CannotStart."""
    volumes = {each["name"]: each for each in pod["spec"].get("volumes") or []}
    places = []
    for each in pod["spec"]["containers"][0].get("volumeMounts") or []:
        mode = "ro" if each.get("readOnly") else "rw"
        mount = _mount(pod, volumes[each["name"]], each["mountPath"], mode, (folder, sources))
        if each.get("subPath"):
            source = str(Path(mount.source) / each["subPath"])
            mount = Mount(mount.kind, mount.place, source, mode)
        places.append(mount.place)
        if mount.place != TOKENS and not Path(mount.place).exists():
            text = f"{mount.place} is not there: pods here see this machine's own folders"
            raise CannotStart("ContainerCreating", _failed(each["name"], text), "FailedMount")
        yield mount
    if "/dev/shm" not in places:
        yield Mount("memory", "/dev/shm", str(64 << 20))


def _failed(name: str, why: str) -> str:
    return f'MountVolume.SetUp failed for volume "{name}" : {why}'


def _mount(
    pod: Object, volume: Object, place: str, mode: str, context: tuple[Path, Sources]
) -> Mount:
    folder, sources = context
    namespace, name = pod["metadata"]["namespace"], volume["name"]
    if "emptyDir" in volume:
        empty = volume["emptyDir"] or {}
        if empty.get("medium") == "Memory":
            return Mount("memory", place, str(int(quantity(empty.get("sizeLimit", "1Gi")))))
        return Mount("bind", place, str(_own(folder, name, {})), mode)
    if "persistentVolumeClaim" in volume:
        source = volume["persistentVolumeClaim"]
        mode = "ro" if source.get("readOnly") else mode
        return Mount("bind", place, str(sources.claims[f"{namespace}/{source['claimName']}"]), mode)
    if "hostPath" in volume:
        path, type = volume["hostPath"]["path"], volume["hostPath"].get("type", "")
        if not Path(path).is_dir() and type in ("", "Directory"):
            text = f"hostPath type check failed: {path} is not a directory"
            raise CannotStart("ContainerCreating", _failed(name, text), "FailedMount")
        return Mount("bind", place, path, mode)
    for plural, key in (("secrets", "secret"), ("configmaps", "configMap")):
        if key in volume:
            of = volume[key].get("secretName") or volume[key].get("name")
            data = _data(sources, plural, namespace, of)
            if data is None:
                text = _failed(name, f'{key.lower()} "{of}" not found')
                raise CannotStart("ContainerCreating", text, "FailedMount")
            return Mount("bind", place, str(_own(folder, name, data)), "ro")
    if "projected" in volume:
        account = pod["spec"]["serviceAccountName"]
        return Mount("token", place, str(_own(folder, name, sources.token(namespace, account))))
    kind = next(key for key in volume if key != "name")
    raise CannotStart("ContainerCreating", _failed(name, f"no volumes {kind} here"), "FailedMount")


def _own(folder: Path, name: str, files: dict[str, str]) -> Path:
    """A folder of a pod's own with these files."""
    place = folder / "volumes" / name
    place.mkdir(parents=True, exist_ok=True)
    for key, text in files.items():
        (place / key).write_text(text)
    return place
