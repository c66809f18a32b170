"""The steady policy: hand-computed steps of three requests, its hysteresis, its looks, and an oracle."""

import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest
from jaxtyping import Array
from scipy.stats import norm

from akjax import FixedCost, SteadyPolicy, dense_cost, table_from_points
from akjax.acceptance import DraftForecast
from akjax.cost import OwnPath
from akjax.cost.model import AbstractCostModel
from akjax.learner import CostForecast, CostState
from akjax.learner.model import AbstractCostLearner
from akjax.policy import Prospect
from akjax.policy.steady import NO_ARM, SteadyMemory

K = 2
choose = jax.jit(SteadyPolicy.choose)


def prospect(
    survival: Sequence[Sequence[float]],
    cost: AbstractCostModel,
    *,
    upside: float = 0.0,
    afresh: Sequence[float] | None = None,
    changed: float = 0.0,
    learner: AbstractCostLearner | None = None,
    state: CostState | None = None,
) -> Prospect:
    """Requests with these survivals, and one row of padding whose numbers must not matter."""
    rows = len(survival)
    alive = np.vstack([np.asarray(survival, np.float64).reshape(rows, K), np.ones((1, K))])
    fresh = alive[-1] if afresh is None else np.asarray(afresh, np.float64)
    learner = FixedCost() if learner is None else learner
    return Prospect(
        drafts=DraftForecast(
            survival=alive,
            upside=np.full_like(alive, upside),
            afresh=fresh,
            changed=np.append(np.full(rows, changed), 1.0),
        ),
        decoding=np.arange(rows + 1) < rows,
        context=np.float64(0),
        learner=learner,
        cost=learner.init(cost) if state is None else state,
    )


# ms of 3, 6 and 9 tokens: three requests at k = 0, 1, 2.
COST = table_from_points([(3.0, 10.0), (6.0, 12.0), (9.0, 15.0)])
THREE = [[0.8, 0.4], [0.5, 0.1], [0.5, 0.3]]


def run(policy: SteadyPolicy, memory: SteadyMemory, prospects: Sequence[Prospect]) -> tuple[SteadyMemory, list[int]]:
    lengths = []
    for each in prospects:
        memory, decision = choose(policy, memory, each)
        lengths.append(int(decision.draft_length))
    return memory, lengths


def test_the_first_choice_of_three_requests_is_the_level_of_most_goodput() -> None:
    # k = 0: 3 tokens in 10 ms, 0.3. k = 1: 3 + 0.8 + 0.5 + 0.5 in 12, 0.4. k = 2: 4.8 + 0.8 in 15, 0.3733.
    policy = SteadyPolicy(levels=(0, 1, 2))
    memory, lengths = run(policy, policy.init(K), [prospect(THREE, COST)])
    assert lengths == [1]
    np.testing.assert_allclose(
        np.asarray(memory.work), np.minimum(np.log(0.4) - np.log([0.3, 0.4, 5.6 / 15]), 0.3), rtol=1e-12
    )


def test_before_the_first_choice_and_without_requests_k_is_the_deepest_level() -> None:
    policy = SteadyPolicy(levels=(0, 2))
    memory, decision = choose(policy, policy.init(K), prospect([], COST))
    assert int(decision.draft_length) == 2
    assert int(memory.arm) == NO_ARM


def test_worthless_drafts_are_not_verified() -> None:
    policy = SteadyPolicy(levels=(0, 1, 2))
    _, lengths = run(policy, policy.init(K), [prospect([[0.1, 0.0]] * 3, COST)])
    assert lengths == [0]


def test_k_moves_when_what_staying_lost_is_the_price_of_a_move() -> None:
    policy = SteadyPolicy(levels=(1, 2), switch_steps=0.3)
    memory, _ = run(policy, policy.init(K), [prospect(THREE, COST)])
    # Now k = 1 gives (3 + 1.8) / 12 = 0.4 and k = 2 (4.8 + 1.8) / 15 = 0.44: 9.53% more in logarithms. The first
    # choice left k = 2 a debt of ln(0.4 / 0.37333) = 6.90%, so the losses of k = 1 exceed those of k = 2 by
    # 2.63%, 12.2%, 21.7%, 31.2% after one to four steps, and 30% is the price.
    better = prospect([[0.6, 0.6]] * 3, COST)
    _, lengths = run(policy, memory, [better] * 5)
    assert lengths == [1, 1, 1, 2, 2]


