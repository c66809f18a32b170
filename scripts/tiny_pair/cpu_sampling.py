"""Sampling with speculation on vLLM's CPU build, whose version 0.32.0 gets temperatures wrong.

There `expand_batch_to_tokens` fills a copy of any tensor that is not of 64-bit integers, so that the temperatures which
the logits are divided by are whatever the memory held before.
"""

import torch
from vllm.v1.sample import rejection_sampler


def repair_sampling() -> bool:
    """Puts a correct function in the place of a broken one, in this process; returns whether it was broken.

    To be called after the engine has started, which is when vLLM installs its CPU kernels.
    """
    if _is_right():
        return False
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    return True


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """One value for each request, repeated for each of its tokens.

    Args:
        x: a value for each request.
        cu_num_tokens: tokens of each request and those before it.
        num_tokens: of all requests.
        replace_from: a value that is replaced wherever it stands,
        replace_to: by this one.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts.long(), output_size=num_tokens)


def _is_right() -> bool:
    """Whether vLLM's own does the same, asked twice: memory left over from the first call is wrong for the second."""
    ends = torch.tensor([2, 5], dtype=torch.int32)
    for values in ([0.25, 0.0], [0.0, 7.5]):
        expanded = rejection_sampler.expand_batch_to_tokens(torch.tensor(values), ends, 5, 0, 1)
        first, second = (value or 1.0 for value in values)
        if expanded.tolist() != [first] * 2 + [second] * 3:
            return False
    return True
