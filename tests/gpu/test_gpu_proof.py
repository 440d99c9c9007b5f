"""The GPU proof's own machinery, without a GPU: what it keeps when a part is ended, what it runs
again, what it says where there is no GPU, and that a wrong number fails."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import packed, prove, speed_llama
from benchmarks.gpu.findings import judged, not_shown, written
from benchmarks.gpu.hardware import Hardware, hardware, summary
from benchmarks.gpu.kernels import rows_of
from benchmarks.gpu.numerics import Computed, compared
from benchmarks.gpu.pack import NEEDED, pins
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.proof import NAME, TABLE, Proof
from benchmarks.gpu.speed import rates
from tests import forkserver
from tests.conftest import alive, wait_for
from tests.programs import put_program
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import sha256_file, write_json

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = Hardware(None, "no device", None, None, "2.11.0", "13.0", None, "3.12.3", None, "cpu", {})
H200 = replace(NO_GPU, gpu="NVIDIA H200", why="", memory_bytes=2**37, driver="580.1")

# stands in for the interpreter of a part: writes a finding, and then does what it is told
STAND_IN = """#!/bin/sh
while [ "$1" != --findings ]; do shift; done
cat > "$2" <<'FINDINGS'
[{"name": "first", "verdict": "pass", "value": 1.5, "unit": "s", "goal": "", "note": ""}]
FINDINGS
echo words of the part
%s
"""


@pytest.fixture
def setting(tmp_path: Path) -> prove.Setting:
    """Parts are shell scripts that end well."""
    return with_parts(tmp_path, "exit 0")


def with_parts(folder: Path, then: str) -> prove.Setting:
    script = put_program(folder, "stand-in", STAND_IN % then)
    return prove.Setting("cuda", "full", str(script), os.environ, folder / "proof", H200, "code")


def test_what_a_part_found_before_its_time_was_over_is_kept(tmp_path: Path) -> None:
    """And what it started is ended with it."""
    slow = with_parts(tmp_path, f"sleep 600 & echo $! > {tmp_path}/child; wait")
    result = prove.run_part("device", slow, 2.0)
    assert result.status == "timed out" and "ended after 2 s" in result.note
    assert [one.name for one in result.findings] == ["first"]
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: not alive(child), "the end of the part's child")
    proof = Proof(slow.folder)
    proof.put("device", result)
    assert "timed out" in (slow.folder / TABLE).read_text()
    assert proof.failed(["device"]) == ["device"]


def test_a_part_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    result = prove.run_part("device", with_parts(tmp_path, "exit 3"), 60.0)
    assert result.status == "failed" and result.findings
    assert "ended with 3" in result.note and "words of the part" in result.note


def test_the_same_command_goes_on_where_it_ended(
    setting: prove.Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["device", "numerics"]
    assert not prove.prove(["device"], setting, time_limit=600, again=False).failed(names)
    proof = prove.prove(names, setting, time_limit=600, again=False)
    assert "device: there already" in capsys.readouterr().out
    assert prove.verdict(proof, names) == Exit.DONE
    assert Proof(setting.folder).results == proof.results
    for other in (replace(setting, code="other"), replace(setting, hardware=NO_GPU)):
        prove.prove(["device"], other, time_limit=600, again=False)
        assert "there already" not in capsys.readouterr().out


def test_when_the_time_is_over_the_rest_is_named(
    setting: prove.Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = prove.prove(["device"], setting, time_limit=0, again=False)
    assert prove.verdict(proof, ["device"]) == Exit.PREEMPTED
    assert "not run: device" in capsys.readouterr().out
    assert "--time-limit" in proof.words()


def test_a_part_that_would_not_come_through_is_for_the_next_call(setting: prove.Setting) -> None:
    """Smaller ones behind it are run; what a part found before is kept."""
    names = ["device", "numerics", "loop"]
    least = PARTS["numerics"].expected_seconds - 5
    proof = prove.prove(names, setting, time_limit=least, again=False)
    found = {name: proof.results[name].status for name in names}
    assert found == {"device": "done", "numerics": "not run", "loop": "done"}
    late = replace(proof.results["device"], status="timed out")
    proof.put("numerics", late)
    assert prove.prove(names[:2], setting, time_limit=20, again=True).results["numerics"] == late


def test_without_a_gpu_it_says_what_was_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove, "hardware", lambda python: NO_GPU)
    assert prove.main(["--results", str(tmp_path)]) == Exit.HEALTH
    said = capsys.readouterr().err
    assert "torch can use no GPU: no device" in said
    assert all(f"not shown: {name}:" in said for name in PARTS)
    document = json.loads((tmp_path / NAME).read_text())
    assert document["schema"] == "gpu-proof/1"
    assert {part["status"] for part in document["parts"].values()} == {"not run"}


def test_a_dry_run_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove, "hardware", lambda python: NO_GPU)
    words = ["--device", "cpu", "--results", str(tmp_path), "--parts", "kernels,device"]
    assert prove.main([*words, "--dry-run"]) == Exit.DONE
    said = capsys.readouterr().out
    assert "kernels" in said and "families x" not in said and "a guess" in said
    assert not (tmp_path / NAME).exists()


def test_an_unknown_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove.main(["--results", str(tmp_path), "--parts", "numeric"]) == Exit.CONFIG
    assert "there are: device, numerics" in capsys.readouterr().err


def test_why_torch_can_use_no_gpu_is_said(tmp_path: Path) -> None:
    """An old driver as torch words it, and an interpreter that is none."""
    program = tmp_path / "python"
    words = "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."
    program.write_text(f"#!/bin/sh\necho '{json.dumps({'torch': '2.11.0', 'why': words})}'\n")
    program.chmod(0o755)
    assert "driver on your system is too old" in hardware(str(program)).why
    assert "ended without an answer" in hardware("/bin/false").why


def test_samples_of_power_are_summed_up() -> None:
    found = summary("500.5, 1980, 2619, 60, 1000\n[N/A], 1700, 2619, 61, 2000\n700.1, 18")
    assert found["power.draw"] == {"least": 500.5, "median": 500.5, "most": 500.5}
    assert found["clocks.sm"]["median"] == 1840 and summary("") == {}


def test_an_unknown_gpu_has_no_mfu() -> None:
    assert rates("", 1e5, 1e9, None) == "100 model TFLOP/s, MFU n/a"
    assert rates("", 1e5, 1e9, 989.4).endswith("MFU 10.1%")


def test_a_wrong_gradient_fails() -> None:
    reference = Computed(2.0, {"w": torch.ones(4, dtype=torch.float64)})
    near = Computed(2.00001, {"w": torch.ones(4, dtype=torch.float64) * 1.001})
    far = Computed(2.0, {"w": torch.tensor([1.0, 1.0, 1.0, 0.5], dtype=torch.float64)})
    broken = Computed(float("nan"), near.gradients)
    verdicts = [compared("x", "bf16", one, reference).verdict for one in (near, far, broken)]
    assert verdicts == ["pass", "fail", "fail"]


def test_depth_is_extrapolated_along_a_line() -> None:
    line = speed_llama.Line.through((2, 0.5), (6, 0.9))
    assert line.layer == pytest.approx(0.1) and line.at(32) == pytest.approx(3.5)


def test_values_are_written_short() -> None:
    assert written(1234567.0, "tokens/s") == "1,234,567 tokens/s"
    assert written(1.23456e-5, "") == "1.23e-05" and written(None, "ms") == "n/a"
    assert not_shown("x", "why").cells() == ["x", "n/a", "", "not shown", "why"]
    assert judged("x", False).verdict == "fail"


def test_rows_of_kernels_are_taken_over() -> None:
    row = {"name": "rms_norm", "dtype": "bf16", "direction": "forward", "fused": {"wall": 2.0}}
    row |= {"limit": {"wall": 1.9}, "others": {"eager": {"wall": 5.0}}}
    slow = row | {"limit": {"wall": 1.0}}
    found = list(rows_of([row, slow], judge=True))
    assert [one.verdict for one in found] == ["pass", "fail"]
    assert found[0].value == 0.95 and found[0].note == "2.50 x as fast as eager"
    assert [one.verdict for one in rows_of([slow], judge=False)] == ["shown"]


# -- what is packed


def pack_of(folder: Path, python: str, **files: str) -> Path:
    """A packed folder with these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    hashes = {name: sha256_file(folder / name) for name in files}
    manifest = {"schema": packed.SCHEMA, "python": python, "csrc_sha256": "", "files": hashes}
    write_json(folder / packed.MANIFEST, manifest)
    return folder


