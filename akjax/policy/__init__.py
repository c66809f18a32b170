"""From survivals and costs to draft lengths."""

from akjax.policy.batch import batch_draft_length
from akjax.policy.per_request import per_request_draft_lengths

__all__ = ["batch_draft_length", "per_request_draft_lengths"]
