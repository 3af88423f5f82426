"""`edgectl profiles`: lists the device profiles that plans can be made for."""

from __future__ import annotations

import click
import msgspec

from edgesplit.device_profile import list_profiles, load_profile
from edgesplit.quantities import format_size
from edgesplit_cli.options.completion import complete_profiles
from edgesplit_cli.output import bold_head, json_option, print_result, table


@click.command()
@click.argument("name", required=False, shell_complete=complete_profiles)
@json_option
def profiles(name: str | None, as_json: bool) -> None:
    """List the device profiles, or show one with the source of each figure."""
    if name is None:
        all_profiles = [load_profile(item) for item in list_profiles()]
        rows = [(item.name, item.description, format_size(item.memory_bytes.value)) for item in all_profiles]
        print_result(msgspec.to_builtins(all_profiles), as_json, table(("profile", "description", ">memory"), rows))
        return
    profile = load_profile(name)
    head = bold_head(profile.name, f"  {profile.description}")
    figures = table(("figure", ">value", "unit", "basis", "source"), profile.figure_rows())
    intervals = [("rates", profile.error)] if profile.error is not None else []
    fits = [*([profile.fit] if profile.fit is not None else []), *profile.tuned]
    intervals += [(f"the fit of {fit.runtime}, {fit.setup or profile.priced_setup}", fit.whole) for fit in fits]
    errors = [
        f"predictions by {label}: actual times are {interval.low:.2f} to {interval.high:.2f} times that, "
        f"{interval.coverage:.0%} sure ({interval.basis}: {interval.source.strip()})"
        for label, interval in intervals
    ]
    priced = f"its figures are for {profile.priced_setup}"
    print_result(msgspec.to_builtins(profile), as_json, head, figures, priced, *errors)
