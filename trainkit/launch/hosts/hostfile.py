"""Which hosts a run has: DeepSpeed's hostfile format, read strictly, and its filters.

One host or range a line, in rank order: `[user@]host[:port] slots=N`; `#` begins a comment; an
IPv6 address stands in brackets; `node[1-16]` and `rack[1-2]n[01-32]` are ranges as ClusterShell
writes them. Without `slots=` a host has the cluster's ranks_per_node. DeepSpeed takes `slots=8x`
for 8, a missing file for "this host alone" and drops unknown hosts of a filter in silence; here
each is an error.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ClusterShell.RangeSet import RangeSet

from trainkit.base.errors import ConfigError, Problem, SourceLocation, raise_problems
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.jobs.messages import suggest
from trainkit.jobs.schema import Cluster

DEFAULT = Path("/job/hostfile")  # DeepSpeed's own default
OVER_SSH = ("ssh", "pdsh")
MOST_HOSTS = 10_000  # of one range; a slip such as node[1-10000000] must not fill the memory
MOST_SLOTS = 4096
MOST_SUGGESTED = 64  # hosts of a file up to which messages suggest names
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\$?")
# never a leading "-": ssh would take it for an option
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:/(\d{1,9}))?)?")

# of a filter: HOST or [IPv6] or RANGE, and :SLOTS
_PART = re.compile(r"(\[[^\]]*:[^\]]*\]|(?:[^:\[\]]|\[[^\]]*\])*)(?::(.*))?")


@dataclass(frozen=True)
class Host:
    """One host.

    Args:
        name: as ssh takes it: a name or an address (IPv6 without brackets).
        user: whom to log in as; None: ssh decides.
        port: of its sshd; None: ssh decides.
        slots: numbers of the slots the run has there, rising; none: not said.
        line: where it stands in its hostfile, from 1; 0: nowhere.
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: tuple[int, ...] = ()
    line: int = 0


class _SyntaxError(Exception):
    """What is wrong, and where in its line or filter (characters from 0)."""

    def __init__(self, message: str, offset: int, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset
        self.hint = hint


def find_hostfile(cluster: Cluster, option: str = "", default: Path = DEFAULT) -> Path:
    """The hostfile of a cluster whose launcher is ssh or pdsh: `--hostfile`, else the cluster's,
    else /job/hostfile.

    Raises ConfigError where there is none; a run never shrinks to one host because a file is
    missing.
    """
    if option:
        path = Path(option).expanduser()
        message = f"--hostfile {option}: there is no such file"
    elif cluster.hostfile:
        path = Path(cluster.hostfile)
        message = f"clusters.{cluster.name}.hostfile = '{cluster.hostfile}': there is no such file"
    else:
        path = default
        message = (
            f"cluster '{cluster.name}' (launcher {cluster.launcher}) has no hostfile: neither"
            f" --hostfile nor clusters.{cluster.name}.hostfile is given, and {default} is not there"
        )
    if not path.is_file():
        raise ConfigError(message, hint="one line a host: HOST slots=N")
    return path


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file, in order. Raises ConfigError with everything that is wrong with it,
    by line and column."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the hostfile {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            [
                Problem(
                    f"no UTF-8 text: {error.reason}",
                    SourceLocation(str(path), error.object[: error.start].count(b"\n") + 1),
                )
            ]
        ) from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """The hosts of a hostfile's text, in order.

    Args:
        text: the text; its last line may lack the newline.
        path: the file's name, for errors.

    Raises ConfigError with everything that is wrong, by line and column.
    """
    hosts: list[Host] = []
    problems: list[Problem] = []
    first: dict[str, int] = {}
    for line, content in enumerate(text.split("\n"), 1):
        words = [
            (match.start(), match.group())
            for match in re.finditer(r"\S+", content.partition("#")[0])
        ]
        try:
            for host in _hosts_of(words) if words else ():
                if (earlier := first.setdefault(host_key(host.name), len(hosts))) < len(hosts):
                    message = f"host '{host.name}' stands in line {hosts[earlier].line} already"
                    raise _SyntaxError(
                        message,
                        words[0][0],
                        "a host has one line; its slots say how often it is used",
                    )
                hosts.append(replace(host, line=line))
        except _SyntaxError as wrong:
            problems.append(
                Problem(
                    f"{wrong.message} (column {wrong.offset + 1})",
                    SourceLocation(path, line),
                    wrong.hint,
                )
            )
    if not hosts and not problems:
        problems = [Problem("names no host", SourceLocation(path), "one line a host: HOST slots=N")]
    raise_problems(problems)
    return tuple(hosts)


def host_key(name: str) -> str:
    """One word for equal hosts: names of hosts know no case, and this machine's loopback has
    several."""
    lower = name.lower()
    if lower in ("localhost", "::1") or lower.startswith("127."):
        return "localhost"
    return lower