def test_gains_that_do_not_last_move_nothing() -> None:
    policy = SteadyPolicy(levels=(1, 2))
    memory, _ = run(policy, policy.init(K), [prospect(THREE, COST)])
    # k = 2 gives 0.44 and 0.36 against the 0.4 of k = 1, so it gains 9.5% and loses 10.5% in turn.
    better, worse = prospect([[0.6, 0.6]] * 3, COST), prospect([[0.6, 0.2]] * 3, COST)
    _, lengths = run(policy, memory, [better, worse] * 30)
    assert lengths == [1] * 60


def test_no_request_changes_nothing() -> None:
    policy = SteadyPolicy(levels=(1, 2))
    memory, _ = run(policy, policy.init(K), [prospect(THREE, COST)])
    after, decision = choose(policy, memory, prospect([], COST))
    assert int(decision.draft_length) == 1
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(memory), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize(("factor", "own"), [(1.0, True), (1.05, True), (1.2, False)])
def test_lengths_of_their_own_pay_only_beyond_what_uneven_steps_cost(factor: float, own: bool) -> None:
    # One request whose drafts are sure, one whose are worthless. For both: k = 0 is 2 tokens in 8 ms, k = 1 is
    # 3 in 12, k = 2 is 4 in 16: 0.25 each. Of their own, 2 and 0: 4 tokens in 12 ms, 0.333.
    cost = OwnPath(table_from_points([(2.0, 8.0), (4.0, 12.0), (6.0, 16.0)]), factor * 1.25, "uneven")
    policy = SteadyPolicy(levels=(0, 1, 2), per_request=True)
    _, decision = choose(policy, policy.init(K), prospect([[1.0, 1.0], [0.0, 0.0]], cost))
    each = np.asarray(decision.per_request)[:2].tolist()
    assert each == ([2, 0] if own else [int(decision.draft_length)] * 2)
    assert (int(decision.draft_length) == 2) or not own


def test_without_drafts_the_chance_that_all_has_changed_makes_it_look() -> None:
    policy = SteadyPolicy(levels=(0, 1), look_steps=4, change_steps=32.0)
    hopeless = [[0.0, 0.0]]
    cost = table_from_points([(1.0, 10.0), (2.0, 12.0)])
    memory, lengths = run(policy, policy.init(K), [prospect(hopeless, cost)])
    assert lengths == [0]
    # k = 1 loses ln(12 / 10) = 0.18232; if all is as it was at first, it gains ln(1.8 / 12 * 10) = 0.40547. A look of
    # 4 steps serves for 32, so it pays from a chance of 0.18232 / (8 * 0.40547) = 5.62% on.
    for changed, looks in ((0.056, False), (0.0563, True)):
        many = [prospect(hopeless, cost, afresh=(0.8, 0.64), changed=changed)] * 5000
        after = memory
        for each in many:
            after, decision = choose(policy, after, each)
            if int(decision.draft_length):
                break
        assert (int(decision.draft_length) == 1) is looks


def test_a_look_takes_its_steps_and_then_ends_at_once() -> None:
    policy = SteadyPolicy(levels=(0, 1), look_steps=4, change_steps=32.0)
    cost = table_from_points([(1.0, 10.0), (2.0, 12.0)])
    quiet = prospect([[0.0, 0.0]], cost)
    memory, _ = run(policy, policy.init(K), [quiet])
    tempting = prospect([[0.0, 0.0]], cost, afresh=(0.8, 0.64), changed=0.5)
    memory, lengths = run(policy, memory, [tempting])
    assert lengths == [1]
    _, lengths = run(policy, memory, [quiet] * 6)
    assert lengths == [1, 1, 1, 0, 0, 0]


