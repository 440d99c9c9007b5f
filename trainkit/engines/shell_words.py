"""The words of a command in a shell script, read without running anything.

What is understood: comments, quotes, lines that go on after a backslash, NAME=value and
NAME=(array), $NAME, ${NAME}, ${NAME[@]}, ${NAME:-default}, $((integers)), (( )), `let`,
`eval TEXT` and `bash -c TEXT` (POSIX.1-2024, Shell Command Language, 2.5 to 2.9; arrays as bash
has them). `if`, `case`, && and || take the branch that what is known says (shell_branches). A
function is read where it is called, with the words of the call; one that is not, where it stands.
What only running the script would tell is read as if it ran once, and noted where it sets
anything.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.engines.shell_branches import (
    ASSIGNMENT,
    CALL,
    DECLARES,
    INNER,
    LONGEST,
    OPENS,
    PRINTS,
    QUOTED,
    UNCALLED,
    Branches,
    calculate,
    computed,
    elements,
    expanded,
    substituted,
    unquoted,
)

_NAME = re.compile(r"[A-Za-z_]\w*(=|$)")
_DEFAULT = re.compile(r"[\"']?\$\{([A-Za-z_]\w*):?=(.*)\}[\"']?", re.DOTALL)
_PIECE = re.compile(rf"{QUOTED}|(?P<comment>(?<![^\s;])\#[^\n]*)|\\.|.", re.DOTALL)
_NESTED = rf"\$\({INNER}\)|\$\{{[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*\}}|`[^`]*`"
_TOKEN = re.compile(
    r"(?P<join>\\\n)|(?P<redirect>(?:(?<!\S)\d)?(?:&>>?|>>|[<>]&|>\||<<<|<<-?|<>|[<>](?!\()))"
    rf"|(?P<word>\(\({INNER}\)\)|(?:{QUOTED}|{_NESTED}"
    rf"|(?<==)\((?:{QUOTED}|{_NESTED}|[^()'\"])*+\)|\\[^\n]|[^\s;|&<>()'\"`\\])+)"
    r"|(?P<end>\n|;;&|;;|;&|&&|\|\||[;|&<>()])",
    re.DOTALL,
)
# made one: NAME() {, function NAME {
_FUNCTION = re.compile(
    r"(^[ \t]*|;[ \t]*)(?:function[ \t]+([\w-]+)(?:[ \t]*\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))"
    r"\s*\{(?=\s)",
    re.MULTILINE,
)
_INTEGER = re.compile(r"(?:local|readonly|declare|typeset) -[a-zA-Z]*i[a-zA-Z]*")
_SHELL = re.compile(r"(?:\S*/)?(?:ba)?sh -[a-z]*c")
_BEFORE_A_COMMAND = ("then", "else", "do", "{")
# of a call, perhaps but for the first ones
_ALL_WORDS = re.compile(r'"\$(?:@|\{@(?::([1-9]))?\})"|\$[@*]|\$\{[@*](?::([1-9]))?\}')
# its line without `<<WORD`, and its text; not one that a comment mentions
_HERE_DOCUMENT = re.compile(
    r"^([^#\n]*)(?<!<)<<-?[ \t]*(['\"]?)(\w+)\2([^\n]*\n)((?:.*\n)*?)\t*\3$", re.MULTILINE
)
_NUMBERED = "123456789"
_FOR_ENV = re.compile(r"[A-Z][A-Z0-9_]*=")  # env NAME=value torchrun, mpirun -x NAME=value
# what gives NAME no value, or one that only running tells
_TAKES_AWAY = (["unset"], ["read"], ["printf"], ["mapfile"], ["readarray"])
_EXPORTS = re.compile(r"(?:local|readonly|declare|typeset) -[a-zA-Z]*x[a-zA-Z]*")
_Scope = tuple[dict[str, str], dict[str, None]]  # variables outside of a (, and exported names
_Read = tuple[str, list[str]]  # what stands before a command, such as && or ;, and its words


@dataclass
class ShellCommand:
    """A command that was found.

    Args:
        before: its words up to the script, as of torchrun.
        words: those after the script.
        unknown: variables and commands in `words` whose value the script does not say.
        environment: variables that the script exports, or sets for this command alone. What
            the script does not know of a value stands in it as it was written.
        nodes: that the script asks of Slurm; None: it asks for none.
        notes: what of the script was assumed, or not read, a line each.
    """

    before: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    nodes: int | None = None


# sbatch(1)
_SBATCH_NODES = re.compile(r"^#SBATCH\s+(?:--nodes(?:=|\s+)|-N\s*)([0-9]{1,6})\s*$", re.MULTILINE)
# of torchrun, deepspeed, srun and mpirun
_NODES = ("nnodes", "num-nodes", "nodes", "N")
_HOSTS: tuple[str, ...] = (
    *("nproc-per-node", "num-gpus", "hostfile", "H", "include", "i", "exclude", "e"),
    *("ntasks", "n", "np"),
)


def torchrun_nodes(command: ShellCommand, not_taken: list[str]) -> dict[str, object]:
    """`nodes` of a job, by the words before the script of torchrun or deepspeed, else by what is
    asked of Slurm; hosts and ranks of a node belong to the cluster, and are named in
    `not_taken`."""
    job: dict[str, object] = {"nodes": command.nodes} if command.nodes else {}
    words = [
        part
        for word in command.before
        for part in re.split(r"=|(?<=^-[Nn])(?=\d)", word, maxsplit=1)  # srun's -N4 has no "="
    ]
    for word, value in itertools.pairwise(words):
        name = word.lstrip("-").replace("_", "-") if word.startswith("-") else ""
        if name in _NODES and value.isdigit():
            job["nodes"] = int(value)
        elif name in (*_NODES, *_HOSTS):
            not_taken.append(f"{word} {value}: hosts and their ranks stand in [clusters.X]")
    return job


def find_command(
    text: str, script: str, caller: Mapping[str, str] | None = None
) -> ShellCommand | None:
    """The last command of a script that runs `script`; None where there is none.

    Args:
        text: of the shell script, or one command line.
        script: the name of the program, such as pretrain_gpt.py.
        caller: variables that its caller has set.

    Raises ValueError for text that no shell takes: a quote without its end.
    """
    variables = dict(caller or {})
    branches = Branches(script)
    exported: dict[str, None] = {}  # names, in the order of the script
    found = None
    times = 0
    # what it feeds to another program, such as JSON, but for the command itself
    plain = _HERE_DOCUMENT.sub(
        lambda match: match[0] if script in match[5] else match[1] + match[4], text
    )
    rest, functions = _functions(list(_commands(plain)))
    outer: list[_Scope] = []
    for before, every in _followed(rest, functions, variables, exported):
        if not branches.in_patterns():
            _cross(before, outer, variables, exported)
        words = branches.within(before, every, variables)
        words = ["export", *words[2:]] if _EXPORTS.fullmatch(" ".join(words[:2])) else words
        branches.notes |= dict.fromkeys(calculate(words, variables))
        kept = dict(variables)
        command = _assigned(words, variables)
        names = _exported_names(words, for_command=bool(command))
        if cut := _cut(command, kept, script):  # what stands in front is not its words' yet
            cut.environment = _values([*exported, *names], variables)
            given = [word.split("=", 1) for word in cut.before if _FOR_ENV.match(word)]
            cut.environment |= dict(given)
            found = cut
            times += 1
        elif words[:1] == ["export"]:
            exported |= dict.fromkeys(names)
        branches.notes |= dict.fromkeys(_unread(words))
        for name in command[1:] if command[:1] in _TAKES_AWAY else ():
            variables.pop(name, None)
        if words[:1] != ["export"]:
            _restore(names, kept, variables)
    found = found or _in_a_variable(script, exported, variables)
    if found is not None:
        asked = _SBATCH_NODES.findall(text)
        found.nodes = int(asked[-1]) if asked else None
        found.notes = list(branches.notes)
        if times > 1:
            found.notes.append(f"{script}: {times} commands run it; this is the last one")
    return found


def command_of(path: Path, script: str, caller: Mapping[str, str]) -> ShellCommand:
    """The same of a file. Raises ConfigError: it cannot be read, or runs no such program."""
    try:
        command = find_command(path.read_text(encoding="utf-8", errors="replace"), script, caller)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if command is None:
        raise ConfigError(f"nothing in {path} runs {script}", hint="give the script that does")
    return command


def _in_a_variable(
    script: str, exported: Iterable[str], variables: Mapping[str, str]
) -> ShellCommand | None:
    """CMD="pretrain_gpt.py ..." that something else runs."""
    found = None
    for name in variables:
        found = _cut([f"${name}"], variables, script) or found
    if found is not None:
        found.environment = _values(exported, variables)
    return found


def _restore(names: Sequence[str], kept: Mapping[str, str], variables: dict[str, str]) -> None:
    """NAME=value in front of a command is for it alone."""
    for name in names:
        variables.pop(name, None)
        variables |= {name: kept[name]} if name in kept else {}


def _cross(
    before: str, outer: list[_Scope], variables: dict[str, str], exported: dict[str, None]
) -> None:
    """Begin a subshell, or end it: what it set is gone then."""
    if before == "(":
        outer.append((dict(variables), dict(exported)))
    elif before == ")" and outer:
        variables.clear()
        exported.clear()
        known, names = outer.pop()
        variables |= known
        exported |= names


def _unread(words: Sequence[str]) -> list[str]:
    """A line for what a command has from elsewhere than the script."""
    if names := " ".join(word for word in words[1:] if words[0] == "export" and word[0] in '$`"'):
        return [f"export {names}: what it names was not read"]
    if words[:1] in (["source"], ["."]):
        return [f"{' '.join(words)}: that file was not read"]
    if _INTEGER.fullmatch(" ".join(words[:2])):
        return [f"{' '.join(words)}: read as text, not worked out"]
    return []


def _exported_names(words: Sequence[str], *, for_command: bool) -> list[str]:
    """Names that a command exports, or those that are set for it alone in front of it."""
    if words[:1] == ["export"]:
        return [word.partition("=")[0] for word in words[1:] if _NAME.match(word)]
    if not for_command:
        return []
    in_front = itertools.takewhile(ASSIGNMENT.fullmatch, words)
    return [word.partition("=")[0].removesuffix("+") for word in in_front]


def _values(names: Iterable[str], variables: Mapping[str, str]) -> dict[str, str]:
    """What is known of the values of variables; those that were never given one are left out:
    they are the caller's."""
    known = [name for name in dict.fromkeys(names) if name in variables]
    return {name: " ".join(expanded(f'"${name}"', variables, [])) for name in known}


