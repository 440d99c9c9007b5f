"""The process of one part of the proof: python -m benchmarks.gpu.run_part NAME --findings FILE ...

It ends 0 when the part came to its end, whatever it found; findings are in FILE as they come.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.gpu.findings import FindingsFile
from benchmarks.gpu.parts import PARTS


def main() -> None:
    parser = argparse.ArgumentParser(description="One part of the GPU proof.")
    parser.add_argument("name", choices=sorted(PARTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--size", choices=("small", "full"), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="its own, for what it writes")
    parser.add_argument("--findings", type=Path, required=True)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    found = FindingsFile(given.findings)
    part = PARTS[given.name]
    module = importlib.import_module(f"benchmarks.gpu.{part.module}")
    for finding in module.run(given.device, given.size, given.folder, **part.options):
        found.add(finding)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
