"""The faults of a drill: what is done to a run that is under way, by the pids of its own record, on
the hosts that it runs on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.schema import Job
from trainkit.launch.agent.memory_folder import memory_folder
from trainkit.launch.cluster_care.remote_commands import run_on_hosts
from trainkit.launch.hosts.hostfile import Host
from trainkit.runs.events import AgentJoined, RankStarted, events_of, read_events
from trainkit.runs.folder import RunFolder

COMMAND_SECONDS = 60.0  # for a host to do what it is asked, beyond what that takes
SLOW_SECONDS = 10.0
SLOW_TURNS = 20  # in which a slow rank stands still, most of each
# what may have the pid by now must be of the run; capital words are put in
OF_RUN = (
    'of() { tr "\\0" "\\n" < /proc/PID/environ; }; of | grep -q "^TRAINKIT_RUN=RUN/" || exit 3; '
)
NOW = "date +%s.%N; "
AGENT = '$(of | sed -n "s/^TRAINKIT_PARENT_PID=//p")'
FLIP = (  # a bit of $file at $at
    "byte=$(od -An -tu1 -j $at -N 1 $file); "
    'printf "\\$(printf %o $((byte ^ 1)))" | dd of=$file bs=1 seek=$at conv=notrunc 2> /dev/null; '
)
DAMAGE = (
    "step=$(ls -d FOLDER/step-???????? | tail -n 1) || exit 4; "
    f"file=$step/$(ls -S $step | head -n 1); at=$(($(stat -c %s $file) / 2)); {FLIP}"
)
DAMAGE_COPIES = (  # in each of the two halves of a file, of which the newer one is believed
    "for file in MEMORY/*.state; do size=$(stat -c %s $file) || exit 4; "
    f"for part in 1 3 5 7; do at=$((size * part / 8)); {FLIP}done; done; "
)


class NotMade(Exception):
    """Why a fault could not be made."""


@dataclass(frozen=True)
class Victim:
    """A run that is under way.

    Args:
        run: the run.
        job: its job.
        hosts: on which it may run.
    """

    run: RunFolder
    job: Job
    hosts: Sequence[Host]

    def rank(self) -> RankStarted:
        """The rank that is hurt: the last one, for rank 0 writes the record."""
        started = list(events_of(read_events(self.run.attempts()[-1]), RankStarted))
        return max(started, key=lambda event: event.rank)

    def do(self, line: str, seconds: float = 0.0) -> float:
        """Run a line of sh on the host of that rank, which prints the time; that, by the
        supervisor's clock. PID, RUN, FOLDER and MEMORY in it are the rank's, the run's id, and the
        folders of its checkpoints and of its copies in memory. Raises NotMade."""
        rank = self.rank()
        words = {
            "PID": rank.pid,
            "RUN": self.run.id,
            "FOLDER": self.run.checkpoints,
            "MEMORY": memory_folder(Path(self.job.cluster.node_folder), self.run.id),
        }
        whole = OF_RUN + line
        for word, value in words.items():
            whole = re.sub(rf"\b{word}\b", shlex.quote(str(value)), whole)
        cluster = self.job.cluster
        hosts = [host for host in self.hosts if host.name == rank.host]
        argv = ("sh", "-c", whole)
        limit = COMMAND_SECONDS + seconds
        found = run_on_hosts(cluster, hosts, cluster.root_folder, argv, limit)[rank.host]
        if found.code != 0:
            why = "its process is not seen there" if found.code == 3 else found.last
            raise NotMade(f"rank {rank.rank} on {rank.host}: {why}")
        joined = events_of(read_events(self.run.attempts()[-1]), AgentJoined)
        ahead = next((each.clock_offset for each in joined if each.host == rank.host), 0.0)
        return float(found.out.split()[0]) - ahead


@dataclass(frozen=True)
class Harm:
    """One row of the table.

    Args:
        name: for the score card.
        words: what is done.
        line: of sh that does it, and prints the time.
        ends_attempt: the run has to start its ranks again.
        seconds: it lasts.
        of_copies: it is one of copies in memory.
    """

    name: str
    words: str
    line: str
    ends_attempt: bool = True
    seconds: float = 0.0
    of_copies: bool = False


TURN = SLOW_SECONDS / SLOW_TURNS
STAND = f"kill -STOP PID; sleep {0.8 * TURN}; kill -CONT PID; sleep {0.2 * TURN}; "
KILL = NOW + "kill -KILL PID"
FAULTS = (
    Harm("rank killed", "SIGKILL to a rank", KILL),
    Harm("agent killed", "SIGKILL to the agent that has started it", f"{NOW}kill -KILL {AGENT}"),
    Harm(
        "checkpoint damaged",
        "one bit of the newest checkpoint is another, and a rank is killed",
        DAMAGE + KILL,
    ),
    Harm(
        "copies damaged",
        "bits of the copies in a host's memory are others, and a rank is killed",
        DAMAGE_COPIES + KILL,
        of_copies=True,
    ),
    Harm(
        "rank slow",
        f"a rank stands still for four fifths of {SLOW_SECONDS:.0f} s",
        NOW + STAND * SLOW_TURNS,
        ends_attempt=False,
        seconds=SLOW_SECONDS,
    ),
    Harm("rank stopped", "SIGSTOP to a rank: a hang", NOW + "kill -STOP PID"),
)
# what only somebody with root's powers can do, and what others would feel
NOT_MADE = {
    "host cut": "needs root on the host; benchmarks/recovery.py does it to hosts made for that",
    "disk full": "others write to that disk too; tests/torture fills one made for that",
}
