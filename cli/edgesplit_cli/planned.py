"""A plan for people: the candidates beside the pure modes, then the switching table."""

from __future__ import annotations

from typing import Any

from edgesplit_cli.show import console, ms, rate, share, size, table

COLUMNS = (
    "",
    "cut",
    "last layer on device",
    ">sends",
    ">device ms",
    ">encode ms",
    ">link ms",
    ">remote ms",
    ">total ms",
)


def print_plan(made: dict[str, Any]) -> None:
    """`made` as `edgesplit_partitioner.describe` gives it."""
    out = console()
    for number, link in enumerate(made.get("links") or [made["link"]]):
        between = f"{made['tiers'][number]} to {made['tiers'][number + 1]}" if len(made["tiers"]) > 2 else "link"
        head = f"[bold]{made['model']}[/] on {made['device_class'] or 'the device'}, " if not number else "  "
        out.print(
            f"{head}{between} {link.get('name') or ''} up {rate(link['up_bytes_per_s'])}, down "
            f"{rate(link['down_bytes_per_s'])}, round trip {ms(link['rtt_s'])} ms"
        )
    for tier, basis in made.get("basis", {}).items():
        out.print(f"  {tier} times: {basis}")
    best, valued = made["best"], made.get("objective", "latency") not in ("latency", "latency_p95")
    further = made["tiers"][1:-1]
    sure = next((one["between"]["coverage"] for one in made["candidates"] if one.get("between")), None)
    within = () if sure is None else (f">within, {sure:.0%} sure",)
    columns = (
        *COLUMNS,
        *within,
        *(f">on {tier}" for tier in further),
        *((f">{made['objective']}",) if valued else ()),
        "",
    )
    rows = [_candidate(one, best, len(further), valued, bool(within)) for one in made["candidates"]]
    out.print(table(columns, rows))
    out.print(_best(made, valued))
    if told := loss_told(next((row for row in made["table"]["rows"] if row["name"] == best), {})):
        out.print(told)
    headings = ("row", "best at this round trip while the uplink is")
    out.print(table(headings, map(_range, made["ranges"]), title="switching table"))


def _best(made: dict[str, Any], valued: bool) -> str:
    """The answer and how sure it is."""
    certificate = made["certificate"]
    shown = figure if valued else ms
    unit = "" if valued else " ms"
    value = f", {made['objective']} {figure(made['value'])}" if valued else ""
    bound = f"lower bound {shown(certificate['lower_bound'])}{unit}, gap {certificate['gap']:.2%}"
    gain = f"; {made['gain']:.2f}x the better of all-local and all-remote" if made["gain"] else ""
    return f"best: [bold]{made['best']}[/] {ms(made['seconds'])} ms{_within(made)}{value}; {bound}{gain}"


def _within(made: dict[str, Any]) -> str:
    """Between what the predicted part leaves the answer."""
    between = made.get("between")
    return f" ({within_told(between)}, {between['coverage']:.0%} sure)" if between else ""


def within_told(between: dict[str, Any] | None) -> str:
    """Milliseconds of both ends; a dash where nothing is predicted."""
    return f"{ms(between['low_s'])} to {ms(between['high_s'])}" if between else "-"


def figure(value: float | None) -> str:
    """A value in the objective's own unit."""
    return "-" if value is None else f"{value:.4g}"


def loss_told(row: dict[str, Any]) -> str:
    """What a row's codecs lose, by the samples that chose them and by those that confirmed it; empty if nothing."""
    if not row.get("loss") and not row.get("confirmed_loss"):
        return ""
    lossy = ", ".join(f"{tensor} by {codec}" for tensor, codec in row["codecs"].items() if codec != "raw")
    confirmed = row.get("confirmed_loss")
    other = "not confirmed by others" if confirmed is None else f"{share(confirmed)} by those that confirm"
    return f"loss: {share(row.get('loss', 0.0))} by the samples that choose, {other} ({lossy})"


def range_told(one: dict[str, Any]) -> str:
    """The bandwidths at which a row is best, in words."""
    if not one["best_somewhere"]:
        return "never (kept as the fallback, or for other conditions)"
    low, high = one["from_bytes_per_s"], one["to_bytes_per_s"]
    if high is None:
        return f"above {rate(low)}" if low else "any"
    return f"{rate(low)} to {rate(high)}" if low else f"below {rate(high)}"


def _range(one: dict[str, Any]) -> tuple[str, str]:
    return one["name"], range_told(one)


def _candidate(one: dict[str, Any], best: str, further: int, valued: bool, within: bool) -> tuple[str, ...]:
    return (
        "*" if one["name"] == best else "",
        one["name"] + (" +zstd" if one.get("compress") else ""),
        one.get("after") or "-",
        size(one["up_bytes"]) if one["up_bytes"] else "-",
        ms(one["device_s"]),
        ms(one["encode_s"]),
        ms(one["link_s"]),
        ms(one["decode_s"] + one["remote_s"]),
        ms(one["total_s"]),
        *((within_told(one.get("between")),) if within else ()),
        *(str(count) for count in _layers_on(one, further)),
        *((figure(one["value"]),) if valued else ()),
        "" if one.get("allowed", True) else "not allowed by the limits",
    )


def _layers_on(one: dict[str, Any], further: int) -> list[int]:
    """Layers on each tier between the device and the last."""
    beyond = [one.get("remote_layers", 0), *(len(hop.get("remote", ())) for hop in one.get("hops", ()))]
    beyond += [0] * (further + 1 - len(beyond))
    return [beyond[place] - beyond[place + 1] for place in range(further)]
