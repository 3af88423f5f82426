"""Plans that grow old: what drifted, what is proposed, and what the controller may do by itself."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from edgesplit.controller_client.client import ControllerClient
from edgesplit_cli.commands.options.percent import as_share
from edgesplit_cli.output import console, headed, json_option, ms, print_json, rate, share, size, table
from edgesplit_cli.quantities import Quantity
from edgesplit_cli.settings import connect

MOST_NAMED = 10
MODES = ("auto", "propose", "off")
LASTING = Quantity("duration", {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}, "30m or 6h")
replan_option = click.option(
    "--replan",
    type=click.Choice(MODES),
    default=None,
    help="When measured times or links drift from the plan: roll another table out, propose it, or nothing. Kept for "
    "the model, on the groups named by --to or everywhere. [default: propose]",
)


def set_policy(api: ControllerClient, model: str, targets: Sequence[str], mode: str) -> None:
    """Keep what `deploy --replan` said: for the groups that it named, or for all devices."""
    groups = [target.removeprefix("group=") for target in targets if target.startswith("group=")]
    wide = [] if len(groups) == len(targets) else [""]
    for each in (groups, wide):
        if each:
            api.post("/v1/replan-policies", {"model": model, "groups": [one for one in each if one], "mode": mode})


@click.command("replan-policy")
@click.argument("model", default="")
@click.argument("mode", type=click.Choice(MODES), required=False)
@click.option("--group", "groups", multiple=True, metavar="NAME", help="Only on devices of this group; several may be.")
@click.option("--devices", type=click.IntRange(1), default=None, help="So many must agree. [default: 3]")
@click.option("--gain", callback=as_share, default=None, metavar="SHARE", help="To be saved at least. [default: 10%]")
@click.option("--observe", type=LASTING, default=None, help="Watch so long before anything is said. [default: 30m]")
@click.option("--cool-down", type=LASTING, default=None, help="Between two changes of a table. [default: 6h]")
@json_option
@click.pass_obj
def replan_policy(
    data: Path,
    /,
    model: str,
    mode: str | None,
    groups: tuple[str, ...],
    devices: int | None,
    gain: float | None,
    observe: float | None,
    cool_down: float | None,
    as_json: bool,
) -> None:
    """What the controller may do when MODEL's plans grow old: MODE is auto, propose or off.

    auto signs another cut with the planner's key and rolls it out; propose waits for `edgectl rollout accept`. Without
    MODEL, or with `all`, the policy of every model that has none of its own. Without MODE: show what is set.
    """
    api = connect(data)
    name = "" if model == "all" else model
    body = {"mode": mode, "least_devices": devices, "least_gain": gain, "observe_s": observe, "cool_down_s": cool_down}
    given = {key: value for key, value in body.items() if value is not None}
    if given:
        shown = api.post("/v1/replan-policies", {"model": name, "groups": list(groups), **given})
    else:
        shown = [one for one in api.get("/v1/replan-policies") if name in ("", one["model"])]
    if as_json:
        print_json(shown)
        return
    columns = ("model", "group", "mode", ">devices", ">gain", ">observe", ">cool-down")
    rows = [
        (
            one["model"] or "all", one["group"] or "all", one["mode"], str(one["least_devices"]),
            share(one["least_gain"]), lasting(one["observe_s"]), lasting(one["cool_down_s"]),
        )
        for one in shown
    ]  # fmt: skip
    console().print(table(columns, rows) if rows else f"{name} has no policy of its own: propose")


@click.command()
@click.argument("model", default="")
@click.option("--look", is_flag=True, help="Make or take back proposals now; else that happens every minute.")
@json_option
@click.pass_obj
def drift(data: Path, /, model: str, look: bool, as_json: bool) -> None:
    """What plans in use assumed, what devices measured since, and what another table is predicted to bring."""
    api = connect(data)
    if look:
        api.post("/v1/drift/look", {})
    found = api.get("/v1/drift", **({"model": model} if model else {}))
    if as_json:
        print_json(found)
        return
    if not found:
        console().print("no device is to run a plan that could be made anew")
    for one in found:
        print_drift(one)


def print_drift(one: Mapping[str, Any]) -> None:
    """One plan on one class of devices."""
    whose = f"  {one['device_class']}  {len(one['devices'])} devices, {one['heard']} heard"
    basis = f", {one['basis']}" if one["basis"] not in (None, "measured") else ""
    console().print(headed(one["model"], f"{whose}{basis}  replan: {one['policy']}"))
    rows = [
        (each["what"], figure(each["assumed"], each["unit"]), figure(each["measured"], each["unit"]), times(each))
        for each in one["drift"]
    ]
    if rows:
        console().print(table(("", ">assumed", ">measured", ">"), rows))
    console().print(f"  {one['note'] or one['why']}")


def print_proposal(one: Mapping[str, Any]) -> None:
    """One proposal, for people."""
    whom = f"{len(one['devices'])} {one['device_class']}" + (f" of group {one['group']}" if one["group"] else "")
    console().print(headed(f"{one['id']}", f"  {one['state']}  {one['model']} on {whom}"))
    basis = "" if one["basis"] == "measured" else f" ({one['basis']} devices)"
    now, then = one["seconds"]["now"], one["seconds"]["then"]
    console().print(f"  predicted{basis}: {one['why']}; {ms(now)} ms per request now, {ms(then)} ms then")
    for which, key in (("now", "rows"), ("then", "proposed_rows")):
        told = ", ".join(row["name"] + (f" (after {row['after']})" if row["after"] else "") for row in one[key])
        console().print(f"  {which}: {told}", soft_wrap=True)
    if one.get("ended"):
        console().print(f"  {one['ended']}")


@click.command()
@click.option("--all", "every", is_flag=True, help="Also those that were decided.")
@json_option
@click.pass_obj
def proposals(data: Path, /, every: bool, as_json: bool) -> None:
    """Other tables that the controller proposes, what they are predicted to bring, and why."""
    found = connect(data).get("/v1/proposals", **({} if every else {"open": "true"}))
    if as_json:
        print_json(found)
        return
    for one in found:
        print_proposal(one)
    if not found:
        console().print("nothing is proposed")


@click.command()
@click.argument("number", type=int)
@json_option
@click.pass_obj
def accept(data: Path, /, number: int, as_json: bool) -> None:
    """Cut, sign (by the planner's key) and roll out the table of proposal NUMBER."""
    done = connect(data).post(f"/v1/proposals/{number}/accept", {})
    if as_json:
        print_json(done)
    else:
        devices = done["devices"]
        whom = ", ".join(devices) if len(devices) <= MOST_NAMED else f"{len(devices)} devices"
        console().print(f"release {done['result'][:16]}… is on its way to {whom}; see `edgectl rollout status`")


@click.command()
@click.argument("number", type=int)
@json_option
@click.pass_obj
def dismiss(data: Path, /, number: int, as_json: bool) -> None:
    """Leave the table as it is, and be asked no more for four times the cool-down."""
    done = connect(data).post(f"/v1/proposals/{number}/dismiss", {})
    if as_json:
        print_json(done)
    else:
        console().print(f"proposal {done['id']} of {time.strftime('%F %R', time.localtime(done['created']))} dismissed")


def figure(value: float, unit: str) -> str:
    """A figure of a drift, for people."""
    told = {"bytes/s": rate, "bytes": size}.get(unit)
    return told(value) if told else f"{ms(value)} ms"


def times(one: Mapping[str, Any]) -> str:
    """By which factor it drifted."""
    return "" if one["factor"] is None else f"×{one['factor']:.2f}"


def lasting(seconds: float) -> str:
    """A long time, for people."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"
