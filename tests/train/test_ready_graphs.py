"""Compiled functions taken ready-made: the right one, or none."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from tests.distributed import call, run_ranks
from trainkit.train import ready_graphs
from trainkit.train.compiled_graphs import agree_on_graphs
from trainkit.train.ready_graphs import (
    NoKeyError,
    ReadyGraph,
    ReadyGraphs,
    merge,
    read_index,
)


def scaled_sine(layer: nn.Module, x: Tensor, factor: float) -> Tensor:
    """What these tests compile: a matrix product and a kernel of C++."""
    y: Tensor = layer(x)
    return y.sin() * factor


def inputs() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)


def step(graphs: ReadyGraphs) -> tuple[Tensor, Tensor]:
    """A result and its gradient."""
    layer, x = inputs()
    y = graphs.compile(scaled_sine)(layer, x, 3.0)
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def learn_by_trying() -> None:
    """Let this process be on a processor of which torch finds out what it has when it tries to
    compile for it, as it does with AMX: the flag is not among those of the class."""
    from torch._inductor import cpu_vec_isa

    def tried(isa: Any) -> bool:
        isa._arch_flags = f"{type(isa)._arch_flags} -mbmi"
        return True

    for kind in {type(each) for each in cpu_vec_isa.supported_vec_isa_list}:
        mock.patch.object(kind, "__bool__", tried).start()


def make_them(folder: str) -> tuple[Tensor, Tensor]:
    from torch._inductor import config

    learn_by_trying()
    made = ReadyGraphs(Path(folder), making=True)
    # a quarter of the time: headers compiled ahead for two kernels, instruction sets tried first
    quick = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}
    with config.patch(quick):
        found = step(made)
    merge(Path(folder), {0: made.made})
    return found


def take_them(folder: str) -> tuple[Tensor, Tensor, int, int, int]:
    """With how many were found, compiled for all that, and traced."""
    from torch._dynamo.utils import counters

    learn_by_trying()
    graphs = ReadyGraphs(Path(folder))
    found = step(graphs)
    layer, x = inputs()
    with torch.compiler.set_stance("force_eager"):
        graphs.compile(scaled_sine)(layer, x, 3.0)
    return (*found, graphs.hits, graphs.misses, len(counters["frames"]))


def take_wrong(folder: str) -> tuple[int, int, str]:
    """(hits, misses, warnings) of the folder's graphs, called for a factor that they were not made
    for; what is computed is right all the same."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        graphs = ReadyGraphs(Path(folder))
        layer, x = inputs()
        # as it is written: what torch would compile instead is not looked at here
        with mock.patch.object(torch, "compile", lambda function, fullgraph: function):
            y = graphs.compile(scaled_sine)(layer, x, 4.0)
    assert torch.equal(y, scaled_sine(layer, x, 4.0))
    return graphs.hits, graphs.misses, said.getvalue()


