"""A tree of Megatron-LM whose parser is argparse's own: it has the options of one of our tables,
and what the caller adds."""

from __future__ import annotations

from pathlib import Path

from tests.stages.engine_trees import repository
from trainkit.engines.options import Option, load_table

TYPES = {"int": "int", "float": "float", "str": "str", "bool": "bool"}
ACTIONS = {"switch": "argparse.BooleanOptionalAction"}
ARGUMENTS = """import argparse, enum, signal, warnings
from dataclasses import dataclass, fields

class Backend(enum.Enum):
    flash = 1
    fused = 2

@dataclass
class Newest:
    newest_depth: int = 3
    newest_share: float = 0.5

def anything(word):
    return word

def parse_args(extra_args_provider=None):
    parser = argparse.ArgumentParser(allow_abbrev=False)
{options}
    for field in fields(Newest):  # as ArgumentGroupFactory
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default)
    parser.add_argument("--newest-backend", type=lambda word: Backend[word], choices=list(Backend))
    parser.add_argument("--newest-constant", action="store_const", const=1)
    parser.add_argument("-s", type=int)
{more}
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_args()
"""
PRETRAIN = """from megatron.training.arguments import parse_args
has_nvidia_modelopt = True
def add_modelopt_args(parser):
    parser.add_argument("--export-anew")
    return parser
if __name__ == "__main__":
    raise SystemExit("nothing is trained")
"""


def added(option: Option) -> str:
    """The call of add_argument that makes an option."""
    names = ", ".join(repr(f"--{name}") for name in (option.name, *option.aliases))
    words = [names, f"default={option.default!r}"]
    if option.action == "store":
        # a function of the tree's own says what "any" takes
        words += [f"type={TYPES.get(option.type, 'anything')}"]
        words += [f"nargs={option.nargs!r}"] if option.nargs is not None else []
        words += [f"choices={list(option.choices)!r}"] if option.choices else []
    else:
        words.append(f"action={ACTIONS.get(option.action, repr(option.action))}")
    return f"    parser.add_argument({', '.join(words)})"


def arguments(more: str = "", version: str = "core-0.19.0") -> str:
    """The text of its parser.

    Args:
        more: statements that add options to `parser`.
        version: whose table of ours it has.
    """
    options = load_table("megatron-lm", version).options.values()
    return ARGUMENTS.format(options="\n".join(map(added, options)), more=f"    {more or 'pass'}")


def parser_tree(folder: Path) -> Path:
    """The tree, in a repository of its own: core 0.99.0."""
    return repository(
        folder,
        {
            "pretrain_gpt.py": PRETRAIN,
            "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 99\nPATCH = 0\n",
            "megatron/training/arguments.py": arguments(),
            ".gitignore": "__pycache__\n",
        },
    )