def _cut(words: list[str], variables: Mapping[str, str], script: str) -> ShellCommand | None:
    """A command whose words are still to be expanded, cut at the script; None where it runs
    another."""
    if words and words[0] in PRINTS:
        return None
    unknown: list[str] = []
    said = [each for word in words for each in expanded(word, variables, unknown)]
    at = next((at for at, word in enumerate(said) if word.endswith(script)), None)
    if at is None:
        return None
    # an array may hold several options in one pair of quotes
    after = [each for word in said[at + 1 :] for each in _options(word)]
    launcher = " ".join(said[: at + 1])
    own = [each for each in unknown if each not in launcher or each in " ".join(after)]
    return ShellCommand(said[:at], after, list(dict.fromkeys(own)))


def _options(word: str) -> list[str]:
    if re.match(r"--[\w-]+ ", word):
        return [each.strip("'\"") for each in word.split()]
    return [word]


def _commands(text: str) -> Iterator[_Read]:
    """Of one command after another, what stands before it, such as && or ;, and its raw words:
    quotes are still there. NAME=(words) is one word. Of `bash -c TEXT` and `eval TEXT` they are
    those of TEXT. In front of a function's { stands the command `function NAME`."""
    before = "\n"
    words: list[str] = []
    aimed = False  # whether the next word is a file, behind > or <
    for match in _TOKEN.finditer(_FUNCTION.sub(r"\1function \2\3\n{", _without_comments(text))):
        kind = match.lastgroup
        if kind == "redirect" and ("[[" not in words or "]]" in words):
            aimed = True
        elif kind in ("word", "redirect"):
            words += [] if aimed else [match[0]]
            aimed = False
        elif kind == "end" and (
            words not in ([], ["[["]) or match[0] != "\n" or before not in ("&&", "||", "|")
        ):
            # [[ a && b ]] is [[ a ]] && [[ b ]]
            opened = (
                ["[["] if "[[" in words and "]]" not in words and match[0] in ("&&", "||") else []
            )
            yield from _opened_shell(before, [*words, "]]"] if opened else words)
            before = match[0]
            words = opened
    yield from _opened_shell(before, words)


