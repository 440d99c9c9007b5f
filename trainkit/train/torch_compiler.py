"""The private parts of torch's compiler that graphs made before a run lean on. Works with 2.11 to
2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast
from unittest import mock

import torch

from trainkit.base.lazy_dataclasses import dataclass


def compile_ahead(
    function: Callable[..., Any], args: Sequence[Any]
) -> tuple[Callable[..., Any], bytes, list[str]]:
    """(`function` compiled for `args`, with its backward; the same as bytes for `load_ahead`; the
    sources that the compiler wrote, one a graph). It runs for arguments of other shapes too, and
    then does something else or raises: who calls it compares them."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    options = {"guard_filter_fn": lambda guards: [False for _ in guards]}
    with (
        cast(Any, dynamo).patch(enable_aot_compile=True),  # torch 2.11's default is False
        cast(Any, inductor).patch(cpp_cache_precompile_headers=False),  # as in `loading_graphs`
    ):
        wrapped = torch.compile(function, fullgraph=True, options=cast(Any, options))
        made = cast(Any, wrapped).aot_compile((tuple(args), {}))
    content = type(made).serialize(made).serialized_data
    entry = made._artifacts.compiled_fn.compiled_fn.serialize()
    parts = [part for part in (entry.compiled_fw, entry.compiled_bw) if part is not None]
    made.disable_guard_check()
    return made.fn, content, [part.result.source_code for part in parts]


def load_ahead(content: bytes, scope: dict[str, Any]) -> Callable[..., Any]:
    """What `compile_ahead` made. `scope`: the globals of the function's module."""
    from torch._dynamo.aot_compile import AOTCompiledFunction

    run: Callable[..., Any] = AOTCompiledFunction.deserialize(content, scope).fn
    return run


@dataclass(frozen=True)
class VectorUnit:
    """What C++ is compiled for. It is a part of what torch looks C++ up by.

    Args:
        bits: width of a vector; 0: there are none.
        macros: that say so in the source.
        flags: of the compiler.
    """

    bits: int
    macros: Sequence[str]
    flags: str


def vector_unit() -> VectorUnit:
    """What torch chooses on this machine: what the processor has and the C++ compiler takes. It is
    tried, in processes of their own."""
    from torch._inductor import cpu_vec_isa

    unit: Any = cpu_vec_isa.pick_vec_isa()
    return VectorUnit(unit.bit_width(), unit.build_macro(), unit.build_arch_flags())


@contextlib.contextmanager
def loading_graphs(unit: VectorUnit) -> Iterator[None]:
    """Nothing is compiled: torch starts no processes for it, compiles no headers (whether it would
    is a part of what C++ is looked up by), and looks for what was made for `unit`. What it does not
    find raises RuntimeError: for another width the same source computes something else."""
    from torch._inductor import config, cpp_builder, cpu_vec_isa

    asked: Any = cpu_vec_isa.VecISA()
    asked._bit_width = unit.bits
    asked._macro = list(unit.macros)
    asked._arch_flags = unit.flags
    found = [asked] if unit.bits else []
    values = {"compile_threads": 1, "cpp_cache_precompile_headers": False}
    with (
        cast(Any, config).patch(values),
        mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda: found),
        mock.patch.object(cpp_builder.CppBuilder, "build", _refuse_to_build),
    ):
        yield


def _refuse_to_build(builder: Any) -> NoReturn:
    raise RuntimeError(f"{builder.get_target_file_path()} is not among what was compiled")


def eager_is_asked() -> bool:
    """Whether torch.compiler.set_stance asks for functions as they are written."""
    from torch._dynamo import eval_frame

    return bool(eval_frame._stance.stance == "force_eager")


def on_compilation(call: Callable[[], None]) -> None:
    """Call it from now on whenever this process begins to compile something."""
    from torch._dynamo.callback import on_compile_start

    on_compile_start(lambda *about: call())