def _hosts_of(words: Sequence[tuple[int, str]]) -> list[Host]:
    """The hosts of one line's words, each word with its offset."""
    slots: tuple[int, ...] = ()
    for offset, word in words[1:]:
        name, equals, value = word.partition("=")
        if name != "slots" or not equals:
            if "slots" in word:
                hint = "write slots=N, without spaces"
            else:
                hint = "one host or range a line: HOST slots=N; '#' begins a comment"
            raise _SyntaxError(f"unknown word '{word}'", offset, hint)
        if slots:
            raise _SyntaxError(f"'{word}': slots are given twice", offset)
        if not re.fullmatch(r"[0-9]{1,9}", value) or not 1 <= int(value) <= MOST_SLOTS:
            raise _SyntaxError(
                f"'{word}': slots must be a whole number from 1 to {MOST_SLOTS}", offset
            )
        slots = tuple(range(int(value)))
    offset, word = words[0]
    return [replace(host, slots=slots) for host in _expanded(word, offset)]


def _expanded(word: str, offset: int) -> Iterator[Host]:
    """The hosts that one word of a hostfile names."""
    user, at, rest = word.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise _SyntaxError(f"'{user}' is not a valid user name", offset)
    names, port = _address(rest, offset + len(user) + len(at))
    # its agent is started without ssh
    if (at or port) and any(host_key(name) == "localhost" for name in names):
        hint = (
            "write `localhost`; or, for a host behind a tunnel, a name that ~/.ssh/config has with"
            " HostName, Port and User"
        )
        raise _SyntaxError(
            f"'{word}' is this machine, which takes no user and no port", offset, hint
        )
    return (Host(name, user if at else None, port) for name in names)


def _address(word: str, offset: int) -> tuple[list[str], int | None]:
    """(names, port) of HOST, HOST:PORT, RANGE:PORT, [IPv6] or [IPv6]:PORT. `offset`: where the
    word begins, for errors."""
    if bracketed := re.fullmatch(
        r"\[([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9_.-]+)?)\](?::(.*))?", word
    ):
        address, port = bracketed.groups()
        try:
            ipaddress.IPv6Address(address)
        except ValueError as error:
            raise _SyntaxError(f"'[{address}]' is not an IPv6 address: {error}", offset) from None
        return [address], _port(port, offset + len(address) + 3) if port is not None else None
    host, colon, port = word.partition(":")
    if ":" in port:
        raise _SyntaxError(
            f"'{word}' has more than one colon",
            offset,
            "an IPv6 address stands in brackets: [fd00::1] or [fd00::1]:22",
        )
    return _names(host, offset), _port(port, offset + len(host) + 1) if colon else None


def _port(text: str, offset: int) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise _SyntaxError(f"'{text}' is not a port: 1 to 65535", offset)
    return int(text)


def _names(word: str, offset: int) -> list[str]:
    """A name, or the names of a range, in the order written."""
    if re.search(r"[,&!^]", re.sub(r"\[[^\]]*\]", "", word)):
        raise _SyntaxError(
            f"'{word}': one host or range a line",
            offset,
            "inside brackets commas are fine: node[1-3,7]",
        )
    pieces = re.split(r"\[([^\[\]]*)\]", word)
    choices_of = [
        list(_numbers(piece, word, offset)) if index % 2 else [piece]
        for index, piece in enumerate(pieces)
    ]
    count = 1
    for each in choices_of:
        count *= len(each)
    if count > MOST_HOSTS:
        raise _SyntaxError(f"'{word}' names {count:,} hosts; {MOST_HOSTS:,} are the limit", offset)
    names = ["".join(parts) for parts in itertools.product(*choices_of)]
    for name in names[:1]:  # they differ in digits only
        if not _NAME.fullmatch(name) or len(name) > 253:
            raise _SyntaxError(
                f"'{word}' is not a host name or address",
                offset,
                "letters, digits, '.', '_' and '-'; ranges as in node[01-16]",
            )
    return names


def _numbers(content: str, word: str, offset: int) -> Iterator[str]:
    """The numbers of "1-3,7" or "01-16/2" as written: padding is kept, and so is the order (a
    RangeSet of all of them would sort)."""
    for part in content.split(","):
        match = _RANGE.fullmatch(part)
        if match:
            low, high, step = (int(number) if number else None for number in match.groups())
        else:
            low = None
            high = None
            step = None
        if low is None or (high is not None and high < low) or step == 0:
            raise _SyntaxError(
                f"'[{content}]' in '{word}' is not a range",
                offset,
                "for example node[1-16], node[01-16], node[1-3,7]",
            )
        if high is not None and (high - low) // (step or 1) >= MOST_HOSTS:
            raise _SyntaxError(f"'{word}' names more than {MOST_HOSTS:,} hosts", offset)
        try:
            yield from RangeSet(part).striter()
        except ValueError as error:
            # the library's own errors are ValueErrors: padding that does not fit, say
            raise _SyntaxError(
                f"'[{content}]' in '{word}' is not a range: {error}", offset
            ) from None


