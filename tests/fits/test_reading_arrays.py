"""The arrays that fits take, against plain loops over the records."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_records import step_record

from akjax import dense_cost, serving_cost
from akjax.acceptance import RunningRates
from akjax.cost import UNEVEN
from akjax.fits import fit_cost
from akjax.fits.acceptance import predicted
from akjax.fits.reading import acceptance_sequences, cost_steps, draft_sequence, engine_of, read_log
from akjax.step_log import LogHeader, StepRecord

HEADER = LogHeader(time=0.0, run="one", levels=[0, 2, 4], experts=64, top_k=4, captured_sizes=[1, 8, 16])


def step(**changes: Any) -> StepRecord:
    usual = {"time": 0.0, "tokens": 4, "prefill": 3, "context": 70, "drafts": 2, "drafting": 1, "k": 1}
    return step_record(**(usual | changes))


def written(path: Path, header: LogHeader, *steps: StepRecord) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in (header, *steps)))
    return path


def test_gaps_that_are_steps_times_are_taken_and_others_counted(tmp_path: Path) -> None:
    log = read_log(
        written(
            tmp_path / "log",
            HEADER,
            step(untaught="idle", gap_ms=None),
            step(gap_ms=1.0, uneven=True),
            step(untaught="unknown", gap_ms=2.0),
            step(untaught="surprise", gap_ms=3.0, tokens=9),
            step(untaught="idle", gap_ms=4.0),
            step(untaught="prompts", gap_ms=5.0),
            step(untaught="fixed", gap_ms=6.0),
            step(untaught="change", gap_ms=7.0),
            step(gap_ms=None),
            step(gap_ms=0.0),
            step(gap_ms=1e-300),
        )
    )
    steps = cost_steps(log)
    assert steps.ms.tolist() == [1.0, 3.0, 5.0, 6.0, 7.0]
    assert steps.row.tolist() == [1, 3, 5, 6, 7]
    assert steps.log.tolist() == [0] * 5
    assert steps.features.tokens.tolist() == [4, 9, 4, 4, 4]
    assert steps.features.uneven.tolist() == [1, 0, 0, 0, 0]
    assert [leaf[0] for leaf in jax.tree.leaves(steps.features)] == [4, 2, 1, 70, 3, 1]
    assert all(leaf.dtype == np.float64 and leaf.shape == (5,) for leaf in jax.tree.leaves(steps.features))
    assert steps.left_out == {
        "the engine was idle in the gap": 2,
        "the step is unknown": 1,
        "no gap": 1,
        "a gap below a microsecond": 2,
    }


def test_logged_steps_can_be_fitted(tmp_path: Path) -> None:
    noise = np.exp(0.01 * np.random.default_rng(0).standard_normal(60))
    records = [step(tokens=n, gap_ms=float((12 + 0.5 * n) * noise[n]), requests=1) for n in range(1, 60)]
    steps = cost_steps(read_log(written(tmp_path / "log", HEADER, *records)))
    fit = fit_cost(dense_cost(27.0, 0.1), steps.features, steps.ms)
    np.testing.assert_allclose(jax.tree.leaves(fit.model), [12.0, 0.5], rtol=0.05)


@st.composite
def some_steps(draw: st.DrawFn) -> list[dict[str, Any]]:
    steps = []
    for _ in range(draw(st.integers(0, 8))):
        request = draw(st.lists(st.integers(0, 9), max_size=5, unique=True))
        drafted = [draw(st.integers(1, 4)) for _ in request]
        steps.append(
            dict(
                request=request,
                drafted=drafted,
                accepted=[draw(st.integers(0, d)) for d in drafted],
                cut=[0] * len(request),
                mode=[draw(st.integers(0, 2)) for _ in request],
                requests=draw(st.integers(1, 4)),
            )
        )
    return steps


@given(fields=st.lists(some_steps(), min_size=1, max_size=3))
def test_sequences_are_those_of_the_records(
    tmp_path_factory: pytest.TempPathFactory, fields: list[list[dict[str, Any]]]
) -> None:
    runs = [[step(**each) for each in of_run] for of_run in fields]
    folder = tmp_path_factory.mktemp("logs")
    log = read_log([written(folder / f"{n}", replace(HEADER, run=f"{n}"), *steps) for n, steps in enumerate(runs)])
    found = acceptance_sequences(log)
    steps = [(run, record) for run, records in enumerate(runs) for record in records]
    known = sorted({(run, number) for run, record in steps for number in record.request})
    seen = set()
    assert found.requests == len(known)
    assert found.request.shape == (len(steps), max((len(record.request) for _, record in steps), default=0))
    for at, (run, record) in enumerate(steps):
        width = len(record.request)
        identities = [(run, number) for number in record.request]
        assert [known[n] for n in found.request[at, :width]] == identities
        assert found.fresh[at, :width].tolist() == [each not in seen for each in identities]
        seen |= set(identities)
        for name in ("drafted", "accepted", "mode"):
            assert getattr(found, name)[at, :width].tolist() == getattr(record, name)
            assert not getattr(found, name)[at, width:].any()
        assert found.counts[at].tolist() == [True] * width + [False] * (found.counts.shape[1] - width)
        assert not found.fresh[at, width:].any()
        assert np.all(found.request[at, width:] == len(known))
        assert (found.log[at], found.features.requests[at]) == (run, record.requests)
    assert found.request.dtype == np.int32

    drafted = draft_sequence(log)
    with_drafts = [at for at, (_, record) in enumerate(steps) if record.request]
    np.testing.assert_array_equal(drafted.request, found.request[with_drafts])
    np.testing.assert_array_equal(drafted.fresh, found.fresh[with_drafts])
    assert drafted.requests == found.requests


def test_a_log_can_be_foretold(tmp_path: Path) -> None:
    record = step(request=[0, 1], drafted=[2, 1], accepted=[2, 0], cut=[0, 0], mode=[0, 0])
    log = read_log(written(tmp_path / "log", HEADER, record, step(), record))
    told = predicted(RunningRates(), draft_sequence(log))
    assert told.trials.tolist() == [3, 3]


def test_the_engine_is_the_header_s(tmp_path: Path) -> None:
    one = written(tmp_path / "1", HEADER, step())
    two = written(tmp_path / "2", replace(HEADER, run="two", levels=[1, 4]), step(uneven=True))
    engine = engine_of(read_log([one, two]))
    assert engine[3:] == ((0, 1, 2, 4), 64, 4, (1, 8, 16), UNEVEN)
    assert serving_cost(**engine._asdict()).parameters()
    assert engine_of(read_log(one)).uneven is None
    other = written(tmp_path / "3", replace(HEADER, run="three", experts=None), step())
    with pytest.raises(ValueError, match="engines that differ: experts 64 and None"):
        engine_of(read_log([one, other]))


def test_without_levels_in_the_header_the_lengths_are_those_of_the_steps(tmp_path: Path) -> None:
    header = replace(HEADER, levels=[])
    assert engine_of(read_log(written(tmp_path / "1", header, step(k=3), step(k=1), step(k=3)))).lengths == (1, 3)
    assert engine_of(read_log(written(tmp_path / "2", header))).lengths == (0, 1)
