"""From measured steps to fitted models."""

from .cost import CostFit, fit_cost

__all__ = ["CostFit", "fit_cost"]
