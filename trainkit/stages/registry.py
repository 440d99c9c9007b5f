"""The stages of this version, in the order in which a job needs them."""

from __future__ import annotations

from trainkit.stages.build import BuildStage
from trainkit.stages.contract import Stage
from trainkit.stages.engine_install import EngineInstallStage
from trainkit.stages.engine_prebuild import EnginePrebuildStage
from trainkit.stages.engine_source import EngineSourceStage
from trainkit.stages.index import IndexStage
from trainkit.stages.prep_data import PrepDataStage
from trainkit.stages.weights import WeightsStage

# of engines that are not native; what is wrong with a tree is said before data are prepared
FOREIGN: tuple[Stage, ...] = (EngineSourceStage(), EngineInstallStage(), EnginePrebuildStage())
AFTER_DATA: tuple[Stage, ...] = (IndexStage(), WeightsStage())
STAGES: tuple[Stage, ...] = (BuildStage(), *FOREIGN, PrepDataStage(), *AFTER_DATA)
