"""`edgectl deploy`: plan, cut, sign and tell devices to run it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from edgesplit.errors import DeadlineExceeded
from edgesplit_cli.api import Api
from edgesplit_cli.commands.limits import limit_options, limits_of
from edgesplit_cli.planned import loss_told
from edgesplit_cli.quantities import Number
from edgesplit_cli.show import console, json_option, print_json, table


@click.command()
@click.argument("model")
@click.option(
    "--partition",
    default="auto",
    show_default=True,
    help="auto, device, cloud, or the last LAYER that runs on the device.",
)
@click.option(
    "--to",
    "targets",
    multiple=True,
    required=True,
    metavar="DEVICE|group=NAME|all",
    help="Where to; may be given several times.",
)
@limit_options
@click.option("--now", is_flag=True, help="Devices fetch it at once, also outside their fetch windows.")
@click.option(
    "--wait", "wait_s", type=Number(0), default=0.0, metavar="SECONDS", help="Wait until every device runs it."
)
@json_option
@click.pass_obj
def deploy(
    data: Path,
    /,
    model: str,
    partition: str,
    targets: tuple[str, ...],
    objective: str | dict[str, float],
    codecs: tuple[str, ...] | None,
    now: bool,
    wait_s: float,
    as_json: bool,
    **limits: Any,
) -> None:
    """Split MODEL for each target, sign it as one release, and tell the devices to run it."""
    api = Api.of(data)
    body: dict[str, Any] = {
        "model": model,
        "partition": partition,
        "to": list(targets),
        "limits": limits_of(**limits),
        "objective": objective,
        "now": now,
    }
    if codecs:
        body["codecs"] = list(codecs)
    with console().status(Text(f"planning, cutting and signing {model}")) if not as_json else _nothing():
        made = api.post("/v1/deployments", body)
    if wait_s:
        wait_for(api, made["devices"], made["release"], wait_s)
    if as_json:
        print_json(made)
        return
    console().print(f"release {made['release'][:16]}…  of {made['model']}  to {', '.join(made['devices'])}")
    for plan in made["plans"]:
        rows = ", ".join(
            row["name"] + (f" (after {row['after']})" if row.get("after") and row["name"] != "local" else "")
            for row in plan["rows"]
        )
        console().print(f"  {plan['device_class']}: {rows}", soft_wrap=True)
        for row in plan["rows"]:
            if told := loss_told(row):
                console().print(f"    {row['name']}: {told}")
    if not wait_s:
        console().print("Devices fetch it now: `edgectl device list` shows who runs what.")


@click.command()
@json_option
@click.pass_obj
def deployments(data: Path, as_json: bool) -> None:
    """What was deployed, newest last."""
    made = Api.of(data).get("/v1/deployments")
    if as_json:
        print_json(made)
        return
    rows = [
        (str(one["id"]), one["model"], one["partition"], one["release"][:16], ", ".join(one["devices"])) for one in made
    ]
    console().print(table((">id", "model", "partition", "release", "devices"), rows))


def wait_for(api: Api, devices: list[str], release: str, seconds: float) -> None:
    """Until every named device runs the release; DeadlineExceeded names those that do not, and why."""
    until = time.monotonic() + seconds
    while True:
        behind = _behind(api, devices, release)
        failed = {name: text for name, text in behind.items() if text.startswith("failed")}
        if not behind:
            return
        if failed or time.monotonic() > until:
            told = "; ".join(f"{name}: {text}" for name, text in (failed or behind).items())
            raise DeadlineExceeded(f"not every device runs it: {told}. See `edgectl device show NAME`.")
        time.sleep(0.3)


def _behind(api: Api, devices: list[str], release: str) -> dict[str, str]:
    """What the devices that do not run the release yet are doing instead."""
    behind = {}
    for name in devices:
        models = api.get(f"/v1/devices/{name}").get("models") or []
        states = [one for one in models if one["wanted"] == release or one["release"] == release]
        if not any(one["release"] == release and one["state"] == "running" for one in states):
            behind[name] = (
                f"{states[0]['state']} {states[0]['detail']}".strip() if states else "has not heard of it yet"
            )
    return behind


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
