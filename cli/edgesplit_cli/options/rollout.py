"""The options that set the terms of a rollout; the controller interprets their values."""

from __future__ import annotations

from typing import Any

import click

from edgesplit_cli.options.completion import complete_devices
from edgesplit_cli.options.types import Number, option_group
from edgesplit_cli.settings import SIGN_VARIABLE

to_option = click.option(
    "--to", "targets", multiple=True, required=True, metavar="DEVICE|group=NAME|EXPRESSION|all",
    shell_complete=complete_devices,
    help="Target devices, as in 'site=oslo and not kind=lab'; repeatable.",
)  # fmt: skip
now_option = click.option(
    "--now", is_flag=True, help="Urgent: devices fetch the release at once, also outside their download windows."
)
wait_option = click.option(
    "--wait", "wait_s", type=Number(0), default=0.0, metavar="SECONDS", help="Follow the rollout until it ends."
)
sign_with_option = click.option(
    "--sign-with",
    "sign_with",
    multiple=True,
    envvar=SIGN_VARIABLE,
    metavar="URI",
    help="Sign the release on this machine, if the release key is not on the controller: a key file or any"
    f" securesystemslib URI. [default: ${SIGN_VARIABLE}]",
)
yes_option = click.option("--yes", is_flag=True, help="Sign without asking.")
STAGING_NAMES = (
    "canary", "then", "rate", "abort_when_failed", "next_when_succeeded", "device_timeout", "timeouts_count", "approve",
    "approve_stages", "at", "between", "prefer", "rollback_when_failed", "unless_busy",
)  # fmt: skip
NAMES = (*STAGING_NAMES, "gates", "gate_after", "follow")
staging_options = option_group(
    click.option(
        "--canary",
        default="",
        metavar="PART|N",
        help="Size of the first stage: a percentage of the devices, or a number.",
    ),
    click.option(
        "--then",
        multiple=True,
        metavar="PART|N",
        help="Size of the next stage, with all earlier stages included; repeatable.",
    ),
    click.option(
        "--rate",
        default="",
        metavar="N/min|exponential:base=5,factor=2,every=10m",
        help="Rate at which devices are assigned their new statement.",
    ),
    click.option(
        "--abort-when-failed",
        default="",
        metavar="PART|N|never",
        help="Stop the rollout when this part or number of a stage's devices has failed."
        " [default: 5% with stages or gates, else never]",
    ),
    click.option(
        "--next-when-succeeded",
        default="",
        metavar="PART|N",
        help="Begin the next stage as soon as this part or number has succeeded. [default: when all have ended]",
    ),
    click.option(
        "--rollback-when-failed",
        is_flag=True,
        help="When the rollout stops, roll back the devices that succeeded, too.",
    ),
    click.option("--device-timeout", default="", metavar="30m", help="Timeout of one device. [default: 24h]"),
    click.option(
        "--timeouts-count",
        type=click.Choice(["never", "heard", "all"]),
        default="heard",
        show_default=True,
        help="Which devices that time out count as failed: none, those that had begun, or all.",
    ),
    click.option("--approve", is_flag=True, help="Wait for `edgectl rollout approve` before each stage."),
    click.option(
        "--approve-stage",
        "approve_stages",
        type=int,
        multiple=True,
        metavar="N",
        help="Wait before this stage only, counted from 1.",
    ),
    click.option(
        "--at",
        default="",
        metavar="2026-11-27T02:00+01:00",
        help="Time at which the rollout begins, with its time zone.",
    ),
    click.option(
        "--between",
        default="",
        metavar="01:00-05:00",
        help="Start devices in these hours only, in UTC or as in 01:00-05:00+01:00 or '01:00-05:00 Europe/Oslo'.",
    ),
    click.option("--prefer", default="", metavar="EXPRESSION", help="Devices that are updated first, as in kind=lab."),
    click.option(
        "--unless-busy",
        is_flag=True,
        help="Refuse, instead of taking over, where another rollout brings the model to one of the devices.",
    ),
)
rollout_options = option_group(
    staging_options,
    click.option(
        "--gate",
        "gates",
        multiple=True,
        metavar="'WHAT<BOUND'",
        help="Health gate, a bound that the release must keep on each device: p95<150ms, errors<1%, fallbacks<10%,"
        " memory<400MB, celsius<80, joules<0.5, drift<1%, accuracy>97%, agreement>99%, changed<2%. Golden inputs are"
        " always checked. Quote it for the shell.",
    ),
    click.option(
        "--gate-after",
        default="",
        metavar='"50 requests / 10m"',
        help="Evidence that a gate needs: a number of requests, a duration, or both. [default: 50 requests / 10m]",
    ),
    click.option("--follow", is_flag=True, help="Also deploy to devices that match later, until it is aborted."),
)


def rollout_body(
    *, canary: str, then: tuple[str, ...], rollback_when_failed: bool, approve_stages: tuple[int, ...],
    gates: tuple[str, ...] = (), **others: Any,
) -> dict[str, Any]:  # fmt: skip
    """The options as the body of the API's request."""
    return {
        **others,
        "stages": [stage for stage in (canary, *then) if stage],
        "gates": list(gates),
        "approve_stages": list(approve_stages),
        "when_failed": "rollback" if rollback_when_failed else "stay",
    }
