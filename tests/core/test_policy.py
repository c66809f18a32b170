"""The choice of k against the oracle and against brute force."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import oracle
from akjax import (
    Constant,
    DiverseTokens,
    ExpertReads,
    PerToken,
    StepFeatures,
    batch_draft_length,
    parse_table,
    per_request_draft_lengths,
    predicted_ms,
    reference_cost,
)

ROWS, DRAFT_LIMIT = 6, 5

choose_batch = jax.jit(batch_draft_length, static_argnames="levels")
choose_per_request = jax.jit(per_request_draft_lengths, static_argnames="least")

# Eighths, so that equal sums of survivals are equal floats and ties are real ties.
RATE = st.integers(0, 8).map(lambda eighths: eighths / 8)
RATES = st.lists(st.lists(RATE, min_size=DRAFT_LIMIT, max_size=DRAFT_LIMIT), min_size=1, max_size=ROWS)
THETA = st.tuples(st.floats(0.5, 60), st.floats(0.0, 2), st.floats(0.0, 2), st.floats(0.05, 2))


def padded(rates: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    survival = np.ones((ROWS, DRAFT_LIMIT))
    survival[: len(rates)] = np.cumprod(rates, axis=1)
    return survival, np.arange(ROWS) < len(rates)


@given(
    rates=RATES,
    theta=THETA,
    levels=st.sets(st.integers(1, DRAFT_LIMIT), min_size=1),
    current=st.integers(1, DRAFT_LIMIT),
    margin=st.sampled_from([0.0, 0.03, 0.2]),
)
def test_the_batchs_k_is_the_oracles(
    rates: list[list[float]], theta: tuple[float, float, float, float], levels: set[int], current: int, margin: float
) -> None:
    base, per_expert, per_token, diversity = theta
    cost = Constant(base) + ExpertReads(per_expert, DiverseTokens(diversity, 64, 6)) + PerToken(per_token)
    known = oracle.CostFilter(oracle.Settings(experts=64, topk=6))
    known.x[:] = (base, per_expert, per_token, diversity)
    survival, decoding = padded(rates)
    chosen = choose_batch(survival, decoding, cost, tuple(sorted(levels)), np.int32(current), margin)
    expected = oracle.choose_batch(list(survival[decoding]), known.predicted, sorted(levels), current, margin)
    if int(chosen) != expected:
        # Another rounding of the same sums may break a tie the other way, and no other difference is allowed.
        assert goodput(cost, survival[decoding], int(chosen)) == pytest.approx(
            goodput(cost, survival[decoding], expected), rel=1e-12
        )


def goodput(cost: object, survival: np.ndarray, k: int) -> float:
    requests = len(survival)
    step = StepFeatures(tokens=jnp.asarray(requests * (k + 1.0)), requests=jnp.asarray(float(requests)))
    return float((requests + survival[:, :k].sum()) / predicted_ms(cost, step))  # pyright: ignore[reportArgumentType]


@given(rates=RATES, theta=THETA)
def test_each_requests_k_is_the_oracles(rates: list[list[float]], theta: tuple[float, float, float, float]) -> None:
    base, per_expert, per_token, diversity = theta
    cost = Constant(base) + ExpertReads(per_expert, DiverseTokens(diversity, 64, 6)) + PerToken(per_token)
    known = oracle.CostFilter(oracle.Settings(experts=64, topk=6))
    known.x[:] = (base, per_expert, per_token, diversity)
    survival, decoding = padded(rates)
    chosen = np.asarray(choose_per_request(survival, decoding, cost))[decoding]
    expected = oracle.choose_per_request(list(survival[decoding]), known.predicted)
    if chosen.tolist() != expected:
        assert budget_goodput(known, survival[decoding], chosen) == pytest.approx(
            budget_goodput(known, survival[decoding], np.asarray(expected)), rel=1e-12
        )


def budget_goodput(known: oracle.CostFilter, survival: np.ndarray, lengths: np.ndarray) -> float:
    tokens = sum(1 + row[:k].sum() for row, k in zip(survival, lengths, strict=True))
    return float(tokens / known.predicted(float((lengths + 1).sum())))


@given(rates=st.lists(st.lists(st.floats(0.05, 0.95), min_size=3, max_size=3), min_size=1, max_size=4))
@settings(max_examples=30)
def test_no_other_lengths_have_more_goodput(rates: list[list[float]]) -> None:
    """All (K+1)**n combinations of lengths, those with 0 drafts included; the walk may only lose by its least of 1."""
    survival = np.cumprod(rates, axis=1)
    known = oracle.CostFilter(oracle.Settings(experts=16, topk=2, model=(5.0, 0.8, 0.4)))
    cost = reference_cost(5.0, 0.8, 0.4, experts=16, top_k=2)
    chosen = np.asarray(choose_per_request(survival, np.ones(len(rates), bool), cost))
    best = max(
        budget_goodput(known, survival, np.asarray(lengths))
        for lengths in itertools.product(range(4), repeat=len(rates))
    )
    unraised = [
        lengths
        for lengths in itertools.product(range(4), repeat=len(rates))
        if budget_goodput(known, survival, np.asarray(lengths)) == pytest.approx(best, rel=1e-12)
    ]
    assert any(np.array_equal(np.maximum(lengths, 1), chosen) for lengths in unraised)


def lengths_by_sorting(survival: np.ndarray, decoding: np.ndarray, ms: np.ndarray, least: int) -> np.ndarray:
    """What each request's k is by its definition: all drafts put in order, and the first best budget of them taken.

    Args:
        survival: of each row.
        decoding: the rows that count.
        ms: of the steps that verify 0, 1, ... drafts.
        least: draft length that every row gets at least.
    """
    requests = int(decoding.sum())
    worth = np.where(decoding[:, None], survival, -1.0).reshape(-1)
    order = np.argsort(-worth, kind="stable")[: requests * survival.shape[1]]
    tokens = requests + np.concatenate([[0.0], np.cumsum(worth[order])])
    budget = int(np.argmax(tokens / ms[: len(tokens)]))
    taken = np.bincount(order[:budget] // survival.shape[1], minlength=len(survival))
    return np.maximum(taken, least)


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (5, 1), (4, 6), (7, 5), (16, 3)])
@pytest.mark.parametrize("least", [0, 1])
@settings(max_examples=40)
@given(data=st.data(), base=st.integers(1, 200), of_draft=st.integers(0, 16), of_step=st.integers(0, 16))
def test_each_requests_k_is_that_of_all_drafts_in_order(
    shape: tuple[int, int], least: int, data: st.DataObject, base: int, of_draft: int, of_step: int
) -> None:
    rates = data.draw(arrays.arrays(np.int8, shape, elements=st.integers(0, 4))) / 4
    decoding = data.draw(arrays.arrays(bool, shape[0]))
    # All of it is exact in binary, so that the same lengths are best here and there, to the last bit and the last tie.
    survival = np.cumprod(rates, axis=1)
    budgets = np.arange(survival.size + 1.0)
    requests = float(decoding.sum())
    ms = np.maximum(base / 4 + of_step / 8 * (requests > 0) + of_draft / 16 * (requests + budgets), 1.0)
    cost = Constant(base / 4 + of_step / 8 * (requests > 0)) + PerToken(of_draft / 16)
    chosen = choose_per_request(survival, decoding, cost, least)
    assert chosen.dtype == np.int32
    assert chosen.tolist() == lengths_by_sorting(survival, decoding, ms, least).tolist()


@given(seed=st.integers(0, 2**32 - 1), decoding=st.integers(0, 64))
@settings(max_examples=40)
def test_of_many_requests_too(seed: int, decoding: int) -> None:
    rng = np.random.default_rng(seed)
    survival = np.cumprod(rng.integers(8, 17, (64, 3)) / 16, axis=1)
    rows = rng.permutation(64) < decoding
    ms = np.maximum(8.0 + (decoding + np.arange(survival.size + 1.0)) / 4, 1.0)
    chosen = choose_per_request(survival, rows, Constant(8.0) + PerToken(0.25))
    assert chosen.tolist() == lengths_by_sorting(survival, rows, ms, 1).tolist()


def test_several_batches_at_once_choose_as_each_would() -> None:
    rng = np.random.default_rng(0)
    survival = np.cumprod(rng.integers(0, 5, (9, 7, 5)) / 4, axis=2)
    decoding = rng.random((9, 7)) < 0.7
    cost = reference_cost(5.0, 0.8, 0.4, experts=16, top_k=2)
    together = jax.vmap(choose_per_request, in_axes=(0, 0, None))(survival, decoding, cost)
    each = [choose_per_request(*batch, cost) for batch in zip(survival, decoding, strict=True)]
    np.testing.assert_array_equal(together, np.stack(each))


def test_drafts_of_rows_that_do_not_decode_are_not_taken_even_where_longer_steps_are_cheaper() -> None:
    decoding = np.asarray([True, False, False])
    lengths = choose_per_request(np.ones((3, 2)), decoding, parse_table("3:100,5:1"))
    assert lengths.tolist() == [2, 1, 1]


def test_costs_that_are_no_numbers_leave_the_least() -> None:
    survival, decoding = np.full((3, 2), 0.5), np.ones(3, bool)
    assert choose_per_request(survival, decoding, Constant(np.nan) + PerToken(1.0)).tolist() == [1, 1, 1]


def test_a_tie_between_levels_goes_to_the_shorter() -> None:
    # 1 + 1 tokens for 20 ms or 1 + 2 tokens for 30 ms.
    chosen = batch_draft_length(np.ones((1, 2)), np.ones(1, bool), parse_table("2:20,3:30"), (1, 2), np.int32(5), 0.0)
    assert int(chosen) == 1


def test_a_gain_of_exactly_the_margin_changes_nothing() -> None:
    # 1 + 0.6 + 0.4 tokens against 1 + 0.6, for the same 16 ms: a gain of a quarter.
    survival = np.asarray([[0.6, 0.4]])
    cost = parse_table("2:16,3:16")
    for margin, expected in ((0.25, 1), (0.2, 2)):
        chosen = batch_draft_length(survival, np.ones(1, bool), cost, (1, 2), np.int32(1), margin)
        assert int(chosen) == expected


def test_without_a_decoding_request_the_current_k_stays_even_if_it_is_no_level() -> None:
    chosen = batch_draft_length(np.ones((2, 4)), np.zeros(2, bool), parse_table("2:20"), (1, 2), np.int32(4), 0.03)
    assert int(chosen) == 4


def test_equal_drafts_go_to_the_earlier_request_then_the_earlier_position() -> None:
    # The second token is free and each further one is dear: one draft is verified, and all four are worth the same.
    cost = parse_table("3:10,4:30,6:100")
    lengths = per_request_draft_lengths(np.ones((2, 2)), np.ones(2, bool), cost)
    assert lengths.tolist() == [1, 1]
    cost = parse_table("4:10,5:100,6:200")
    lengths = per_request_draft_lengths(np.ones((2, 2)), np.ones(2, bool), cost)
    assert lengths.tolist() == [2, 1]