class Doubtful(AbstractCostLearner):
    """A learner whose forecast is given."""

    log_ms: np.ndarray
    covariance: np.ndarray

    @property
    def learns(self) -> bool:
        return False

    @property
    def expects_exact_times(self) -> bool:
        return False

    def admits(self, step: object) -> bool:
        return False

    def init(self, cost: AbstractCostModel) -> CostState:
        return FixedCost().init(cost)

    def learn(self, state: CostState, step: object, ms: object, teaches: object) -> CostState:
        return state

    def is_sound(self, state: CostState) -> Array:
        return FixedCost().is_sound(state)

    def forecast(self, state: CostState, steps: object) -> CostForecast:
        return CostForecast(self.log_ms, self.covariance)


class Oracle:
    """The rule in NumPy, for levels alone."""

    def __init__(self, policy: SteadyPolicy) -> None:
        self.policy, self.arm, self.look = policy, NO_ARM, -1
        self.work = np.zeros(len(policy.levels))

    def choose(self, each: Prospect) -> int:
        p, rows = self.policy, np.asarray(each.decoding)
        alive, up = (np.asarray(x)[rows] for x in (each.drafts.survival, each.drafts.upside))
        fresh = np.tile(np.asarray(each.drafts.afresh), (len(alive), 1))
        n, k = float(rows.sum()), np.asarray(p.levels)
        assert isinstance(each.learner, Doubtful)

        def total(values: np.ndarray) -> np.ndarray:
            return np.array([values[:, :length].sum() for length in k])

        expected = n + total(alive)
        second = np.array([(alive[:, :length] * (2 * np.arange(1, length + 1) - 1)).sum() for length in k])
        first = np.array([(alive[:, :length].sum(axis=1) ** 2).sum() for length in k])
        goodput = np.log(expected) - each.learner.log_ms
        covariance, here = each.learner.covariance, self.arm
        of_cost = np.maximum(np.diag(covariance) - covariance[here] ** 2 / covariance[here, here], 0.0)
        of_drafts = np.log1p(total(up) / expected) ** 2

        def gain(variance: np.ndarray, noise: np.ndarray) -> np.ndarray:
            doubt = variance / np.sqrt(variance + noise)
            behind = goodput - goodput.max()
            z = np.maximum(behind / np.maximum(doubt, 1e-9), -30.0)
            return doubt * norm.pdf(z) + behind * norm.cdf(z)

        worth = p.cost_steps * gain(of_cost, np.full(len(k), p.noise**2 / p.look_steps))
        worth += p.draft_steps * gain(of_drafts, (second - first) / expected**2 / p.look_steps + 1e-12)
        risen = np.log(n + total(fresh)) - each.learner.log_ms - goodput.max()
        worth += p.change_steps * float(np.asarray(each.drafts.changed)[rows].max()) * np.maximum(risen, 0.0)
        hopeful = goodput + worth / p.look_steps

        work = self.work + hopeful.max() - hopeful
        work = np.minimum(work, work.min() + p.switch_steps)
        if self.arm == NO_ARM:
            target: int | None = int(hopeful.argmax())
        elif self.look > 0:
            target = None
            self.look -= 1
        elif self.look == 0 and hopeful[self.arm] < hopeful.max():
            target = int(hopeful.argmax())
        else:
            target = int(work.argmin()) if work[self.arm] >= work.min() + p.switch_steps * (1 - 1e-9) else None
            self.look = -1
        if target is not None:
            self.arm = target
            self.look = p.look_steps - 1 if goodput[target] < goodput.max() else -1
        self.work = work - work.min()
        return int(k[self.arm])


