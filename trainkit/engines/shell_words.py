"""The words of a command in a shell script, read without running anything.

What is understood: comments, quotes, lines that go on after a backslash, NAME=value and
NAME=(array), $NAME, ${NAME}, ${NAME[@]}, ${NAME:-default}, $((integers)) and `bash -c TEXT`
(POSIX.1-2024, Shell Command Language, 2.5 to 2.9; arrays as bash has them). `if`, && and || take
the branch that comparisons of what is known say, and a variable that nobody gave is empty there.
What only running the script would tell is read as if it ran once. Both are noted where they set
anything.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.base.errors import ConfigError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*(=|$)")
_VARIABLE = re.compile(
    r"\$(?:([A-Za-z_]\w*|\d)|\{([A-Za-z_]\w*|\d)(?:\[[@*]\])?(?::?[-=]((?:[^{}]|\{[^{}]*\})*))?\})"
)
_DEFAULT = re.compile(r"[\"']?\$\{([A-Za-z_]\w*):?=(.*)\}[\"']?", re.DOTALL)
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_UNKNOWN = re.compile(
    r"\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`|\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\$(?:\w+|[@*#?])"
)
# a command in double quotes has quotes of its own
_QUOTED = r"""'[^']*'|"(?:[^"\\`$]|\\.|`[^`]*`|\$\([^()]*\)|\$)*+\""""
_QUOTE = re.compile(rf"{_QUOTED}|\\.", re.DOTALL)
_PIECE = re.compile(rf"{_QUOTED}|(?P<comment>(?<![^\s;])\#[^\n]*)|\\.|.", re.DOTALL)
_NESTED = r"\$\(\([^()]*\)\)|\$\([^()]*\)|\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|`[^`]*`"
_TOKEN = re.compile(
    r"(?P<join>\\\n)|(?P<redirect>(?<!\S)\d(?=[<>]))"
    rf"|(?P<word>(?:{_QUOTED}|{_NESTED}|(?<==)\((?:{_QUOTED}|{_NESTED}|[^()'\"])*+\)"
    r"|\\[^\n]|[^\s;|&<>()'\"`\\])+)"
    r"|(?P<end>\n|&&|\|\||[;|&<>()])",
    re.DOTALL,
)
_SHELL = re.compile(r"(?:\S*/)?(?:ba)?sh -[a-z]*c")
_PRINTS = ("echo", "printf")
_DECLARES = ("export", "local", "readonly", "declare", "typeset")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
DEEPEST = 20  # variables in variables
LONGEST = 10**5  # characters of a value; variables that hold each other would grow without end


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
# of torchrun and of deepspeed
_NODES = ("nnodes", "num-nodes")
_HOSTS = ("nproc-per-node", "num-gpus", "hostfile", "H", "include", "i", "exclude", "e")


def torchrun_nodes(command: ShellCommand, not_taken: list[str]) -> dict[str, object]:
    """`nodes` of a job, by the words before the script of torchrun or deepspeed, else by what is
    asked of Slurm; hosts and ranks of a node belong to the cluster, and are named in
    `not_taken`."""
    job: dict[str, object] = {"nodes": command.nodes} if command.nodes else {}
    words = [part for word in command.before for part in word.split("=", 1)]
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
    branches = _Branches(script)
    exported: dict[str, None] = {}  # names, in the order of the script
    found = None
    times = 0
    for before, every in _commands(text):
        words = branches.within(before, every, variables)
        command = _assigned(words, variables)
        names = _exported_names(words, for_command=bool(command))
        if cut := _cut(command, variables, script):
            cut.environment = _values([*exported, *names], variables)
            found = cut
            times += 1
        elif words[:1] == ["export"]:
            exported |= dict.fromkeys(names)
        elif words[:1] in (["source"], ["."]):
            branches.notes[f"{' '.join(words)}: that file was not read"] = None
    if found is None:
        # CMD="pretrain_gpt.py ..." that something else runs
        for name in variables:
            found = _cut([f"${name}"], variables, script) or found
        if found is not None:
            found.environment = _values(exported, variables)
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