def test_a_packed_folder_that_was_changed_is_refused(tmp_path: Path) -> None:
    folder = pack_of(tmp_path, "3.12", a="text")
    assert packed.read_pack(folder).python == "3.12"
    (folder / "a").write_text("texts")
    with pytest.raises(ConfigError, match="not what gpu-pack"):
        packed.read_pack(folder)
    with pytest.raises(ConfigError, match="is not a packed folder"):
        packed.read_pack(tmp_path / "none")


def test_a_pack_for_another_python_is_refused(tmp_path: Path) -> None:
    pack = packed.read_pack(pack_of(tmp_path, "3.9", a="text"))
    with pytest.raises(ConfigError, match=r"packed for Python 3\.9"):
        packed.prepare_python(pack, tmp_path / "python")


def test_no_room_for_wheels_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "one-1.0-py3-none-any.whl"
    shutil.make_archive(str(tmp_path / "made"), "zip", ROOT / "tests" / "gpu")
    (tmp_path / "made.zip").rename(wheel)
    full = os.terminal_size((0, 0))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": full.lines}))
    with pytest.raises(TrainkitError, match="0 MiB free") as error:
        packed._unpack([wheel], tmp_path / "site")
    assert error.value.exit == Exit.RANK_INFRA


def test_only_what_is_missing_or_older_is_unpacked() -> None:
    wheels = [Path(f"{name}-1.10-py3-none-any.whl") for name in ("a_b", "numpy", "new", "rich")]
    there = {"a-b": "1.9", "numpy": "1.2", "rich": "2.0"}
    found = [packed.wheel_name(wheel)[0] for wheel in packed.missing_wheels(wheels, there)]
    assert found == ["a-b", "new"]


