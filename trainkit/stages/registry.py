"""The stages of this version, in the order in which a job needs them."""

from __future__ import annotations

from trainkit.stages.build import BuildStage
from trainkit.stages.contract import Stage
from trainkit.stages.index import IndexStage
from trainkit.stages.prep_data import PrepDataStage
from trainkit.stages.weights import WeightsStage

AFTER_DATA: tuple[Stage, ...] = (IndexStage(), WeightsStage())
STAGES: tuple[Stage, ...] = (BuildStage(), PrepDataStage(), *AFTER_DATA)
