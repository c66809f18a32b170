"""A world with true costs and acceptance, to measure how well draft lengths are chosen."""

from akjax.simulate.policies import AbstractSimPolicy, Controlled, FixedLength, LengthByBatch, Oracle, stacked
from akjax.simulate.run import Result, Totals, Trace, simulate
from akjax.simulate.scenario import Scenario, all_tokens
from akjax.simulate.text import Drafter, Text
from akjax.simulate.times import StepTimes
from akjax.simulate.traffic import AbstractTraffic, ClosedLoop, Lengths, OpenLoop, poisson_traffic
from akjax.simulate.tuning import steady_scores, tune_by_batch
from akjax.simulate.windows import Windows
from akjax.simulate.world import StepRecord, Truth, View

__all__ = [
    "AbstractSimPolicy",
    "AbstractTraffic",
    "ClosedLoop",
    "Controlled",
    "Drafter",
    "FixedLength",
    "LengthByBatch",
    "Lengths",
    "OpenLoop",
    "Oracle",
    "Result",
    "Scenario",
    "StepRecord",
    "StepTimes",
    "Text",
    "Totals",
    "Trace",
    "Truth",
    "View",
    "Windows",
    "all_tokens",
    "poisson_traffic",
    "simulate",
    "stacked",
    "steady_scores",
    "tune_by_batch",
]
