"""Tables of engines' options: how they are read from a tree, and how a job is checked by them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.base.errors import ConfigError
from trainkit.base.snapshot_files import package_files
from trainkit.engines.extract_options import read_tree
from trainkit.engines.options import (
    Option,
    check_engine_args,
    dump_table,
    load_table,
    parse_table,
    release,
    tables_of,
    version_at,
)
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Training

MEGATRON = {
    "pretrain_gpt.py": """
import must_not_be_imported
pretrain(extra_args_provider=add_more_args if has_more else None)
""",
    "megatron/post_training/arguments.py": """
def add_more_args(parser):
    parser.add_argument('--more', action='store_true')
""",
    "megatron/training/arguments.py": """
raise SystemExit('executed')
def add_megatron_arguments(parser):
    parser = _add_size_args(parser)
    return parser
def parse_args(extra=None):
    parser = add_megatron_arguments(parser)
def _add_size_args(parser):
    exclude = ['callback', 'hidden']
    factory = ArgumentGroupFactory(ShapeConfig, exclude=exclude)
    group = parser.add_argument_group(title='size')
    group.add_argument('--num-layers', '--layers', type=int, default=None, help='x')
    group.add_argument('--initial-scale', type=float, default=2**32)
    group.add_argument('--backend', type=lambda b: Backend[b], choices=list(Backend),
                       default=Backend.auto)
    group.add_argument('--level', type=int, choices=range(0, 3))
    group.add_argument('--strict', choices=[e.value for e in Strict])
    group.add_argument('--no-bias', action='store_false', dest='bias')
    group.add_argument('--tune', action=argparse.BooleanOptionalAction)
    group.add_argument('--files', nargs='*')
    if HAVE_IT:
        group.add_argument('--odd', type=odd_type, choices=CHOSEN)
    return parser
def _add_unused_args(parser):
    parser.add_argument('--never', type=int)
""",
    "megatron/core/config.py": """
class Backend(enum.Enum):
    flash = 1
    auto = 2
class Strict(Enum):
    RAISE = 'raise'
    LOG = 'log'
@dataclass
class BaseConfig:
    depth: int = 0
    callback: Callable = None
    kept: bool = True
@dataclass
class ShapeConfig(BaseConfig):
    depth: Optional[int] = field(default=0, metadata={"argparse_meta": {"default": None}})
    biased: bool = False
    named: bool = field(default=True, metadata={"argparse_meta": {"arg_names": ["--un-named"]}})
    mode: Literal['a', 'b'] | None = None
    sizes: list[int] | None = field(default=None, metadata={"argparse_meta": {"nargs": 3}})
    kind: Optional[Backend] = None
    either: int | str | None = field(default=None, metadata={"argparse_meta": {"type": str}})
    made: int = field(init=False)
    ranks: List[int] = field(default_factory=lambda: [])
    hidden: int = 3
    call: Thing = None
