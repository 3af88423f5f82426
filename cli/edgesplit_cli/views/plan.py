"""A plan as text: the candidates beside the pure modes, then the switching table."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.text import Text

from edgesplit import plan as plans
from edgesplit.cascade import ChangedShare
from edgesplit.quantities import format_size
from edgesplit_cli.output import bold_head, console, ms, percent_text, rate, table
from edgesplit_cli.views.exit_plan import print_exit
from edgesplit_partitioner.presentation.labels import codec_suffix, link_name

COLUMNS = (
    "", "cut", "last layer\non device", ">\nsends", ">\nreceives", ">device\nms", ">encode\nms", ">link\nms",
    ">remote\nms", ">total\nms",
)  # fmt: skip


def print_plan(plan: dict[str, Any]) -> None:
    """Print a plan, the result of `edgesplit_partitioner.describe`."""
    out = console()
    for number, link in enumerate(plan.get("links") or [plan["link"]]):
        between = f"{plan['tiers'][number]} to {plan['tiers'][number + 1]}" if len(plan["tiers"]) > 2 else "link"
        named = f"{link_name(link)} " if link_name(link) else ""
        on = f" on {plan['device_class'] or 'the device'}, "
        link_text = (
            f"{between} {named}up {rate(link['up_bytes_per_s'])}, down "
            f"{rate(link['down_bytes_per_s'])}, round trip {ms(link['rtt_s'])} ms"
        )
        out.print(bold_head(plan["model"], f"{on}{link_text}") if not number else f"  {link_text}")
    for tier, basis in plan.get("basis", {}).items():
        out.print(f"  {tier} times: {basis}")
    best, has_value_column = plan["best"], plan.get("objective", "latency") not in ("latency", "latency_p95")
    middle_tiers = plan["tiers"][1:-1]
    coverage = next(
        (candidate["between"]["coverage"] for candidate in plan["candidates"] if candidate.get("between")), None
    )
    within = () if coverage is None else (f">within\n({coverage:.0%} sure)",)
    columns = (
        *COLUMNS,
        *within,
        *(f">on\n{tier}" for tier in middle_tiers),
        *((objective_heading(plan["objective"]),) if has_value_column else ()),
    )
    rows = [
        _candidate_row(candidate, plan, len(middle_tiers), has_value_column, bool(within))
        for candidate in plan["candidates"]
    ]
    out.print(table(columns, rows))
    if not all(candidate.get("allowed", True) for candidate in plan["candidates"]):
        out.print("x: a limit forbids it")
    out.print(_best_text(plan, has_value_column))
    for picture in plan.get("pictures", ()):
        if picture["hides_the_cloud"]:
            out.print(picture_text(picture))
    if private := plan["table"].get("required_local_layers"):
        out.print(f"privacy: nothing leaves before {private[-1]!r} has run on the device ({len(private)} layers stay)")
    if link_text := loss_text(next((row for row in plan["table"]["rows"] if row["name"] == best), {})):
        out.print(link_text)
    if changed := next(
        (row["changed"] for row in plan["table"]["rows"] if row["name"] == best and "changed" in row), None
    ):
        out.print(changed_text(changed))
    if "exit" in plan:
        print_exit(plan["exit"])
    headings = ("row", "best at this round trip while the uplink is")
    out.print(table(headings, map(_range_row, plan["ranges"]), title="switching table"))


def picture_text(picture: dict[str, Any]) -> str:
    """That a picture is priced as numbers, which alone keeps it from the cloud, and what to do about it."""
    return (
        f"{picture['input']} looks like a picture: {format_size(picture['bytes'])} as a tensor; as JPEG about "
        f"{format_size(picture['jpeg_bytes'])}, with which all-remote would take about {ms(picture['seconds'])} ms: "
        f"push with --input '{picture['input_spec']} scale=… mean=… std=…'"
    )


def _best_text(plan: dict[str, Any], valued: bool) -> Text:
    """The best row and how certain it is."""
    certificate = plan["certificate"]
    value = f", {objective_summary(plan)}" if valued else ""
    least = objective_value_text(plan["objective"], certificate["lower_bound"])
    bound = f"lower bound {least}, gap {certificate['gap']:.2%}"
    gain = f"; {plan['gain']:.2f}x {_baseline_text(plan)}" if plan["gain"] else ""
    text = f" {ms(plan['seconds'])} ms{_interval_suffix(plan)}{value}; {bound}{gain}"
    return Text.assemble("best: ", (plan["best"], "bold"), text)


def _interval_suffix(plan: dict[str, Any]) -> str:
    """The interval that the uncertainty of predictions leaves for the result."""
    between = plan.get("between")
    return f" ({interval_text(between)}, {between['coverage']:.0%} sure)" if between else ""


def interval_text(between: dict[str, Any] | None) -> str:
    """Both ends of an interval in milliseconds; a dash where nothing is predicted."""
    return f"{ms(between['low_s'])} to {ms(between['high_s'])}" if between else "-"


def _baseline_text(plan: dict[str, Any]) -> str:
    """What the gain is relative to: the pure modes that the limits allow."""
    pure = {plans.LOCAL: "all-local", plans.REMOTE: "all-remote"}
    allowed = {candidate["name"]: candidate["allowed"] for candidate in plan["candidates"] if candidate["name"] in pure}
    allowed_modes = [pure[name] for name in pure if allowed.get(name)]
    if len(allowed_modes) != 1 or len(allowed) != len(pure):
        return "the better of all-local and all-remote"
    other = next(pure[name] for name in pure if not allowed[name])
    return f"{allowed_modes[0]} ({other} is forbidden)"


def objective_value_text(objective: str, value: float | None) -> str:
    """A value of the objective with its unit."""
    if value is None:
        return "-"
    if objective in ("latency", "latency_p95", "throughput"):
        return f"{ms(value)} ms" if value >= 1e-3 or not value else f"{value * 1000:.3g} ms"
    return f"{value:.4g} J" if objective == "energy" else f"{value:.4g}"


def objective_heading(objective: str) -> str:
    """Heading of the column of the objective's values."""
    named = {"energy": ">energy\nJ", "throughput": ">slowest\nstage ms"}
    return named.get(objective, ">weighted\nsum")