def _opened_shell(before: str, words: list[str]) -> Iterator[_Read]:
    pairs = map(" ".join, itertools.pairwise(words[:-1]))
    at = next((at for at, pair in enumerate(pairs) if _SHELL.fullmatch(pair)), None)
    start = _start(words)
    if words[start : start + 1] == ["eval"]:
        text = " ".join(map(unquoted, words[start + 1 :]))
    elif at is None or words[0] in PRINTS:
        yield before, words
        return
    else:
        given = [word for word in words[start:at] if ASSIGNMENT.fullmatch(word)]
        yield before, [*words[:start], "{"]
        yield "(", ["export", *given]
        yield from _commands(unquoted(words[at + 2]))
        yield ")", []
        yield ";", ["}"]
        return
    for number, (inside, inner) in enumerate(_commands(text)):
        yield (inside, inner) if number else (before, [*words[:start], *inner])


def _start(words: Sequence[str]) -> int:
    """How many words stand in front of a command, such as `then`."""
    return sum(1 for _ in itertools.takewhile(lambda word: word in _BEFORE_A_COMMAND, words))


def _without_assignments(words: Sequence[str]) -> list[str]:
    return [*itertools.dropwhile(ASSIGNMENT.fullmatch, words[_start(words) :])]


def _functions(commands: list[_Read]) -> tuple[list[_Read], dict[str, list[_Read]]]:
    """A script without the functions that it calls by their names, and these."""
    called = {word for _, words in commands for word in _without_assignments(words)[:1]}
    rest: list[_Read] = []
    found: dict[str, list[_Read]] = {}
    body = rest
    name = ""  # of the function whose { comes now
    depth = 0
    for before, words in commands:
        if words[:1] == ["function"] and not depth:  # its { comes next
            name = words[-1]
            body = found.setdefault(name, []) if name in called else rest
            continue
        if name and body is rest:
            words = [f"{UNCALLED}{name}{{", *words[1:]]
        name = ""
        if body is not rest:  # JSON in a text has braces too
            depth += max(words[: _start(words)].count("{"), words[-1:] == ["{"])
            depth -= words[:1] in (["}"], ["},"])
        body.append((before, words))
        if not depth:
            body = rest
    return (commands, {}) if depth else (rest, found)