def _exported_names(words: Sequence[str], *, for_command: bool) -> list[str]:
    """Names that a command exports, or those that are set for it alone in front of it."""
    if words[:1] == ["export"]:
        return [word.partition("=")[0] for word in words[1:] if _NAME.match(word)]
    if not for_command:
        return []
    in_front = itertools.takewhile(_ASSIGNMENT.fullmatch, words)
    return [word.partition("=")[0] for word in in_front]


def _values(names: Iterable[str], variables: Mapping[str, str]) -> dict[str, str]:
    """What is known of the values of variables; those that were never given one are left out:
    they are the caller's."""
    known = [name for name in dict.fromkeys(names) if name in variables]
    return {name: " ".join(_expanded(f'"${name}"', variables, [])) for name in known}


def _cut(words: list[str], variables: Mapping[str, str], script: str) -> ShellCommand | None:
    """A command whose words are still to be expanded, cut at the script; None where it runs
    another."""
    if words and words[0] in _PRINTS:
        return None
    unknown: list[str] = []
    expanded = [each for word in words for each in _expanded(word, variables, unknown)]
    at = next((at for at, word in enumerate(expanded) if word.endswith(script)), None)
    if at is None:
        return None
    # an array may hold several options in one pair of quotes
    after = [each for word in expanded[at + 1 :] for each in _options(word)]
    launcher = " ".join(expanded[: at + 1])
    own = [each for each in unknown if each not in launcher or each in " ".join(after)]
    return ShellCommand(expanded[:at], after, list(dict.fromkeys(own)))


def _options(word: str) -> list[str]:
    if word.startswith("--") and " " in word:
        return [each.strip("'\"") for each in word.split()]
    return [word]


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Of one command after another, what stands before it, such as && or ;, and its raw words:
    quotes are still there. NAME=(words) is one word. Of `bash -c TEXT` they are those of TEXT."""
    before = "\n"
    words: list[str] = []
    for match in _TOKEN.finditer(_without_comments(text)):
        kind = match.lastgroup
        if kind == "word":
            words.append(match[0])
        elif kind == "end":
            yield from _opened_shell(before, words)
            before = match[0]
            words = []
    yield from _opened_shell(before, words)


def _opened_shell(before: str, words: list[str]) -> Iterator[tuple[str, list[str]]]:
    pairs = map(" ".join, itertools.pairwise(words[:-1]))
    at = next((at for at, pair in enumerate(pairs) if _SHELL.fullmatch(pair)), None)
    if at is None or words[0] in _PRINTS:
        yield before, words
        return
    for number, (inside, inner) in enumerate(_commands(_unquoted(words[at + 2]))):
        yield inside if number else before, inner


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
    rest = [word for word in words if word not in _DECLARES]
    while len(rest) < len(words) and rest and rest[0].startswith("-"):  # declare -a NAME=(...)
        rest = rest[1:]
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        name, adds, value = match.groups()
        rest = rest[1:]
        if value.startswith("("):
            inner = _without_comments(value[1:-1]).replace("\\\n", " ")
            value = " ".join(inner.split())
        else:
            value = _unquoted(value)
        # as the shell does it, now: a variable may be its own beginning. What is not known yet may
        # be another's business, and never its own.
        value = _substituted(value, {name: "", **variables})[:LONGEST]
        variables[name] = f"{variables.get(name, '')} {value}".strip() if adds else value
    if rest[:1] == [":"]:  # `: ${NAME:=value}` gives a value to what has none
        for given in filter(None, map(_DEFAULT.fullmatch, rest[1:])):
            if not variables.get(given[1]):
                variables[given[1]] = _substituted(_unquoted(given[2]), variables)[:LONGEST]
    return rest


_BRACKETS = ("[", "[[", "]", "]]", "test")
_COMPARED: Mapping[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": lambda first, second: int(first) == int(second),
    "-ne": lambda first, second: int(first) != int(second),
    "-lt": lambda first, second: int(first) < int(second),
    "-le": lambda first, second: int(first) <= int(second),
    "-gt": lambda first, second: int(first) > int(second),
    "-ge": lambda first, second: int(first) >= int(second),
}


_READ = "only running it tells; all that depends on it was read, one after the other"


def _decided(words: Sequence[str], variables: Mapping[str, str]) -> bool | None:
    """What a condition says; None where only running it would tell."""
    inner = [word for word in words if word not in _BRACKETS]
    if len(inner) == len(words):
        return None
    if inner[:1] == ["!"]:
        found = _decided(["test", *inner[1:]], variables)
        return None if found is None else not found
    if inner[:1] == ["-v"] and len(inner) == 2:
        return inner[1] in variables
    known = {name: value for name, value in variables.items() if "$" not in value}
    said = [_VARIABLE.sub(lambda match: _given(match, known), _unquoted(word)) for word in inner]
    if any("$" in word or "`" in word for word in said):
        return None
    if len(said) == 1:
        return said[0] != ""
    if len(said) == 2 and said[0] in ("-z", "-n"):
        return (said[1] == "") == (said[0] == "-z")
    if len(said) != 3 or said[1] not in _COMPARED:
        return None
    try:
        return _COMPARED[said[1]](said[0], said[2])
    except ValueError:
        return None


def _given(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """A variable's value; nothing where it has none."""
    found = _value(match, variables)
    return "" if found == match[0] else found


