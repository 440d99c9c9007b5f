"""Documents of many kinds, the same on every machine. Standard library only: interpreters of peers
read this too."""

from __future__ import annotations

import random
from collections.abc import Callable

_COMMON_WORDS = (
    "the of and to in a is that it was for on are as with his they be at one have this from "
    "or had by but some what there we can out other were all your when up use word how said "
    "an each she which do their time if will way about many then them would write like so "
    "these her long make thing see him two has look more day could go come did my sound no "
    "most number who over know water than call first people may down side been now find any "
    "new work part take get place made live where after back little only round man year came "
    "show every good me give our under name very through just form much great think say help "
    "low line before turn cause same mean differ move right boy old too does tell sentence "
    "set three want air well also play small end put home read hand port large spell add even "
    "land here must big high such follow act why ask men change went light kind off need "
    "house picture try us again animal point mother world near build self earth father head "
    "stand own page should country found answer school grow study still learn plant cover "
    "food sun four thought let keep eye never last door between city tree cross since hard "
    "start might story saw far sea draw left late run while press close night real life few "
    "stop open seem together next white children begin got walk example ease paper often "
    "always music those both mark book letter until mile river car feet care second group "
    "carry took rain eat room friend began idea fish mountain north once base hear horse cut "
    "sure watch color face wood main enough plain girl usual young ready above ever red list "
    "though feel talk bird soon body dog family direct pose leave song measure state product "
    "black short numeral class wind question happen complete ship area half rock order fire "
    "south problem piece told knew pass farm top whole king size heard best hour better true "
    "during hundred am remember step early hold west ground interest reach fast five sing "
    "listen six table travel less morning ten simple several vowel toward war lay against "
    "pattern slow center love person money serve appear road map science rule govern pull "
    "cold notice voice fall power town fine certain fly unit lead cry dark machine note wait "
    "plan figure star box noun field rest correct able pound done beauty drive stood contain "
    "front teach week final gave green quick develop sleep warm free minute strong special "
    "mind behind clear tail produce fact street inch lot nothing course stay wheel full force "
    "blue object decide surface deep moon island foot yet busy test record boat common gold "
    "possible plane age dry wonder laugh thousand ago ran check game shape yes hot miss "
    "brought heat snow bed bring sit perhaps fill east weight language"
)
COMMON = _COMMON_WORDS.split(" ")
_ODD_WORDS = (
    "don't cannot gonna I'm we'll they've y'all o'clock U.S.A. e.g. i.e. Mr. Ph.D. vs. a.m. "
    "10am 10km 5kg $5.00 €12 3.14% 1,000 20-30 well-known and/or w/o C++ :-) :) ;) <3 (c) [1] "
    "[edit] http://example.com/a?b=c www.example.org user@example.com #tag @name "
    "path/to/file.py x=y a*b “quoted” ‘single’ «French» … ... -- — – • naïve café Ångström "
    "straße ﬁne ½ ² № ™ © 😀 👍🏽 日本語 你好。 привет Ελλάς ΣΊΣΥΦΟΣ שלום مرحبا नमस्ते "
    "한국어 ٣٫١٤ Kelvin ſ İstanbul e\u0301 a\u200bb"
)
ODD = _ODD_WORDS.split(" ")
EDGES = (
    "",
    " ",
    "\n",
    "\n\n\n",
    "!",
    "…",
    "word",
    "one two three four",
    "one two three four five",
    "no newline at the end",
    "a\r\nb.\r\n" * 30,
    "x" * 5000,
    "word " * 400,
    "lorem ipsum dolor sit amet. " * 20,
    "😀 😀 😀",
    "line\u2028separator\x85next\x0cpage\x1cfile\n" * 10,
    "שלום עולם " * 60,
    "你好，世界。" * 60,
    "نص عربي طويل؟ " * 60,
    "tab\tand  double  spaces   everywhere \n" * 20,
    "{ code }\n" * 20,
    "- bullet\n" * 60,
    "• point ...\n" * 60,
    "# # # hash " * 60,
)
ENDS = (".", ".", ".", "!", "?", "...", "…", ",", "", ":", '."', ".)", "。", "’.")


