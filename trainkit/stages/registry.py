"""The stages of this version, in the order in which a job needs them."""

from __future__ import annotations

from trainkit.data.fetch.retry import FetchRetryPolicy
from trainkit.stages.build import BuildStage
from trainkit.stages.build_container import BuildContainerStage
from trainkit.stages.contract import Stage
from trainkit.stages.engine_install import EngineInstallStage
from trainkit.stages.engine_prebuild import EnginePrebuildStage
from trainkit.stages.engine_source import EngineSourceStage
from trainkit.stages.index import IndexStage
from trainkit.stages.precompile import PrecompileStage
from trainkit.stages.prep_data import PrepDataStage
from trainkit.stages.weights import WeightsStage

# of engines that are not native; what is wrong with a tree is said before data are prepared
FOREIGN: tuple[Stage, ...] = (EngineSourceStage(), EngineInstallStage(), EnginePrebuildStage())
# with servers, under a dry run
ONCE = FetchRetryPolicy(attempts=1, timeout=10.0)
AFTER_DATA: tuple[Stage, ...] = (IndexStage(), WeightsStage())
# for a run alone: `prep-data` of a job prepares what it reads
LAST: tuple[Stage, ...] = (PrecompileStage(),)
# where you type, on no node: what they need is there, and may be nowhere else
HERE_FIRST: tuple[Stage, ...] = (BuildStage(), BuildContainerStage())
STAGES: tuple[Stage, ...] = (*HERE_FIRST, *FOREIGN, PrepDataStage(), *AFTER_DATA, *LAST)


def stages_asked_once() -> tuple[Stage, ...]:
    """The same for a dry run: a server that does not answer is not asked again and again."""
    return (*HERE_FIRST, *FOREIGN, PrepDataStage(ONCE), *AFTER_DATA, *LAST)