@pytest.mark.parametrize("seed", range(6))
def test_any_run_follows_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy = SteadyPolicy(levels=(0, 1, 2))
    oracle, memory = Oracle(policy), policy.init(K)
    seen = set()
    level = rng.uniform(0.05, 0.9, K)
    root = rng.normal(0, 0.05, (3, 3))
    for number in range(120):
        if number % 15 == 0:
            level, root = rng.uniform(0.05, 0.9, K), rng.normal(0, rng.choice([0.01, 0.1]), (3, 3))
        alive = np.cumprod(np.clip(level + rng.normal(0, 0.05, (3, K)), 0.01, 0.99), axis=1)
        each = prospect(
            alive.tolist(),
            COST,
            upside=float(rng.uniform(0, 0.1)),
            afresh=(0.8, 0.64),
            changed=float(rng.uniform(0, 0.02)),
            learner=Doubtful(np.log([10.0, 12.5, 15.5]) + rng.normal(0, 0.01, 3), root @ root.T + 1e-4 * np.eye(3)),
        )
        memory, decision = choose(policy, memory, each)
        chosen = oracle.choose(each)
        assert int(decision.draft_length) == chosen
        np.testing.assert_allclose(np.asarray(memory.work), oracle.work, rtol=1e-9, atol=1e-12)
        seen.add(chosen)
    assert len(seen) > 1


def one_request(gain: float) -> Prospect:
    """Sure drafts of one request: 2 tokens in 10 ms at k = 1, and a log goodput higher by `gain` at k = 2."""
    return prospect([[1.0, 1.0]], table_from_points([(2.0, 10.0), (3.0, 15.0 * np.exp(-gain))]))


def settled(policy: SteadyPolicy, work: Sequence[float], arm: int = 0, look: int = -1) -> SteadyMemory:
    return SteadyMemory(np.int32(arm), np.asarray(work, np.float64), np.int32(look))


# A price of 0.3 is paid by 1 x 0.31, 2 x 0.29, 3 x 0.1 exactly, 5 x 0.07 and 28 x 0.011.
@pytest.mark.parametrize(("gain", "steps"), [(0.31, 1), (0.29, 2), (0.1, 3), (0.07, 5), (0.011, 28)])
def test_a_steady_gain_moves_k_once_it_adds_up_to_the_price(gain: float, steps: int) -> None:
    policy = SteadyPolicy(levels=(1, 2))
    _, lengths = run(policy, settled(policy, [0.0, 0.0]), [one_request(gain)] * (steps + 3))
    assert lengths == [1] * (steps - 1) + [2] * 4


def test_a_long_bad_past_counts_for_no_more_than_the_price_of_a_move() -> None:
    policy = SteadyPolicy(levels=(1, 2))
    memory, lengths = run(policy, settled(policy, [0.0, 0.0]), [one_request(-1.5)] * 200)
    assert set(lengths) == {1}
    np.testing.assert_allclose(np.asarray(memory.work), [0.0, 0.3], rtol=1e-12)
    # From -0.3 to 0.3 in steps of 0.11: after six of them it is at 0.36.
    _, lengths = run(policy, memory, [one_request(0.11)] * 8)
    assert lengths == [1] * 5 + [2] * 3


def test_equal_goodput_never_moves_k() -> None:
    policy = SteadyPolicy(levels=(1, 2))
    for gain in (0.29, 0.1, 1e-3):
        _, lengths = run(policy, settled(policy, [0.0, 0.0]), [one_request(gain), one_request(-gain)] * 20)
        assert lengths == [1] * 40


# 4 tokens in 12 ms times the factor, against 2 tokens in 8 ms: even at 4/3.
@pytest.mark.parametrize(("factor", "own"), [(1.333, True), (1.334, False)])
def test_lengths_of_their_own_are_left_exactly_where_uneven_steps_cost_what_they_gain(factor: float, own: bool) -> None:
    cost = OwnPath(table_from_points([(2.0, 8.0), (4.0, 12.0), (6.0, 18.0)]), factor, "uneven")
    policy = SteadyPolicy(levels=(0, 1, 2), per_request=True)
    memory, decision = choose(policy, policy.init(K), prospect([[1.0, 1.0], [0.0, 0.0]], cost))
    assert int(memory.arm) == (3 if own else 0)
    assert np.asarray(decision.per_request)[:2].tolist() == ([2, 0] if own else [0, 0])


