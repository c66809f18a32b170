"""Which drafts get accepted."""

from akjax.acceptance.model import AbstractAcceptanceModel, survival
from akjax.acceptance.running_rates import RunningRates

__all__ = ["AbstractAcceptanceModel", "RunningRates", "survival"]