def _followed(
    commands: Iterable[_Read],
    functions: Mapping[str, list[_Read]],
    variables: dict[str, str],
    exported: dict[str, None],
) -> Iterator[_Read]:
    """The commands, and in the place of a call those of its function. Whoever reads them sets
    `variables` and `exported` between two of them."""
    for before, words in commands:
        start = _start(words)
        call = _without_assignments(words)
        name = "".join(call[:1])
        if name not in functions:
            yield before, words
            continue
        given = [
            f'"{each}"' if "$" in each or "`" in each else shlex.quote(each)
            for word in call[1:]
            for each in expanded(word, variables, [])
        ]
        others = {each: body for each, body in functions.items() if each != name}
        yield before, [*words[:start], CALL]
        in_front = words[start : len(words) - len(call)]  # for the call alone
        body = [(";", ["declare", "-x", *in_front]), *functions[name]]
        inner = _body(body[not in_front :], given, variables)
        its_own = {word.partition("=")[0] for word in in_front} - exported.keys()
        yield from _followed(inner, others, variables, exported)
        for each in its_own:
            exported.pop(each, None)
        yield ";", ["}"]


def _body(body: list[_Read], given: list[str], variables: dict[str, str]) -> Iterator[_Read]:
    """A function's commands; "$@" and $1 are the words that it was given, until it is not known
    by how many they are shifted."""
    kept = {number: variables.get(number) for number in _NUMBERED}
    for _, words in body:
        inner = words[_start(words) :]
        if inner[:1] in (["local"], ["declare"], ["typeset"]):
            names = [word.partition("=")[0] for word in inner[1:]]
            kept |= {name: variables.get(name) for name in names}
    known = True
    asked = False  # whether what follows may not be run
    for before, words in body:
        inner = words[_start(words) :]
        asked = asked or inner[:1] in [[each] for each in OPENS]
        if inner[:1] == ["shift"]:
            by = "".join(inner[1:]) or "1"
            open_end = asked or before in ("&&", "||") or any(map(_ALL_WORDS.search, given))
            known = known and by.isdigit() and not open_end
            given = given[int(by) :] if known else []
        for number in _NUMBERED:
            variables.pop(number, None)
        variables.update(zip(_NUMBERED, map(unquoted, given), strict=False))
        yield before, [each for word in words for each in _given(word, given)] if known else words
    for name, value in kept.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value


