"""What an engine needs on this host, asked before it starts: its interpreter, modules, files."""

from __future__ import annotations

import json
import os
import subprocess

from trainkit.engines.rank.spec import RankSpec

SECONDS = 120
# found is not imported: torch alone takes seconds
CODE = (
    "import importlib.util, json, sys\n"
    "def there(name):\n"
    "    try:\n"
    "        return importlib.util.find_spec(name) is not None\n"
    "    except (ImportError, ValueError):\n"
    "        return False\n"
    "print(json.dumps([name for name in sys.argv[1:] if not there(name)]))\n"
)


def missing_on_this_host(spec: RankSpec, environment: dict[str, str]) -> list[str]:
    """What is missing, each with its mend; nothing where the engine can start.

    Args:
        spec: of the rank.
        environment: in which the engine will run.
    """
    host = os.uname().nodename
    if not os.path.isdir(spec.cwd):
        return [f"{spec.cwd} is not there on {host}: it must lie on a folder that all nodes share"]
    missing = [f"{path} is not there on {host}" for path in spec.reads if not os.path.exists(path)]
    return missing + _missing_modules(spec, environment, host)


def _missing_modules(spec: RankSpec, environment: dict[str, str], host: str) -> list[str]:
    if not spec.modules:
        return []
    argv = [spec.argv[0], "-c", CODE, *(module.name for module in spec.modules)]
    try:
        done = subprocess.run(
            argv,
            env=environment,
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{spec.argv[0]} cannot be run on {host}: {error}"]
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return [f"{spec.argv[0]} fails on {host}: {''.join(last)}"]
    names = set(json.loads(done.stdout.decode().splitlines()[-1]))
    return [
        f"{spec.argv[0]} on {host} has no module {module.name}: {module.mend}"
        for module in spec.modules
        if module.name in names
    ]