def test_a_request_that_is_left_alone_gets_the_best_level_at_once() -> None:
    cost = OwnPath(table_from_points([(1.0, 7.0), (2.0, 8.0), (3.0, 11.0), (4.0, 12.0), (6.0, 18.0)]), 1.0, "uneven")
    policy = SteadyPolicy(levels=(0, 1, 2), per_request=True)
    two = prospect([[1.0, 1.0], [0.0, 0.0]], cost)
    memory, decision = choose(policy, policy.init(K), two)
    assert int(memory.arm) == 3
    # 1 token in 7 ms, 1.9 in 8, 2 in 11.
    lone = prospect([[0.9, 0.1]], cost)
    drafts = jax.tree.map(lambda one, both: both.at[:1].set(one[:1]), lone.drafts, jax.tree.map(np_to_jax, two.drafts))
    memory, decision = choose(policy, memory, Prospect(drafts, np.arange(3) < 1, lone.context, lone.learner, lone.cost))
    assert int(memory.arm) == 1
    assert int(decision.draft_length) == 1
    assert int(np.asarray(decision.per_request)[0]) == 1


def np_to_jax(leaf: np.ndarray) -> jax.Array:
    return jax.numpy.asarray(leaf)


class OwnOracle:
    """The rule with lengths of their own as the last arm, for a cost without doubt; those lengths by trying all."""

    def __init__(self, policy: SteadyPolicy, ms: Callable[[int, bool], float]) -> None:
        self.policy, self.ms, self.arm = policy, ms, NO_ARM
        self.work = np.zeros(len(policy.levels) + 1)

    def choose(self, alive: np.ndarray) -> list[int]:
        n = len(alive)

        def log_goodput(lengths: Sequence[int], uneven: bool) -> float:
            tokens = n + sum(row[:k].sum() for row, k in zip(alive, lengths, strict=True))
            return float(np.log(tokens / self.ms(n + sum(lengths), uneven)))

        own = max(itertools.product(range(K + 1), repeat=n), key=lambda lengths: log_goodput(lengths, True))
        arms = [*((k,) * n for k in self.policy.levels), own]
        goodput = np.array([log_goodput(k, number == len(arms) - 1) for number, k in enumerate(arms)])
        work = self.work + goodput.max() - goodput
        work = np.minimum(work, work.min() + self.policy.switch_steps)
        if self.arm == NO_ARM:
            self.arm = int(goodput.argmax())
        elif work[self.arm] >= work.min() + self.policy.switch_steps * (1 - 1e-9):
            self.arm = int(work.argmin())
        self.work = work - work.min()
        return list(arms[self.arm])


@pytest.mark.parametrize("seed", range(4))
def test_any_run_with_lengths_of_their_own_follows_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy = SteadyPolicy(levels=(0, 2), per_request=True)
    cost = OwnPath(dense_cost(6.0, 1.1), 1.08, "uneven")
    oracle = OwnOracle(policy, lambda tokens, uneven: (6.0 + 1.1 * tokens) * (1.08 if uneven else 1.0))
    memory, arms = policy.init(K), set()
    level = np.zeros((3, 1))
    for number in range(80):
        if number % 10 == 0:
            level = rng.uniform(0.05, 0.95) + rng.choice([0.0, 0.3]) * rng.normal(0, 1, (3, 1))
        alive = np.cumprod(np.clip(level + rng.normal(0, 0.05, (3, K)), 0.01, 0.99), axis=1)
        memory, decision = choose(policy, memory, prospect(alive.tolist(), cost))
        lengths = oracle.choose(alive)
        assert np.asarray(decision.per_request)[:3].tolist() == lengths
        assert int(decision.draft_length) == max(lengths)
        np.testing.assert_allclose(np.asarray(memory.work), oracle.work, rtol=1e-9, atol=1e-12)
        arms.add(int(memory.arm))
    assert {0, 1} & arms
    assert 2 in arms