def _joined(first: bool | None, operator: str, second: bool | None) -> bool | None:
    """`first && second` or `first || second` of what may be unknown."""
    stops = operator == "||"
    if stops in (first, second):
        return stops
    return None if None in (first, second) else not stops


@dataclass
class _Branch:
    """An `if`, a loop or a `case` whose end has not come.

    Args:
        now: whether the branch that is being read is taken; None: nobody knows, so it is read.
        done: one of them was.
        condition: as it is written.
        why: what of its conditions the script alone does not say; "": nothing.
    """

    now: bool | None = None
    done: bool = False
    condition: str = ""
    why: str = ""

    def ask(self, operator: str, words: Sequence[str], variables: Mapping[str, str]) -> None:
        """One more command of the condition, behind `operator`; "": the first."""
        found = _decided(words, variables)
        if operator:
            found = _joined(self.now, operator, found)
        self.condition = f"{self.condition} {operator} {' '.join(words)}".strip()
        self.now = False if self.done else found
        names = [match[1] or match[2] for match in _VARIABLE.finditer(" ".join(words))]
        names += [name for flag, name in itertools.pairwise(words) if flag == "-v"]
        unset = [name for name in names if name not in variables]
        if self.done:
            return
        if found is None:
            self.why = f"`{self.condition}`: {_READ}"
        elif unset:
            taken = "true" if found else "false"
            said = ", ".join(dict.fromkeys(unset))
            self.why = f"`{self.condition}`: {taken} here, for nothing in the file sets {said}"


