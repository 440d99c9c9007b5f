"""An engine's own parser, asked in a rehearsal what it says of the arguments of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.engines.contract import Command
from trainkit.jobs.schema import Job

PARSED = "trainkit: parsed"
CHECKED = "trainkit: checked"
REFUSED = "trainkit: refused "
# Beginning of a program of the engine's interpreter, in its tree. What an engine asserts is its own
# refusal; any other error is of the place: a package or a GPU that is missing here.
REFUSAL = f"""
import json, sys, traceback
sys.path.insert(0, ".")

def refused(error):
    frame = traceback.extract_tb(error.__traceback__)[-1]
    print({REFUSED!r} + json.dumps(str(error) or frame.line), flush=True)
"""


@dataclass(frozen=True)
class OwnParser:
    """One engine's.

    Args:
        program: what its interpreter runs, in its tree: it prints PARSED, CHECKED or REFUSED.
        words: what the program is given of a job and its command; it may write into the folder.
        takes: the sentence for arguments that it takes, with {words} for their number.
        set_by: names of its options and the keys of jobs.toml that say them.
    """

    program: str
    words: Callable[[Job, Command, Path], Sequence[str]]
    takes: str
    set_by: Mapping[str, str]
