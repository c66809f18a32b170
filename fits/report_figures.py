"""The figures of a report, each as an SVG that stands in a page."""

import re
from collections.abc import Callable
from io import StringIO
from typing import Any, Literal

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from .report_cost import CostPicture, ExpertPicture, Residuals
from .report_drafts import Acceptance, Goodput, Lengths

# Inches: on a phone's width its letters are still large enough to read.
_SIZE = (4.8, 3.6)
# Okabe and Ito's colours, which the colour-blind tell apart too; https://jfly.uni-koeln.de/color
_BLUE, _ORANGE, _GREEN, _BLACK, _GREY = "#0072B2", "#D55E00", "#009E73", "#000000", "#777777"
_MARKERS = "osD^vP"
# From the standard error of an estimate to half the width of its 95% interval.
_REACH = 1.96
_SHARES = LinearSegmentedColormap.from_list("shares", ["#dfeaf3", _BLUE, "#002a44"])
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters: they can be searched and copied, and take the page's font
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
}
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def cost_figure(picture: CostPicture) -> str:
    """Step ms against tokens: steps, the fit's curve of each batch size, and its 95% band."""

    def draw(figure: Figure) -> None:
        axes = _axes(figure, "verified tokens of the step", "step time, ms")
        colours = _ordered(len(picture.curves))
        for curve, tokens, ms, colour, marker in zip(
            picture.curves, picture.tokens, picture.ms, colours, _MARKERS, strict=False
        ):
            axes.plot(tokens, ms, ".", color=colour, alpha=0.4, markersize=4, markeredgewidth=0)
            reach = _REACH * curve.error
            axes.fill_between(
                curve.tokens, curve.value - reach, curve.value + reach, color=colour, alpha=0.3, linewidth=0
            )
            alone = len(curve.tokens) == 1
            axes.plot(curve.tokens, curve.value, color=colour, marker=marker if alone else "", label=_named(curve))
        drawn, values = np.concatenate(picture.ms), np.concatenate([curve.value for curve in picture.curves])
        # A single step of a second, or a band without end, would press all others into a line.
        low = float(min(np.quantile(drawn, 0.005), values.min()))
        high = float(max(np.quantile(drawn, 0.99), values.max()))
        _log_if_wide(axes, "x", *_ends(curve.tokens for curve in picture.curves))
        if low > 0 and high > 16 * low:
            axes.set_ylim(low / 1.3, high * 1.3)
            _log_if_wide(axes, "y", low, high)
        else:
            axes.set_ylim(0.0, high * 1.1)
        _legend(figure)

    return _svg("cost", draw)


def residuals_by_tokens_figure(residuals: Residuals) -> str:
    """Residuals against tokens: steps, and what most of them have."""

    def draw(figure: Figure) -> None:
        axes = _axes(figure, "verified tokens of the step", "longer than predicted, % of the time")
        _draw_steps(axes, residuals.tokens, residuals.percent)
        band = residuals.by_tokens
        reach = np.stack([band.median - band.low, band.high - band.median])
        axes.errorbar(band.x, band.median, reach, fmt="o", color=_BLUE, elinewidth=1.0, label="median and four fifths")
        _log_if_wide(axes, "x", *_ends((residuals.tokens, residuals.by_tokens.x)))
        axes.set_ylim(-1.15 * residuals.reach, 1.15 * residuals.reach)
        _legend(figure)

    return _svg("residuals-by-tokens", draw)


def residuals_by_time_figure(residuals: Residuals) -> str:
    """Residuals over time: steps, and what most of them have."""

    def draw(figure: Figure) -> None:
        unit, seconds = _unit_of_time(float(residuals.seconds[-1]))
        axes = _axes(figure, f"time, {unit}", "longer than predicted, % of the time")
        _draw_steps(axes, residuals.seconds / seconds, residuals.percent)
        band = residuals.by_time._replace(x=residuals.by_time.x / seconds)
        axes.fill_between(band.x, band.low, band.high, color=_BLUE, alpha=0.25, linewidth=0, label="four fifths")
        axes.plot(band.x, band.median, color=_BLUE, marker="o" if len(band.x) == 1 else "", label="median")
        axes.set_ylim(-1.15 * residuals.reach, 1.15 * residuals.reach)
        _legend(figure)

    return _svg("residuals-by-time", draw)


def experts_figure(picture: ExpertPicture) -> str:
    """Distinct experts of a layer against tokens: the fit's rule with its 95% band, and independent tokens."""

    def draw(figure: Figure) -> None:
        axes = _axes(figure, "tokens of the step", "experts touched, of a layer")
        for curve, colour in zip(picture.curves, _ordered(len(picture.curves)), strict=True):
            reach = _REACH * curve.error
            low, high = (np.clip(curve.value + sign * reach, 0.0, picture.experts) for sign in (-1.0, 1.0))
            axes.fill_between(curve.tokens, low, high, color=colour, alpha=0.25, linewidth=0)
            label = "the fit" if curve.requests is None else _named(curve)
            axes.plot(curve.tokens, curve.value, color=colour, label=label)
        tokens = picture.curves[0].tokens
        axes.plot(tokens, picture.independent, "--", color=_GREY, linewidth=1.0, label="independent tokens")
        axes.axhline(picture.experts, color=_BLACK, linestyle=":", linewidth=1.0, label=f"all {picture.experts:,}")
        axes.set_ylim(0.0, 1.05 * picture.experts)
        _log_if_wide(axes, "x", *_ends(curve.tokens for curve in picture.curves))
        _legend(figure)

    return _svg("experts", draw)


