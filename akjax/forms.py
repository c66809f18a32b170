"""The cost forms by name, as settings and commands know them, and how a form of one's own joins them."""

import importlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from akjax.cost import (
    AbstractCostModel,
    AbstractExpertUnion,
    Constant,
    Context,
    CostTable,
    DispersedPower,
    Drafting,
    ExpertReads,
    IndependentTokens,
    Padded,
    PerRequest,
    PerToken,
    PowerTokens,
    Prefill,
    Residual,
    Roofline,
    SplitPower,
    dense_cost,
    reference_cost,
    serving_cost,
    small_network,
)
from akjax.features import StepFeatures


class Engine(NamedTuple):
    """What a form may know of the engine whose steps it is for, and where its coefficients start.

    Attributes:
        base: ms of any step.
        per_expert: ms per distinct expert touched.
        per_token: ms per verified token.
        lengths: draft lengths that may be served, ascending.
        experts: routed experts of a layer; None for a dense model.
        top_k: experts a token picks; None for a dense model.
        sizes: captured numbers of tokens, ascending; none if steps are not padded.
        uneven: where the factor starts of steps whose requests verify different numbers of drafts; None where no step
            does.
    """

    base: float = 27.0
    per_expert: float = 0.635
    per_token: float = 0.542
    lengths: tuple[int, ...] = (0, 1)
    experts: int | None = None
    top_k: int | None = None
    sizes: tuple[int, ...] = ()
    uneven: float | None = None

    @property
    def routing(self) -> tuple[int, int] | None:
        """Experts and top_k, None where every token reads the same weights."""
        if self.experts is None or self.top_k is None or self.top_k >= self.experts:
            return None
        return self.experts, self.top_k


Form = Callable[[Engine], AbstractCostModel]
"""Makes a cost model for an engine, its parameters where learning starts."""

Union = Callable[[int, int], AbstractExpertUnion]


def _reads(union: Union) -> Form:
    """Base, experts by this rule of their union, and tokens; on padded tokens where the engine pads."""

    def form(engine: Engine) -> AbstractCostModel:
        model: AbstractCostModel = Constant(engine.base)
        if engine.routing is not None:
            model = model + ExpertReads(engine.per_expert, union(*engine.routing))
        return _padded(model + PerToken(engine.per_token), engine)

    return form


def _padded(model: AbstractCostModel, engine: Engine) -> AbstractCostModel:
    return Padded(model, engine.sizes) if engine.sizes else model


def _reference(engine: Engine) -> AbstractCostModel:
    if engine.routing is None:
        return dense_cost(engine.base, engine.per_token)
    experts, top_k = engine.routing
    return reference_cost(engine.base, engine.per_expert, engine.per_token, experts=experts, top_k=top_k)


def _work(engine: Engine) -> AbstractCostModel:
    """`power` with every other kind of work: requests, drafts, context and prompts."""
    return (
        FORMS["power"](engine)
        + PerRequest(0.01 * engine.base)
        + Drafting(0.03 * engine.base)
        + Context(1e-6 * engine.base)
        + Prefill(0.25 * engine.per_token or 1e-3 * engine.base)
    )


def _roofline(engine: Engine) -> AbstractCostModel:
    """The base and the experts are read while the tokens are computed."""
    reading: AbstractCostModel = Constant(engine.base)
    if engine.routing is not None:
        reading = reading + ExpertReads(engine.per_expert, PowerTokens(0.8, *engine.routing))
    return _padded(Roofline(reading, PerToken(engine.per_token), 0.25), engine)


def _table(engine: Engine) -> AbstractCostModel:
    """A value of its own at each of some token counts, from where tokens that route independently have it."""
    tokens = np.asarray(_knots(engine), np.float64)
    ms = engine.base + engine.per_token * tokens
    if engine.routing is not None:
        experts, top_k = engine.routing
        ms = ms - engine.per_expert * experts * np.expm1(tokens * math.log1p(-top_k / experts))
    return _padded(CostTable(ms, tuple(tokens.tolist())), engine)


def _knots(engine: Engine) -> list[int]:
    """Token counts of the engine's steps, each at least a third above the one before: few teach more than one."""
    requests = (2**power for power in range(7))
    counts = engine.sizes or sorted(
        {(1 + length) * each for length, each in itertools.product(engine.lengths, requests)}
    )
    knots = [counts[0]]
    for count in counts:
        if 3 * count >= 4 * knots[-1]:
            knots.append(count)
    return knots


def _residual(engine: Engine) -> AbstractCostModel:
    """`power`, and a small network for what it gets wrong: an example of a form for research."""
    return Residual(FORMS["power"](engine), small_network())


FORMS: Mapping[str, Form] = {
    "serving": lambda engine: serving_cost(**engine._asdict()),
    "reference": _reference,
    "line": lambda engine: dense_cost(engine.base, engine.per_token),
    "independent": _reads(IndependentTokens),
    "power": _reads(lambda experts, top_k: PowerTokens(0.8, experts, top_k)),
    "split": _reads(lambda experts, top_k: SplitPower(0.9, 0.8, experts, top_k)),
    "dispersion": _reads(lambda experts, top_k: DispersedPower(0.2, 0.95, experts, top_k)),
    "roofline": _roofline,
    "table": _table,
    "residual": _residual,
    "work": _work,
}
"""The forms that come with akjax. "serving" is what serving learns by default, "reference" the reference's."""


def form_named(name: str) -> Form:
    """A form by its name, or any callable that takes an `Engine` by `package.module:name`.

    The latter imports the module, so it runs code that whoever gave the name has chosen.

    Raises:
        ValueError: no such form, module or name in it; the message says what there is.
    """
    if name in FORMS:
        return FORMS[name]
    known = f"there are {', '.join(FORMS)}, and package.module:name for a form of your own"
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"form {name!r} is not known: {known}")
    try:
        form = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"form {name!r} cannot be imported, {error}: {known}") from error
    if not callable(form):
        raise ValueError(f"form {name!r} is a {type(form).__name__} and not something that makes a cost model: {known}")
    return cast(Form, form)


def features_used(model: AbstractCostModel) -> tuple[str, ...]:
    """The names of the features that a model's milliseconds change with, in the order of `StepFeatures`.

    Asked at a step that has some of everything: what a model uses only to tell kinds of steps apart is not named.
    """
    names = tuple(StepFeatures.__dataclass_fields__)
    with jax.enable_x64(True):
        values = dict(zip(names, (13.0, 3.0, 4.0, 1000.0, 50.0, 0.0), strict=True))
        step = StepFeatures(**{name: jnp.asarray(value, jnp.float64) for name, value in values.items()})
        pure = StepFeatures(**{**{name: getattr(step, name) for name in names}, "prefill": jnp.zeros((), jnp.float64)})
        slopes = [jax.grad(lambda step: jnp.sum(model(step)))(each) for each in (step, pure)]
        return tuple(name for name in names if any(np.asarray(getattr(slope, name)).any() for slope in slopes))


def check_features(model: AbstractCostModel, features: Collection[str]) -> None:
    """Refuses a model that asks for other features than these, which are told of the steps.

    Raises:
        ValueError: with the names of those that are missing.
    """
    missing = [name for name in features_used(model) if name not in features]
    if missing:
        raise ValueError(
            f"this form needs {', '.join(missing)}, which these steps do not have: they have {', '.join(features)}"
        )