""",
}
NEOX = {
    "megatron/neox_arguments/arguments.py": "BASE_CLASSES = [NeoXArgsModel]\n",
    "megatron/neox_arguments/neox_args.py": '''
@dataclass
class NeoXArgsModel(NeoXArgsTemplate):
    """The model."""
    num_layers: int = None
    """layers"""
    precision: Literal["fp16", "bfloat16"] = None
    factor: Union[int, float] = None
    ports: Union[int, List[int]] = 6000
    optimizer: dict = None
    sizes: list = None
    thing: Any = None
@dataclass
class NotOfThem:
    other: int = 1
''',
}


def tree(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def job(engine_args: dict[str, Any]) -> Job:
    return Job(
        name="j",
        engine="megatron-lm",
        engine_args=engine_args,
        cluster=Cluster(name="c"),
        model=Model(
            name="m",
            num_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            seq_length=8,
            vocab_size=9,
        ),
        dataset=Dataset(name="mock", source="mock"),
        training=Training(train_iters=1, lr=1.0),
    )


def test_the_options_of_a_parser_are_read_without_running_it(tmp_path: Path) -> None:
    table = read_tree(tree(tmp_path, MEGATRON), None, "abc")
    found = table.options
    assert (table.engine, table.version, table.commit) == ("megatron-lm", "2021", "abc")
    assert found["num-layers"] == Option("num-layers", "int", aliases=("layers",))
    assert found["initial-scale"] == Option("initial-scale", "float", default=2**32)
    assert found["backend"] == Option("backend", "any", choices=("flash", "auto"), default="auto")
    assert found["level"].choices == (0, 1, 2)
    assert found["strict"] == Option("strict", choices=("raise", "log"))
    assert found["no-bias"] == Option("no-bias", "bool", "store_false")
    assert found["tune"] == Option("tune", "bool", "switch")
    assert found["files"] == Option("files", nargs="*")
    assert found["odd"] == Option("odd", "any", condition="HAVE_IT")
    assert found["more"] == Option("more", "bool", "store_true", condition="has_more")
    assert "never" not in table


def test_the_options_that_dataclasses_become_are_read_too(tmp_path: Path) -> None:
    """As Megatron-LM's ArgumentGroupFactory names and types them."""
    table = read_tree(tree(tmp_path, MEGATRON), "core-9", "")
    found = table.options
    assert found["depth"] == Option("depth", "int")
    assert found["biased"] == Option("biased", "bool", "store_true")
    assert found["no-kept"] == Option("no-kept", "bool", "store_false", aliases=("disable-kept",))
    assert found["un-named"] == Option("un-named", "bool", "store_false")
    assert found["mode"] == Option("mode", choices=("a", "b"))
    assert found["sizes"] == Option("sizes", "int", nargs=3)
    assert found["kind"] == Option("kind", choices=("flash", "auto"))
    assert found["either"] == Option("either")
    assert found["ranks"] == Option("ranks", "int", nargs="+")
    assert not {"callback", "hidden", "made"} & set(found)


def test_what_only_running_the_code_would_tell_is_listed(tmp_path: Path) -> None:
    table = read_tree(tree(tmp_path, MEGATRON), None, "")
    assert table.not_seen == ("--call, of ShapeConfig: the type Thing", "--odd: the choices CHOSEN")
    without = {name: text for name, text in MEGATRON.items() if "config" not in name}
    table = read_tree(tree(tmp_path / "b", without), None, "")
    assert "dataclass ShapeConfig: not found in the tree" in table.not_seen


def test_the_dataclasses_of_gpt_neox(tmp_path: Path) -> None:
    table = read_tree(tree(tmp_path, NEOX), None, "ea7aefd")
    found = table.options
    assert (table.engine, table.version) == ("gpt-neox", "2.0.0")
    assert found["num_layers"] == Option("num_layers", "int")
    assert found["precision"].choices == ("fp16", "bfloat16")
    assert found["factor"].type == "int|float"
    assert found["ports"] == Option("ports", "int|list", default=6000)
    assert (found["optimizer"].type, found["sizes"].type) == ("dict", "list")
    assert table.not_seen == ("thing, of NeoXArgsModel: the type Any",)
    assert "other" not in table
    assert "num-layers" in table  # NeoX's loader takes both spellings


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    table = read_tree(tree(tmp_path, MEGATRON), None, "abc")
    text = dump_table(table)
    assert parse_table(text) == table
    assert len(text.splitlines()) == len(table.options) + 8


