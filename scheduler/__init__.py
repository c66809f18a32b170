"""The vLLM side: `--scheduler-cls akjax.scheduler.AdaptiveKScheduler`."""

from .adaptive_k import AdaptiveKScheduler

__all__ = ["AdaptiveKScheduler"]
