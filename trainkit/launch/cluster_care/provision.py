"""What makes a cluster of bare machines: keys, a shared folder over NFS, a hostfile. Each step
is a piece of shell that a person can read and run, and that may run again: it says "already"
where nothing is left to do.

Lines in files of the system stand between two lines that name trainkit, so that a second run
replaces them and never adds to them (appending with `tee -a` joins a line to one that lacks its
newline, and doubles it the next time).
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.clusters import Cluster
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.session import SAFE_PATH, is_this_machine

STEP_SECONDS = 300.0  # of one step: a package or a mount may take its time
HERE = "here"
ALREADY = "already"
CHANGED = "changed"
KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
# Every step begins with this. block FILE NAME: what comes on stdin replaces what stands between
# NAME's two lines in FILE, or is added at its end.
PREAMBLE = """\
set -eu
say() { echo "trainkit: $*"; }
SUDO=; [ "$(id -u)" = 0 ] || SUDO='sudo -n'
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
block() {
    begin="# trainkit $2: begin" end="# trainkit $2: end" old=$scratch/old new=$scratch/new
    $SUDO cat "$1" > "$old" 2> /dev/null || :
    if [ "$(grep -cxF "$begin" "$old")" != "$(grep -cxF "$end" "$old")" ]; then
        echo "$1: '$begin' and '$end' do not pair; correct it by hand" >&2
        exit 1
    fi
    {
        awk -v b="$begin" -v e="$end" \
            '$0 == b { out = 1 } !out { print } $0 == e { out = 0 }' "$old"
        echo "$begin"
        cat
        echo "$end"
    } > "$new"
    if cmp -s "$old" "$new"; then return 1; fi
    $SUDO mkdir -p "$(dirname "$1")" && $SUDO tee "$1" < "$new" > /dev/null || exit 1
}
"""


@dataclass(frozen=True)
class SetupStep:
    """One thing to set up.

    Args:
        where: HERE, or a host's name.
        title: what it does, in words.
        script: shell that does it and says "trainkit: already" or "trainkit: changed"; without
            PREAMBLE.
        asks: over ssh it may be the first contact: a person may have to type a password.
    """

    where: str
    title: str
    script: str
    asks: bool = False

    @property
    def text(self) -> str:
        """All that bash reads."""
        return PREAMBLE + self.script


@dataclass(frozen=True)
class StepResult:
    """How a step ended: ALREADY, CHANGED or "failed", with what was said."""

    step: SetupStep
    state: str
    said: str


def key_step() -> SetupStep:
    """A key pair of this machine's user, without a passphrase; none is made where there is one."""
    script = f"""\
mkdir -p -m 700 ~/.ssh
for key in {" ".join(KEYS)}; do [ ! -f ~/.ssh/$key.pub ] || {{ say {ALREADY}; exit 0; }}; done
ssh-keygen -q -t ed25519 -N '' -C "$(id -un)@$(uname -n)" -f ~/.ssh/id_ed25519
say {CHANGED}
"""
    return SetupStep(HERE, "a key pair to log in with (~/.ssh/id_ed25519, no passphrase)", script)


def accept_step(host: Host, public_key: str) -> SetupStep:
    """A host accepts that key. `public_key`: the line of the .pub file."""
    kind, body = public_key.split()[:2]
    script = f"""\
mkdir -p -m 700 ~/.ssh
file=~/.ssh/authorized_keys
touch $file; chmod 600 $file
if grep -qF {shlex.quote(f"{kind} {body}")} $file; then say {ALREADY}; exit 0; fi
[ -z "$(tail -c 1 $file)" ] || echo >> $file
echo {shlex.quote(" ".join(public_key.split()))} >> $file
say {CHANGED}
"""
    return SetupStep(
        host.name, "accepts this machine's key (~/.ssh/authorized_keys)", script, asks=True
    )


def export_step(folder: Path, hosts: Sequence[Host]) -> SetupStep:
    """This machine exports a folder to the hosts over NFS (exports(5)): root stays root, so that
    a run's files have one owner."""
    options = "(rw,sync,no_subtree_check,no_root_squash)"
    line = f"{folder} " + " ".join(f"{host.name}{options}" for host in hosts)
    script = f"""\
command -v exportfs > /dev/null || {{
    echo "there is no NFS server: apt-get install nfs-kernel-server, or dnf install nfs-utils" >&2
    exit 1
}}
$SUDO mkdir -p {folder}
if block /etc/exports {shlex.quote(str(folder))} <<'EXPORT'
{line}
EXPORT
then $SUDO exportfs -ra; say {CHANGED}; else say {ALREADY}; fi
"""
    return SetupStep(HERE, f"exports {folder} over NFS (/etc/exports)", script)


def mount_step(folder: Path, head: str, host: Host) -> SetupStep:
    """A host mounts the head's folder under the same path, now and at every boot. `head`: this
    machine's address, as the host reaches it."""
    line = f"{_bracketed(head)}:{folder} {folder} nfs rw,hard,noatime,_netdev,nofail 0 0"
    script = f"""\
command -v mount.nfs > /dev/null || {{
    echo "there is no NFS client: apt-get install nfs-common, or dnf install nfs-utils" >&2
    exit 1
}}
changed=
$SUDO mkdir -p {folder}
block /etc/fstab {shlex.quote(str(folder))} <<'MOUNT' && changed=1
{line}
MOUNT
mountpoint -q {folder} || {{ $SUDO mount {folder}; changed=1; }}
if [ -n "$changed" ]; then say {CHANGED}; else say {ALREADY}; fi
"""
    return SetupStep(host.name, f"mounts {folder} of {head} (/etc/fstab)", script)