def _given(word: str, given: list[str]) -> list[str]:
    if match := _ALL_WORDS.fullmatch(word):
        return _from(match, given)
    return [_ALL_WORDS.sub(lambda match: " ".join(_from(match, given)), word)]


def _from(match: re.Match[str], given: list[str]) -> list[str]:
    return given[int(match[1] or match[2] or 1) - 1 :]


def _without_comments(text: str) -> str:
    """The script without what follows a # that begins a word. Raises ValueError for a quote that
    does not end."""
    found = []
    for match in _PIECE.finditer(text):
        if match[0] in ("'", '"'):
            raise ValueError(f"a quote {match[0]} has no end")
        if match.lastgroup != "comment":
            found.append(match[0])
    return "".join(found)


def _assigned(words: Sequence[str], variables: dict[str, str]) -> list[str]:
    """Make the assignments that a command begins with; returns its other words."""
    rest = [word for word in words if word not in DECLARES]
    while len(rest) < len(words) and rest and rest[0].startswith("-"):  # declare -a NAME=(...)
        rest = rest[1:]
    while rest and (match := ASSIGNMENT.fullmatch(rest[0])):
        name, adds, value = match.groups()
        rest = rest[1:]
        between = ""
        if value.startswith("("):
            inner = elements(_without_comments(value[1:-1]).replace("\\\n", " "))
            value = " ".join(inner.split())
            between = " "
        else:
            value = unquoted(value)
        # as the shell does it, now: a variable may be its own beginning. What is not known yet may
        # be another's business, and never its own.
        value = computed(substituted(value, {name: "", **variables}), variables)[:LONGEST]
        old = variables.get(name, "") if adds else ""
        variables[name] = f"{old}{between}{value}" if old else value
    if rest[:1] == [":"]:  # `: ${NAME:=value}` gives a value to what has none
        for given in filter(None, map(_DEFAULT.fullmatch, rest[1:])):
            if not variables.get(given[1]):
                variables[given[1]] = substituted(unquoted(given[2]), variables)[:LONGEST]
    return rest
