"""Which draft lengths may be chosen."""

from collections.abc import Sequence


def levels_of_schedule(
    lookup: Sequence[int] | None, schedule: Sequence[tuple[int, int, int]] | None, draft_limit: int
) -> tuple[int, ...]:
    """The distinct draft lengths of vLLM's dynamic schedule, ascending, 0 among them if it has one; else only K.

    Args:
        lookup: the schedule as vLLM's scheduler holds it: the draft length at each batch size, index 0 unused.
        schedule: the same as the operator wrote it: (first batch size, last batch size, draft length).
        draft_limit: K, `num_speculative_tokens`.

    Raises:
        ValueError: a draft length above K, which vLLM would lower without a word, or none above 0.
    """
    for first, last, length in schedule or ():
        if length > draft_limit:
            raise ValueError(
                f"num_speculative_tokens_per_batch_size: {length} drafts for batch sizes {first} to {last}, but"
                f" num_speculative_tokens is {draft_limit}; lower the one or raise the other"
            )
    if lookup is None:
        return (draft_limit,)
    levels = tuple(sorted({*lookup[1:]}))
    if levels[-1] == 0:
        raise ValueError(
            "num_speculative_tokens_per_batch_size: every draft length is 0, so there is none to choose;"
            f" give batch sizes draft lengths from 1 to {draft_limit}"
        )
    return levels


def out_of_reach(levels: Sequence[int], schedule: Sequence[tuple[int, int, int]] | None) -> tuple[int, ...]:
    """The draft lengths that the operator wrote and that are no levels, ascending: those of batches that cannot be."""
    return tuple(sorted({length for _, _, length in schedule or ()} - {*levels}))