def test_all_that_is_packed_is_pinned() -> None:
    found = pins((ROOT / "constraints.txt").read_text(), NEEDED)
    assert len(found) == len(NEEDED) and not any(pin.startswith("torch") for pin in found)
    with pytest.raises(ConfigError, match="has no nothing"):
        pins("a==1", ["nothing"])


# -- on a CPU


# passes of each part at small size; the others have figures alone
PASSES = {"numerics": 33, "attention": 12, "loop": 3, "resume": 2, "kernels": 40}


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path: Path) -> None:
    """The command itself and every process that it starts, forked: their imports are shared."""
    argv = [sys.executable, "-m", "benchmarks.gpu.prove", "--device", "cpu"]
    done = forkserver.run([*argv, "--results", str(tmp_path)], cwd=ROOT, capture_output=True)
    assert done.returncode == Exit.DONE, done.stdout.decode() + done.stderr.decode()
    parts = json.loads((tmp_path / NAME).read_text())["parts"]
    assert list(parts) == list(PARTS)
    for name, part in parts.items():
        assert part["status"] == "done" and part["findings"], name
        verdicts = [finding["verdict"] for finding in part["findings"]]
        assert verdicts.count("pass") == PASSES.get(name, 0) and "fail" not in verdicts, name
    assert (tmp_path / TABLE).read_text().startswith("GPU proof, ")


@pytest.mark.slow
def test_all_parts_run_in_interpreters_of_their_own(tmp_path: Path) -> None:
    assert prove.main(["--device", "cpu", "--results", str(tmp_path)]) == Exit.DONE
    document = json.loads((tmp_path / NAME).read_text())
    assert {part["status"] for part in document["parts"].values()} == {"done"}
