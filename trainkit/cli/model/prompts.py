"""Prompts from a file."""

from __future__ import annotations

import json
from pathlib import Path

from trainkit.base.errors import ConfigError


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: a line is a JSON string, or a JSON object whose key "prompt" holds one.
    Empty lines are ignored.

    Raises ConfigError for the first line that is neither, and for a file without prompts.
    OSError as reading does.
    """
    prompts = []
    try:
        lines = path.read_bytes().decode().split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
        except ValueError:
            prompt = None
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt")
        if not isinstance(prompt, str):
            raise ConfigError(
                f'{path}:{number}: neither a JSON string nor {{"prompt": "..."}}: {line[:60]}',
                hint="plain text to JSON lines: jq -R .",
            )
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} holds no prompt")
    return prompts