def test_the_program_prints_a_table_and_refuses_another_tree(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "trainkit.engines.extract_options"]
    here = tree(tmp_path / "a", NEOX)
    asked = [*argv, str(here), "--version", "9", "--commit", "c"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert parse_table(done.stdout) == read_tree(here, "9", "c")
    (tmp_path / "b").mkdir()
    failed = subprocess.run(
        [*argv, str(tmp_path / "b")], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 3
    assert "megatron/training/arguments.py" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_versions_are_in_order() -> None:
    versions = ["2021", "core-0.12.0rc0", "core-0.12.0rc3", "core-0.12.0", "core-0.12.2"]
    versions += ["core-0.13.0", "core-0.16.1", "core-0.17.0", "core-1.0.0"]
    versions.reverse()
    assert sorted(versions, key=release) == versions[::-1]


def test_there_are_tables_of_what_the_references_run() -> None:
    assert list(tables_of("megatron-lm")) == [
        "2021",
        "core-0.12.0rc0",
        "core-0.12.0",
        "core-0.13.0",
        "core-0.14.0",
        "core-0.15.0",
        "core-0.16.1",
        "core-0.17.1",
        "core-0.18.0",
        "core-0.19.0",
    ]
    assert list(tables_of("gpt-neox")) == ["2.0.0"]
    for engine in ("megatron-lm", "gpt-neox"):
        for version in tables_of(engine):
            table = load_table(engine, version)
            assert (table.engine, table.version, table.notice) == (engine, version, "")
            assert len(table.options) > 100
    assert version_at("megatron-lm", "825375cf38") == "2021"
    assert version_at("megatron-lm", "e958b2ca") == "core-0.12.0rc0"
    assert version_at("megatron-lm", "e958b2ca1" + 31 * "f") is None
    assert version_at("megatron-lm", "main") is None


def test_tables_travel_with_the_package() -> None:
    import trainkit

    package = Path(trainkit.__file__).parent
    assert "trainkit/engines/option_tables/megatron-lm-2021.json" in package_files(package)


def test_another_version_has_the_table_before_it_and_says_so() -> None:
    table = load_table("megatron-lm", "core-0.13.1")
    assert table.version == "core-0.13.0"
    assert "megatron-lm core-0.13.1" in table.notice and "core-0.13.0" in table.notice
    assert load_table("megatron-lm", "2019").version == "2021"
    with pytest.raises(ConfigError, match="native"):
        load_table("native", "1")


SET_BY = {"num-layers": "model.num_layers", "ckpt-format": "checkpoint", "save": "nothing"}


@pytest.mark.parametrize(
    ("engine_args", "said", "hint"),
    [
        ({"attention-backendd": "auto"}, "no option 'attention-backendd'", "attention-backend"),
        ({"num_layers": 3}, "trainkit sets num-layers itself", "model.num_layers"),
        ({"data-impl": "mmap"}, "has no option 'data-impl'", ""),
        ({"attention-backend": "fast"}, "'fast' is none of its values", "flash, fused, unfused"),
        ({"timing-log-level": "2"}, "expected an integer, got the string '2'", ""),
        ({"timing-log-level": True}, "expected an integer, got the boolean true", ""),
        ({"moe-z-loss-coeff": "x"}, "expected a number", ""),
        ({"swiglu": 1}, "expected true or false, got the integer 1", ""),
        ({"spec": [1, 2]}, "expected a string", ""),
        ({"train-data-path": []}, "", ""),
        (
            {"hierarchical-context-parallel-sizes": []},
            "at least one value",
            "",
        ),
        ({"swiglu": True, "--swiglu": True}, "are one option", ""),
    ],
)
def test_engine_args_are_checked(engine_args: dict[str, Any], said: str, hint: str) -> None:
    table = load_table("megatron-lm", "core-0.12.0")
    problems = check_engine_args(job(engine_args), table, SET_BY)
    if not said:
        assert problems == []
        return
    assert len(problems) == 1
    assert said in problems[0].message
    assert problems[0].message.startswith("engine_args.")
    assert hint in problems[0].hint


def test_right_engine_args_are_taken_in_either_spelling() -> None:
    table = load_table("megatron-lm", "core-0.12.0")
    given = {
        "attention_backend": "auto",
        "timing-log-level": 2,
        "moe-z-loss-coeff": 1,
        "swiglu": False,
        "cp-comm-type": ["p2p", "a2a"],
        "moe-layer-freq": "[1]*3",
    }
    assert check_engine_args(job(given), table, SET_BY) == []


def test_an_option_that_an_older_version_lacks_is_named_with_the_version() -> None:
    table = load_table("megatron-lm", "2021")
    (problem,) = check_engine_args(job({"attention-backend": "auto"}), table, SET_BY)
    assert "megatron-lm 2021 has no option 'attention-backend'" in problem.message


def test_words_of_a_command_line() -> None:
    assert Option("a", "int").words(3) == ("--a", "3")
    assert Option("a", "float").words(6e-05) == ("--a", "6e-05")
    assert Option("a", nargs="+").words(["x", "y"]) == ("--a", "x", "y")
    flag = Option("no-a", "bool", "store_false")
    assert (flag.words(True), flag.words(False)) == (("--no-a",), ())
    switch = Option("a", "bool", "switch")
    assert (switch.words(True), switch.words(False)) == (("--a",), ("--no-a",))
    # argparse's type=bool takes every word but the empty one for true
    assert Option("a", "bool").words(False) == ("--a", "")