def test_taken_they_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, without a compiler; and what is wrong, for another processor or damaged is
    left."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "ready"
    made = call("tests.train.test_ready_graphs:make_them", str(folder))
    (ready,) = read_index(folder).graphs
    assert ready.graphs == 2
    *taken, hits, misses, frames = call("tests.train.test_ready_graphs:take_them", str(folder))
    assert all(map(torch.equal, made, taken))
    assert (hits, misses, frames) == (2, 0, 0)

    whole = (folder / "index.json").read_text()
    built = set(tmp_path.rglob("*.so"))

    def wrongly() -> str:
        hits, misses, said = call("tests.train.test_ready_graphs:take_wrong", str(folder))
        assert (hits, misses) == (0, 2) and set(tmp_path.rglob("*.so")) == built
        return str(said)

    (folder / "index.json").write_text(whole.replace("'3.0'", "'4.0'"))
    assert "its result is off by" in wrongly()
    (folder / "index.json").write_text(whole.replace("-mbmi", "-mbmi2"))
    assert "is not among what was compiled" in wrongly(), "of another processor"
    (folder / "index.json").write_text(whole)
    content = (folder / ready.file).read_bytes()
    (folder / ready.file).write_bytes(content[: len(content) // 2])
    assert f"not used: {folder / ready.file}" in wrongly()


@dataclass(frozen=True)
class Pair:
    """As a model hands its blocks."""

    first: Tensor
    second: Tensor | None = None


def test_what_a_graph_depends_on_is_in_its_key() -> None:
    graphs = ReadyGraphs()
    x = torch.zeros(4, 8)
    layer = nn.Linear(8, 8)
    frozen = nn.Linear(8, 8).requires_grad_(False)
    values = [
        (x,),
        (torch.zeros(8, 8),),
        (torch.zeros(8, 4).t(),),
        (x.double(),),
        (x.clone().requires_grad_(),),
        (x, 1),
        (x, 2),
        (x, 1.0),
        (x, True),
        (x, 0.0),
        (x, -0.0),
        (x, "none"),
        (x, None),
        (Pair(x),),
        (Pair(x, x),),
        (layer, x),
        (nn.Linear(8, 8, bias=False), x),
        (frozen, x),
        (nn.Linear(8, 8).eval(), x),
    ]
    keys = [graphs._key(value) for value in values]
    with torch.no_grad():
        keys.append(graphs._key((x,)))
    assert len(set(keys)) == len(keys)
    assert graphs._key((nn.Linear(8, 8), x)) == graphs._key((layer, x)), "any layer of the kind"
    for other in ([x], {"x": x}, x.to_sparse):
        with pytest.raises(NoKeyError):
            graphs._key((other,))


def test_the_number_of_a_gpu_is_in_the_key() -> None:
    """It stands in the code: what was made for GPU 0 computes there."""
    with FakeTensorMode():  # of "cuda:1" it would ask the driver where there is one
        keys = [
            ReadyGraphs()._key((nn.LayerNorm(8, device=place),))
            for place in ("cpu", "xpu:0", "xpu:1")
        ]
    assert len(set(keys)) == len(keys)


def ready(folder: Path, file: str, code: str, key: str = "(1,)") -> ReadyGraph:
    (folder / file).write_bytes(b"")
    return ReadyGraph("f", key, 2, code, file)


def test_the_first_rank_s_serve_all(tmp_path: Path) -> None:
    first = ready(tmp_path, "a", "code")
    own = ready(tmp_path, "c", "other", "(2,)")
    second = [replace(first, file="b"), own]
    (tmp_path / "b").write_bytes(b"")
    assert merge(tmp_path, {0: [first], 1: second}) == {0: (2, 0), 1: (2, 2)}
    assert read_index(tmp_path).graphs == [first, own]
    assert not (tmp_path / "b").exists()


def test_ranks_that_differ_get_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A graph that depends on the rank, which no key tells, must not be another rank's; and then
    no rank has any of that function, for ranks that compute together take them together."""
    first = [ready(tmp_path, "a", "x"), ready(tmp_path, "c", "x", "(2,)")]
    merge(tmp_path, {0: first, 3: [ready(tmp_path, "b", "y")]})
    assert read_index(tmp_path).graphs == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json"]
    assert "rank 3 needs another f: (1,)" in capsys.readouterr().err


def test_of_a_function_that_failed_nobody_gets_any(tmp_path: Path) -> None:
    merge(tmp_path, {0: [ready(tmp_path, "a", "x")]}, {"f"})
    assert read_index(tmp_path).graphs == []
    assert not (tmp_path / "a").exists()


def doubled(x: Tensor) -> Tensor:
    return x + x


def take_if_all_have(folder: str, lacks: str) -> tuple[int, bool]:
    """(graphs that this rank used, whether its result is right), where rank 1 lacks `lacks`."""
    dist.init_process_group("gloo")
    x = torch.ones(3)
    place = Path(folder) / str(dist.get_rank())
    place.mkdir()
    name = f"{doubled.__module__}.{doubled.__qualname__}"
    key = repr(ReadyGraphs()._key((x,)))
    merge(place, {0: [replace(ready(place, "a", "code", key), function=name)]})
    if dist.get_rank() == 1 and lacks == "the file":
        (place / "a").unlink()
    graphs = ReadyGraphs(None if dist.get_rank() == 1 and lacks == "all" else place)
    with (
        mock.patch.object(torch, "compile", lambda function, fullgraph: function),
        mock.patch.object(ready_graphs, "load_ahead", lambda content, scope: doubled),
    ):
        run = graphs.compile(doubled)
    agree_on_graphs(graphs)
    right = torch.equal(run(x), x + x)
    return graphs.hits, right


@pytest.mark.parametrize(("lacks", "used"), [("nothing", 2), ("the file", 0), ("all", 0)])
def test_where_one_rank_lacks_a_graph_none_takes_any(lacks: str, used: int, tmp_path: Path) -> None:
    """At its first use a graph is computed twice: ranks that talk in it would wait for ever."""
    target = "tests.train.test_ready_graphs:take_if_all_have"
    assert run_ranks(2, target, str(tmp_path), lacks) == [(used, True)] * 2
