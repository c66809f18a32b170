"""akjax: how many drafted tokens should the next step verify?"""

from akjax.acceptance import AbstractAcceptanceModel, RunningRates, survival
from akjax.compiled_controller import CompiledController, DraftLengths, DraftOutcome
from akjax.controller import (
    CODE,
    TOOL,
    USUAL,
    Batch,
    CodeMode,
    Controller,
    ControllerState,
    Decision,
    Observations,
    Outcome,
    RequestRows,
)
from akjax.cost import (
    FLOOR_MS,
    AbstractCostModel,
    AbstractExpertUnion,
    Constant,
    CostTable,
    DiverseTokens,
    ExpertReads,
    PerToken,
    Sum,
    dense_cost,
    parse_table,
    predicted_ms,
    reference_cost,
    table_from_points,
)
from akjax.ekf import Belief, Innovation, prior_belief, update
from akjax.features import StepFeatures
from akjax.packing import Layout
from akjax.parameter import Parameter, as_parameter
from akjax.policy import batch_draft_length, per_request_draft_lengths

__all__ = [
    "CODE",
    "FLOOR_MS",
    "TOOL",
    "USUAL",
    "AbstractAcceptanceModel",
    "AbstractCostModel",
    "AbstractExpertUnion",
    "Batch",
    "Belief",
    "CodeMode",
    "CompiledController",
    "Constant",
    "Controller",
    "ControllerState",
    "CostTable",
    "Decision",
    "DiverseTokens",
    "DraftLengths",
    "DraftOutcome",
    "ExpertReads",
    "Innovation",
    "Layout",
    "Observations",
    "Outcome",
    "Parameter",
    "PerToken",
    "RequestRows",
    "RunningRates",
    "StepFeatures",
    "Sum",
    "as_parameter",
    "batch_draft_length",
    "dense_cost",
    "parse_table",
    "per_request_draft_lengths",
    "predicted_ms",
    "prior_belief",
    "reference_cost",
    "survival",
    "table_from_points",
    "update",
]