def acceptance_figure(acceptance: tuple[Acceptance, ...]) -> str:
    """The chance of each draft position, by kind of text, with 95% intervals."""

    def draw(figure: Figure) -> None:
        axes = _axes(figure, "position of the draft", "accepted, of those tested")
        # Where there is one kind of text, all text is the same once more.
        kinds = acceptance[:-1] if len(acceptance) == 2 else acceptance
        looks = {"usual text": (_BLUE, "o"), "code": (_ORANGE, "s"), "tool calls": (_GREEN, "D")}
        for at, kind in enumerate(kinds):
            colour, marker = looks.get(kind.text, (_BLACK, ""))
            some = kind.tested > 0
            position, rates = np.arange(1, len(kind.tested) + 1), kind.rates
            low, high = kind.interval()
            beside = 0.06 * (at - (len(kinds) - 1) / 2)
            axes.errorbar(
                (position + beside)[some],
                rates[some],
                np.maximum(np.stack([rates - low, high - rates]), 0.0)[:, some],
                color=colour,
                marker=marker,
                linestyle="-" if marker else "--",
                elinewidth=1.0,
                capsize=2,
                label=kind.text,
            )
        axes.set_ylim(0.0, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, columns=4)

    return _svg("acceptance", draw)


def lengths_figure(lengths: Lengths) -> str:
    """k over time: how many of the steps of each slice of time planned each, and their mean."""

    def draw(figure: Figure) -> None:
        unit, seconds = _unit_of_time(float(lengths.edges[-1]))
        axes = _axes(figure, f"time, {unit}", "drafts planned for each request, k")
        edges, rows = lengths.edges / seconds, np.arange(len(lengths.levels))
        slices, row = np.nonzero(lengths.shares > 0)
        colours = _SHARES(lengths.shares[slices, row])
        axes.barh(row, np.diff(edges)[slices], left=edges[slices], color=colours, edgecolor=colours, linewidth=0.3)
        axes.set_yticks(rows, [f"{level:,}" for level in lengths.levels])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlim(0.0, edges[-1])
        axes.grid(visible=False)
        for share, label in ((0.1, "10%"), (0.5, "50%"), (1.0, "all of the steps at that time")):
            axes.bar(0.0, 0.0, color=_SHARES(share), label=label)
        _legend(figure)

    return _svg("k", draw)


def goodput_figure(goodput: tuple[Goodput, ...]) -> str:
    """Expected tokens per ms against k, each batch size relative to its best, with 95% bands."""

    def draw(figure: Figure) -> None:
        axes = _axes(figure, "drafts verified for each request, k", "tokens per ms, % of the best k")
        lows = []
        for curve, colour, marker in zip(goodput, _ordered(len(goodput)), _MARKERS, strict=False):
            percent = 100.0 * curve.tokens_per_ms / curve.tokens_per_ms[curve.best]
            factor = np.exp(np.minimum(_REACH * curve.relative_error, 5.0))
            axes.fill_between(curve.k, percent / factor, percent * factor, color=colour, alpha=0.15, linewidth=0)
            axes.plot(curve.k, percent, color=colour)
            for which, face in ((curve.served, colour), (~curve.served, "white")):
                shown = curve.allowed & which
                axes.plot(curve.k[shown], percent[shown], marker, color=colour, markerfacecolor=face)
            label = f"{_named(curve)}: {curve.tokens_per_ms[curve.best]:.3g}/ms at k={curve.k[curve.best]}"
            axes.plot([], [], marker=marker, color=colour, label=label)
            lows.append(percent.min())
        axes.set_ylim(max(0.0, min(lows) - 5.0), 112.0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, columns=2)

    return _svg("goodput", draw)


def _svg(name: str, draw: Callable[[Figure], None]) -> str:
    """What `draw` puts on a figure, as an SVG element whose ids are its own in the page."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(_SIZE, layout="constrained")
        draw(figure)
        text = StringIO()
        figure.savefig(text, format="svg", metadata=_NO_METADATA, transparent=True)
    svg = text.getvalue()
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg[svg.index("<svg") :])


def _axes(figure: Figure, x: str, y: str) -> Axes:
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return axes


def _legend(figure: Figure, columns: int = 3) -> None:
    """Below the axes, where it covers no data."""
    figure.legend(loc="outside lower center", ncols=columns, handlelength=1.6, columnspacing=1.2)


def _draw_steps(axes: Axes, x: Float[np.ndarray, " drawn"], percent: Float[np.ndarray, " drawn"]) -> None:
    axes.plot(x, percent, ".", color=_GREY, alpha=0.5, markersize=4, markeredgewidth=0, label="steps")
    axes.axhline(0.0, color=_BLACK, linewidth=0.8)


def _named(curve: Any) -> str:
    return f"{curve.requests:,.0f} {'request' if curve.requests == 1 else 'requests'}"


def _ordered(count: int) -> list[Any]:
    """Colours from dark to light, as few or many are in an order; none so light that it cannot be seen."""
    return [matplotlib.colormaps["viridis"](place) for place in np.linspace(0.0, 0.82, count)]


def _ends(arrays: Any) -> tuple[float, float]:
    values = np.concatenate([*arrays])
    return float(values.min()), float(values.max())


def _log_if_wide(axes: Axes, which: Literal["x", "y"], low: float, high: float) -> None:
    """A logarithmic axis, its numbers plain, where the values ask for one."""
    if low <= 0 or high <= 16 * low:
        return
    axis, set_scale = (axes.xaxis, axes.set_xscale) if which == "x" else (axes.yaxis, axes.set_yscale)
    set_scale("log", base=2)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_formatter(NullFormatter())


def _unit_of_time(seconds: float) -> tuple[str, float]:
    """A unit in which so many seconds are a number that is easy to read, and how many seconds it has."""
    if seconds <= 180.0:
        return "s", 1.0
    return ("min", 60.0) if seconds <= 10800.0 else ("h", 3600.0)
