from trainkit.experiment.api import Run as Run
from trainkit.experiment.api import all_runs as all_runs
from trainkit.experiment.api import find_run as find_run
from trainkit.experiment.api import load as load
from trainkit.experiment.api import plan_job as plan_job
from trainkit.experiment.api import prepare as prepare
from trainkit.experiment.api import run as run
from trainkit.experiment.options import ResumeOptions as ResumeOptions
from trainkit.experiment.options import TrainOptions as TrainOptions

__version__: str
_API: dict[str, str]
