"""What nvidia-smi's figures become: MiB are bytes, and a figure that it does not have is none."""

from __future__ import annotations

from pathlib import Path

from trainkit.runs.devices import Gpu, _gpus


def test_figures_of_nvidia_smi(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho '0, GPU-a, NVIDIA H100, 97, 1024, 81559, 512.25, 61'\necho '1, GPU-b,"
        " NVIDIA H100, [N/A], 1, 2, [N/A], [N/A]'\n"
    )
    program.chmod(0o755)
    assert _gpus(str(program)) == [
        Gpu(0, "GPU-a", "NVIDIA H100", 97.0, 1024 * 1024**2, 81559 * 1024**2, 512.25, 61.0),
        Gpu(1, "GPU-b", "NVIDIA H100", None, 1024**2, 2 * 1024**2, None, None),
    ]
