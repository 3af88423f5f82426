"""A plan as a picture for a talk: what each cut takes and on what, and which is best over the uplink's bandwidth."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from io import BytesIO
from typing import IO, Any

import msgspec
import numpy as np

from edgesplit import plan as words
from edgesplit.plan import Conditions, Link, Row
from edgesplit_partitioner.presentation.labels import link_name, travels

INK, PAPER, GRID = "#24292f", "#ffffff", "#d8dee4"
LOCAL, INSIDE, REMOTE = "#2f6f4f", "#b7791f", "#2b6cb0"
FAINT = "#8b949e"
PARTS = (
    ("device", LOCAL, ("device_s", "encode_s")),
    ("link", INSIDE, ("link_s",)),
    ("remote", REMOTE, ("decode_s", "remote_s")),
)
"""What a bar is made of: encoding is the device's, decoding that of who receives."""
CUTS = ("#b7791f", "#805ad5", "#c05621", "#2c7a7b", "#b83280", "#4a5568", "#975a16", "#5a67d8")
"""Lines of cuts inside the model, in order; all-local and all-remote have the colours of their tiers."""
REMOTE_PACKED = "#4fa3d9"
LONGEST_NAME = 30
LONGEST_SOURCES = 190
MOST_BARS = 10
CLOSE_LABELS = 0.14
"""Of the axis: bandwidths nearer than this make way for each other."""
AROUND = 3.0
"""How far beyond the planned link and the switch points the bandwidths go."""
POINTS = 400
LATENCIES = ("latency", "latency_p95")
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "edgesplit",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 12,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": GRID,
}


def svg(made: dict[str, Any]) -> bytes:
    """The picture as SVG."""
    into = BytesIO()
    render(made, into, "svg")
    return into.getvalue()


def render(made: dict[str, Any], into: IO[bytes], kind: str) -> None:
    """Write the picture of `made`, as `edgesplit_partitioner.presentation.plan_json.describe` gives it: `svg`, `png` or
    `pdf`.

    One at a time: matplotlib's settings are the process's.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        bars = shown_candidates(made)
        figure, (left, right) = pyplot.subplots(
            1, 2, figsize=(15, 3.4 + 0.42 * max(len(bars), 6)), facecolor=PAPER, width_ratios=(1.15, 1.0)
        )
        _bars(left, made, bars)
        _lines(right, made)
        device = made["device_class"] or "the device"
        figure.suptitle(f"{made['model']} on {device}: where to cut", x=0.02, ha="left", fontsize=17, weight="bold")
        figure.tight_layout(rect=(0, 0.03, 1, 0.97), w_pad=4)
        figure.text(0.02, 0.012, sources(made), fontsize=9.5, color=FAINT)
        plain = {"Date": None} if kind == "svg" else None
        try:
            figure.savefig(into, format=kind, facecolor=PAPER, metadata=plain, dpi=130)
        finally:
            pyplot.close(figure)


def sources(made: dict[str, Any]) -> str:
    """Where the times come from, tier by tier: a picture must not pass for a measurement."""
    told = [f"{tier} times {made.get('basis', {}).get(tier) or 'predicted'}" for tier in made["tiers"]]
    return "\n".join(textwrap.wrap("; ".join(told), LONGEST_SOURCES))


def shortened(text: str, most: int) -> str:
    """At most so many letters: the end of a name, from a whole part of its path on where there is one."""
    if len(text) <= most:
        return text
    kept = text[-most + 1 :]
    part = kept.find("/")
    return f"…{kept[part:]}" if 0 <= part < most // 2 else f"…{kept}"


def shown_candidates(made: dict[str, Any]) -> list[dict[str, Any]]:
    """Most remote first, as the plan lists them; of very many those in the table and the pure modes."""
    found: list[dict[str, Any]] = made["candidates"]
    if len(found) <= MOST_BARS:
        return found
    kept = sorted(found, key=lambda one: (one["name"] not in ("local", "remote", made["best"]), one["value"]))
    names = {one["name"] for one in kept[:MOST_BARS]}
    return [one for one in found if one["name"] in names]


def label(one: dict[str, Any], tiers: Sequence[str] = ()) -> str:
    """A cut as people call it; with more than two tiers it says where the rest runs."""
    packed = travels(one)
    if one["name"] == words.LOCAL:
        return "all on the device"
    further = " and ".join(reached(one, tiers)) if len(tiers) > 2 else ""
    if not one.get("after"):
        return f"all on {further}{packed}" if further else f"all remote{packed}"
    return f"after {shortened(one['after'], LONGEST_NAME)}{packed}{f', rest on {further}' if further else ''}"


def reached(one: dict[str, Any], tiers: Sequence[str]) -> list[str]:
    """Tiers beyond the device that run something. A hop's remote layers are those beyond it."""
    first = one["remote_layers"] if "remote_layers" in one else len(one.get("remote", ()))
    beyond = [first, *(len(hop.get("remote", ())) for hop in one.get("hops", ()))]
    beyond += [0] * (len(tiers) - len(beyond))
    return [tier for tier, here, there in zip(tiers[1:], beyond[:-1], beyond[1:], strict=False) if here > there]


