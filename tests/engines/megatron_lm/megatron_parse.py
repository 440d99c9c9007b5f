"""A program for the interpreter of a real Megatron-LM tree: parse command lines with the tree's own
parser, check each by its own validate_args, and print what came out.

    python megatron_parse.py TREE < CASES.json        # [{"world": 2, "words": [..]}, ..]
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import typing

# core 0.19 is for Python 3.12, which has it; only its parser is asked here
vars(typing).setdefault("override", lambda method: method)


def parsed(words: list[str]) -> object:
    """The tree's arguments for a command line, validated."""
    sys.argv = ["pretrain_gpt.py", *words]
    defaults = {"tokenizer_type": "GPT2BPETokenizer"}
    if os.path.isdir("megatron/training"):
        from megatron.training import arguments

        args = arguments.parse_args()
        return arguments.validate_args(args, defaults) or args
    # 2021. By its file: the package itself imports apex. Its parse_args validates too.
    spec = importlib.util.spec_from_file_location("arguments", "megatron/arguments.py")
    assert spec is not None and spec.loader is not None
    of_2021 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(of_2021)
    return of_2021.parse_args(defaults=defaults)


def main() -> None:
    tree = sys.argv[1]
    cases = json.load(sys.stdin)
    os.chdir(tree)
    sys.path.insert(0, tree)
    for case in cases:
        os.environ["WORLD_SIZE"] = str(case["world"])
        found = {
            name: value
            for name, value in vars(parsed(case["words"])).items()
            if value is None or isinstance(value, (str, int, float, bool, list))
        }
        print("\nPARSED " + json.dumps(found, default=str), flush=True)


main()
