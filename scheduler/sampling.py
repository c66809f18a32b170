"""Which requests' drafts are accepted for reasons of their own."""

from vllm import SamplingParams

# Of `SamplingParams.extra_args`, which the OpenAI API has as `vllm_xargs`.
TEACHES_POOL = "adaptive_k_teaches_pool"


def is_apart(sampling: SamplingParams | None) -> bool:
    """Whether what becomes of such a request's drafts says nothing of other requests.

    That is so where it says so itself, and where its tokens are not the model's own choice, which no drafter knows of:
    with penalties, biases, words that are forbidden or tokens that alone are allowed.
    """
    if sampling is None:
        return False
    if sampling.extra_args and not sampling.extra_args.get(TEACHES_POOL, True):
        return True
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.bad_words
        or sampling.allowed_token_ids
        or sampling.logit_bias
    )
