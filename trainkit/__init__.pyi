from trainkit.experiment.api import (
    Run as Run,
    all_runs as all_runs,
    find_run as find_run,
    load as load,
    plan_job as plan_job,
    prepare as prepare,
    run as run,
)
from trainkit.experiment.options import ResumeOptions as ResumeOptions, TrainOptions as TrainOptions

__version__: str
_API: dict[str, str]