def labels(several: Sequence[dict[str, Any]], tiers: Sequence[str] = ()) -> list[str]:
    """By cut: names that tell them apart; cuts that end with the same layer by their numbers of layers too."""
    plain = [label(one, tiers) for one in several]
    return [
        f"{name} ({one['layers']} layers)" if plain.count(name) > 1 and "layers" in one else name
        for name, one in zip(plain, several, strict=True)
    ]


# ---- left: candidates --------------------------------------------------------------------------------------------


def _bars(axis: Any, made: dict[str, Any], bars: Sequence[dict[str, Any]]) -> None:
    """A bar per candidate, the best one marked; what a limit forbids is pale."""
    places = range(len(bars))
    for place, one in zip(places, bars, strict=True):
        start, pale = 0.0, not one.get("allowed", True)
        for _, colour, names in PARTS:
            width = 1000 * sum(one[name] for name in names)
            axis.barh(place, width, left=start, height=0.66, color=colour, alpha=0.25 if pale else 1.0, lw=0)
            start += width
    room = 1.22 if made["objective"] in LATENCIES else 1.5
    longest = 1000 * max(one["total_s"] for one in bars)
    cap = _cap([1000 * one["total_s"] for one in bars], room)
    for place, one in zip(places, bars, strict=True):
        _total(axis, made, one, place, min(1000 * one["total_s"], cap), longest > cap < 1000 * one["total_s"])
    axis.set_xlim(0, cap * room)
    axis.set_yticks(list(places), labels(bars, made["tiers"]))
    for tick, one in zip(axis.get_yticklabels(), bars, strict=True):
        tick.set_weight("bold" if one["name"] == made["best"] else "normal")
        tick.set_color(INK if one.get("allowed", True) else FAINT)
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds from the input to the answer")
    axis.set_title(f"What each cut takes on {_link_name(made)}", loc="left", fontsize=13, pad=30)
    axis.grid(axis="x", color=GRID, lw=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    _legend(axis, made)


def _cap(totals: Sequence[float], room: float) -> float:
    """The longest bar shown whole: an outlier that would flatten all others runs out of the picture."""
    ordered = sorted(totals)
    middle = ordered[len(ordered) // 2]
    shown = max(4 * middle, 1.05 * ordered[0])
    return (ordered[-1] if ordered[-1] <= shown * room else shown) or 1.0


def _total(axis: Any, made: dict[str, Any], one: dict[str, Any], place: int, end: float, cut_off: bool) -> None:
    """The sum behind the bar, and the objective's value where that is something else."""
    best = one["name"] == made["best"]
    text = _figure(1000 * one["total_s"])
    if made["objective"] == "throughput":
        text += f" ms · stage {_figure(1000 * one['value'])} ms"
    elif made["objective"] not in LATENCIES:
        text += f" ms · {one['value']:.3g}{' J' if made['objective'] == 'energy' else ''}"
    if cut_off:
        text = f"→ {text}"
    if best:
        text += "  best"
    note = "" if one.get("allowed", True) else "  not allowed"
    axis.annotate(
        text + note,
        (end, place),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=11.5,
        weight="bold" if best else "normal",
        color=INK if one.get("allowed", True) else FAINT,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5},
    )


def _legend(axis: Any, made: dict[str, Any]) -> None:
    from matplotlib.patches import Patch

    beyond = " and ".join(made["tiers"][1:])
    names = {"device": "device", "link": "link" if len(made["tiers"]) == 2 else "links", "remote": beyond}
    patches = [Patch(color=colour, label=names[part]) for part, colour, _ in PARTS]
    axis.legend(
        handles=patches, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=11.5,
        borderpad=0.1, handlelength=1.1, columnspacing=1.6,
    )  # fmt: skip


def _link_name(made: dict[str, Any]) -> str:
    link, name = made["link"], link_name(made["link"])
    figures = f"{_figure(link['up_bytes_per_s'] * 8e-6)} Mbit/s up, {_figure(link['rtt_s'] * 1000)} ms round trip"
    if len(made["links"]) == 1:
        return f"{name} ({figures})" if name else figures
    every = [link_name(one) or f"{_figure(one['up_bytes_per_s'] * 8e-6)} Mbit/s" for one in made["links"]]
    return ", then ".join(every)


def _figure(value: float) -> str:
    """Three digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 3)}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


# ---- right: bandwidth ----------------------------------------------------------------------------------------------


def _lines(axis: Any, made: dict[str, Any]) -> None:
    """Each row of the table over bandwidth, thin; the best of them, thick; a line where it changes."""
    table = msgspec.convert(made["table"], words.Plan)
    link = table.link
    rates = bandwidths(made, link)
    costs = {row.name: np.array([_cost(row, table, link, rate) for rate in rates]) for row in table.rows}
    best = np.minimum.reduce(list(costs.values()))
    winner = [min(costs, key=lambda name: (costs[name][place], name)) for place in range(len(rates))]
    colours = line_colours(table.rows)
    for row in table.rows:
        axis.plot(rates * 8e-6, costs[row.name], color=colours[row.name], lw=1.1, alpha=0.55, zorder=2)
    for start, end in _runs(winner):
        upto = min(end + 1, len(rates))
        axis.plot(rates[start:upto] * 8e-6, best[start:upto], color=colours[winner[start]], lw=4.5, zorder=3)
    remote = _all_remote(made, rates)
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
    _switches(axis, made, rates, winner)
    _names(axis, made, winner, colours, beside=remote is not None)
    now = _cost(table.row(made["best"]), table, link, link.up_bytes_per_s)
    axis.plot([link.up_bytes_per_s * 8e-6], [now], "o", ms=9, mfc=PAPER, mec=INK, mew=1.8, zorder=5)
    axis.annotate(
        "planned link", (link.up_bytes_per_s * 8e-6, now), xytext=(7, 8), textcoords="offset points", fontsize=10.5,
        zorder=6,
    )  # fmt: skip
    _axes(axis, made)


def _all_remote(made: dict[str, Any], rates: Any) -> Any:
    """Milliseconds of the all-remote cut where latency counts and the table leaves it out, since it is best nowhere."""
    found = [one for one in made["candidates"] if not one["layers"] and one["allowed"]]
    known = any(not row.get("layers") for row in made["table"]["rows"])
    if not found or known or made["objective"] != "latency" or len(made["tiers"]) > 2:
        return None
    one = min(found, key=lambda candidate: candidate["total_s"])
    planned = made["link"]["up_bytes_per_s"]
    return 1000 * (one["total_s"] + one["up_bytes"] * (1 / rates - 1 / planned))


def _even_ticks(low: float, high: float) -> list[float]:
    """Round figures over a range of less than a decade."""
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= 6)
    return [round(step * count, 12) for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def bandwidths(made: dict[str, Any], link: Link) -> Any:
    """Bytes per second, from below to above the planned link and every switch point that is not absurdly far."""
    edges = [link.up_bytes_per_s]
    for one in made["ranges"]:
        edges += [edge for edge in (one["from_bytes_per_s"], one["to_bytes_per_s"]) if edge]
    near = [edge for edge in edges if link.up_bytes_per_s / 300 <= edge <= link.up_bytes_per_s * 300]
    low = min(min(near) / AROUND, link.up_bytes_per_s / 10)
    high = max(max(near) * AROUND, link.up_bytes_per_s * 10)
    return np.geomspace(low, high, POINTS)


def line_colours(rows: Sequence[Row]) -> dict[str, str]:
    """By row: green for all-local, blues for all-remote, others in their order."""
    found: dict[str, str] = {}
    for row in rows:
        inside = sum(colour in CUTS for colour in found.values())
        remote = "" if row.after else REMOTE_PACKED if row.compress else REMOTE
        found[row.name] = LOCAL if row.is_local else remote or CUTS[inside % len(CUTS)]
    return found


def _cost(row: Row, table: words.Plan, link: Link, up_bytes_per_s: float) -> float:
    """Milliseconds, or the objective's own unit where energy counts."""
    now = Conditions(link=msgspec.structs.replace(link, up_bytes_per_s=float(up_bytes_per_s)))
    value = words.cost(row, now, table.weights, table.power)
    return value if "energy" in table.weights else value * 1000


def _runs(winner: Sequence[str]) -> list[tuple[int, int]]:
    """Stretches over which one row is best."""
    starts = [place for place, name in enumerate(winner) if not place or winner[place - 1] != name]
    return list(zip(starts, [*starts[1:], len(winner)], strict=True))


def switch_points(made: dict[str, Any], rates: Any, winner: Sequence[str]) -> list[float]:
    """Where the best changes: the bandwidth of the switching table, which lies between two that were drawn."""
    edges = [edge for one in made["ranges"] for edge in (one["from_bytes_per_s"], one["to_bytes_per_s"]) if edge]
    found = []
    for _, end in _runs(winner)[:-1]:
        between = math.sqrt(rates[end - 1] * rates[end])
        nearest = min(edges, key=lambda edge: abs(math.log(edge / between)), default=between)
        found.append(nearest if abs(math.log(nearest / between)) < math.log(rates[1] / rates[0]) else between)
    return found


def _switches(axis: Any, made: dict[str, Any], rates: Any, winner: Sequence[str]) -> None:
    """A dashed line at each change, with the bandwidth above it, aside where it would hide its neighbour's."""
    found = [rate * 8e-6 for rate in switch_points(made, rates, winner)]
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


def _names(axis: Any, made: dict[str, Any], winner: Sequence[str], colours: dict[str, str], *, beside: bool) -> None:
    """What is best, from the slowest uplink to the fastest, in its colour; in the corner that falling lines leave."""
    from matplotlib.lines import Line2D

    rows = {row["name"]: row for row in made["table"]["rows"]}
    ordered = list(dict.fromkeys(winner[start] for start, _ in _runs(winner)))
    shown = labels([rows[name] | {"layers": len(rows[name].get("layers", ()))} for name in ordered], made["tiers"])
    lines = [Line2D([], [], color=colours[name], lw=4.5, label=text) for name, text in zip(ordered, shown, strict=True)]
    if beside:
        lines.append(Line2D([], [], color=REMOTE, lw=1.1, alpha=0.55, label="all remote (never best)"))
    axis.legend(
        handles=lines, title="best, from slow to fast", loc="upper right", frameon=True, framealpha=0.9,
        edgecolor="none", fontsize=11.5, title_fontsize=10.5, alignment="left",
    )  # fmt: skip


def _axes(axis: Any, made: dict[str, Any]) -> None:
    energy = "energy" in made["table"].get("weights", {})
    unit = (
        ("joules (J) of the device" if made["objective"] == "energy" else made["objective"])
        if energy
        else ("milliseconds of the slowest stage" if made["objective"] == "throughput" else "milliseconds")
    )
    axis.set_ylabel(unit)
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