def _word(dice: random.Random) -> str:
    word = dice.choice(COMMON) if dice.random() < 0.97 else dice.choice(ODD)
    roll = dice.random()
    if roll < 0.04:
        return word.upper()
    if roll < 0.10:
        return word.capitalize()
    if roll < 0.12:
        return word + dice.choice(",;:")
    if roll < 0.125:
        return f"({word})"
    if roll < 0.13:
        return f'"{word}"'
    if roll < 0.14:
        return str(dice.randrange(10 ** dice.randrange(1, 6)))
    if roll < 0.15:
        return f"{word}-{dice.choice(COMMON)}"
    return word


def _sentence(dice: random.Random) -> str:
    words = " ".join(_word(dice) for _ in range(dice.randrange(3, 22)))
    return words[:1].upper() + words[1:] + dice.choice(ENDS)


def _paragraph(dice: random.Random) -> str:
    return " ".join(_sentence(dice) for _ in range(dice.randrange(1, 7)))


def _article(dice: random.Random) -> str:
    return dice.choice(["\n", "\n\n"]).join(_paragraph(dice) for _ in range(dice.randrange(1, 9)))


def _menu(dice: random.Random) -> str:
    items = [" ".join(_word(dice) for _ in range(dice.randrange(1, 4))) for _ in range(12)]
    return "\n".join(dice.choice(items) for _ in range(dice.randrange(3, 60)))


def _listed(dice: random.Random) -> str:
    mark = dice.choice(["- ", "• ", "* ", "1. "])
    return "\n".join(mark + _sentence(dice) for _ in range(dice.randrange(2, 30)))


def _repeated(dice: random.Random) -> str:
    parts = [_sentence(dice) for _ in range(dice.randrange(1, 6))]
    return dice.choice(["\n", "\n\n", " "]).join(
        dice.choice(parts) for _ in range(dice.randrange(2, 40))
    )


def _notice(dice: random.Random) -> str:
    lines = _article(dice).split("\n")
    notices = (
        *(
            "We use cookies to serve you.",
            "See our Privacy Policy and Terms of Use.",
            "A lorem ipsum text is here.",
        ),
        *(
            "Please enable JavaScript in your browser.",
            "function () { return 1; }",
            "All of it. [12]",
        ),
    )
    for _ in range(dice.randrange(1, 4)):
        lines.insert(dice.randrange(len(lines) + 1), dice.choice(notices))
    return "\n".join(lines)


def _symbols(dice: random.Random) -> str:
    return " ".join(
        dice.choice(["#", "...", "…", "=", "|", "&", "42", _word(dice)])
        for _ in range(dice.randrange(20, 200))
    )


def _windows(dice: random.Random) -> str:
    return _article(dice).replace("\n", "\r\n")


KINDS: tuple[Callable[[random.Random], str], ...] = (
    *(
        _article,
        _article,
        _article,
        _menu,
        _listed,
        _repeated,
        _notice,
        _notice,
        _symbols,
        _windows,
    ),
)


def documents(count: int, seed: int = 1) -> list[str]:
    """So many documents; the first are `EDGES`."""
    dice = random.Random(seed)
    found = list(EDGES)
    while len(found) < count:
        found.append(dice.choice(KINDS)(dice))
    return found[:count]


def near_duplicates(groups: int, seed: int = 2) -> list[str]:
    """Documents of plain words in groups of one to four that differ in some words; shuffled."""
    dice = random.Random(seed)
    vocabulary = [
        "".join(dice.choice("abcdefghijklmnoprstuvw") for _ in range(6)) for _ in range(4000)
    ]
    found = []
    for _ in range(groups):
        words = [dice.choice(vocabulary) for _ in range(dice.randrange(30, 200))]
        found.append(" ".join(words))
        for _ in range(dice.choice([0, 0, 1, 3])):
            copy = list(words)
            for _ in range(dice.choice([0, 1, 2, len(words) // 20, len(words) // 8])):
                copy[dice.randrange(len(copy))] = dice.choice(vocabulary)
            found.append(" ".join(copy))
    dice.shuffle(found)
    return found
