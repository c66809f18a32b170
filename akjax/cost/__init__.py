"""What a step costs, in milliseconds."""

from akjax.cost.experts import (
    AbstractExpertUnion,
    DispersedPower,
    DispersedTokens,
    DiverseTokens,
    ExpertReads,
    IndependentTokens,
    PowerTokens,
    SplitPower,
)
from akjax.cost.levels import ByDraftLength
from akjax.cost.linear import Constant, PerToken
from akjax.cost.model import FLOOR_MS, AbstractCostModel, Sum, predicted_ms
from akjax.cost.padded import Padded, Unfilled
from akjax.cost.paths import OwnPath
from akjax.cost.reference import dense_cost, reference_cost
from akjax.cost.residual import Residual, small_network
from akjax.cost.roofline import Roofline, smooth_maximum
from akjax.cost.serving import UNEVEN, serving_cost
from akjax.cost.table import CostTable, parse_table, table_from_points
from akjax.cost.work import Context, Drafting, PerRequest, Prefill

__all__ = [
    "FLOOR_MS",
    "UNEVEN",
    "AbstractCostModel",
    "AbstractExpertUnion",
    "ByDraftLength",
    "Constant",
    "Context",
    "CostTable",
    "DispersedPower",
    "DispersedTokens",
    "DiverseTokens",
    "Drafting",
    "ExpertReads",
    "IndependentTokens",
    "OwnPath",
    "Padded",
    "PerRequest",
    "PerToken",
    "PowerTokens",
    "Prefill",
    "Residual",
    "Roofline",
    "SplitPower",
    "Sum",
    "Unfilled",
    "dense_cost",
    "parse_table",
    "predicted_ms",
    "reference_cost",
    "serving_cost",
    "small_network",
    "smooth_maximum",
    "table_from_points",
]
