"""Programs of Megatron-Bridge's own interpreter, in its tree: which fields its configuration has,
and what its own dry run says of a job's words."""

from __future__ import annotations

from trainkit.engines.own_parser import CHECKED, PARSED, REFUSAL

# of the packages that its interpreter does not have installed: a clone with its submodule
PATHS = ("src", "3rdparty/Megatron-LM", "scripts/training")
# the model's class, as the file has it
GPT = "_target_: megatron.bridge.models.gpt_provider.GPTModelProvider"
HERE = f"""
import os, sys
sys.path[:0] = [os.path.abspath(each) for each in {PATHS!r}]
"""
# Fields of the dataclasses that the recipe of a bare GPT has, with their types; a part that it has
# not, but may have, by the class that its type names.
OPTIONS = f"""{HERE}
import dataclasses, enum, json, types, typing
from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
from megatron.bridge.training.mixed_precision import MIXED_PRECISION_RECIPES

KINDS = {{bool: "bool", int: "int", float: "float", str: "str"}}

def parts(hint):
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    found = typing.get_args(hint) if union else (hint,)
    return [each for each in found if each is not type(None)]

def said(hint):
    kinds, choices = [], []
    for each in parts(hint):
        origin = typing.get_origin(each) or each
        if origin is typing.Literal:
            choices += typing.get_args(each)
            kinds += [KINDS.get(type(choice), "any") for choice in typing.get_args(each)]
        elif origin in (list, tuple):
            kinds.append("list")
        else:
            kinds.append("dict" if origin is dict else KINDS.get(each, "any"))
    kinds = list(dict.fromkeys(kinds))
    found = {{"type": "any" if "any" in kinds else "|".join(kinds)}}
    if choices and all(typing.get_origin(each) is typing.Literal for each in parts(hint)):
        found["choices"] = choices
    return found

def leaves(owner, value, name):
    hints = typing.get_type_hints(owner)
    for field in dataclasses.fields(owner):
        inner = name + field.name
        there = getattr(value, field.name, None)
        whole = not inner.rpartition(".")[0]
        classes = [each for each in parts(hints[field.name]) if dataclasses.is_dataclass(each)]
        if field.name.startswith("_"):
            continue
        if whole and dataclasses.is_dataclass(there):
            yield from leaves(type(there), there, inner + ".")
        elif whole and len(classes) == 1:
            yield from leaves(classes[0], None, inner + ".")
        if not (whole and dataclasses.is_dataclass(there)):
            yield inner, said(hints[field.name])

recipe = vanilla_gpt_pretrain_config()
found = {{"recipe": {{"type": "str"}}, **dict(leaves(type(recipe), recipe, ""))}}
found["mixed_precision"] = {{"type": "str", "choices": sorted(MIXED_PRECISION_RECIPES)}}
with open(sys.argv[1], "w", encoding="utf-8") as file:
    json.dump(found, file)
os._exit(0)
"""
# argv: the words of run_recipe.py, at last the file into which its dry run writes the whole
# configuration.
PARSER = f"""{REFUSAL}{HERE}
import run_recipe
try:
    run_recipe.parse_args(sys.argv[1:])
    print({PARSED!r}, flush=True)
    run_recipe.main([*sys.argv[1:], "--dry-run"])
    with open(sys.argv[-1].partition("=")[2], encoding="utf-8") as file:
        text = file.read()
    if {GPT!r} not in text:
        raise ValueError("its recipe is of another model than a GPT")
    print({CHECKED!r}, flush=True)
except (AssertionError, ValueError, SystemExit) as error:
    refused(error)
except Exception as error:
    if type(error).__name__ != "OverridesError":
        raise
    refused(error)
"""
