"""A plan as a picture: how long each cut takes and where, and which cut is best over the uplink's bandwidth."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import IO, Any

import msgspec
import numpy as np

from edgesplit import plan as plan_table
from edgesplit.plan import Conditions, Link, Row
from edgesplit_partitioner.presentation.labels import codec_suffix, link_name

INK, PAPER, GRID = "#24292f", "#ffffff", "#d8dee4"
LOCAL, INSIDE, REMOTE = "#2f6f4f", "#b7791f", "#2b6cb0"
FAINT = "#8b949e"
PARTS = (
    ("device", LOCAL, ("device_s", "encode_s")),
    ("link", INSIDE, ("link_s",)),
    ("remote", REMOTE, ("decode_s", "remote_s")),
)
"""The parts of a bar with the fields they add up: encoding counts to the device, decoding to the receiver."""
CUTS = ("#b7791f", "#805ad5", "#c05621", "#2c7a7b", "#b83280", "#4a5568", "#975a16", "#5a67d8")
"""Colours of cuts inside the model, in order; all-local and all-remote have the colours of their tiers."""
REMOTE_PACKED = "#4fa3d9"
MAX_NAME_CHARS = 30
MAX_SOURCE_CHARS = 190
"""Characters of a line that names where times come from."""
MAX_BARS = 10
CLOSE_LABELS = 0.14
"""Fraction of the axis: labels of switch points nearer to each other are put aside or left out."""
MARGIN = 3.0
"""Factor by which the bandwidths go beyond the planned link and the switch points."""
POINTS = 400
"""Bandwidths at which each line is computed."""
LATENCIES = ("latency", "latency_p95")
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "edgesplit", "text.parse_math": False, "font.family": "sans-serif",
    "font.size": 12, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.edgecolor": GRID,
}  # fmt: skip


def render(plan: dict[str, Any], into: IO[bytes], kind: str) -> None:
    """Write the picture of a plan as `plan_json.describe` returns it; `kind` is `svg`, `png` or `pdf`.

    Not thread-safe: matplotlib's settings are global to the process.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        bars = shown_candidates(plan)
        figure, (left, right) = pyplot.subplots(
            1, 2, figsize=(15, 3.4 + 0.42 * max(len(bars), 6)), facecolor=PAPER, width_ratios=(1.15, 1.0)
        )
        _bars(left, plan, bars)
        _lines(right, plan)
        device = plan["device_class"] or "the device"
        figure.suptitle(f"{plan['model']} on {device}: where to cut", x=0.02, ha="left", fontsize=17, weight="bold")
        figure.tight_layout(rect=(0, 0.03, 1, 0.97), w_pad=4)
        figure.text(0.02, 0.012, sources(plan), fontsize=9.5, color=FAINT)
        plain = {"Date": None} if kind == "svg" else None
        try:
            figure.savefig(into, format=kind, facecolor=PAPER, metadata=plain, dpi=130)
        finally:
            pyplot.close(figure)


def sources(plan: dict[str, Any]) -> str:
    """Where the times come from, tier by tier: a picture of predictions must not pass for a measurement."""
    by_tier = [f"{tier} times {plan.get('basis', {}).get(tier) or 'predicted'}" for tier in plan["tiers"]]
    return "\n".join(textwrap.wrap("; ".join(by_tier), MAX_SOURCE_CHARS))


def shortened(text: str, most: int) -> str:
    """The last `most` characters of a name, from the start of a part of its path where there is one."""
    if len(text) <= most:
        return text
    kept = text[-most + 1 :]
    part = kept.find("/")
    return f"…{kept[part:]}" if 0 <= part < most // 2 else f"…{kept}"


