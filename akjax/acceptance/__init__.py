"""Which drafts get accepted."""

from akjax.acceptance.logit_filter import LogitFilter, PoolLogits, RequestLead
from akjax.acceptance.model import AbstractAcceptanceModel, DraftForecast, Verified, survival
from akjax.acceptance.running_rates import RunningRates

__all__ = [
    "AbstractAcceptanceModel",
    "DraftForecast",
    "LogitFilter",
    "PoolLogits",
    "RequestLead",
    "RunningRates",
    "Verified",
    "survival",
]
