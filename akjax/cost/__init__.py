"""What a step costs, in milliseconds."""

from akjax.cost.experts import AbstractExpertUnion, DiverseTokens, ExpertReads
from akjax.cost.linear import Constant, PerToken
from akjax.cost.model import FLOOR_MS, AbstractCostModel, Sum, predicted_ms
from akjax.cost.reference import dense_cost, reference_cost
from akjax.cost.table import CostTable, parse_table, table_from_points

__all__ = [
    "FLOOR_MS",
    "AbstractCostModel",
    "AbstractExpertUnion",
    "Constant",
    "CostTable",
    "DiverseTokens",
    "ExpertReads",
    "PerToken",
    "Sum",
    "dense_cost",
    "parse_table",
    "predicted_ms",
    "reference_cost",
    "table_from_points",
]
