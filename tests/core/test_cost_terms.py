"""Terms beside the reference form's: hand-computed values, gradients, plain-Python oracles, and what is refused."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads

from akjax import (
    AbstractCostModel,
    AbstractExpertUnion,
    ByDraftLength,
    Constant,
    Context,
    CostTable,
    DiverseTokens,
    Drafting,
    ExpertReads,
    IndependentTokens,
    OwnPath,
    Padded,
    PerRequest,
    PerToken,
    PowerTokens,
    Prefill,
    Roofline,
    SplitPower,
    StepFeatures,
    prior_belief,
    serving_cost,
    update,
)

# Steps on every path: a single token, undrafted ones, uneven ones, with and without prompts.
STEPS = StepFeatures(
    tokens=np.asarray([1.0, 2.0, 5.0, 8.0, 13.0, 40.0, 9.0]),
    requests=np.asarray([1.0, 2.0, 1.0, 4.0, 3.0, 8.0, 9.0]),
    drafting=np.asarray([4.0, 1.0, 4.0, 1.0, 6.0, 0.0, 2.0]),
    context=np.asarray([100.0, 3e4, 5e3, 2e5, 0.0, 1e6, 7.0]),
    prefill=np.asarray([0.0, 0.0, 512.0, 0.0, 33.0, 0.0, 0.0]),
    uneven=np.asarray([0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]),
)
LENGTHS = (0, 1, 2, 4, 6)
FACTORS = np.asarray([0.8, 1.0, 1.1, 0.95, 1.2])
VERIFYING = Constant(27.0) + PerToken(0.5)

# Each with its parameters by name, in the order of its leaves.
FORMS: dict[str, tuple[AbstractCostModel, dict[str, float]]] = {
    "drafting": (Drafting(0.8), {"per_draft": 0.8}),
    "context": (Context(3e-5), {"per_kv_token": 3e-5}),
    "prefill": (Prefill(0.1), {"per_prefill_token": 0.1}),
    "per_request": (PerRequest(0.2), {"per_request": 0.2}),
    "one_token": (
        OwnPath(VERIFYING, 1.3, "one_token"),
        {"base": 27.0, "per_token": 0.5, "one_token_factor": 1.3},
    ),
    "undrafted": (
        OwnPath(VERIFYING, 0.7, "undrafted"),
        {"base": 27.0, "per_token": 0.5, "undrafted_factor": 0.7},
    ),
    "uneven": (OwnPath(VERIFYING, 1.2, "uneven"), {"base": 27.0, "per_token": 0.5, "uneven_factor": 1.2}),
    "padded": (Padded(VERIFYING, (1, 2, 4, 8, 16)), {"base": 27.0, "per_token": 0.5}),
    "by_draft_length": (
        ByDraftLength(VERIFYING, FACTORS, LENGTHS),
        {
            "base": 27.0,
            "per_token": 0.5,
            "factor_at_0": 0.8,
            "factor_at_1": 1.0,
            "factor_at_2": 1.1,
            "factor_at_4": 0.95,
            "factor_at_6": 1.2,
        },
    ),
    "one_draft_length": (
        ByDraftLength(VERIFYING, np.asarray([0.9]), (3,)),
        {"base": 27.0, "per_token": 0.5, "factor_at_3": 0.9},
    ),
    "independent": (ExpertReads(0.6, IndependentTokens(128, 6)), {"per_expert": 0.6}),
    "power": (ExpertReads(0.6, PowerTokens(0.8, 128, 6)), {"per_expert": 0.6, "gamma": 0.8}),
    "split_power": (
        ExpertReads(0.6, SplitPower(0.9, 0.8, 128, 6)),
        {"per_expert": 0.6, "gamma_requests": 0.9, "gamma_per_request": 0.8},
    ),
    "roofline": (
        Roofline(Constant(27.0), PerToken(2.0), 0.3),
        {"base": 27.0, "per_token": 2.0, "softness": 0.3},
    ),
    "table": (
        CostTable(np.asarray([8.0, 9.5, 12.0]), (1.0, 4.0, 16.0)),
        {"ms_at_1": 8.0, "ms_at_4": 9.5, "ms_at_16": 12.0},
    ),
    "serving": (
        serving_cost(20.0, 0.5, 0.4, lengths=(0, 2), experts=288, top_k=8, sizes=(1, 2, 4, 8, 16)),
        {
            "base": 20.0,
            "per_expert": 0.5,
            "diversity": 1.0,
            "per_token": 0.4,
            "per_draft": 0.6,
            "factor_at_0": 1.0,
            "factor_at_2": 1.0,
            "one_token_factor": 1.0,
            "per_kv_token": 2e-5,
            "per_prefill_token": 0.1,
        },
    ),
}
EVERY_FORM = pytest.mark.parametrize("model", [model for model, _ in FORMS.values()], ids=FORMS)

UNIONS: list[Callable[[int, int], AbstractExpertUnion]] = [
    IndependentTokens,
    lambda experts, top_k: DiverseTokens(1.0, experts, top_k),
    lambda experts, top_k: PowerTokens(0.8, experts, top_k),
    lambda experts, top_k: SplitPower(0.9, 0.8, experts, top_k),
]


def steps(tokens: list[float], requests: float | list[float] = 1.0, **others: float) -> StepFeatures:
    return StepFeatures(
        tokens=np.asarray(tokens),
        requests=np.broadcast_to(np.asarray(requests, np.float64), len(tokens)),
        **{name: np.asarray(value) for name, value in others.items()},
    )


@pytest.mark.parametrize(("model", "values"), FORMS.values(), ids=FORMS)
def test_parameters_are_the_leaves_in_order(model: AbstractCostModel, values: dict[str, float]) -> None:
    assert [parameter.name for parameter in model.parameters()] == list(values)
    np.testing.assert_allclose(ravel_pytree(model)[0], list(values.values()), rtol=1e-12)
    assert prior_belief(model).covariance.shape == (len(values), len(values))
    # All of them positive: the log filter learns each in its logarithm.
    assert all(parameter.spread is not None for parameter in model.parameters())


@EVERY_FORM
def test_gradients_are_right_and_finite_on_every_path(model: AbstractCostModel) -> None:
    values, unravel = ravel_pytree(model)
    check_grads(lambda x: unravel(x)(STEPS), (values,), order=1, atol=1e-6, rtol=1e-6)
    assert np.all(np.isfinite(jax.jacrev(lambda x: unravel(x)(STEPS))(values)))


@EVERY_FORM
def test_a_batch_is_its_steps_one_by_one(model: AbstractCostModel) -> None:
    together = model(STEPS)
    assert together.shape == STEPS.tokens.shape
    single = [model(jax.tree.map(lambda leaf, at=at: leaf[at], STEPS)) for at in range(len(STEPS.tokens))]
    assert all(jnp.shape(ms) == () for ms in single)
    np.testing.assert_allclose(together, np.stack(single), rtol=1e-13)


@EVERY_FORM
def test_features_that_all_steps_share_or_that_are_left_out_keep_the_shape(model: AbstractCostModel) -> None:
    shared = {"drafting": 3.0, "context": 500.0, "prefill": 7.0, "uneven": 1.0}
    spelled_out = StepFeatures(
        STEPS.tokens, STEPS.requests, *(np.full_like(STEPS.tokens, value) for value in shared.values())
    )
    np.testing.assert_array_equal(
        model(StepFeatures(STEPS.tokens, STEPS.requests, *map(np.asarray, shared.values()))), model(spelled_out)
    )
    assert model(StepFeatures(STEPS.tokens, STEPS.requests)).shape == STEPS.tokens.shape


@EVERY_FORM
def test_a_step_of_padding_spoils_no_gradient(model: AbstractCostModel) -> None:
    gradient = jax.grad(lambda m: jnp.sum(m(steps([0.0, 8.0], [0.0, 2.0]))))(model)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


def test_work_is_priced_by_its_own_amount() -> None:
    step = steps([8.0, 9.0], 2.0, drafting=5.0, context=1e4, prefill=30.0)
    np.testing.assert_allclose(Drafting(0.8)(step), [4.0, 4.0], rtol=1e-12)
    np.testing.assert_allclose(Context(3e-5)(step), [0.3, 0.3], rtol=1e-12)
    np.testing.assert_allclose(Prefill(0.1)(step), [3.0, 3.0], rtol=1e-12)
    np.testing.assert_allclose(PerRequest(0.2)(step), [0.4, 0.4], rtol=1e-12)
    units = [term(1.0).parameters()[0].unit for term in (Drafting, Context, Prefill, PerRequest)]
    assert units == ["ms/draft", "ms/KV token", "ms/prefill token", "ms/request"]


@pytest.mark.parametrize(
    ("when", "on_the_path"),
    [
        ("one_token", [True, False, False, False, False, False, False]),
        ("undrafted", [True, True, False, False, False, False, True]),
        # The fifth step is uneven too, but takes in prompts.
        ("uneven", [False, False, False, True, False, False, False]),
    ],
)
def test_an_own_path_costs_its_factor_and_teaches_it_there_alone(when: str, on_the_path: list[bool]) -> None:
    model = OwnPath(VERIFYING, 1.5, when)  # pyright: ignore[reportArgumentType]
    common = np.asarray(VERIFYING(STEPS))
    np.testing.assert_allclose(model(STEPS), np.where(on_the_path, 1.5 * common, common), rtol=1e-14)

    values, unravel = ravel_pytree(model)
    by_base, by_token, by_factor = np.asarray(jax.jacrev(lambda x: unravel(x)(STEPS))(values)).T
    np.testing.assert_array_equal(by_base, np.where(on_the_path, 1.5, 1.0))
    np.testing.assert_array_equal(by_token, np.where(on_the_path, 1.5, 1.0) * STEPS.tokens)
    np.testing.assert_array_equal(by_factor, np.where(on_the_path, common, 0.0))


def test_a_path_that_is_not_known_is_refused() -> None:
    # Beartype refuses it by its type before the form's own check, where types are checked at all.
    with pytest.raises(Exception, match="one_token"):
        OwnPath(VERIFYING, 1.5, "eager")  # pyright: ignore[reportArgumentType]


SIZES = st.lists(st.integers(1, 600), min_size=1, max_size=12, unique=True).map(lambda sizes: tuple(sorted(sizes)))


@given(sizes=SIZES)
def test_padding_rounds_up_to_the_next_size(sizes: tuple[int, ...]) -> None:
    tokens = list(range(700))
    expected = [next((size for size in sizes if size >= t), t) for t in tokens]
    np.testing.assert_array_equal(Padded(PerToken(1.0), sizes)(steps([*map(float, tokens)])), expected)


def test_padding_leaves_the_other_features_alone() -> None:
    rest = PerRequest(0.2) + Drafting(0.8) + Context(3e-5) + Prefill(0.1) + OwnPath(Constant(5.0), 2.0, "uneven")
    np.testing.assert_array_equal(Padded(rest, (64,))(STEPS), rest(STEPS))


def test_a_path_around_padding_sees_the_step_as_it_is() -> None:
    single = steps([1.0])
    np.testing.assert_allclose(OwnPath(Padded(PerToken(1.0), (4, 8)), 1.5, "one_token")(single), [6.0])
    np.testing.assert_allclose(Padded(OwnPath(PerToken(1.0), 1.5, "one_token"), (4, 8))(single), [4.0])


@pytest.mark.parametrize("sizes", [(), (0, 1), (-1, 2), (4, 2), (2, 2)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"given {sizes}")):
        Padded(VERIFYING, sizes)


def plain_factor(drafts: float, lengths: tuple[int, ...], factors: list[float]) -> float:
    if drafts <= lengths[0]:
        return factors[0]
    for at in range(1, len(lengths)):
        low, high = lengths[at - 1], lengths[at]
        if drafts <= high:
            return ((high - drafts) * factors[at - 1] + (drafts - low) * factors[at]) / (high - low)
    return factors[-1]


@given(data=st.data())
def test_factors_are_linear_between_lengths_and_constant_beyond(data: st.DataObject) -> None:
    lengths = tuple(sorted(data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True))))
    factors = data.draw(st.lists(st.floats(0.5, 2.0), min_size=len(lengths), max_size=len(lengths)))
    requests = data.draw(st.integers(1, 16))
    verified = data.draw(st.lists(st.integers(0, 15 * requests), min_size=1, max_size=9))
    # Every length itself too, where two pieces meet.
    verified = [*verified, *(length * requests for length in lengths)]

    model = ByDraftLength(Constant(10.0), np.asarray(factors), lengths)
    ms = model(steps([float(requests + drafts) for drafts in verified], float(requests)))
    expected = [10.0 * plain_factor(drafts / requests, lengths, factors) for drafts in verified]
    np.testing.assert_allclose(ms, expected, rtol=1e-12)


def test_a_draft_length_by_hand_and_whom_it_teaches() -> None:
    model = ByDraftLength(Constant(10.0), FACTORS, LENGTHS)
    # 2 requests with 0, 1, 3 and 7 drafts each: on a length, between 2 and 4, and beyond the last.
    drafted = steps([2.0, 4.0, 8.0, 16.0], 2.0)
    np.testing.assert_allclose(model(drafted), [8.0, 10.0, 10.25, 12.0], rtol=1e-12)
    teaches = jax.jacrev(lambda m: m(drafted))(model).factors
    np.testing.assert_array_equal(
        teaches, [[10.0, 0.0, 0.0, 0.0, 0.0], [0.0, 10.0, 0.0, 0.0, 0.0], [0.0, 0.0, 5.0, 5.0, 0.0], [0, 0, 0, 0, 10.0]]
    )


def test_factors_know_how_sure_they_are() -> None:
    model = ByDraftLength(Constant(10.0), np.ones(3), (0, 2, 4), spread=0.1, spread_undrafted=0.4, log_drift=1e-5)
    _, *factors = model.parameters()
    assert [parameter.spread for parameter in factors] == [0.4, 0.1, 0.1]
    np.testing.assert_allclose([parameter.variance for parameter in factors], [0.16, 0.01, 0.01])
    assert {parameter.log_drift for parameter in factors} == {1e-5}
    assert {parameter.log_drift for parameter in ByDraftLength(Constant(1.0), np.ones(1), (1,)).parameters()} == {0.0}


def test_a_length_never_served_stays_as_uncertain_as_it_was() -> None:
    belief = prior_belief(ByDraftLength(Constant(27.0), np.ones(len(LENGTHS)), LENGTHS))
    served = StepFeatures(tokens=np.asarray(5.0), requests=np.asarray(1.0))
    taught = jax.jit(update)
    for _ in range(200):
        belief, _ = taught(belief, served, np.asarray(30.0))
    np.testing.assert_allclose(belief.model(served), 30.0, rtol=1e-3)
    before, after = (np.diag(b.covariance)[1:] for b in (prior_belief(belief.model), belief))
    np.testing.assert_allclose(after[[0, 1, 2, 4]], before[[0, 1, 2, 4]], rtol=1e-12)
    assert after[3] < 0.95 * before[3]


@pytest.mark.parametrize("lengths", [(), (-1, 2), (4, 2), (2, 2)])
def test_draft_lengths_that_cannot_be_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"given {lengths}")):
        ByDraftLength(VERIFYING, np.ones(len(lengths)), lengths)
    with pytest.raises(ValueError, match="one factor is needed for each"):
        ByDraftLength(VERIFYING, np.ones(3), (1, 2))


@pytest.mark.parametrize("union", UNIONS)
def test_every_union_is_exact_at_one_token_and_touches_all_in_the_end(
    union: Callable[[int, int], AbstractExpertUnion],
) -> None:
    np.testing.assert_allclose(union(288, 8)(steps([1.0, 1e6])), [8.0, 288.0], rtol=1e-12)
    whole = union(8, 8)
    np.testing.assert_array_equal(whole(STEPS), 8.0)
    gradient = jax.grad(lambda u: jnp.sum(u(STEPS)))(whole)
    assert all(leaf == 0.0 for leaf in jax.tree.leaves(gradient))
    for experts, top_k in ((8, 9), (8, 0), (0, 0)):
        with pytest.raises(ValueError, match=f"top_k={top_k}"):
            union(experts, top_k)


def test_unions_by_hand() -> None:
    # Half of 4 experts a token: n independent tokens leave 4 * 0.5**n untouched.
    step = steps([16.0], 4.0)
    np.testing.assert_allclose(IndependentTokens(4, 2)(steps([3.0])), [3.5], rtol=1e-12)
    np.testing.assert_allclose(PowerTokens(0.5, 4, 2)(step), [4 - 4 * 0.5**4], rtol=1e-12)
    np.testing.assert_allclose(SplitPower(1.0, 0.5, 4, 2)(step), [4 - 4 * 0.5**8], rtol=1e-12)
    np.testing.assert_allclose(SplitPower(0.5, 1.0, 4, 2)(step), [4 - 4 * 0.5**8], rtol=1e-12)
    np.testing.assert_allclose(SplitPower(0.8, 0.8, 128, 6)(STEPS), PowerTokens(0.8, 128, 6)(STEPS), rtol=1e-12)
    np.testing.assert_array_equal(PowerTokens(1.0, 128, 6)(STEPS), IndependentTokens(128, 6)(STEPS))


@pytest.mark.parametrize(
    "touched",
    [[6.0, 10.25, 17.46, 31.75, 48.04], [6.0, 10.11, 17.05, 30.64, 46.56]],
    ids=["code", "prose"],
)
def test_a_power_fits_the_routing_of_real_text_and_no_diversity_does(touched: list[float]) -> None:
    # Distinct experts, measured, of a layer of 128 with top 6 that 1 to 17 neighbouring tokens of a request touch.
    measured = steps([1.0, 2.0, 4.0, 9.0, 17.0])

    def worst_error(union: AbstractExpertUnion) -> float:
        return float(np.max(np.abs(np.asarray(union(measured)) / np.asarray(touched) - 1)))

    assert min(worst_error(PowerTokens(gamma, 128, 6)) for gamma in np.arange(0.7, 0.951, 0.01)) < 0.01
    assert min(worst_error(DiverseTokens(diversity, 128, 6)) for diversity in np.arange(0.05, 2.0, 0.01)) > 0.1


def test_the_serving_form_starts_at_what_it_was_given() -> None:
    model = serving_cost(20.0, 0.5, 0.4, lengths=(0, 1, 2), experts=4, top_k=2, sizes=(1, 4))
    step = steps([3.0], drafting=2.0, context=1000.0, prefill=10.0)
    # Padded to 4 tokens, which touch 3.75 of 4 experts; 2 drafts, 1000 KV tokens and 10 tokens of a prompt.
    np.testing.assert_allclose(model(step), [20 + 0.5 * 3.75 + 0.4 * 4 + 2 * 0.6 + 0.02 + 1.0], rtol=1e-12)
    unpadded = serving_cost(20.0, 0.5, 0.4, lengths=(0, 1, 2), experts=4, top_k=2)
    np.testing.assert_allclose(unpadded(step), [20 + 0.5 * 3.5 + 0.4 * 3 + 2 * 0.6 + 0.02 + 1.0], rtol=1e-12)


@pytest.mark.parametrize(("experts", "top_k"), [(None, None), (None, 2), (8, 8), (8, 9)])
def test_a_serving_form_without_a_choice_of_experts_is_dense(experts: int | None, top_k: int | None) -> None:
    model = serving_cost(20.0, 0.5, 0.4, lengths=(1, 2), experts=experts, top_k=top_k)
    names = [parameter.name for parameter in model.parameters()]
    assert "base" in names
    assert not {"per_expert", "diversity"} & set(names)
    np.testing.assert_allclose(model(steps([2.0])), [20.8], rtol=1e-12)


def test_a_coefficient_of_zero_starts_where_it_has_a_logarithm() -> None:
    model = serving_cost(20.0, 0.0, 0.0, lengths=(1, 2), experts=8, top_k=2)
    values = dict(zip((p.name for p in model.parameters()), ravel_pytree(model)[0], strict=True))
    assert all(value > 0 for value in values.values())
    for name in ("per_expert", "per_token", "per_prefill_token"):
        np.testing.assert_allclose(values[name], 0.02)


@pytest.mark.parametrize(
    "given", [(0.0, 0.5, 0.4), (-1.0, 0.5, 0.4), (20.0, -0.5, 0.4), (20.0, 0.5, -0.4), (float("nan"), 0.5, 0.4)]
)
def test_a_serving_form_from_what_has_no_logarithm_is_refused(given: tuple[float, float, float]) -> None:
    base, per_expert, per_token = given
    with pytest.raises(ValueError, match=re.escape(f"given base={base}, per_expert={per_expert}")):
        serving_cost(base, per_expert, per_token, lengths=(1,), experts=8, top_k=2)


def test_a_serving_form_of_experts_without_a_top_k_is_refused() -> None:
    with pytest.raises(ValueError, match="experts=8 needs top_k"):
        serving_cost(20.0, 0.5, 0.4, lengths=(1,), experts=8, top_k=None)
