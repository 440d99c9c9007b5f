"""The tasks after training: generate."""

from __future__ import annotations

from trainkit.base.forms import document
from trainkit.cli.jobs import load_jobs
from trainkit.cli.wrapper import Answer, Talk
from trainkit.runs.record import find_run


def generate(talk: Talk, words: str, prompt: str, max_new_tokens: int, temperature: float, top_k: int, seed: int) -> Answer:
    """The task `generate`."""
    from trainkit.train.generate import generate as write

    run = find_run(load_jobs(talk).roots(), words)
    text = prompt + write(run, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed)
    if not talk.json:
        talk.say(text)
    return Answer(document("generate/1", run=run.id, prompt=prompt, text=text))