def objective_summary(plan: dict[str, Any]) -> str:
    """The best cut's value of an objective other than latency."""
    objective, value = plan["objective"], plan["value"]
    if objective == "throughput":
        return f"slowest stage {objective_value_text(objective, value)}" + (
            f" ({1 / value:.3g} answers per second)" if value else ""
        )
    return f"{objective} {objective_value_text(objective, value)}"


def loss_text(row: dict[str, Any]) -> str:
    """What a row's codecs lose, by the samples that chose them and by those that confirmed them; empty if nothing."""
    if not row.get("loss") and not row.get("confirmed_loss"):
        return ""
    lossy = ", ".join(f"{tensor} by {codec}" for tensor, codec in row["codecs"].items() if codec != "raw")
    confirmed = row.get("confirmed_loss")
    other = "not confirmed by others" if confirmed is None else f"{percent_text(confirmed)} by those that confirm"
    return f"loss: {percent_text(row.get('loss', 0.0))} by the samples that choose, {other} ({lossy})"


def changed_text(changed: dict[str, Any]) -> str:
    """What is promised of the answers that a row's codecs change."""
    share = msgspec.convert(changed, ChangedShare)
    return f"answers: {share.text}; {share.differing} of the samples' differ"


def range_text(row: dict[str, Any]) -> str:
    """The range of bandwidths at which a row is best, as text."""
    if not row["best_somewhere"]:
        return "never (kept as the fallback, or for other conditions)"
    low, high = row["from_bytes_per_s"], row["to_bytes_per_s"]
    if high is None:
        return f"above {rate(low)}" if low else "any"
    return f"{rate(low)} to {rate(high)}" if low else f"below {rate(high)}"


def _range_row(row: dict[str, Any]) -> tuple[str, str]:
    return row["name"], range_text(row)


def _candidate_row(
    candidate: dict[str, Any], plan: dict[str, Any], middle_tiers: int, valued: bool, within: bool
) -> tuple[str, ...]:
    value = objective_value_text(plan["objective"], candidate["value"]).partition(" ")[0]
    return (
        "*" if candidate["name"] == plan["best"] else "" if candidate.get("allowed", True) else "x",
        candidate["name"] + ("" if candidate["name"].startswith("cut-") else codec_suffix(candidate)),
        _split_text(candidate),
        format_size(candidate["up_bytes"]) if candidate["up_bytes"] else "-",
        format_size(candidate["down_bytes"]) if candidate["down_bytes"] else "-",
        ms(candidate["device_s"]),
        ms(candidate["encode_s"]),
        ms(candidate["link_s"]),
        ms(candidate["decode_s"] + candidate["remote_s"]),
        ms(candidate["total_s"]),
        *((interval_text(candidate.get("between")),) if within else ()),
        *(str(count) for count in _layer_counts(candidate, middle_tiers)),
        *((value,) if valued else ()),
    )


def _split_text(candidate: dict[str, Any]) -> str:
    """The cut's last layers and how many of all layers it runs on the device, as in `Equal (1 of 312)`."""
    if not candidate.get("split_after"):
        return "-"
    here = candidate.get("layers", 0)
    return f"{candidate['split_after']} ({here} of {here + candidate.get('remote_layers', 0)})"


def _layer_counts(candidate: dict[str, Any], middle_tiers: int) -> list[int]:
    """Number of layers on each tier between the device and the last."""
    counts = [candidate.get("remote_layers", 0), *(len(hop.get("remote", ())) for hop in candidate.get("hops", ()))]
    counts += [0] * (middle_tiers + 1 - len(counts))
    return [counts[index] - counts[index + 1] for index in range(middle_tiers)]