def filter_hosts(hosts: Sequence[Host], include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """The hosts that DeepSpeed's filters leave, in the hostfile's order:
    `HOST[:SLOTS]@HOST[:SLOTS]...`, SLOTS as in 0,2-3.

    With both, what is excluded is taken from what is included; naming the same host or slot in
    both is a contradiction.

    Args:
        hosts: of the hostfile, each with its slots.
        include: a filter; "": all.
        exclude: a filter; "": none.

    Raises:
        ConfigError: every unknown host and slot, by column; or no host is left.
    """
    problems: list[Problem] = []
    wanted = _read_filter(hosts, include, "--include", problems)
    unwanted = _read_filter(hosts, exclude, "--exclude", problems)
    for name in wanted.keys() & unwanted.keys():
        both = wanted[name].slots & unwanted[name].slots
        if wanted[name].by_slots == unwanted[name].by_slots and both:
            shown = f"{name}:{','.join(map(str, sorted(both)))}" if wanted[name].by_slots else name
            problems.append(Problem(f"'{shown}' is both in --include and in --exclude"))
    raise_problems(problems)
    everything = {} if include else {host.name: frozenset(host.slots) for host in hosts}
    included = everything | {name: each.slots for name, each in wanted.items()}
    excluded = {name: each.slots for name, each in unwanted.items()}
    none = frozenset[int]()
    left = []
    for host in hosts:
        slots = included.get(host.name, none) - excluded.get(host.name, none)
        if slots:
            left.append(replace(host, slots=tuple(sorted(slots))))
    if not left:
        filters = [flag for flag, text in (("--include", include), ("--exclude", exclude)) if text]
        raise ConfigError(f"no host is left of {len(hosts)} after {' and '.join(filters)}")
    return tuple(left)


@dataclass(frozen=True)
class _Filtered:
    """What a filter says of one host. `by_slots`: slots were written."""

    slots: frozenset[int]
    by_slots: bool


def _read_filter(
    hosts: Sequence[Host], text: str, flag: str, problems: list[Problem]
) -> dict[str, _Filtered]:
    """By host, what one filter says; what is wrong is added to `problems`."""
    known = {host_key(host.name): host for host in hosts}
    found: dict[str, _Filtered] = {}
    offset = 0
    for part in text.split("@") if text else []:
        try:
            for name, filtered in _read_filter_part(part, offset, known):
                if name in found:
                    raise _SyntaxError(f"host '{name}' is named twice", offset)
                found[name] = filtered
        except _SyntaxError as wrong:
            problems.append(
                Problem(
                    f"{wrong.message} (column {wrong.offset + 1})", SourceLocation(flag), wrong.hint
                )
            )
        offset += len(part) + 1
    return found


def _read_filter_part(
    part: str, offset: int, known: Mapping[str, Host]
) -> Iterator[tuple[str, _Filtered]]:
    """(host, what is said of it) of one part of a filter, which begins at `offset`."""
    match = _PART.fullmatch(part)
    if not match or not match.group(1):
        raise _SyntaxError(f"expected HOST or HOST:SLOTS, got '{part}'", offset)
    address, slots_text = match.groups()
    slots = None
    if slots_text is not None:
        slots = frozenset(_slot_numbers(slots_text, offset + len(address) + 1))
    for name in _address(address, offset)[0]:
        host = known.get(host_key(name))
        if host is None:
            names = [each.name for each in known.values()]
            raise _SyntaxError(
                f"the hostfile has no host '{name}'",
                offset,
                suggest(name, names) if len(names) <= MOST_SUGGESTED else "",
            )
        if slots is None:
            yield host.name, _Filtered(frozenset(host.slots), by_slots=False)
            continue
        if missing := sorted(slots.difference(host.slots)):
            raise _SyntaxError(
                f"host '{name}' has no slot {missing[0]}",
                offset,
                f"its slots: {_shown(host.slots)}",
            )
        yield host.name, _Filtered(slots, by_slots=True)


def _slot_numbers(text: str, offset: int) -> set[int]:
    """The slots of "0,2-3"."""
    found: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.partition("-")
        ends = [low, high] if dash else [low]
        if not all(re.fullmatch(r"[0-9]{1,4}", end) for end in ends) or int(ends[-1]) < int(low):
            raise _SyntaxError(f"'{text}' is not a list of slots", offset, "for example 0,2-3")
        found |= set(range(int(low), int(ends[-1]) + 1))
    return found


def _shown(slots: Sequence[int]) -> str:
    if len(slots) > 1 and slots[-1] - slots[0] == len(slots) - 1:
        return f"{slots[0]}-{slots[-1]}"
    return ",".join(map(str, slots))
