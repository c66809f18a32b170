"""The command, from a log to a fit that can be served."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from akjax.fit_file import start_of
from akjax.fits.command import app
from akjax.fits.fit_file import read_fit
from akjax.forms import Engine
from akjax.step_log import LogHeader, StepRecord

HEADER = LogHeader(time=1.7e9, model="tiny", draft_limit=4, levels=[0, 1, 2, 4], experts=64, top_k=6)


def record(number: int, rng: np.random.Generator, requests: int) -> StepRecord:
    """A step of a machine that takes 5 ms, 0.1 for each expert, 0.02 for each token and 0.2 for each draft made."""
    drafts, drafting = (int(length) for length in rng.choice(HEADER.levels, 2))
    tokens = requests * (drafts + 1)
    experts = 64 * (1 - (1 - 6 / 64) ** tokens)
    ms = (5.0 + 0.1 * experts + 0.02 * tokens + 0.2 * drafting) * np.exp(0.03 * rng.standard_normal())
    alive = np.cumprod(rng.random((requests, drafts)) < 0.7, axis=1)
    ids = [number // 20 * 8 + each for each in range(requests)] if drafts else []
    return StepRecord(
        time=1.7e9 + number / 100,
        gap_ms=float(ms) if number else None,
        untaught="" if number else "idle",
        tokens=tokens,
        requests=requests,
        prefill=0,
        context=300 * requests,
        drafts=requests * drafts,
        drafting=drafting,
        uneven=False,
        k=drafting,
        forced=False,
        predicted_ms=None,
        request=ids,
        drafted=[drafts] * len(ids),
        accepted=[int(row.sum()) for row in alive] if drafts else [],
        cut=[0] * len(ids),
        mode=[0] * len(ids),
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "steps.jsonl"
    rng = np.random.default_rng(0)
    records = [record(number, rng, 2 ** (number // 20 % 4)) for number in range(1500)]
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in (HEADER, *records)))
    return path


def run(*arguments: object, expected: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == expected, result.output
    return result.stdout if expected == 0 else result.output


def test_a_fit_is_written_shown_and_can_be_started_from(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "fit.json"
    said = run("fit", "cost", log, "--out", out, "--form", "work")
    assert "per_expert" in said
    assert f"VLLM_ADAPTIVE_K_MODEL={out}" in said.replace("\n", "")
    fit = read_fit(out)
    values = {parameter.name: parameter.value for parameter in fit.parameters}
    assert values["per_draft"] == pytest.approx(0.2, rel=0.1)
    assert (fit.form, fit.rows, fit.logs) == ("work", 1499, [str(log)])
    assert fit.error_percent < 3.0
    assert "per_expert" in run("show", out)
    assert start_of(fit, Engine(lengths=(0, 1, 2, 4), experts=64, top_k=6)).unmatched == ()


def test_fits_that_come_with_akjax_are_listed_and_shown_by_name() -> None:
    said = " ".join(run("show").split())
    assert "default: the reference algorithm's coefficients" in said
    assert "gpt-oss-120b-gb10: github.com/ggml-org/llama.cpp" in said
    said = run("show", "llama-8b-eagle")
    assert "per_draft" in said
    assert "20 steps; mean error" in said
    said = run("show", "default")
    assert "From the reference algorithm's" in said
    assert "mean error" not in said


def test_json_is_for_machines(log: Path) -> None:
    told = json.loads(run("fit", "cost", log, "--form", "reference", "--json"))
    assert told["kind"] == "cost fit"
    assert told["converged"]


def test_forms_are_compared_the_best_first(log: Path) -> None:
    rows = json.loads(run("compare", log, "--forms", "line,work", "--json"))
    assert [row["form"] for row in rows] == ["work", "line"]
    assert rows[0]["held_out_percent"] < rows[1]["held_out_percent"]


def test_acceptance_is_fitted_and_foretold(log: Path) -> None:
    told = json.loads(run("fit", "acceptance", log, "--json"))
    assert set(told["rates"]) == {"alpha", "global_alpha", "global_drift", "prior"}
    losses = [row["held_out_log_loss"] for row in told["models"]]
    # All drafts here are accepted at 0.7, so 0.611 nats is what nobody can be below but by chance.
    assert all(0.58 < loss < 0.72 for loss in losses)
    assert losses[1] < losses[0]


def test_a_table_of_other_peoples_is_fitted_by_the_forms_that_it_can_feed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    batch = rng.integers(1, 33, 300)
    rows = "".join(f"{b},{(5.0 + 0.2 * b) * np.exp(0.02 * rng.standard_normal())}\n" for b in batch)
    table = tmp_path / "steps.csv"
    table.write_text(f"batch,latency\n{rows}3,nothing\n")
    told = json.loads(run("fit", "cost", table, "--columns", "tokens=batch,ms=latency", "--form", "line", "--json"))
    values = {parameter["name"]: parameter["value"] for parameter in told["parameters"]}
    assert told["rows"] == 300
    assert values["base"] == pytest.approx(5.0, rel=0.02)
    assert values["per_token"] == pytest.approx(0.2, rel=0.02)
    said = run("fit", "cost", table, "--columns", "tokens=batch,ms=latency", "--form", "work", expected=2)
    assert "needs drafting, context, prefill" in " ".join(said.split())
    said = run("compare", table, "--columns", "tokens:batch", expected=2)
    assert "must be like tokens=batch,ms=latency_ms" in " ".join(said.split())


def test_what_was_refused_is_named_with_its_file(log: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(log.read_bytes()[:-40])
    result = CliRunner().invoke(app, ["fit", "cost", str(torn), "--form", "line", "--json"])
    assert result.exit_code == 0
    assert "torn.jsonl: torn last line" in " ".join(result.stderr.split())


def test_a_converted_log_gives_the_same_fit(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "steps.parquet"
    run("convert", log, out)
    of_lines, of_columns = (json.loads(run("fit", "cost", path, "--form", "line", "--json")) for path in (log, out))
    assert of_lines["parameters"] == of_columns["parameters"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("fit", "cost", "no-such.jsonl"), "no-such.jsonl"),
        (("fit", "cost", "LOG", "--form", "best"), "there are serving, reference"),
        (("compare", "LOG", "--forms", "line,best"), "there are serving, reference"),
        (("show", "LOG"), "no fit of a cost model"),
        (("show", "best"), "there is no fit named 'best': there are default, glm-4.5-air"),
        (("convert", "LOG", "steps.csv"), "must end in .parquet"),
    ],
)
def test_what_cannot_be_done_is_said_without_a_traceback(log: Path, arguments: tuple[str, ...], complaint: str) -> None:
    said = run(*(log if argument == "LOG" else argument for argument in arguments), expected=2)
    assert complaint in " ".join(said.split())
    assert "Traceback" not in said
