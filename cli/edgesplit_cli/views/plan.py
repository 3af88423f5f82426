"""A plan for people: the candidates beside the pure modes, then the switching table."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from edgesplit import plan as words
from edgesplit_cli.output import console, headed, ms, rate, share, size, table
from edgesplit_partitioner.presentation.labels import link_name, travels

COLUMNS = (
    "",
    "cut",
    "last layer\non device",
    ">\nsends",
    ">device\nms",
    ">encode\nms",
    ">link\nms",
    ">remote\nms",
    ">total\nms",
)


def print_plan(made: dict[str, Any]) -> None:
    """`made` as `edgesplit_partitioner.describe` gives it."""
    out = console()
    for number, link in enumerate(made.get("links") or [made["link"]]):
        between = f"{made['tiers'][number]} to {made['tiers'][number + 1]}" if len(made["tiers"]) > 2 else "link"
        named = f"{link_name(link)} " if link_name(link) else ""
        on = f" on {made['device_class'] or 'the device'}, "
        told = (
            f"{between} {named}up {rate(link['up_bytes_per_s'])}, down "
            f"{rate(link['down_bytes_per_s'])}, round trip {ms(link['rtt_s'])} ms"
        )
        out.print(headed(made["model"], f"{on}{told}") if not number else f"  {told}")
    for tier, basis in made.get("basis", {}).items():
        out.print(f"  {tier} times: {basis}")
    best, valued = made["best"], made.get("objective", "latency") not in ("latency", "latency_p95")
    further = made["tiers"][1:-1]
    sure = next((one["between"]["coverage"] for one in made["candidates"] if one.get("between")), None)
    within = () if sure is None else (f">within\n({sure:.0%} sure)",)
    columns = (
        *COLUMNS,
        *within,
        *(f">on\n{tier}" for tier in further),
        *((heading(made["objective"]),) if valued else ()),
    )
    rows = [_candidate(one, made, len(further), valued, bool(within)) for one in made["candidates"]]
    out.print(table(columns, rows))
    if not all(one.get("allowed", True) for one in made["candidates"]):
        out.print("x: a limit forbids it")
    out.print(_best(made, valued))
    if kept := made["table"].get("earliest_cut"):
        out.print(f"privacy: nothing leaves before {kept[-1]!r} has run on the device ({len(kept)} layers stay)")
    if told := loss_told(next((row for row in made["table"]["rows"] if row["name"] == best), {})):
        out.print(told)
    headings = ("row", "best at this round trip while the uplink is")
    out.print(table(headings, map(_range, made["ranges"]), title="switching table"))


def _best(made: dict[str, Any], valued: bool) -> Text:
    """The answer and how sure it is."""
    certificate = made["certificate"]
    value = f", {told_objective(made)}" if valued else ""
    bound = f"lower bound {worth(made['objective'], certificate['lower_bound'])}, gap {certificate['gap']:.2%}"
    gain = f"; {made['gain']:.2f}x {_pure_told(made)}" if made["gain"] else ""
    took = f" {ms(made['seconds'])} ms{_within(made)}{value}; {bound}{gain}"
    return Text.assemble("best: ", (made["best"], "bold"), took)


def _within(made: dict[str, Any]) -> str:
    """Between what the predicted part leaves the answer."""
    between = made.get("between")
    return f" ({within_told(between)}, {between['coverage']:.0%} sure)" if between else ""


def within_told(between: dict[str, Any] | None) -> str:
    """Milliseconds of both ends; a dash where nothing is predicted."""
    return f"{ms(between['low_s'])} to {ms(between['high_s'])}" if between else "-"


def _pure_told(made: dict[str, Any]) -> str:
    """What the gain is measured by: the pure modes that the limits allow."""
    pure = {words.LOCAL: "all-local", words.REMOTE: "all-remote"}
    allowed = {one["name"]: one["allowed"] for one in made["candidates"] if one["name"] in pure}
    kept = [pure[name] for name in pure if allowed.get(name)]
    if len(kept) != 1 or len(allowed) != len(pure):
        return "the better of all-local and all-remote"
    other = next(pure[name] for name in pure if not allowed[name])
    return f"{kept[0]} ({other} is forbidden)"


def worth(objective: str, value: float | None) -> str:
    """A value of the objective, with its unit."""
    if value is None:
        return "-"
    if objective in ("latency", "latency_p95", "throughput"):
        return f"{ms(value)} ms" if value >= 1e-3 or not value else f"{value * 1000:.3g} ms"
    return f"{value:.4g} J" if objective == "energy" else f"{value:.4g}"


def heading(objective: str) -> str:
    """Of the column of the objective's values."""
    named = {"energy": ">energy\nJ", "throughput": ">slowest\nstage ms"}
    return named.get(objective, ">weighted\nsum")


def told_objective(made: dict[str, Any]) -> str:
    """What the best cut is worth, where that is not its latency."""
    objective, value = made["objective"], made["value"]
    if objective == "throughput":
        return f"slowest stage {worth(objective, value)}" + (f" ({1 / value:.3g} answers per second)" if value else "")
    return f"{objective} {worth(objective, value)}"


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


def _candidate(one: dict[str, Any], made: dict[str, Any], further: int, valued: bool, within: bool) -> tuple[str, ...]:
    value = worth(made["objective"], one["value"]).partition(" ")[0]
    return (
        "*" if one["name"] == made["best"] else "" if one.get("allowed", True) else "x",
        one["name"] + travels(one),
        one.get("after") or "-",
        size(one["up_bytes"]) if one["up_bytes"] else "-",
        ms(one["device_s"]),
        ms(one["encode_s"]),
        ms(one["link_s"]),
        ms(one["decode_s"] + one["remote_s"]),
        ms(one["total_s"]),
        *((within_told(one.get("between")),) if within else ()),
        *(str(count) for count in _layers_on(one, further)),
        *((value,) if valued else ()),
    )


def _layers_on(one: dict[str, Any], further: int) -> list[int]:
    """Layers on each tier between the device and the last."""
    beyond = [one.get("remote_layers", 0), *(len(hop.get("remote", ())) for hop in one.get("hops", ()))]
    beyond += [0] * (further + 1 - len(beyond))
    return [beyond[place] - beyond[place + 1] for place in range(further)]
