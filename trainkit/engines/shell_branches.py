"""What words of a shell script stand for, and which branches of it are taken, as far as variables
are known.

Quotes, variables, arithmetic, conditions and the patterns of `case` (POSIX.1-2024, Shell Command
Language, 2.2, 2.6, 2.9 and 2.14; `[[ ]]`, `(( ))` and `let` as bash has them). A variable that
nobody gave is empty in a condition, which is noted. Nothing is run.
"""

from __future__ import annotations

import ast
import fnmatch
import glob
import itertools
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence

from trainkit.base.lazy_dataclasses import dataclass

_VARIABLE = re.compile(
    r"\$(?:([A-Za-z_]\w*|\d)|\{([A-Za-z_]\w*|\d)(?:\[[@*]\])?(?::?[-=]((?:[^{}]|\{[^{}]*\})*))?\})"
)
# what stands in parentheses, with three more pairs of them inside
_PAIR = r"\((?:[^()]|\([^()]*\))*+\)"
INNER = rf"(?:[^()]|\((?:[^()]|{_PAIR})*+\))*+"
_ARITHMETIC = re.compile(rf"\$\(\(({INNER})\)\)")
_UNKNOWN = re.compile(
    rf"\$\({INNER}\)|`[^`]*`|\$\{{[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*\}}|\$(?:\w+|[@*#?$!-])?"
)
# a folder of the caller's, and {a,b} or {1..9}, which are several words
_SHELLS_OWN = re.compile(r"(?<!\S)~(?:/\S*)?(?!\S)|(?<!\$)\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
# a command in double quotes has quotes of its own
QUOTED = rf"""'[^']*'|"(?:[^"\\`$]|\\.|`[^`]*`|\$\({INNER}\)|\$)*+\""""
_QUOTE = re.compile(rf"{QUOTED}|\\.", re.DOTALL)
# "${NAME[@]}" is as many words as the array has
_ALL_OF_ARRAY = re.compile(r'"(\$\{\w+\[@\]\})"')
DEEPEST = 20  # variables in variables
LONGEST = 10**5  # characters of a value; variables that hold each other would grow without end


def _quotient(first: int, second: int) -> int:
    """As C divides: towards zero."""
    found = abs(first) // abs(second)
    return found if (first < 0) == (second < 0) else -found


_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda first, second: first - second * _quotient(first, second),
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)")  # one with a 0 in front is octal
_BRACKETS = ("[", "[[", "]", "]]", "test")
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
PRINTS = ("echo", "printf")
DECLARES = ("export", "local", "readonly", "declare", "typeset")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
OPENS = ("if", "for", "while", "until", "case")
_ASKS = ("!", "command", "false", "grep", "hash", "type", "which")  # often of no success
# begin the commands of a function that is called, and of one that is not: no shell's words
CALL = "call {"
UNCALLED = "function "
_ARMS_END = (";;", ";&", ";;&")
_READ = "only running it tells; all that depends on it was read, one after the other"
# NAME++, --NAME, NAME=3, NAME*=3
_CHANGE = re.compile(
    r"\s*(?:(\+\+|--)\s*([A-Za-z_]\w*)"
    r"|([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*/%]?)=(?!=)(.*)))\s*",
    re.DOTALL,
)
_CHANGES = re.compile(r"\+\+|--|(?<![=!<>])=(?!=)|<<=|>>=")
# in a pattern: values, classes of characters, quotes in brackets
_NO_PATTERN = re.compile(r"[$`]|\[[!^]?\[[:.=]|\[[^]]*[\\'\"]")


