"""Drafters for which no draft length can be chosen."""

from collections.abc import Sequence

from vllm.config import VllmConfig

# Those of vLLM's first model runner that end the engine's process where they are asked for another number than K.
RIGID = ("medusa", "suffix", "ngram_gpu", "extract_hidden_states")


def is_rigid(vllm_config: VllmConfig) -> bool:
    """Whether the engine's drafter gives K drafts or ends the engine; one that chooses a length needs none such."""
    speculation = vllm_config.speculative_config
    return speculation is not None and speculation.method in RIGID and not vllm_config.use_v2_model_runner


def check_drafter(vllm_config: VllmConfig, levels: Sequence[int], draft_limit: int, *, per_request: bool) -> None:
    """Makes sure that the draft lengths may be chosen.

    Args:
        vllm_config: of the engine.
        levels: the draft lengths that there are.
        draft_limit: K.
        per_request: whether requests get lengths of their own.

    Raises:
        ValueError: vLLM itself trims drafts as it goes, or its drafter can make no other number than K.
    """
    speculation = vllm_config.speculative_config
    if speculation is None:
        return
    # A setting of vLLM 0.32 that older ones do not have.
    if vars(speculation).get("enable_adaptive_verification", False):
        raise ValueError(
            "enable_adaptive_verification has vLLM choose how many drafts it verifies, and AdaptiveKScheduler does so"
            " too; leave one out"
        )
    if not is_rigid(vllm_config):
        return
    unable = f"vLLM's {speculation.method} drafter makes {draft_limit} drafts and no other number, but"
    if tuple(levels) != (draft_limit,):
        lengths = ", ".join(map(str, levels))
        raise ValueError(f"{unable} num_speculative_tokens_per_batch_size has {lengths}; leave it out")
    if per_request:
        raise ValueError(f"{unable} PER_REQUEST=1 has each request get a number of its own; leave it out")
