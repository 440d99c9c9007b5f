"""A real agent process and a small supervisor: how they meet, what is started, what is said of
it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import trainkit
from tests.launch.fake_supervisor import AGENT, Peer, Session, process
from trainkit.base.slots import slot_holders
from trainkit.base.snapshot_files import snapshot_hash
from trainkit.launch.agent.connection import SupervisorLost, dial
from trainkit.launch.agent.host_report import driver_version, gpus
from trainkit.launch.protocol import framing, handshake
from trainkit.launch.supervise.code_snapshot import take_snapshot


def test_it_needs_only_the_standard_library() -> None:
    code = f"""
import runpy, sys
sys.argv = ["agent.py"]
try:
    runpy.run_path({str(AGENT)!r}, run_name="__main__")
except SystemExit as usage:
    assert "usage" in str(usage), usage
from pathlib import Path
files = {{n: getattr(m, "__file__", None) or "" for n, m in sys.modules.items()}}
foreign = [name for name, file in files.items() if "site-packages" in file]
assert not foreign, foreign
ours = [n for n in sys.modules if n.startswith("trainkit.")]
allowed = ("trainkit.base", "trainkit.launch.protocol", "trainkit.launch.agent")
assert ours and all(n == "trainkit.launch" or n.startswith(allowed) for n in ours), ours
print(len(ours))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and int(done.stdout) > 10, done.stderr