def arithmetic(text: str, variables: Mapping[str, str]) -> str | None:
    """The value of an expression of whole numbers; None: it is something else."""
    try:
        inner = substituted(text, variables).strip().replace("#", "@")  # 10#08; no comment
        return str(_integer(ast.parse(inner, mode="eval").body, variables))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _integer(node: ast.expr, variables: Mapping[str, str]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _integer(node.left, variables)
        return _OPERATORS[type(node.op)](left, _integer(node.right, variables))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left = _integer(node.left, variables)
        right = _integer(node.comparators[0], variables)
        return int(_OPERATORS[type(node.ops[0])](left, right))
    # a name needs no $ there
    if isinstance(node, ast.Name) and _NUMBER.fullmatch(variables.get(node.id, "")):
        return int(variables[node.id])
    raise ValueError("not whole numbers")


def calculate(words: Sequence[str], variables: dict[str, str]) -> list[str]:
    """Make the assignments of `(( ))` or `let`; returns a line for each that only a shell could
    make. Such a variable has no known value afterwards."""
    texts = [unquoted(word) for word in words[1:]] if words[:1] == ["let"] else []
    if words and words[0].startswith("(("):
        texts = words[0][2:-2].split(",")
    left = []
    for text in texts:
        match = _CHANGE.fullmatch(text)
        if match is None:
            if _CHANGES.search(text):
                left.append(f"`{text.strip()}`: this arithmetic was not worked out")
            continue
        name = match[2] or match[3]
        step = match[1] or match[4]
        by = "1" if step else match[6]
        sign = step[0] if step else match[5]
        value = arithmetic(f"{name} {sign} ({by})" if sign else by, variables)
        if value is None:
            left.append(f"`{text.strip()}`: {name} was not worked out")
        variables[name] = f"$(({name}))" if value is None else value
    return left


def _is_condition(word: str) -> bool:
    """Whether a command that begins with this asks, and does nothing else."""
    return word in _BRACKETS or (word.startswith("((") and not _CHANGES.search(word))


def _decided(words: Sequence[str], variables: Mapping[str, str]) -> bool | None:
    """What a condition says; None where only running it would tell."""
    if len(words) == 1 and words[0].startswith("(("):
        value = arithmetic(words[0][2:-2], variables)
        return None if value is None else value != "0"
    inner = [word for word in words if word not in _BRACKETS]
    if len(inner) == len(words):
        return {"true": True, "false": False}.get(_known_text(" ".join(words), variables) or "")
    if inner[:1] == ["!"]:
        found = _decided(["[[" if "[[" in words else "test", *inner[1:]], variables)
        return None if found is None else not found
    if inner[:1] == ["-v"] and len(inner) == 2:
        return inner[1] in variables
    known = _known(variables)
    given = [_VARIABLE.sub(lambda match: _given(match, known), unquoted(word)) for word in inner]
    said = [computed(word, variables) for word in given]
    if re.search("[$`]", "".join(said)):
        return None
    if len(said) == 1:
        return said[0] != ""
    if len(said) == 2 and said[0] in ("-z", "-n"):
        return (said[1] == "") == (said[0] == "-z")
    if len(said) != 3:
        return None
    pattern = _VARIABLE.sub(lambda match: _given(match, known), inner[2])
    return _comparison(said[0], said[1], said[2], pattern if "[[" in words else None)


def _comparison(left: str, sign: str, right: str, pattern: str | None) -> bool | None:
    """What a comparison says; `pattern`: the right side as [[ takes it, where that is asked."""
    if sign in ("=", "==", "!="):
        same = left == right if pattern is None else _matches(left, pattern)
        return None if same is None else same == (sign != "!=")
    try:
        return _NUMBERS[sign](int(left), int(right))
    except (KeyError, ValueError):
        return None


def _known(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if "$" not in value}


def _given(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """A variable's value; nothing where it has none."""
    found = _value(match, variables)
    return "" if found == match[0] else found


def _known_text(word: str, variables: Mapping[str, str]) -> str | None:
    """What a word that is not split stands for, as that of `case`; None: nobody knows."""
    text = computed(substituted(unquoted(word), _known(variables)), variables)
    return None if "$" in text or "`" in text else text


def _matches(text: str, pattern: str) -> bool | None:
    """Whether a pattern of `case` is this text's; None: it has more than *, ?, [...] and quotes."""
    if _NO_PATTERN.search(pattern):
        return None
    plain = _QUOTE.sub(lambda match: glob.escape(_bare(match)), pattern.replace("[^", "[!"))
    return fnmatch.fnmatchcase(text, plain)


def unquoted(word: str) -> str:
    """A word without its quotes and backslashes (POSIX.1-2024, Shell Command Language, 2.2)."""
    return _QUOTE.sub(_bare, word)


def _bare(match: re.Match[str]) -> str:
    piece = match[0]
    if piece.startswith("\\"):
        return piece[1:]
    if piece.startswith("'"):
        return piece[1:-1].replace("\\\n", " ")
    return re.sub(r'\\(?:\n|([$`"\\]))', r"\1", piece[1:-1])


def expanded(word: str, variables: Mapping[str, str], unknown: list[str]) -> list[str]:
    """One word of a command as the program gets it: none, one or several. What the script does
    not say of it is added to `unknown`."""
    if re.fullmatch("'[^']*'", word):
        return [word[1:-1]]
    whole = _VARIABLE.fullmatch(word.strip('"'))
    if whole and word.startswith('"') and "[" not in word:  # quotes in its value are its own
        value = _value(whole, variables)
        if "$" not in value and "`" not in value:
            return [value]
    text = elements(word)
    for _ in range(DEEPEST):
        new = substituted(text, variables)
        if new == text or len(new) > LONGEST:
            break
        text = new
    text = computed(text, variables)
    unknown += [match[0] for match in _UNKNOWN.finditer(text)]
    unknown += _SHELLS_OWN.findall(_QUOTE.sub("", text))
    if whole or "$" in word:
        try:
            return shlex.split(text)
        except ValueError:
            return [text]
    return [unquoted(text)]


def elements(text: str) -> str:
    """The text with arrays whose elements are wanted out of their quotes: each has its own."""
    return _ALL_OF_ARRAY.sub(r"\1", text)


def substituted(text: str, variables: Mapping[str, str]) -> str:
    """The text with every variable that is known replaced, once."""
    return _VARIABLE.sub(lambda match: _value(match, variables), text)


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name = match[1] or match[2]
    if match[3] is not None and not variables.get(name):
        return unquoted(match[3])
    return variables.get(name, match[0])


def computed(text: str, variables: Mapping[str, str]) -> str:
    """The text with each $((...)) of whole numbers worked out."""
    return _ARITHMETIC.sub(lambda match: arithmetic(match[1], variables) or match[0], text)


def _joined(first: bool | None, operator: str, second: bool | None) -> bool | None:
    """`first && second` or `first || second` of what may be unknown."""
    stops = operator == "||"
    if stops in (first, second):
        return stops
    return None if None in (first, second) else not stops


@dataclass
class _Branch:
    """An `if`, a loop, a `case` or a { whose end has not come.

    Args:
        now: whether the branch that is being read is taken; None: nobody knows, so it is read.
        done: one of them was.
        condition: as it is written.
        why: what of its conditions the script alone does not say; "": nothing.
        text: of `case`; None: nobody knows it.
        patterns: of the arm of `case` that begins; None: none does.
        line: of {: the commands before && or ||, itself one of them.
    """

    now: bool | None = None
    done: bool = False
    condition: str = ""
    why: str = ""
    text: str | None = None
    patterns: list[str] | None = None
    line: _Branch | None = None

    def ask(self, operator: str, words: Sequence[str], variables: Mapping[str, str]) -> None:
        """One more command of the condition, behind `operator`; "": the first."""
        found = _decided(words, variables)
        if operator:
            found = _joined(self.now, operator, found)
        self.condition = f"{self.condition} {operator} {' '.join(words)}".strip()
        self.now = False if self.done else found
        names = [name for flag, name in itertools.pairwise(words) if flag == "-v"]
        if self.done:
            return
        if found is None:
            self.why = f"`{self.condition}`: {_READ}"
        else:
            self._assume("true" if found else "false", words, names, variables)

    def _assume(
        self,
        taken: str,
        words: Sequence[str],
        names: Sequence[str],
        variables: Mapping[str, str],
    ) -> None:
        """Note the variables that nobody gave; `names` are some more of these words."""
        every = [match[1] or match[2] for match in _VARIABLE.finditer(" ".join(words))]
        unset = [name for name in (*every, *names) if name not in variables]
        if unset:
            said = ", ".join(dict.fromkeys(unset))
            self.why = f"`{self.condition}`: {taken} here, for nothing in the file sets {said}"

    def begin_case(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        """`case WORD in`, and perhaps its first pattern."""
        self.condition = " ".join(words[:3])
        self.text = _known_text("".join(words[1:2]), variables)
        self.patterns = list(words[3:])
        if self.text is None:
            self.why = f"`{self.condition}`: {_READ}"
        else:
            self._assume(f"{self.text!r}", words[1:2], (), variables)

    def begin_arm(self) -> None:
        """The patterns of an arm of `case` have been read."""
        said = [
            None if self.text is None else _matches(self.text, pattern)
            for pattern in self.patterns or ()
        ]
        self.done = self.done or self.now is True
        self.now = False if self.done else (None if None in said else any(said))
        if self.now is None:
            self.why = f"`{self.condition}`: {_READ}"
        self.patterns = None


class Branches:
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
        if self._is_pattern(before, words):
            return ()
        while words and self._opened(before, words, variables):
            hidden = self.asking or words[0] == "case"
            words = () if hidden else words[1:]
            before = "\n"
        if not words:
            return ()
        if self.asking:
            if before in ("&&", "||"):
                self.open[-1].ask(before, words, variables)
            return ()
        skipped = self._skipped(before, words, variables)
        if self._sets(words):
            self.notes |= {each.why: None for each in (*self.open, self.line) if each.why}
        if words[0] == "return" and not skipped:
            self._return(before)
        return () if skipped else words

    def in_patterns(self) -> bool:
        """Whether the patterns of an arm of `case` are being read."""
        return bool(self.open) and self.open[-1].patterns is not None

    def _return(self, before: str) -> None:
        """Leave out what is left of the function, where it is sure that it ends here."""
        calls = [at for at, branch in enumerate(self.open) if branch.condition == CALL]
        inner = self.open[calls[-1] :] if calls else []
        stopped = before in ("&&", "||") and self.line.now is None
        for branch in inner if not stopped and all(each.now for each in inner) else ():
            branch.now = False
            branch.done = True

    def _is_pattern(self, before: str, words: Sequence[str]) -> bool:
        """Whether these words belong to the patterns of a `case`, which are decided at their )."""
        branch = self.open[-1] if self.open else _Branch()
        if branch.condition.startswith("case ") and before in _ARMS_END:
            if before != ";;" and branch.now and not self._left_out():
                said = f"`{branch.condition}`: {before}: the arms that it goes on to were not taken"
                self.notes[said] = None
            branch.patterns = []
        if branch.patterns is None or words[:1] == ["esac"]:
            return False
        if before == ")":
            branch.begin_arm()
            return False  # @(a|b) is no pattern that is understood
        branch.patterns += ["$"] if before == "(" and branch.patterns else words
        return True

    def _opened(self, before: str, words: Sequence[str], variables: Mapping[str, str]) -> bool:
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
        elif first == "case":
            self.open.append(_Branch())
            self.open[-1].begin_case(words, variables)
        elif first in OPENS:
            self.open.append(_Branch(why=f"`{' '.join(words)}`: {_READ}"))
            self.asking = True
        elif first in ("then", "do"):
            self.asking = False
        elif first in ("{", "}", CALL) or first.startswith(UNCALLED):
            self._group(before, first)
        else:
            return self._ended(first)
        return True

    def _ended(self, first: str) -> bool:
        """The same of words that end a branch."""
        if first not in ("else", "fi", "done", "esac") or not self.open:
            return False
        branch = self.open[-1]
        if first == "else":
            branch.done = branch.done or branch.now is True
            branch.now = False if branch.done else (True if branch.now is False else None)
            return True
        while self.open.pop().line is not None and self.open:
            pass  # a { of a text that is no command, such as JSON
        return True

    def _group(self, before: str, word: str) -> None:
        """{ and its }: one command, as && and || see it."""
        if word != "}":
            if before not in ("&&", "||"):
                self.line = _Branch(now=True)
            taken: bool | None = None if self.line.now is None else True
            if self.line.now is (before == "||"):
                taken = False
            why = self.line.why
            if word.startswith(UNCALLED):
                why = f"{word[:-1]}: nothing calls it by its name; it was read where it stands"
            self.open.append(_Branch(taken, condition=word, why=why, line=self.line))
        elif self.open and (line := self.open[-1].line) is not None:
            self.open.pop()
            self.line = line

    def _skipped(self, before: str, words: Sequence[str], variables: Mapping[str, str]) -> bool:
        """Whether a command is in a branch that is not taken, or behind && or || that stop."""
        skipped = self._left_out()
        if before not in ("&&", "||"):
            self.line = _Branch()
        elif self.line.now is (before == "||"):
            return True
        if _is_condition(words[0]) or words[0] in _ASKS or _VARIABLE.fullmatch("".join(words)):
            self.line.ask("", words, variables)
        elif before not in ("&&", "||") or self.line.now is False:
            self.line.now = True  # a command is taken to succeed
        return skipped

    def _left_out(self) -> bool:
        return any(branch.now is False for branch in self.open)

    def _sets(self, words: Sequence[str]) -> bool:
        """Whether a command gives a variable its value, or is the one that is looked for."""
        if words[0] in PRINTS:
            return False
        gives = words[0] in (*DECLARES, ":", "let", "return") or ASSIGNMENT.fullmatch(words[0])
        works = words[0].startswith("((") and not _is_condition(words[0])
        return bool(gives) or works or any(self.script in each for each in words)
