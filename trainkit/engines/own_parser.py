"""An engine's own parser, asked by the engine's own Python: in a rehearsal what it says of the
arguments of a job, and by the stage engine-prebuild which options it has.

Options are kept below the cluster's root in the form of option_tables. A text alone does not say
them all: newer trees make most flags of dataclasses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainkit.base.documents import canonical_json
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.git import head_commit
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.engines.contract import Command
from trainkit.engines.options import Option, OptionTable, parse_table
from trainkit.engines.sources import engine_python, engines_root, in_image, source_of, source_tree
from trainkit.jobs.schema import Job

PARSED = "trainkit: parsed"
CHECKED = "trainkit: checked"
REFUSED = "trainkit: refused "
# Beginning of a program of the engine's interpreter, in its tree. What an engine asserts is its own
# refusal; any other error is of the place: a package or a GPU that is missing here.
REFUSAL = f"""
import json, sys, traceback
sys.path.insert(0, ".")

def refused(error):
    frame = traceback.extract_tb(error.__traceback__)[-1]
    print({REFUSED!r} + json.dumps(str(error) or frame.line), flush=True)
"""
# The same. The options of the parser that is first asked to read words are written into the file
# that the program is given, as a table has them, and nothing of the tree goes on.
ASK = """
import argparse, enum, json, os, sys
sys.path.insert(0, ".")

def plain(value):
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple, range)):
        return [plain(each) for each in value]
    return value if isinstance(value, (str, int, float)) else None

def option(each, names, action):
    if action != "store":
        return {"action": action, "aliases": names[1:]}
    kinds = {None: "str", str: "str", int: "int", float: "float", bool: "bool"}
    return {
        "type": kinds.get(each.type, "str" if each.choices else "any"),
        "nargs": each.nargs,
        "choices": plain(list(each.choices)) if each.choices else None,
        "aliases": names[1:],
        "default": plain(each.default),
    }

def write(parser, *words, **named):
    actions = {"_StoreFalseAction": "store_false", "BooleanOptionalAction": "switch"}
    options = {}
    for each in parser._actions:
        names = [name[2:] for name in each.option_strings if name.startswith("--")]
        other = "store_true" if each.nargs == 0 else "store"
        action = actions.get(type(each).__name__, other)
        if action == "switch":
            names = [name for name in names if "no-" + name in names]
        if names and names[0] != "help":
            options[names[0]] = option(each, names, action)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(options, file)
    os._exit(0)

argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_known_args = write
"""


@dataclass(frozen=True)
class OwnParser:
    """One engine's.

    Args:
        program: what its interpreter runs, in its tree: it prints PARSED, CHECKED or REFUSED.
        words: what the program is given of a job and its command; it may write into the folder.
        takes: the sentence for arguments that it takes, with {words} for their number.
        set_by: names of its options and the keys of jobs.toml that say them.
        options: what its interpreter runs, in its tree, to write them all (`ASK`);
            "": it is not asked for them.
    """

    program: str
    words: Callable[[Job, Command, Path], Sequence[str]]
    takes: str
    set_by: Mapping[str, str]
    options: str = ""


def asks(job: Job) -> bool:
    """Whether the job's options are those that its tree's own parser has."""
    return source_of(job).options == "from-source"


def options_file(job: Job) -> Path:
    """<root>/engines/options/KEY.json: equal for the same tree, commit and interpreter, by their
    names, so that it is the same on machines without them."""
    tree = source_tree(job)
    image = job.container.image if job.container is not None else ""
    parts = [str(tree), head_commit(tree), image, str(engine_python(job))]
    digest = hashlib.sha256(canonical_json(parts).encode()).hexdigest()
    return engines_root(job) / "options" / f"{tree.name}-{digest[:12]}.json"


def asked_table(job: Job, version: str) -> OptionTable | None:
    """The options that the tree's own parser has; None where it was not asked yet.

    Args:
        job: the job.
        version: what its tree is.

    Raises ConfigError: no stage can ask it.
    """
    box = job.container
    if box is not None and (not box.stages_in_container or in_image(job)):
        raise ConfigError(
            f"engines.{source_of(job).name}.options = 'from-source': no stage of jobs.{job.name}"
            f" can ask the engine in the image {box.image}",
            hint=(
                f"set containers.{box.name}.stages_in_container = true, with a source outside of"
                " the image; or options = 'table'"
            ),
        )
    path = options_file(job)
    if not path.is_file():
        return None
    return replace(parse_table(path.read_text(encoding="utf-8")), version=version)


def has_changed(job: Job) -> bool:
    """Whether a file that the tree's parser may be made of is newer than what was asked of it."""
    table = options_file(job)
    tree = source_tree(job)
    if not table.is_file():
        return False
    asked = table.stat().st_mtime
    return any(file.stat().st_mtime > asked for file in parser_sources(tree))


def parser_sources(tree: Path) -> list[Path]:
    """Files of a tree that its parser may be made of: its packages, and the scripts that ask."""
    folders = ("megatron", "src", "scripts", "3rdparty/*/megatron")
    places = ("*.py", *(f"{folder}/**/*.py" for folder in folders))
    return [path for place in places for path in sorted(tree.glob(place))]


def not_asked(job: Job) -> ConfigError:
    """What to raise (exit 5) where options are needed that were not asked for yet."""
    return ConfigError(
        f"engines.{source_of(job).name}.options = 'from-source': the parser of {source_tree(job)}"
        " was not asked yet",
        exit=Exit.STAGE_STALE,
        hint=f"`invoke train {job.name}` asks it first, in its stage engine-prebuild",
    )


def read_options(text: str) -> dict[str, Option]:
    """What a program with `ASK` has written: options by name."""
    return {name: Option.from_json(name, each) for name, each in json.loads(text).items()}
