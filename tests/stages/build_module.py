"""What `python -m build --no-isolation --wheel --outdir OUT FOLDER` leaves, of one module."""

from __future__ import annotations

import sys
import tomllib
import zipfile
from pathlib import Path

if __name__ == "__main__":
    assert sys.argv[1:4] == ["--no-isolation", "--wheel", "--outdir"], sys.argv
    made = Path(sys.argv[4])
    folder = Path(sys.argv[5])
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    name = project["name"]
    made.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(made / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.write(folder / f"{name}.py", f"{name}.py")
        file.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: tiny\n",
        )
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
