"""What a rank of GPT-NeoX is started with."""

from __future__ import annotations

import json

from trainkit.engines.foreign import spec_name
from trainkit.engines.gpt_neox.arguments import Values, decode
from trainkit.engines.gpt_neox.engine import GptNeox
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder


def rank_words(job: Job, run: RunFolder) -> tuple[Values, Values]:
    """(DeepSpeed's configuration, GPT-NeoX's) as the rank's command line has them."""
    command = GptNeox().command(job, run, 1)
    argv = json.loads(command.files[spec_name(1)])["argv"]
    assert argv[1:3] == ["train.py", "--local_rank=${LOCAL_RANK}"]
    assert [argv[3], argv[5]] == ["--deepspeed_config", "--megatron_config"]
    assert len(argv) == 7
    return decode(argv[4]), decode(argv[6])