class _Branches:
    """Leaves out commands of branches that are not taken, and notes what was assumed.

    Args:
        script: the program that is looked for.
    """

    def __init__(self, script: str) -> None:
        self.script = script
        self.open: list[_Branch] = []
        self.asking = False  # between `if` and `then`
        self.line = _Branch()  # the commands before && or ||
        self.notes: dict[str, None] = {}

    def within(
        self, before: str, words: Sequence[str], variables: Mapping[str, str]
    ) -> Sequence[str]:
        """What of a command is to be read.

        Args:
            before: what stands before it, such as && or ;.
            words: its own.
            variables: what is known so far.
        """
        while words and self._opened(words, variables):
            words = () if self.asking else words[1:]
            before = "\n"
        if self.asking:
            if words and before in ("&&", "||"):
                self.open[-1].ask(before, words, variables)
            return ()
        skipped = self._skipped(before, words, variables)
        if self._sets(words):
            self.notes |= {each.why: None for each in (*self.open, self.line) if each.why}
        return () if skipped else words

    def _opened(self, words: Sequence[str], variables: Mapping[str, str]) -> bool:
        """Whether the first word is one of the shell's own, which is done with."""
        first = words[0]
        if first in ("if", "elif"):
            if first == "if" or not self.open:
                self.open.append(_Branch())
            branch = self.open[-1]
            branch.done = branch.done or branch.now is True
            branch.condition = ""
            branch.ask("", words[1:], variables)
            self.asking = True
        elif first in ("for", "while", "until", "case"):
            self.open.append(_Branch(why=f"`{' '.join(words)}`: {_READ}"))
            self.asking = first != "case"
        elif first == "else" and self.open:
            branch = self.open[-1]
            branch.done = branch.done or branch.now is True
            branch.now = False if branch.done else (True if branch.now is False else None)
        elif first in ("fi", "done", "esac") and self.open:
            self.open.pop()
        elif first in ("then", "do"):
            self.asking = False
        else:
            return first in ("{", "}")
        return True

    def _skipped(self, before: str, words: Sequence[str], variables: Mapping[str, str]) -> bool:
        """Whether a command is in a branch that is not taken, or behind && or || that stop."""
        skipped = any(branch.now is False for branch in self.open)
        if before not in ("&&", "||"):
            self.line = _Branch()
        elif self.line.now is (before == "||"):
            return True
        if words and words[0] in _BRACKETS:
            self.line.ask("", words, variables)
        elif before not in ("&&", "||"):
            self.line.now = True  # a command is taken to succeed
        return skipped

    def _sets(self, words: Sequence[str]) -> bool:
        """Whether a command gives a variable its value, or is the one that is looked for."""
        if not words or words[0] in _PRINTS:
            return False
        gives = words[0] in (*_DECLARES, ":") or _ASSIGNMENT.fullmatch(words[0])
        return bool(gives) or any(self.script in each for each in words)


def _unquoted(word: str) -> str:
    """A word without its quotes and backslashes (POSIX.1-2024, Shell Command Language, 2.2)."""
    return _QUOTE.sub(_bare, word)


def _bare(match: re.Match[str]) -> str:
    piece = match[0]
    if piece.startswith("\\"):
        return piece[1:]
    inner = piece[1:-1].replace("\\\n", " ")
    return inner if piece.startswith("'") else re.sub(r'\\([$`"\\])', r"\1", inner)


def _expanded(word: str, variables: Mapping[str, str], unknown: list[str]) -> list[str]:
    """One word of a command as the program gets it: none, one or several."""
    if word.startswith("'") and word.endswith("'"):
        return [word[1:-1]]
    whole = _VARIABLE.fullmatch(word.strip('"'))
    text = word
    for _ in range(DEEPEST):
        new = _substituted(text, variables)
        if new == text or len(new) > LONGEST:
            break
        text = new
    text = _ARITHMETIC.sub(lambda match: _computed(match, variables), text)
    unknown += [match[0] for match in _UNKNOWN.finditer(text)]
    if whole or "$" in word:
        try:
            return shlex.split(text)
        except ValueError:
            return [text]
    return [_unquoted(text)]


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    """The text with every variable that is known replaced, once."""
    return _VARIABLE.sub(lambda match: _value(match, variables), text)


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name = match[1] or match[2]
    if match[3] is not None and not variables.get(name):
        return _unquoted(match[3])
    return variables.get(name, match[0])


def _computed(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """$((...)) of whole numbers; itself where it is something else."""
    try:
        return str(_integer(ast.parse(match[1].strip(), mode="eval").body, variables))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return match[0]


def _integer(node: ast.expr, variables: Mapping[str, str]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _integer(node.left, variables)
        return _OPERATORS[type(node.op)](left, _integer(node.right, variables))
    if isinstance(node, ast.Name):  # a name needs no $ there
        return int(variables.get(node.id, ""))
    raise ValueError("not whole numbers")
