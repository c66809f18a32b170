"""From survivals and costs to draft lengths."""

from akjax.policy.batch import batch_draft_length
from akjax.policy.model import AbstractPolicy, Decision, Prospect
from akjax.policy.per_request import per_request_draft_lengths
from akjax.policy.reference import ReferencePolicy
from akjax.policy.steady import SteadyMemory, SteadyPolicy

__all__ = [
    "AbstractPolicy",
    "Decision",
    "Prospect",
    "ReferencePolicy",
    "SteadyMemory",
    "SteadyPolicy",
    "batch_draft_length",
    "per_request_draft_lengths",
]
