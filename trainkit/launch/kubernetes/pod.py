"""The program of a pod, its process 1: python -I -S CODE/trainkit/launch/kubernetes/pod.py
RUN_FOLDER JOBSET [--agent] [--supervise]; the latter is for the pod of index 0 alone.

It lives as long as its run, over all attempts: it runs the agents that the supervisor calls for,
one after another, and the supervisor itself where it is asked to, which is started again when it is
killed. TERM is passed on to both; once they have ended, so does the pod. A worker whose agent has
ended, and who hears of no other, looks after pods of lost nodes meanwhile.

Exit codes: what call.json says; 143 after TERM. Standard library and trainkit.base only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

if __name__ == "__main__":
    # before an import writes bytecode: files.keep_others_from_writing says why
    os.umask(os.umask(0o002) | 0o002)
    # the snapshot this file is part of
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json, write_text
from trainkit.launch.protocol import pod_call as calls

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
LOOK_SECONDS = 0.5  # between two looks at the call
BUSY_SECONDS = 5.0  # the same while an agent is at work: its end wakes us
AGAIN_SECONDS = 2.0  # before a supervisor is started again
TERMINATED = 128 + signal.SIGTERM
KILLED = 128 + signal.SIGKILL
STARTS = 20  # of supervisors in one pod: one that cannot even begin an attempt has no budget
ORPHANED_SECONDS = 60.0  # without a call since an agent ended: its supervisor may be gone
PYTHON_FAILED = (1, 2)  # a traceback; the program cannot be read


def main() -> None:
    run, jobset, *roles = sys.argv[1:]
    # taken by `sigtimedwait` in the loop: process 1 has no default action
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    sys.exit(Pod(Path(run), jobset, roles).live())


class Pod:
    """One pod.

    Args:
        run: the run's folder.
        jobset: the name of its JobSet.
        roles: see above.
    """

    def __init__(self, run: Path, jobset: str, roles: Sequence[str]) -> None:
        self.run = run
        self.jobset = jobset
        self.folder = calls.jobset_folder(run, jobset)
        self.index = int(os.environ["JOB_COMPLETION_INDEX"])
        self.uid = os.environ["TRAINKIT_POD_UID"]
        self.works = "--agent" in roles
        self.supervises = "--supervise" in roles and self.index == 0
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.starts = 0  # of supervisors
        self.start_at = 0.0  # the next one, by time.monotonic()
        self.agent: subprocess.Popen[bytes] | None = None
        self.agent_exit = Path()  # where its exit code is to stand
        self.ended_at = float("inf")  # the last agent, by time.monotonic()
        self.caretaker: subprocess.Popen[bytes] | None = None
        self.seen: set[tuple[str, int]] = set()  # agents that it was called to be, by session
        self.terminated = False

    def live(self) -> int:
        """Until the run, or this pod, is over; the exit code."""
        introduced = False
        while True:
            taken = signal.sigtimedwait(SIGNALS, BUSY_SECONDS if self.agent else LOOK_SECONDS)
            if taken is not None and taken.si_signo in (signal.SIGTERM, signal.SIGINT):
                self._terminate()
            self._collect()
            try:
                if not introduced:
                    self._introduce()
                    introduced = True
                call = calls.read_call(self.folder)
                code = self._act(call)
            except (OSError, TrainkitError) as error:  # a file system that stalls or recovers
                say(str(error))
                continue
            if code is not None:
                return code

    def _introduce(self) -> None:
        environment = os.environ
        note = calls.PodNote(
            self.uid,
            environment["TRAINKIT_POD_NAME"],
            environment["TRAINKIT_NODE_NAME"],
            environment["TRAINKIT_POD_IP"],
        )
        say(f"pod {note.name} on {note.node}: index {self.index} of {self.jobset}")
        if self.works:
            path = calls.note_path(self.folder, self.index)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, note.to_json())

    def _terminate(self) -> None:
        """The pod is to end: its ranks save, and so do the others' when it has the supervisor."""
        self.terminated = True
        for child in (self.supervisor, self.agent):
            if child is not None:
                child.send_signal(signal.SIGTERM)

    def _collect(self) -> None:
        """Take the exit codes of children, and of orphans, which come to process 1."""
        for child in (self.supervisor, self.agent):
            if child is not None:
                child.poll()
        if self.caretaker is not None and self.caretaker.poll():  # by a fault: another, later
            self.caretaker = None
            self.ended_at = time.monotonic()
        children = (self.supervisor, self.agent, self.caretaker)
        own = {c.pid for c in children if c and c.returncode is None}
        try:
            while True:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid in own:
                    return
                os.waitpid(ended.si_pid, 0)
        except ChildProcessError:
            return

    def _act(self, call: calls.PodCall) -> int | None:
        """Start and note what is due; the exit code where this pod is done."""
        if self.agent is not None and self.agent.returncode is not None:
            self._note_end(self.agent.returncode)
        if self.supervisor is not None and self.supervisor.returncode is not None:
            self._judge_supervisor(self.supervisor.returncode, call)
            call = calls.read_call(self.folder)
        if self.terminated or call.exit is not None:
            self._end_caretaker()
        if self.agent is None and self.supervisor is None:
            if call.exit is not None:
                return call.exit
            if self.terminated:
                return TERMINATED
        if self.terminated or call.exit is not None:
            return None
        if self.supervises and self.supervisor is None and time.monotonic() >= self.start_at:
            self._start_supervisor()
        node = call.nodes.get(str(self.index))
        if self.works and self.agent is None and node is not None:
            self._start_agent(call, node)
        if not self.supervises and time.monotonic() - self.ended_at > ORPHANED_SECONDS:
            self._start_caretaker()
        return None

    def _start_supervisor(self) -> None:
        self.starts += 1
        program = Path(__file__).resolve().parents[1] / "main.py"
        with open(self.folder / "supervisor.log", "ab") as output:
            self.supervisor = start(
                [sys.executable, "-I", str(program), str(self.run)],
                output,
                {**os.environ, calls.JOBSET_VARIABLE: self.jobset},
            )

    def _judge_supervisor(self, code: int, call: calls.PodCall) -> None:
        """One that was killed is started again; what it has left of the run is its record's word,
        and its budgets'. So is one that found the run locked: the file system lets go of the lock
        of a node that is gone, some time, and a supervisor that lives is not to be disturbed. One
        that has ended by itself has said how the pods end, or could not."""
        self.supervisor = None
        self.start_at = time.monotonic() + AGAIN_SECONDS
        if call.exit is not None or self.terminated:
            return
        say(f"the supervisor ended with {code}")
        if code == Exit.HOSTS_BUSY:
            self.starts -= 1
        elif self.starts >= STARTS or (code >= 0 and code not in PYTHON_FAILED):
            given = code if code > max(PYTHON_FAILED) else int(Exit.RANK_INFRA)
            calls.write_call(self.folder, calls.PodCall(exit=given))

    def _start_agent(self, call: calls.PodCall, node: int) -> None:
        """Become an agent of the session, unless a pod of this index was that already."""
        if (call.script, node) in self.seen:
            return
        self.seen.add((call.script, node))
        self._end_caretaker()
        logs = Path(call.logs)
        claim = calls.claim_path(logs, node)
        try:
            handle = os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            # by the pod whose place this one has taken: it is over
            write_text(calls.exit_path(logs, node), f"{KILLED}\n")
            return
        os.close(handle)
        write_json(claim, {"uid": self.uid, "index": self.index, "jobset": self.jobset})
        self.agent_exit = calls.exit_path(logs, node)
        with open(logs / call.outputs[str(self.index)], "ab") as output:
            self.agent = start(["/bin/bash", call.script, str(node)], output, dict(os.environ))

    def _note_end(self, code: int) -> None:
        self.agent = None
        self.ended_at = time.monotonic()
        write_text(self.agent_exit, f"{code}\n")

    def _start_caretaker(self) -> None:
        """Once, after the end of an agent."""
        self.ended_at = float("inf")
        program = Path(__file__).with_name("caretaker.py")
        say("no supervisor has called for a while: looking after pods of lost nodes")
        with open(self.folder / f"caretaker-{self.index}.log", "ab") as output:
            self.caretaker = start(
                [sys.executable, "-I", str(program), str(self.run), self.jobset],
                output,
                dict(os.environ),
            )

    def _end_caretaker(self) -> None:
        self.ended_at = float("inf")
        if self.caretaker is not None:
            self.caretaker.kill()
            self.caretaker.wait()
            self.caretaker = None


def start(
    argv: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """A child in a session of its own, which takes signals as usual."""
    return subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
        # one system call, nothing that could hold a lock
        preexec_fn=take_signals,  # noqa: PLW1509
    )


def take_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def say(text: str) -> None:
    print(f"trainkit: {text}", flush=True)


if __name__ == "__main__":
    main()
