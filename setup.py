"""The C++ extensions; everything else about the package stands in pyproject.toml."""

import runpy
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

ROOT = Path(__file__).resolve().parent
csrc_sha256 = runpy.run_path(str(ROOT / "trainkit" / "base" / "install.py"))["csrc_sha256"]

setup(
    ext_modules=[
        Pybind11Extension(
            "trainkit._index",
            ["csrc/index/bindings.cpp"],
            cxx_std=17,
            # a fused multiply-add would change ties of Megatron's blending
            extra_compile_args=["-O3", "-pthread", "-ffp-contract=off"],
            extra_link_args=["-pthread"],
            define_macros=[("TRAINKIT_CSRC_SHA256", f'"{csrc_sha256(ROOT)}"')],
        )
    ],
    # the compiled-in hash covers all of csrc; file times do not
    options={"build_ext": {"force": True}},
)
