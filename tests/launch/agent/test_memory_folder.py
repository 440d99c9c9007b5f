"""A run's folder in the memory of a host: who gets it, and when it goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launch.fake_supervisor import Peer, Session, process

SHOW = "import os; print('folder', os.environ.get('TRAINKIT_MEMORY_FOLDER'))"


def folder_of(session: Session) -> Path:
    return session.node_folder / f"trainkit-memory-{session.run}"


def keep(session: Session, peer: Peer, key: str = "0") -> None:
    """Start a rank that keeps a copy there."""
    write = "open(os.environ['TRAINKIT_MEMORY_FOLDER'] + '/' + os.environ['KEY'], 'w').write('x')"
    program = f"{SHOW}; {write}"
    peer.go(process(key, program, memory=True, env={"KEY": f"{key}.state"}))
    assert peer.hear("ended", key)["code"] == 0
    assert peer.output(key).splitlines() == [f"folder {folder_of(session)}"]


def leave(session: Session, peer: Peer, *, run_ends: bool) -> None:
    peer.say(type="bye", run_ends=run_ends)
    assert session.agent and session.agent.wait(timeout=600) == 0


def test_it_outlives_rank_and_agent_until_the_run_ends(session: Session) -> None:
    peer = session.begin()
    keep(session, peer)
    assert folder_of(session).stat().st_mode & 0o777 == 0o700
    leave(session, peer, run_ends=False)
    assert (folder_of(session) / "0.state").read_text() == "x"
    peer = session.begin()
    keep(session, peer, key="1")  # on another layout rank 0 is elsewhere
    assert not (folder_of(session) / "0.state").exists()
    leave(session, peer, run_ends=True)
    assert not folder_of(session).exists()


def test_a_killed_agent_leaves_it(session: Session) -> None:
    peer = session.begin()
    keep(session, peer)
    assert session.agent is not None
    os.kill(peer.hello["pid"], 9)
    session.agent.wait(timeout=600)
    assert (folder_of(session) / "0.state").exists()


def test_who_does_not_ask_has_none(session: Session) -> None:
    peer = session.begin()
    peer.go(process("0", SHOW))
    peer.hear("ended", "0")
    assert peer.output("0").splitlines() == ["folder None"] and not folder_of(session).exists()


def test_a_sweep_keeps_it_unless_told_to_forget(session: Session) -> None:
    peer = session.begin()
    keep(session, peer)
    for forget in (False, True):
        peer.say(type="sweep", run=session.run, kill=False, forget=forget)
        peer.hear("swept")
        assert folder_of(session).exists() is not forget


def test_the_next_run_on_its_slots_removes_it(session: Session, tmp_path: Path) -> None:
    peer = session.begin()
    keep(session, peer)
    leave(session, peer, run_ends=False)
    other = Session(tmp_path / "other", node_folder=str(session.node_folder))
    try:
        peer = other.begin(slots=("gpu1",))
        assert folder_of(session).exists()
        leave(other, peer, run_ends=True)
        leave(other, other.begin(slots=("cpu",)), run_ends=True)
        assert not folder_of(session).exists()
    finally:
        other.close()


@pytest.mark.parametrize("kind", ["link", "open to others", "file"])
def test_what_others_may_have_put_there_is_refused(
    kind: str, session: Session, tmp_path: Path
) -> None:
    folder = folder_of(session)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    (elsewhere / "0.state").touch()
    if kind == "link":
        folder.symlink_to(elsewhere)
    elif kind == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    peer = session.begin()
    peer.go(process("0", SHOW, memory=True))
    error = peer.hear("start_failed")["error"]
    assert str(folder) in error and "node_folder" in error
    leave(session, peer, run_ends=True)
    assert os.path.lexists(folder) and (elsewhere / "0.state").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_refused(session: Session) -> None:
    folder_of(session).mkdir(0o700)
    os.chown(folder_of(session), 1234, 1234)
    peer = session.begin()
    peer.go(process("0", SHOW, memory=True))
    assert str(folder_of(session)) in peer.hear("start_failed")["error"]
    leave(session, peer, run_ends=True)
    assert folder_of(session).stat().st_uid == 1234
