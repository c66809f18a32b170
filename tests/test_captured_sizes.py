"""Captured sizes are found from times alone."""

import numpy as np
import pytest
from bench_accuracy import DecodeSteps, captured_sizes


def steps(sizes: tuple[int, ...]) -> DecodeSteps:
    rng = np.random.default_rng(0)
    requests = np.repeat(np.arange(1, 33), 20)
    context = requests * rng.uniform(3000.0, 5000.0, len(requests))
    padded = np.asarray(sizes)[np.searchsorted(sizes, requests)]
    ms = 3.0 + 0.9 * np.sqrt(padded) + 7e-6 * context
    return DecodeSteps(requests, context, ms * np.exp(0.01 * rng.standard_normal(len(ms))))


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8, 16, 24, 32), (1, 2, 4, 8, 16, 32), (1, 4, 8, 16, 24, 32)])
def test_they_are_found_whichever_batch_size_was_not_seen(sizes: tuple[int, ...]) -> None:
    every = steps(sizes)
    assert captured_sizes(every) == sizes
    found = [captured_sizes(every.where(every.requests != left_out)) for left_out in range(1, 33)]
    # A captured size that was not seen itself is a guess by roundness, which may miss.
    assert sum(each == sizes for each in found) >= 30
