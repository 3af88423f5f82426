"""`edgectl profiles`: the device profiles that plans can be made for."""

from __future__ import annotations

import click
import msgspec

from edgesplit.device_profile import list_profiles, load_profile
from edgesplit_cli.output import console, headed, json_option, print_json, size, table


@click.command()
@click.argument("name", required=False)
@json_option
def profiles(name: str | None, as_json: bool) -> None:
    """List the device profiles, or show one with the source of each figure."""
    if name is None:
        every = [load_profile(one) for one in list_profiles()]
        if as_json:
            print_json([msgspec.to_builtins(one) for one in every])
            return
        rows = [(one.name, one.description, size(one.memory_bytes.value)) for one in every]
        console().print(table(("profile", "what it is", ">memory"), rows))
        return
    profile = load_profile(name)
    if as_json:
        print_json(msgspec.to_builtins(profile))
        return
    console().print(headed(profile.name, f"  {profile.description}"))
    console().print(table(("figure", ">value", "unit", "basis", "source"), profile.figures()))
    for what, one in (("rates", profile.error), ("fit", profile.fit.whole if profile.fit else None)):
        if one is not None:
            console().print(
                f"predictions by {what}: the truth is {one.low:.2f} to {one.high:.2f} times that, {one.coverage:.0%} "
                f"sure ({one.basis}: {one.source.strip()})"
            )
