"""The `akjax` command: from logs to fits, comparisons and tables."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from akjax.acceptance import LogitFilter, RunningRates
from akjax.fit_file import FitFile
from akjax.forms import FORMS, Engine, check_features, form_named
from akjax.presets import preset, preset_names

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Cost and acceptance models from step logs: what a step of speculative decoding costs, and which drafts get"
    " accepted. Logs are written by the scheduler where VLLM_ADAPTIVE_K_STEP_LOG is set.",
)
fit_app = typer.Typer(no_args_is_help=True, help="Fit a model to logs.")
app.add_typer(fit_app, name="fit")

Logs = Annotated[
    list[str], typer.Argument(help="Step logs: .jsonl, .jsonl.zst or .parquet; several, and wildcards, are one log.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")]
Columns = Annotated[
    str,
    typer.Option(
        help="The file is a table of your own, CSV or Parquet, a step a row: which column is what, as in"
        " tokens=batch,ms=latency_ms. There are ms, tokens, requests, drafts, context, prefill and drafting."
    ),
]
FormName = Annotated[str, typer.Option(help=f"One of {', '.join(FORMS)}, or package.module:name for one of your own.")]

# Names of files and models are printed as they are, whatever brackets and colons they have.
_out, _log = Console(markup=False, emoji=False), Console(stderr=True, markup=False, emoji=False)


@fit_app.command("cost")
def fit_cost_command(
    logs: Logs,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the fit here, for VLLM_ADAPTIVE_K_MODEL to load.")
    ] = None,
    form: FormName = "serving",
    columns: Columns = "",
    as_json: AsJson = False,
) -> None:
    """Fit a cost model to the times of logged steps, with standard errors, and say what the steps cannot tell."""
    from .cost import fit_cost
    from .fit_file import fit_file_of, write_fit

    with _refusals():
        steps, ms, told, engine = _cost_steps(logs, columns)
        model = form_named(form)(engine)
        check_features(model, told)
        with _working(f"Fitting {form} to {len(ms):,} steps"):
            fit = fit_cost(model, steps, ms)
        file = fit_file_of(fit, form, engine, steps, ms, logs)
        if out is not None:
            write_fit(out, file)
    if as_json:
        _print_json(_plain(file) | {"converged": fit.converged, "outliers": len(fit.outliers)})
    else:
        _print_fit(file)
        if len(fit.outliers):
            _out.print(f"{len(fit.outliers):,} steps are outliers, more than five standard deviations off.")
        _print_errors(steps, ms, fit)
        if out is not None:
            _out.print(f"Written to {out}: serve with VLLM_ADAPTIVE_K_MODEL={out}", soft_wrap=True)
    if not fit.converged:
        _unconverged()


@fit_app.command("acceptance")
def fit_acceptance_command(logs: Logs, as_json: AsJson = False) -> None:
    """Fit the running rates to what became of drafts, and say how well each acceptance model foretells them.

    The first half of the steps is fitted, the second foretold.
    """
    from .acceptance import fit_running_rates, predicted
    from .reading import draft_sequence, read_log

    with _refusals():
        with _working("Reading"):
            sequence = draft_sequence(read_log(logs))
        half = len(sequence.request) // 2
        if half == 0:
            raise ValueError("fewer than two steps with drafts: nothing to fit and to foretell")
        with _working(f"Fitting running rates to {half:,} steps"):
            fit = fit_running_rates(sequence.first(half))
        models = {
            "running rates, as the reference has them": RunningRates(),
            "running rates, fitted": fit.model,
            "logit filter, the default": LogitFilter(),
        }
        rows = []
        for name, model in models.items():
            with _working(f"Foretelling by {name}"):
                told = predicted(model, sequence, skip=half)
            rows.append(
                {
                    "model": name,
                    "held_out_log_loss": told.log_loss,
                    "calibration": [
                        {"tenth": tenth, "expected": float(e), "accepted": float(a), "drafts": int(c)}
                        for tenth, (e, a, c) in enumerate(zip(told.expected, told.accepted, told.counted, strict=True))
                    ],
                }
            )
    rates = {name: float(getattr(fit.model, name)) for name in ("alpha", "global_alpha", "global_drift", "prior")}
    if as_json:
        _print_json({"steps": len(sequence.request), "rates": rates, "converged": fit.converged, "models": rows})
        return
    _out.print("Fitted running rates: " + ", ".join(f"{name} {value:.4f}" for name, value in rates.items()))
    table = _table("acceptance model", "log-loss a draft, held out", title=f"{len(sequence.request):,} steps")
    for row in rows:
        table.add_row(row["model"], f"{row['held_out_log_loss']:.4f}")
    _out.print(table)
    table = _table("chance given", *models, title="Held out: accepted of what was expected, by the chance given")
    for tenth in range(10):
        cells = [row["calibration"][tenth] for row in rows]
        shares = [f"{c['accepted'] / c['expected']:.3f} of {c['drafts']:,}" if c["drafts"] else "-" for c in cells]
        table.add_row(f"{tenth / 10:.1f} to {(tenth + 1) / 10:.1f}", *shares)
    _out.print(table)


@app.command()
def compare(
    logs: Logs,
    forms: Annotated[str, typer.Option(help="Names by commas; all that come with akjax by default.")] = ",".join(FORMS),
    columns: Columns = "",
    as_json: AsJson = False,
) -> None:
    """Compare cost forms by how well they predict batches and draft lengths that they were not fitted on."""
    from .compare import compared

    with _refusals():
        steps, ms, told, engine = _cost_steps(logs, columns)
        models = {name: form_named(name)(engine) for name in forms.split(",") if name}
        for model in models.values():
            check_features(model, told)
        with _working("Comparing") as say:
            rows = compared(models, steps, ms, report=lambda name: say(f"Fitting {name}"))
    if as_json:
        _print_json([{**row._asdict(), "fit": None, "converged": row.fit.converged} for row in rows])
        return
    table = _table(
        "form", "parameters", "held out %", "95% interval", "log-likelihood a step", "fitted %", "larger batches %"
    )
    for row in rows:
        low, high = row.held_out_interval
        table.add_row(
            row.form,
            str(row.parameters),
            f"{row.held_out_percent:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{row.log_likelihood:.3f}",
            f"{row.fitted_percent:.2f}",
            "-" if row.larger_percent is None else f"{row.larger_percent:.2f}",
        )
    _out.print(table)


@app.command()
def report(
    logs: Logs,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write, ending in .html.")],
    fit: Annotated[
        str,
        typer.Option(help="Report on this fit and make none: a file, or the name of one that comes with akjax."),
    ] = "",
    form: FormName = "serving",
    as_json: AsJson = False,
) -> None:
    """Write a page about logs: costs, errors, experts, acceptance, k and goodput, in pictures and tables.

    It is one HTML file that needs nothing beside it. A fit of a form of your own is read only where --form names it.
    """
    with _refusals():
        if out.suffix != ".html" or not out.parent.is_dir():
            raise ValueError(f"the page to write must end in .html and be in a folder that there is, given {out}")
        with _working("Loading"):
            from .cost import fit_cost
            from .fit_file import fit_file_of
            from .reading import cost_steps, engine_of
            from .report import report_of
            from .report_cost import fitted_before, fitted_here
            from .report_page import page_of, sections_of, write_page

        log = _log_of(logs)
        steps, engine = cost_steps(log), engine_of(log)
        ms: Any = steps.ms
        fitted, converged = None, True
        if fit:
            fitted = fitted_before(_fit_named(fit), fit, engine, runs=form)
        elif len(ms):
            with _working(f"Fitting {form} to {len(ms):,} steps"):
                made = fit_cost(form_named(form)(engine), steps.features, ms)
            fitted = fitted_here(made, fit_file_of(made, form, engine, steps.features, ms, logs))
            converged = made.converged
        with _working("Counting") as say:
            numbers = report_of(log, steps, engine, fitted)
            say("Drawing")
            sections = sections_of(numbers)
            size = write_page(out, page_of(numbers, sections))
    lacking = {section.title: section.lacking for section in sections if section.lacking}
    if as_json:
        figures = [section.title for section in sections if section.figure]
        told = {"steps": numbers.rows, "steps_with_times": numbers.steps, "error_percent": numbers.error_percent}
        written = {"written": str(out), "bytes": size, "figures": figures, "lacking": lacking}
        _print_json(written | told | {"converged": converged})
    else:
        for title, why in lacking.items():
            _out.print(f"{title}: {why}", soft_wrap=True)
        _out.print(f"Written to {out}, {size / 1e6:.1f} MB", soft_wrap=True)
    if not converged:
        _unconverged()


@app.command()
def show(
    fit: Annotated[
        str,
        typer.Argument(help="A file that `akjax fit cost --out` wrote, or the name of one that comes with akjax."),
    ] = "",
) -> None:
    """Show a fit: its parameters with their errors, what it was fitted on, and what it could not tell.

    Without a fit, list those that come with akjax.
    """
    with _refusals():
        if fit:
            _print_fit(_fit_named(fit))
            return
        for name in preset_names():
            _out.print(f"{name}: {', '.join(preset(name).logs)}", soft_wrap=True)


@app.command()
def convert(logs: Logs, out: Annotated[Path, typer.Argument(help="The file to write, ending in .parquet.")]) -> None:
    """Convert logs into one Parquet file, which all commands read as well and much faster."""
    from .reading import convert as convert_logs

    with _refusals(), _working("Converting"):
        convert_logs(logs, out)


def _cost_steps(logs: Sequence[str], columns: str) -> tuple[Any, Any, tuple[str, ...], Engine]:
    """The features, their times, the names of the features that are told, and what is known of the engine."""
    from .reading import cost_steps, engine_of, read_table

    if columns:
        if len(logs) != 1:
            raise ValueError(f"--columns is for one table, given {', '.join(logs)}")
        with _working("Reading"):
            steps, engine = read_table(logs[0], _mapping(columns)), Engine()
    else:
        log = _log_of(logs)
        steps, engine = cost_steps(log), engine_of(log)
    for reason, count in steps.left_out.items():
        _log.print(f"{count:,} {'row' if count == 1 else 'rows'} left out: {reason}")
    if not len(steps.ms):
        raise ValueError(f"no step in {', '.join(logs)} has a time of its own, so there is nothing to fit")
    return steps.features, steps.ms, steps.told, engine


def _log_of(logs: Sequence[str]) -> Any:
    """The log; says what was refused in reading it."""
    from .reading import read_log

    with _working("Reading"):
        log = read_log(logs)
    for refused in log.refusals:
        _log.print(str(refused), soft_wrap=True)
    return log


def _fit_named(name: str) -> FitFile:
    """A fit from its file, or by its name one that comes with akjax."""
    from .fit_file import read_fit

    return read_fit(Path(name)) if Path(name).exists() else preset(name)


def _mapping(columns: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in columns.split(",")]
    if not all(quantity and equals and column for quantity, equals, column in pairs):
        raise ValueError(f"--columns={columns} must be like tokens=batch,ms=latency_ms: a quantity, = and a column")
    return {quantity: column for quantity, _, column in pairs}


@contextmanager
def _refusals() -> Iterator[None]:
    """Says what cannot be done, without a traceback; the command ends with 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        _log.print(f"Error: {error}", style="bold red", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None


@contextmanager
def _working(what: str) -> Iterator[Any]:
    """Shows what goes on and for how long, on a terminal; yields what changes the text."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=_log, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=None)
        yield lambda text: progress.update(task, description=text)


def _unconverged() -> NoReturn:
    """Says so; the command ends with 3."""
    _log.print("The search has not converged: treat the parameters with care.", style="bold red")
    raise typer.Exit(3)


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _print_fit(fit: FitFile) -> None:
    table = _table("parameter", "value", "standard error", "unit", "determined", title=f"Cost model of form {fit.form}")
    for each in fit.parameters:
        error = "not known" if each.standard_error is None else f"{each.standard_error:.2g}"
        unit = "" if each.unit == "1" else each.unit
        table.add_row(each.name, f"{each.value:.5g}", error, unit, "yes" if each.determined else "no")
    _out.print(table)
    if fit.rows:
        _out.print(
            f"{fit.rows:,} steps; mean error {fit.error_percent:.2f}%, noise of a step {100 * fit.noise:.2f}%.",
            soft_wrap=True,
        )
    _out.print(f"From {', '.join(fit.logs) or 'unnamed steps'}.", soft_wrap=True)
    for finding in fit.findings:
        _out.print(f"- {finding}", soft_wrap=True)


def _print_errors(steps: Any, ms: Any, fit: Any) -> None:
    from .compare import errors_by_cell

    table = _table("requests", "drafts", "steps", "ms", "predicted", "error %", title="By requests and drafts")
    rows = errors_by_cell(steps, ms, fit)
    for row in rows[:20]:
        table.add_row(
            f"{row.requests:g}",
            f"{row.drafts:g}",
            f"{row.steps:,}",
            f"{row.ms:.3f}",
            f"{row.predicted_ms:.3f}",
            f"{row.error_percent:.2f}",
        )
    _out.print(table)
    if len(rows) > 20:
        _out.print(f"The 20 most frequent of {len(rows)} kinds of steps.")


def _plain(fit: FitFile) -> dict[str, Any]:
    import msgspec

    return msgspec.to_builtins(fit)


def _print_json(what: Any) -> None:
    print(json.dumps(what, indent=2))


def main() -> None:
    """Runs the command."""
    app()


if __name__ == "__main__":
    main()