def test_torch_is_found_through_a_pth_file(session: Session, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "torch"
    elsewhere.mkdir(parents=True)
    (elsewhere / "version.py").write_text("__version__ = '2.99.1'\n")
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    lines = ("# a comment", "import absent_module", "/no/such/folder", str(elsewhere.parent))
    (site / "others.pth").write_text("\n".join(lines))
    peer = session.begin(python=str(tmp_path / "venv" / "bin" / "python"))
    assert peer.hello["versions"]["torch"] == "2.99.1" and not peer.hello["errors"]


def test_hello(session: Session) -> None:
    import torch

    peer = session.begin(python=sys.executable)
    hello = peer.hello
    assert session.agent and hello["pid"] != session.agent.pid == int(
        Path(f"/proc/{hello['pid']}/stat").read_text().rpartition(")")[2].split()[1]
    )
    assert (
        hello["node"],
        hello["host"],
        hello["nonce"],
        hello["address"],
        hello["address_error"],
    ) == (0, socket.gethostname(), "abc", "127.0.0.1", None)
    assert (
        hello["interface"] == "lo"
        and hello["writable"] is None
        and not hello["errors"]
        and abs(hello["clock"] - time.time()) < 20
    )
    assert (
        hello["versions"]["torch"] == torch.__version__
        and hello["versions"]["python"] == sys.version.split()[0]
    )
    assert (
        hello["snapshot"] == snapshot_hash(Path(trainkit.__file__).parents[1])
        and len(hello["snapshot"]) == 64
    )
    assert hello["slots"] == {}
    keeper = Path(f"/proc/{session.agent.pid}")
    shown = (keeper / "cmdline").read_text().rstrip("\0")
    assert (
        shown.startswith("run-keeper ")
        and shown.endswith(" 0")
        and "trainkit" not in shown
        and (keeper / "comm").read_text() == "run-keeper\n"
    )


def test_the_code_it_runs_is_told_by_its_content(session: Session, tmp_path: Path) -> None:
    """What programs write beside a snapshot's files is none of it; an edited file is."""
    digest, folder, _ = take_snapshot(Path(trainkit.__file__).parent, tmp_path / "code")

    def told() -> str | None:
        session.start(agent=folder / "trainkit" / "launch" / "agent" / "main.py")
        peer = session.accept()
        hello = peer.hear("hello")
        peer.say(type="bye")
        assert session.agent and session.agent.wait(timeout=600) == 0
        assert ("snapshot" in hello["errors"]) == (hello["snapshot"] is None)
        return str(hello["snapshot"]) if hello["snapshot"] else None

    (folder / "written-by-a-program").write_text("x")
    assert told() == digest == folder.name
    (folder / "trainkit" / "py.typed").unlink()  # see tests/linked_code.py
    (folder / "trainkit" / "py.typed").write_text("edited")
    assert told() not in (digest, None)
    (folder / "trainkit" / "py.typed").unlink()
    assert told() is None


def test_gpus_by_what_the_driver_says(tmp_path: Path) -> None:
    """/proc/driver/nvidia as drivers 535 (closed) and 550 (open) write it: two of three GPUs are
    given to this container."""
    devices, driver = tmp_path / "dev", tmp_path / "nvidia"
    for number, place in enumerate(("0000:c3:00.0", "0000:03:00.0", "0000:19:00.0")):
        about = driver / "gpus" / place / "information"
        about.parent.mkdir(parents=True)
        about.write_text(
            f"Model: \t\t NVIDIA H{number}00 80GB HBM3\nIRQ:   \t\t 45\nBus Location: \t"
            f" {place}\nDevice Minor: \t {number}\nGPU Excluded:\t No\n"
        )
    devices.mkdir()
    for name in ("nvidia2", "nvidia0", "nvidia7", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    assert gpus(devices, driver) == ["NVIDIA H000 80GB HBM3", "NVIDIA H200 80GB HBM3", "nvidia7"]
    assert (
        gpus(tmp_path / "none", tmp_path / "none") == []
        and driver_version(tmp_path / "none") is None
    )
    for text in (
        "Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023",
        "Open Kernel Module for x86_64  535.129.03  Release Build  (dvs-builder@U16)",
    ):
        (driver / "version").write_text(
            f"NVRM version: NVIDIA UNIX x86_64 {text}\nGCC version:  gcc version 12.3.0 (Ubuntu)\n"
        )
        assert driver_version(driver) == "535.129.03"


def test_an_address_that_is_not_here_is_said_not_guessed(tmp_path: Path) -> None:
    session = Session(tmp_path, interface="203.0.113.0/24")
    try:
        session.start()
        hello = session.accept().hear("hello")
        assert "203.0.113.0/24" in hello["address_error"] and "127.0.0.1" in hello["address_error"]
    finally:
        session.close()


def challenge(session: Session, frame: dict[str, Any] | bytes) -> int | None:
    """What becomes of an agent whose supervisor says `frame` to its knock."""
    agent = session.start()
    peer = Peer(session.server.accept()[0])
    peer.hear("knock")
    peer.sock.sendall(frame if isinstance(frame, bytes) else framing.encode(frame))
    peer.sock.sendall(
        framing.encode(
            {
                "type": "go",
                "processes": [process("0", f"open({str(session.folder / 'executed')!r}, 'w')")],
                "secret_names": [],
            }
        )
    )
    return agent.wait(timeout=600)


def test_a_supervisor_that_cannot_prove_itself_executes_nothing(session: Session) -> None:
    own = handshake.new_nonce()
    # to another knock
    replayed = handshake.make_proof(session.token, "supervisor", own, handshake.new_nonce())
    mirrored = {
        "type": "challenge",
        "nonce": own,
        "proof": handshake.make_proof(b"another token", "supervisor", own, own),
    }
    said: list[dict[str, Any] | bytes] = [
        {"type": "challenge", "nonce": own, "proof": replayed},
        mirrored,
        {"type": "challenge", "nonce": own},
        {"type": "challenge", "nonce": 5, "proof": None},
        {"type": "go", "processes": [process("0", "print(1)")], "secret_names": []},
        b"\x00\x00\x20\x00" + b"x" * 100,  # longer than a stranger may be
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x02{}",
    ]
    for frame in said:
        assert challenge(session, frame) == 8, frame
        assert "prove" in session.words() and "Traceback" not in session.words()
    assert not (session.folder / "executed").exists()


def test_a_silent_supervisor_is_given_up(session: Session) -> None:
    with pytest.raises(SupervisorLost, match="did not prove"):
        dial("127.0.0.1", session.server.getsockname()[1], session.token, 0, seconds=0.5)
    with pytest.raises(SupervisorLost, match="cannot connect"):
        dial("127.0.0.1", 1, session.token, 0, seconds=0.5)


def test_a_root_that_is_not_shared_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(AGENT), str(tmp_path / "nothing"), "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.returncode == 7
        and "nothing" in done.stderr
        and "share" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_orders_it_cannot_do_end_nothing(session: Session) -> None:
    peer = session.begin()
    peer.go(process("0", "import time; time.sleep(600)"))
    peer.hear("started", "0")
    for order in (
        {"type": "dance"},
        {"type": "go"},
        {"type": "signal", "signal": "NONE"},
        {"type": "stop", "grace": "x"},
        {"type": "connect", "address": 1, "port": 2},
    ):
        peer.say(**order)
        assert peer.hear("refused")["frame"] == order["type"]
    assert session.left() and not [f for f in peer.heard if f["type"] == "ended"]


def test_ports_are_tried_and_strangers_on_them_known(session: Session) -> None:
    peer = session.begin()
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        peer.say(type="listen", ports=[port])
        assert f"port {port}" in peer.hear("listening")["error"]
        peer.say(type="listen", ports=[port, 0])
        mine = peer.hear("listening")["port"]
        assert mine not in (None, port)
        peer.say(type="connect", address="127.0.0.1", port=mine)
        assert peer.hear("connected")["error"] is None
        peer.say(type="connect", address="127.0.0.1", port=port)
        stranger, _ = taken.accept()
        with stranger:
            stranger.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n" * 10)
            assert "something else" in peer.hear("connected")["error"]
    peer.say(type="connect", address="127.0.0.1", port=port)
    assert "refused" in peer.hear("connected")["error"]
    peer.say(type="unlisten")
    peer.hear("unlistened")
    with socket.create_server(("127.0.0.1", mine)):
        pass  # free for rank 0


def test_slots_are_refused_by_name_and_freed(session: Session, tmp_path: Path) -> None:
    peer = session.begin(slots=("gpu0", "gpu1"))
    other = Session(tmp_path / "other", node_folder=str(session.node_folder))
    try:
        other.start()
        second = other.accept()
        assert second.hear("hello")["slots"]["gpu0"]["run"] == session.run
        second.say(
            type="reserve",
            run=other.run,
            attempt=1,
            slots=["gpu1", "gpu2"],
            share=False,
            mark=other.mark,
        )
        busy = second.hear("busy")
        assert (busy["slot"], busy["holder"]["run"], busy["holder"]["pid"]) == (
            "gpu1",
            session.run,
            peer.hello["pid"],
        )
        second.say(
            type="reserve",
            run=other.run,
            attempt=1,
            slots=["gpu1", "gpu2"],
            share=True,
            mark=other.mark,
        )
        second.hear("reserved")
        told = {slot: holder["run"] for slot, holder in slot_holders(session.node_folder).items()}
        # who shares holds what was free
        assert told == {"gpu0": session.run, "gpu1": session.run, "gpu2": other.run}
        peer.say(
            type="reserve",
            run=session.run,
            attempt=1,
            slots=["gpu1"],
            share=False,
            mark=session.mark,
        )
        assert peer.hear("reserved")["cleared"] == []  # again, and fewer
        second.say(
            type="reserve", run=other.run, attempt=1, slots=["gpu0"], share=False, mark=other.mark
        )
        second.hear("reserved")
        peer.say(type="bye")
        assert session.agent and session.agent.wait(timeout=600) == 0
        second.say(
            type="reserve",
            run=other.run,
            attempt=1,
            slots=["gpu1", "gpu2"],
            share=False,
            mark=other.mark,
        )
        assert second.hear("reserved")["cleared"] == []
    finally:
        other.close()


def test_no_order_breaks_it(session: Session) -> None:
    """Whatever a supervisor with the token says: what cannot be done is refused, what runs goes
    on."""
    peer = session.begin()
    peer.go(process("0", "import time; time.sleep(600)"))
    peer.hear("started")
    keys = [
        "ports",
        "address",
        "port",
        "slots",
        "run",
        "attempt",
        "share",
        "processes",
        "secret_names",
        "signal",
        "keys",
        "grace",
        "kill",
        "key",
        "argv",
        "env",
    ]
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(keys), v),
    )

    @settings(max_examples=40, deadline=None)
    @given(
        st.sampled_from(
            ["reserve", "listen", "unlisten", "connect", "go", "signal", "stacks", "sweep", "x"]
        ),
        st.dictionaries(st.sampled_from(keys), values),
    )
    def say(kind: str, words: dict[str, Any]) -> None:
        peer.say(**({"signal": "0"} | words | {"type": kind}))

    say()
    peer.say(type="listen", ports=[0])
    while not peer.hear("listening")["port"]:
        pass
    assert {p.mark for p in session.left()} == {f"{session.mark}/0"} and not [
        f for f in peer.heard if f["type"] == "ended"
    ]
    assert [f for f in peer.heard if f["type"] == "refused"]
    peer.say(type="bye")
    peer.hear("ended", "0")
    assert (
        session.agent
        and session.agent.wait(timeout=600) == 0
        and "Traceback" not in session.words()
    )
