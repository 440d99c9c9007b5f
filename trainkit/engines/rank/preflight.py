"""What an engine needs on this host, asked before it starts: its interpreter, modules, files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.engines.rank.node_setup import device_problems
from trainkit.engines.rank.spec import RankSpec
from trainkit.engines.rank.versions import allows, bounded_package

SECONDS = 120
# found is not imported: torch alone takes seconds
CODE = """
import importlib.metadata, importlib.util, json, sys
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
modules, packages = json.loads(sys.argv[1])
print(json.dumps([[name for name in modules if not any(map(there, name.split(" or ")))],
                  {name: version(name) for name in packages}]))
"""


@dataclass(frozen=True)
class HostCheck:
    """What was found on a host.

    Args:
        missing: what the engine cannot start without, each with its mend.
        notes: what it may well run with, and is not known to.
    """

    missing: list[str]
    notes: list[str] = field(default_factory=list)


def check_this_host(spec: RankSpec, environment: dict[str, str]) -> HostCheck:
    """What is missing, and which packages have other versions than the engine is known to run
    with.

    Args:
        spec: of the rank.
        environment: in which the engine will run.
    """
    host = os.uname().nodename
    if not os.path.isdir(spec.cwd):
        where = f"{spec.cwd} is not there on {host}: it must lie on a folder that all nodes share"
        return HostCheck([where])
    missing = [f"{path} is not there on {host}" for path in spec.reads if not os.path.exists(path)]
    missing += device_problems(spec.node)
    if os.path.dirname(spec.argv[0]) == "" and not shutil.which(
        spec.argv[0], path=environment.get("PATH")
    ):
        missing.append(f"{spec.argv[0]} is not on PATH on {host}: {environment.get('PATH')}")
    asked = _check_interpreter(spec, environment, host)
    return HostCheck(missing + asked.missing, asked.notes)


def _check_interpreter(spec: RankSpec, environment: dict[str, str], host: str) -> HostCheck:
    lines = {bounded_package(line): line for line in spec.versions}
    if not spec.modules and not lines:
        return HostCheck([])
    question = json.dumps([[module.name for module in spec.modules], list(lines)])
    try:
        done = subprocess.run(
            [spec.interpreter, "-c", CODE, question],
            env=environment,
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return HostCheck([f"{spec.interpreter} cannot be run on {host}: {error}"])
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return HostCheck([f"{spec.interpreter} fails on {host}: {''.join(last)}"])
    absent, versions = json.loads(done.stdout.decode().splitlines()[-1])
    missing = [
        f"{spec.interpreter} on {host} has no module {module.name}: {module.mend}"
        for module in spec.modules
        if module.name in absent
    ]
    notes = [
        f"{host} has {name} {there}; {spec.engine} is known to run with {lines[name]}"
        for name, there in versions.items()
        if there is not None and not allows(lines[name], there)
    ]
    return HostCheck(missing, notes)
