"""What a script sets for a part of itself alone, and what of it only a shell makes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from trainkit.engines.shell_words import ShellCommand, find_command, torchrun_nodes

RUN = "torchrun pretrain_gpt.py"
PROGRAM = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["OUT"], "w") as file:
    json.dump([sys.argv[2:], dict(os.environ)], file)
"""


def read(text: str) -> ShellCommand:
    command = find_command(text, "pretrain_gpt.py")
    assert command is not None
    return command


@pytest.mark.parametrize(
    "text",
    [
        f"A=1; (A=5); {RUN} --a $A",
        f"A=1; (case $A in 1) A=5;; (2) A=6;; esac; A=7); {RUN} --a $A",
        f"(A=b; case $A in a) B=1;; b) B=2;; esac; {RUN} --b $B)",
        f"A=1; A=7 {RUN} --a $A",
        f'A=1; f() {{ {RUN} --a $A "$@"; }}; A=5 f --b $A',
        f"export A=1; f() {{ A=9; }}; A=5 f; {RUN} --a $A",
        f"A=1; A=7 bash -c '{RUN} --a $A'",
        f"{RUN} --a 1 > out --b 2 2>&1 < /dev/null --c a1>>out --d &> out",
        f"A=1; read A <<< 1; {RUN} --b 2 ~no.user=1",
        f"{RUN} --a=\"b c\" --d 'e'\"f\"'g'",
        f'A=\'{{"a": 1, "b": "it\'\\\'\'s"}}\'; {RUN} --a "$A" --b "${{A}}"',
        f'{RUN} --a "b,\\\nc"',
        f"A=b; [[ $A == a* ]] && B=1 || B=2; [[ ! $A != b* ]] && C=1 || C=2; {RUN} $B $C",
        f'A="b*"; [[ bcd == $A ]] && B=1 || B=2; [[ bcd = "$A" ]] && C=1 || C=2; {RUN} $B $C',
        f"A=false; $A && B=1 || B=2; A=true; if $A; then C=1; else C=2; fi; {RUN} $B $C",
        f"A=1; f() {{ A=2; return; A=3; }}; f; {RUN} --a $A",
        f"f() {{ A=$1; if [ $1 = 2 ]; then return; else A=4; fi; A=3; }}; f 2; {RUN} --a $A",
        f"f() {{ A=1; [ $1 = 2 ] && return; A=3; }}; f 3; B=$A; f 2; {RUN} --a $A --b $B",
        f"f() {{ return; }}; g() {{ f; A=3; }}; A=1; g; {RUN} --a $A",
        f"f() {{ {{ A=1; return; }}; A=2; }}; A=3; f; {RUN} --a $A",
        f"A=1; f() {{ B=$A; }}; A=3 f; {RUN} --a $A --b $B",
        f"A=2 bash -c 'A=4 B=1; echo'; A=1; {RUN} --a $A",
        f"A=1; (export A); {RUN} --a $A",
        f"declare -rx A=1; typeset -x B=2; {RUN} --a $A --b $B",
        f"A=9; [[ $A == 1 || $A == 2 || $A == 9* ]] && B=1; [[ 2 = $A ||\n $A = 3 ]] || {RUN} $B",
        f"A=9; B=0; [[ $A -gt 5 && $A -lt 8 ]] && B=1; {RUN} --b $B",
        f"A=1; [ $A = 2 ] || B=1 && C=2; {RUN} --b $B --c $C",
    ],
)
def test_a_scope_ends_where_bash_ends_it(tmp_path: Path, text: str) -> None:
    """bash itself runs the script, with a program that writes down its words."""
    program = tmp_path / "torchrun"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    out = tmp_path / "words.json"
    caller = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(out)}
    subprocess.run(["bash", "-c", text], env=caller, cwd=tmp_path, check=True)
    words, environment = json.loads(out.read_text())
    command = read(text)
    assert command.words == words
    assert command.environment == {name: environment[name] for name in "ABC" if name in environment}
    assert not command.notes and not command.unknown


def test_variables_of_a_launcher_are_the_commands() -> None:
    text = 'declare -x A=1\nA2=4 env B=2 C="x y" torchrun --rdzv_conf timeout=9 pretrain_gpt.py'
    assert read(text).environment == {"A": "1", "A2": "4", "B": "2", "C": "x y"}
    text = "NCCL_DEBUG=INFO srun bash -c 'torchrun pretrain_gpt.py'"
    assert read(text).environment == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    "words", ["srun -N 4 -n 32", "srun -N4 -n32", "srun --nodes=4 --ntasks 32"]
)
def test_nodes_that_srun_is_asked_for_are_the_jobs(words: str) -> None:
    left: list[str] = []
    assert torchrun_nodes(read(f"{words} {RUN}"), left) == {"nodes": 4}
    assert len(left) == 1 and "32: hosts and their ranks stand in" in left[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a7() { A=7; }; a8() { A=8; }; $F", "function a8: nothing calls it by its name"),
        ("f() { if [ -f x ]; then return; fi; A=1; }; f", "`[ -f x ]`: only running it tells"),
        ("command -v nvidia-smi && A=1", "`command -v nvidia-smi`: only running it tells"),
        ("A=1; ! true || A=2", "`! true`: only running it tells"),
        ("[[ 10 > 9 ]] && A=1", "`[[ 10 > 9 ]]`: only running it tells"),
        ("export $(cat .env)", "export $(cat .env): what it names was not read"),
        ("A=1; read -r A < file", "${A[@]}"),
        ("A=1; printf -v A %d 3", "${A[@]}"),
        ("A=~/data", "~/data"),
        ("A=(/d/part_{0..3})", "{0..3}"),
        ("N=08; A=$((10#$N + 1))", "10#08"),
    ],
)
def test_what_only_a_shell_tells_is_said(text: str, said: str) -> None:
    command = read(f"{text}\n{RUN} --a ${{A[@]}}\n")
    assert any(said in line for line in (*command.notes, *command.unknown))