def shown_candidates(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The candidates to draw, most remote first, as the plan lists them.

    Of more than `MAX_BARS` the pure modes, the best, and those of least value.
    """
    candidates: list[dict[str, Any]] = plan["candidates"]
    if len(candidates) <= MAX_BARS:
        return candidates
    kept = sorted(candidates, key=lambda cut: (cut["name"] not in ("local", "remote", plan["best"]), cut["value"]))
    names = {cut["name"] for cut in kept[:MAX_BARS]}
    return [cut for cut in candidates if cut["name"] in names]


def label(cut: dict[str, Any], tiers: Sequence[str] = ()) -> str:
    """A cut's label for people; with more than two tiers it contains where the rest runs."""
    packed = codec_suffix(cut)
    if cut["name"] == plan_table.LOCAL:
        return "all on the device"
    further = " and ".join(reached(cut, tiers)) if len(tiers) > 2 else ""
    if not cut.get("split_after"):
        return f"all on {further}{packed}" if further else f"all remote{packed}"
    return f"after {shortened(cut['split_after'], MAX_NAME_CHARS)}{packed}{f', rest on {further}' if further else ''}"


def reached(cut: dict[str, Any], tiers: Sequence[str]) -> list[str]:
    """Tiers beyond the device that run something. A hop's remote layers are those beyond it."""
    first = cut["remote_layers"] if "remote_layers" in cut else len(cut.get("remote", ()))
    beyond = [first, *(len(hop.get("remote", ())) for hop in cut.get("hops", ()))]
    beyond += [0] * (len(tiers) - len(beyond))
    return [tier for tier, here, there in zip(tiers[1:], beyond[:-1], beyond[1:], strict=False) if here > there]


def labels(several: Sequence[dict[str, Any]], tiers: Sequence[str] = ()) -> list[str]:
    """By cut, a label that distinguishes it: cuts that end with the same layer get their numbers of layers too."""
    plain = [label(cut, tiers) for cut in several]
    return [
        f"{name} ({cut['layers']} layers)" if plain.count(name) > 1 and "layers" in cut else name
        for name, cut in zip(plain, several, strict=True)
    ]


# ---- left: candidates --------------------------------------------------------------------------------------------


def _bars(axis: Any, plan: dict[str, Any], bars: Sequence[dict[str, Any]]) -> None:
    """A bar per candidate, the best one marked; what a limit forbids is pale."""
    places = range(len(bars))
    for place, cut in zip(places, bars, strict=True):
        start, pale = 0.0, not cut.get("allowed", True)
        for _, colour, names in PARTS:
            width = 1000 * sum(cut[name] for name in names)
            axis.barh(place, width, left=start, height=0.66, color=colour, alpha=0.25 if pale else 1.0, lw=0)
            start += width
    room = 1.22 if plan["objective"] in LATENCIES else 1.5
    longest = 1000 * max(cut["total_s"] for cut in bars)
    cap = _cap([1000 * cut["total_s"] for cut in bars], room)
    for place, cut in zip(places, bars, strict=True):
        _total(axis, plan, cut, place, min(1000 * cut["total_s"], cap), longest > cap < 1000 * cut["total_s"])
    axis.set_xlim(0, cap * room)
    axis.set_yticks(list(places), labels(bars, plan["tiers"]))
    for tick, cut in zip(axis.get_yticklabels(), bars, strict=True):
        tick.set_weight("bold" if cut["name"] == plan["best"] else "normal")
        tick.set_color(INK if cut.get("allowed", True) else FAINT)
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds from the input to the answer")
    axis.set_title(f"What each cut takes on {_link_name(plan)}", loc="left", fontsize=13, pad=30)
    axis.grid(axis="x", color=GRID, lw=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    _legend(axis, plan)


def _cap(totals: Sequence[float], room: float) -> float:
    """Length of the longest bar that is drawn whole: an outlier that would flatten all others is cut off."""
    ordered = sorted(totals)
    middle = ordered[len(ordered) // 2]
    shown = max(4 * middle, 1.05 * ordered[0])
    return (ordered[-1] if ordered[-1] <= shown * room else shown) or 1.0


def _total(axis: Any, plan: dict[str, Any], cut: dict[str, Any], place: int, end: float, cut_off: bool) -> None:
    """Write the total beside the bar, and the objective's value where that is not the total."""
    best = cut["name"] == plan["best"]
    text = _figure(1000 * cut["total_s"])
    if plan["objective"] == "throughput":
        text += f" ms · stage {_figure(1000 * cut['value'])} ms"
    elif plan["objective"] not in LATENCIES:
        text += f" ms · {cut['value']:.3g}{' J' if plan['objective'] == 'energy' else ''}"
    if cut_off:
        text = f"→ {text}"
    if best:
        text += "  best"
    note = "" if cut.get("allowed", True) else "  not allowed"
    axis.annotate(
        text + note,
        (end, place),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=11.5,
        weight="bold" if best else "normal",
        color=INK if cut.get("allowed", True) else FAINT,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5},
    )


def _legend(axis: Any, plan: dict[str, Any]) -> None:
    from matplotlib.patches import Patch

    beyond = " and ".join(plan["tiers"][1:])
    names = {"device": "device", "link": "link" if len(plan["tiers"]) == 2 else "links", "remote": beyond}
    patches = [Patch(color=colour, label=names[part]) for part, colour, _ in PARTS]
    axis.legend(
        handles=patches, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=11.5,
        borderpad=0.1, handlelength=1.1, columnspacing=1.6,
    )  # fmt: skip


def _link_name(plan: dict[str, Any]) -> str:
    link, name = plan["link"], link_name(plan["link"])
    figures = f"{_figure(link['up_bytes_per_s'] * 8e-6)} Mbit/s up, {_figure(link['rtt_s'] * 1000)} ms round trip"
    if len(plan["links"]) == 1:
        return f"{name} ({figures})" if name else figures
    every = [link_name(hop) or f"{_figure(hop['up_bytes_per_s'] * 8e-6)} Mbit/s" for hop in plan["links"]]
    return ", then ".join(every)


def _figure(value: float) -> str:
    """The value with three digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 3)}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


# ---- right: bandwidth ----------------------------------------------------------------------------------------------


def _lines(axis: Any, plan: dict[str, Any]) -> None:
    """Each row of the table over bandwidth, thin; the best of them, thick; a dashed line where the best changes."""
    table = msgspec.convert(plan["table"], plan_table.Plan)
    link = table.link
    rates = bandwidths(plan, link)
    costs = {row.name: np.array([_cost(row, table, link, rate) for rate in rates]) for row in table.rows}
    best = np.minimum.reduce(list(costs.values()))
    winner = [min(costs, key=lambda name: (costs[name][place], name)) for place in range(len(rates))]
    colours = line_colours(table.rows)
    for row in table.rows:
        axis.plot(rates * 8e-6, costs[row.name], color=colours[row.name], lw=1.1, alpha=0.55, zorder=2)
    for start, end in _runs(winner):
        upto = min(end + 1, len(rates))
        axis.plot(rates[start:upto] * 8e-6, best[start:upto], color=colours[winner[start]], lw=4.5, zorder=3)
    remote = _all_remote(plan, rates)
    if remote is not None:
        axis.plot(rates * 8e-6, remote, color=REMOTE, lw=1.1, alpha=0.55, zorder=2)
        costs = costs | {"": remote}
    low = best.min()
    least = [line.min() for line in costs.values()]
    alone = len(_runs(winner)) == 1
    high = max(best.max(), min(max(least) * (3.0 if alone else 1.1), best.max() * (100.0 if alone else 6.0)))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(rates[0] * 8e-6, rates[-1] * 8e-6)
    axis.set_ylim(low * 0.75, high * 1.35 * 1.17 ** len(_runs(winner)))
    _switches(axis, plan, rates, winner)
    _names(axis, plan, winner, colours, beside=remote is not None)
    now = _cost(table.row(plan["best"]), table, link, link.up_bytes_per_s)
    axis.plot([link.up_bytes_per_s * 8e-6], [now], "o", ms=9, mfc=PAPER, mec=INK, mew=1.8, zorder=5)
    axis.annotate(
        "planned link", (link.up_bytes_per_s * 8e-6, now), xytext=(7, 8), textcoords="offset points", fontsize=10.5,
        zorder=6,
    )  # fmt: skip
    _axes(axis, plan)


def _all_remote(plan: dict[str, Any], rates: Any) -> Any:
    """Milliseconds of the all-remote cut where latency counts and the table lacks it because it is best nowhere."""
    remote = [cut for cut in plan["candidates"] if not cut["layers"] and cut["allowed"]]
    in_table = any(not row.get("layers") for row in plan["table"]["rows"])
    if not remote or in_table or plan["objective"] != "latency" or len(plan["tiers"]) > 2:
        return None
    fastest = min(remote, key=lambda cut: cut["total_s"])
    planned = plan["link"]["up_bytes_per_s"]
    return 1000 * (fastest["total_s"] + fastest["up_bytes"] * (1 / rates - 1 / planned))


def _even_ticks(low: float, high: float) -> list[float]:
    """Ticks at round values over a range of less than a decade."""
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= 6)
    return [round(step * count, 12) for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def bandwidths(plan: dict[str, Any], link: Link) -> Any:
    """Bytes per second, from below to above the planned link and every switch point within a factor of 300 of it."""
    edges = [link.up_bytes_per_s]
    for best in plan["ranges"]:
        edges += [edge for edge in (best["from_bytes_per_s"], best["to_bytes_per_s"]) if edge]
    near = [edge for edge in edges if link.up_bytes_per_s / 300 <= edge <= link.up_bytes_per_s * 300]
    low = min(min(near) / MARGIN, link.up_bytes_per_s / 10)
    high = max(max(near) * MARGIN, link.up_bytes_per_s * 10)
    return np.geomspace(low, high, POINTS)


def line_colours(rows: Sequence[Row]) -> dict[str, str]:
    """By row: green for all-local, blues for all-remote, others in their order."""
    found: dict[str, str] = {}
    for row in rows:
        inside = sum(colour in CUTS for colour in found.values())
        remote = "" if row.split_after else REMOTE_PACKED if row.compress else REMOTE
        found[row.name] = LOCAL if row.is_local else remote or CUTS[inside % len(CUTS)]
    return found


def _cost(row: Row, table: plan_table.Plan, link: Link, up_bytes_per_s: float) -> float:
    """A row's cost at an uplink rate: milliseconds, or the objective's own unit where energy counts."""
    now = Conditions(link=msgspec.structs.replace(link, up_bytes_per_s=float(up_bytes_per_s)))
    value = plan_table.cost(row, now, table.weights, table.power)
    return value if "energy" in table.weights else value * 1000


def _runs(winner: Sequence[str]) -> list[tuple[int, int]]:
    """Ranges of positions, end excluded, over which the same row is best."""
    starts = [place for place, name in enumerate(winner) if not place or winner[place - 1] != name]
    return list(zip(starts, [*starts[1:], len(winner)], strict=True))


def switch_points(plan: dict[str, Any], rates: Any, winner: Sequence[str]) -> list[float]:
    """Bandwidths at which the best row changes.

    Taken from the switching table where it has one between the two bandwidths drawn, else their geometric mean.
    """
    edges = [edge for best in plan["ranges"] for edge in (best["from_bytes_per_s"], best["to_bytes_per_s"]) if edge]
    found = []
    for _, end in _runs(winner)[:-1]:
        between = math.sqrt(rates[end - 1] * rates[end])
        nearest = min(edges, key=lambda edge: abs(math.log(edge / between)), default=between)
        found.append(nearest if abs(math.log(nearest / between)) < math.log(rates[1] / rates[0]) else between)
    return found


def _switches(axis: Any, plan: dict[str, Any], rates: Any, winner: Sequence[str]) -> None:
    """A dashed line at each change, with the bandwidth above it, aside where it would hide its neighbour's."""
    found = [rate * 8e-6 for rate in switch_points(plan, rates, winner)]
    near = CLOSE_LABELS * math.log(rates[-1] / rates[0])
    for number, rate in enumerate(found):
        axis.axvline(rate, color=INK, lw=0.9, ls=(0, (4, 3)), alpha=0.6, zorder=1)
        before = number > 0 and math.log(rate / found[number - 1]) < near
        after = number + 1 < len(found) and math.log(found[number + 1] / rate) < near
        if before and after:
            continue  # no room between its neighbours; the table has the figure
        axis.text(
            rate, 1.012, f"{_figure(rate)} Mbit/s",
            ha="left" if before else "right" if after else "center", va="bottom",
            transform=axis.get_xaxis_transform(), fontsize=10.5,
        )  # fmt: skip


def _names(axis: Any, plan: dict[str, Any], winner: Sequence[str], colours: dict[str, str], *, beside: bool) -> None:
    """A legend of the best rows from the slowest uplink to the fastest, in the corner that falling lines leave free."""
    from matplotlib.lines import Line2D

    rows = {row["name"]: row for row in plan["table"]["rows"]}
    ordered = list(dict.fromkeys(winner[start] for start, _ in _runs(winner)))
    shown = labels([rows[name] | {"layers": len(rows[name].get("layers", ()))} for name in ordered], plan["tiers"])
    lines = [Line2D([], [], color=colours[name], lw=4.5, label=text) for name, text in zip(ordered, shown, strict=True)]
    if beside:
        lines.append(Line2D([], [], color=REMOTE, lw=1.1, alpha=0.55, label="all remote (never best)"))
    axis.legend(
        handles=lines, title="best, from slow to fast", loc="upper right", frameon=True, framealpha=0.9,
        edgecolor="none", fontsize=11.5, title_fontsize=10.5, alignment="left",
    )  # fmt: skip


def _axes(axis: Any, plan: dict[str, Any]) -> None:
    units = {"energy": "joules (J) of the device", "throughput": "milliseconds of the slowest stage"}
    weighed = plan["objective"] if "energy" in plan["table"].get("weights", {}) else "milliseconds"
    axis.set_ylabel(units.get(plan["objective"], weighed))
    axis.set_xlabel("uplink, Mbit/s")
    axis.set_title("The best cut over bandwidth", loc="left", fontsize=13, pad=30)
    for along in (axis.xaxis, axis.yaxis):
        along.set_major_formatter(lambda value, _: f"{value:g}")
    low, high = axis.get_ylim()
    steps = [base * 10.0**power for power in range(-6, 7) for base in (1, 2, 5)]
    ticks = [step for step in steps if low <= step <= high]
    if len(ticks) < 3:
        ticks = _even_ticks(low, high)
    axis.set_yticks(ticks if len(ticks) <= 9 else [step for step in ticks if f"{step:e}"[0] == "1"])
    axis.minorticks_off()
    axis.grid(color=GRID, lw=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
