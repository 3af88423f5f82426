"""Replanning: drift of plans in use, the controller's proposals, and the policy for automatic changes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from edgesplit.controller_client.client import ControllerClient
from edgesplit.quantities import format_duration, format_size
from edgesplit_cli.options.completion import complete_models
from edgesplit_cli.options.types import DURATION, FRACTION, POSITIVE
from edgesplit_cli.output import (
    bold_head,
    console,
    counted,
    json_option,
    ms,
    percent_text,
    print_json,
    print_result,
    rate,
    table,
)
from edgesplit_cli.settings import connect

MAX_NAMED = 10
MODES = ("auto", "propose", "off")
replan_option = click.option(
    "--replan",
    type=click.Choice(MODES),
    help="When measured times or links drift from the plan: roll another table out, propose it, or nothing. Kept for "
    "the model, on the groups named by --to or everywhere. [default: propose]",
)


def set_policy(api: ControllerClient, model: str, targets: Sequence[str], mode: str) -> None:
    """Set the policy of `deploy --replan`, for the groups of its targets or for all devices."""
    groups = [target.removeprefix("group=") for target in targets if target.startswith("group=")]
    everywhere = [] if len(groups) == len(targets) else [""]
    for names in filter(None, (groups, everywhere)):
        body = {"model": model, "groups": [group for group in names if group], "mode": mode}
        api.post("/v1/replan-policies", body)


@click.command("replan-policy")
@click.argument("model", default="", shell_complete=complete_models)
@click.argument("mode", type=click.Choice(MODES), required=False)
@click.option("--group", "groups", multiple=True, metavar="NAME", help="Only on devices of this group; repeatable.")
@click.option("--devices", type=POSITIVE, help="Number of devices that must agree. [default: 3]")
@click.option("--gain", type=FRACTION, metavar="SHARE", help="Least predicted saving. [default: 10%]")
@click.option("--observe", type=DURATION, help="How long to observe before a proposal. [default: 30m]")
@click.option("--cool-down", type=DURATION, help="Least time between two changes of a table. [default: 6h]")
@json_option
@click.pass_obj
def replan_policy(
    data: Path, /, model: str, mode: str | None, groups: tuple[str, ...], devices: int | None, gain: float | None,
    observe: float | None, cool_down: float | None, as_json: bool,
) -> None:  # fmt: skip
    """What the controller may do when the measurements of MODEL's plans drift: MODE is auto, propose or off.

    auto signs another cut with the planner's key and rolls it out; propose waits for `edgectl rollout accept`. Without
    MODEL, or with `all`, the policy of every model that has none of its own. Without MODE: show what is set.
    """
    api = connect(data)
    name = "" if model == "all" else model
    body = {"mode": mode, "least_devices": devices, "least_gain": gain, "observe_s": observe, "cool_down_s": cool_down}
    changes = {key: value for key, value in body.items() if value is not None}
    if changes:
        policies = api.post("/v1/replan-policies", {"model": name, "groups": list(groups), **changes})
    else:
        policies = [policy for policy in api.get("/v1/replan-policies") if name in ("", policy["model"])]
    columns = ("model", "group", "mode", ">devices", ">gain", ">observe", ">cool-down")
    rows = [
        (
            policy["model"] or "all", policy["group"] or "all", policy["mode"], str(policy["least_devices"]),
            percent_text(policy["least_gain"]), format_duration(policy["observe_s"]),
            format_duration(policy["cool_down_s"]),
        )
        for policy in policies
    ]  # fmt: skip
    print_result(policies, as_json, table(columns, rows) if rows else f"{name} has no policy of its own: propose")


@click.command()
@click.argument("model", default="", shell_complete=complete_models)
@click.option("--look", is_flag=True, help="Update proposals now; otherwise that happens every minute.")
@json_option
@click.pass_obj
def drift(data: Path, /, model: str, look: bool, as_json: bool) -> None:
    """Drift of the plans in use: assumed against measured figures, and the predicted gain of another table."""
    api = connect(data)
    if look:
        api.post("/v1/drift/inspect", {})
    plans = api.get("/v1/drift", **({"model": model} if model else {}))
    if as_json:
        print_json(plans)
        return
    if not plans:
        console().print("no device runs a plan that can be replanned")
    for plan in plans:
        print_drift(plan)


def print_drift(drift: Mapping[str, Any]) -> None:
    """Print the drift of one plan on one class of devices."""
    devices = counted(len(drift["devices"]), "device")
    details = f"  {drift['device_class']}  {devices}, {drift['measured_devices']} of them measured"
    basis = f", {drift['basis']}" if drift["basis"] not in (None, "measured") else ""
    console().print(bold_head(drift["model"], f"{details}{basis}  replan: {drift['policy']}"))
    rows = [
        (
            item["quantity"],
            figure_text(item["assumed"], item["unit"]),
            figure_text(item["measured"], item["unit"]),
            factor_text(item),
        )
        for item in drift["drift"]
    ]
    if rows:
        console().print(table(("", ">assumed", ">measured", ">"), rows))
    console().print(f"  {drift['note'] or drift['reason']}")


def print_proposal(proposal: Mapping[str, Any]) -> None:
    """Print one proposal."""
    devices = f"{len(proposal['devices'])} {proposal['device_class']}" + (
        f" of group {proposal['group']}" if proposal["group"] else ""
    )
    console().print(bold_head(f"{proposal['id']}", f"  {proposal['state']}  {proposal['model']} on {devices}"))
    basis = "" if proposal["basis"] == "measured" else f" ({proposal['basis']} devices)"
    now, then = proposal["seconds"]["now"], proposal["seconds"]["then"]
    console().print(f"  predicted{basis}: {proposal['reason']}; {ms(now)} ms per request now, {ms(then)} ms then")
    for which, key in (("now", "rows"), ("then", "proposed_rows")):
        rows = ", ".join(
            row["name"] + (f" (after {row['split_after']})" if row["split_after"] else "") for row in proposal[key]
        )
        console().print(f"  {which}: {rows}", soft_wrap=True)
    if proposal.get("ended"):
        console().print(f"  {proposal['ended']}")


@click.command()
@click.option("--all", "every", is_flag=True, help="Also proposals that were decided.")
@json_option
@click.pass_obj
def proposals(data: Path, /, every: bool, as_json: bool) -> None:
    """Other tables that the controller proposes, their predicted gain, and why."""
    found_proposals = connect(data).get("/v1/proposals", **({} if every else {"open": "true"}))
    if as_json:
        print_json(found_proposals)
        return
    for proposal in found_proposals:
        print_proposal(proposal)
    if not found_proposals:
        console().print("no table is proposed")


@click.command()
@click.argument("number", type=int)
@json_option
@click.pass_obj
def accept(data: Path, /, number: int, as_json: bool) -> None:
    """Cut, sign (by the planner's key) and roll out the table of proposal NUMBER."""
    result = connect(data).post(f"/v1/proposals/{number}/accept", {})
    devices = result["devices"]
    recipients = ", ".join(devices) if len(devices) <= MAX_NAMED else f"{len(devices)} devices"
    text = f"release {result['result'][:16]}… is being rolled out to {recipients}; see `edgectl rollout status`"
    print_result(result, as_json, text)


@click.command()
@click.argument("number", type=int)
@json_option
@click.pass_obj
def dismiss(data: Path, /, number: int, as_json: bool) -> None:
    """Keep the present table; nothing is proposed again for four times the cool-down."""
    result = connect(data).post(f"/v1/proposals/{number}/dismiss", {})
    created = time.strftime("%F %R", time.localtime(result["created"]))
    print_result(result, as_json, f"proposal {result['id']} of {created} dismissed")


def figure_text(value: float, unit: str) -> str:
    """A measured or assumed figure with its unit."""
    formatter = {"bytes/s": rate, "bytes": format_size}.get(unit)
    return formatter(value) if formatter else f"{ms(value)} ms"


def factor_text(drift: Mapping[str, Any]) -> str:
    """The factor by which a figure drifted."""
    return "" if drift["factor"] is None else f"×{drift['factor']:.2f}"
