"""What ranks print is shown, not obeyed."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.base.printable import printable
from trainkit.cli.inspect.logs import LogTail
from trainkit.cli.run.summary import last_lines
from trainkit.launch.supervise.outcome import RankExit, judge_outcome

TITLE = "\x1b]0;owned\x07\x1b[2Jtext\x9b31m"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2Jtext\\x9b31m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (TITLE, SHOWN),
        ("a\tb\nc\r\n", "a\tb\nc\n"),
        ("\x1b[1;32mgreen\x1b[0m", "green"),
        ("\x00\x7f\r", "\\x00\\x7f\\x0d"),
        ("é漢", "é漢"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_logs_and_causes_are_printable(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text(TITLE + "\n")
    assert last_lines(log, 3) == [SHOWN]
    assert (
        LogTail(log, "").last(3, unfinished=True) == [SHOWN]
        and LogTail(log, "").new(unfinished=True) == SHOWN + "\n"
        and LogTail(log, "[0] ").new(unfinished=True) == f"[0] {SHOWN}\n"
    )
    cause = (
        judge_outcome(
            [RankExit(0, "h", 9, 1.0, False, error={"message": TITLE, "type": TITLE, "exit": 9})],
            1,
            None,
        ).root_cause
        or {}
    )
    assert cause["message"] == cause["type"] == SHOWN