def hostfile_step(path: Path, hosts: Sequence[Host], slots: int) -> SetupStep:
    """The hostfile; one that is there with other lines is somebody's and stays."""
    lines = "\n".join(f"{_entry(host)} slots={len(host.slots) or slots}" for host in hosts)
    script = f"""\
wanted=$scratch/wanted
cat > "$wanted" <<'HOSTS'
{lines}
HOSTS
if [ -s {path} ]; then
    if {{ cat {path}; echo; }} | sed 's/ *#.*//; /^ *$/d' | cmp -s - "$wanted"; then
        say {ALREADY}
        exit 0
    fi
    echo "{path} is there and names other hosts; correct it by hand" >&2; exit 1
fi
$SUDO mkdir -p {path.parent}
$SUDO tee {path} < "$wanted" > /dev/null
say {CHANGED}
"""
    return SetupStep(HERE, f"the hostfile {path}", script)


def pdsh_step() -> SetupStep:
    """What people who type pdsh themselves need: Debian's takes rsh by default. trainkit's own
    says it on the line."""
    script = f"""\
if block ~/.bashrc pdsh <<'PDSH'
export DSHPATH=$PATH PDSH_RCMD_TYPE=ssh
PDSH
then say {CHANGED}; else say {ALREADY}; fi
"""
    return SetupStep(HERE, "pdsh's variables for your own shell (~/.bashrc)", script)


@dataclass(frozen=True)
class SetupPlan:
    """What is to be set up.

    Args:
        cluster: how its hosts are reached.
        hosts: all nodes; this machine may be one of them.
        hostfile: a hostfile to be written; None: the hosts come from one.
        slots: of hosts that do not say theirs.
        share: a folder of this machine to be shared; None: there is a shared one.
        head: this machine's address for the others.

    Raises ConfigError for paths that do not fit on a line of /etc/exports.
    """

    cluster: Cluster
    hosts: tuple[Host, ...]
    hostfile: Path | None
    slots: int
    share: Path | None
    head: str

    def __post_init__(self) -> None:
        for path in filter(None, (self.hostfile, self.share)):
            if not SAFE_PATH.fullmatch(str(path)) or not path.is_absolute():
                message = (
                    f"{path}: an absolute path of letters, digits and _ . / + = : @ , - is needed"
                )
                raise ConfigError(
                    message, hint="lines of /etc/exports and /etc/fstab have no quotes"
                )

    @property
    def away(self) -> list[Host]:
        """The nodes that are other machines."""
        return [host for host in self.hosts if not is_this_machine(host)]

    def before(self) -> list[SetupStep]:
        """What is done here before hosts are logged in to."""
        return [
            key_step(),
            *([export_step(self.share, self.away)] if self.share and self.away else []),
        ]

    def of_host(self, host: Host, public_key: str) -> list[SetupStep]:
        """What is done on a host; the second only where the first has worked."""
        return [
            accept_step(host, public_key),
            *([mount_step(self.share, self.head, host)] if self.share else []),
        ]

    def after(self) -> list[SetupStep]:
        """What is done here at last."""
        written = [hostfile_step(self.hostfile, self.hosts, self.slots)] if self.hostfile else []
        return [*written, *([pdsh_step()] if self.cluster.launcher == "pdsh" else [])]


def own_public_key(home: Path) -> str | None:
    """The line of this user's public key; None where there is none yet."""
    paths = [home / ".ssh" / f"{key}.pub" for key in KEYS]
    return next((path.read_text().strip() for path in paths if path.is_file()), None)


def _entry(host: Host) -> str:
    port = f":{host.port}" if host.port else ""
    return (f"{host.user}@" if host.user else "") + (_bracketed(host.name) + port)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def ssh_command(cluster: Cluster, host: Host, *, person: bool) -> list[str]:
    """The line of ssh to a host that may never have been logged in to from here. `person`:
    somebody is there to type a password."""
    port = ["-p", str(host.port)] if host.port else []
    user = ["-l", host.user] if host.user else []
    asking = [] if person else ["-oBatchMode=yes"]
    return [
        "ssh",
        *cluster.ssh_args,
        *asking,
        "-oStrictHostKeyChecking=accept-new",
        "-oConnectTimeout=10",
        *port,
        *user,
        host.name,
        "bash",
        "-s",
    ]


def run_step(
    step: SetupStep, cluster: Cluster, hosts: Sequence[Host], *, person: bool
) -> StepResult:
    """Run one step; its text goes in by stdin, so that nothing of it is quoted twice."""
    host = next((host for host in hosts if host.name == step.where), None)
    if host is None:
        words = ["bash", "-s"]
    else:
        words = ssh_command(cluster, host, person=person and step.asks)
    try:
        done = subprocess.run(
            words,
            input=step.text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=STEP_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return StepResult(step, "failed", str(error))
    states = [
        line.removeprefix("trainkit: ")
        for line in done.stdout.splitlines()
        if line.startswith("trainkit: ")
    ]
    if done.returncode == 0 and states and states[-1] in (ALREADY, CHANGED):
        return StepResult(step, states[-1], "")
    said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return StepResult(step, "failed", said[-1] if said else f"it ended with {done.returncode}")
