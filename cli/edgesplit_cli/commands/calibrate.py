"""`edgectl calibrate`: measures this machine and writes a device profile of it."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import click
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from edgesplit.device_profile import NAME, DeviceProfile, list_profiles, load_profile
from edgesplit.errors import UsageError
from edgesplit_cli.options.completion import complete_profiles
from edgesplit_cli.options.types import NEW_FILE, POSITIVE, Number
from edgesplit_cli.output import check_writable, console, json_option, print_json, table
from edgesplit_cli.progress import progress_bar


@click.command()
@click.option(
    "--minutes", type=Number(0, 240, min_open=True), default=5.0, show_default=True, help="How long to measure."
)
@click.option("--out", type=NEW_FILE, help="File to write, .yaml or .json. [default: NAME.yaml]")
@click.option("--name", default="local", show_default=True, help="Name of the profile: the device class in plans.")
@click.option("--threads", type=POSITIVE, default=1, show_default=True, help="Threads of the fit as cut.")
@click.option(
    "--base", default="generic-x86", show_default=True, shell_complete=complete_profiles,
    help="Profile that supplies what cannot be measured here: power, and the speed of storage.",
)  # fmt: skip
@json_option
def calibrate(minutes: float, out: Path | None, name: str, threads: int, base: str, as_json: bool) -> None:
    """Measure this machine by a few minutes of microbenchmarks and write a device profile fitted to it: with slices as
    they were cut, and with the engine options among which agents choose.

    Keep the machine idle meanwhile: other load distorts the profile.
    """
    from edgesplit_partitioner.calibration.calibrate import calibrate as measure
    from edgesplit_partitioner.calibration.calibrate import profile_text

    path = out or Path(f"{name}.yaml")
    _check_output(name, path)
    base_profile = load_profile(base)
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    with progress_bar("calibrating", *columns, quiet=as_json) as update:
        profile = measure(
            name, base=base_profile, minutes=minutes, threads=threads, today=date.today().isoformat(),
            progress=lambda done, total: update(completed=done, total=total),
        )  # fmt: skip
    try:
        path.write_text(profile_text(profile, path.suffix == ".json"), "utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    _print_profile(profile, path, as_json)


def _check_output(name: str, path: Path) -> None:
    """UsageError before the measurement for a name or file that would be refused after it."""
    if not NAME.fullmatch(name) or name in list_profiles():
        raise UsageError(
            f"not a name for a profile of your own: {name[:80]!r} (a-z, 0-9, '+', '-', '_'; none that ships)"
        )
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise UsageError(f"--out needs a file that ends with .yaml or .json, not {path.name!r}")
    check_writable(path)


def _print_profile(profile: DeviceProfile, path: Path, as_json: bool) -> None:
    fit = profile.fit
    assert fit is not None
    if as_json:
        spread = {"low": fit.whole.low, "high": fit.whole.high, "coverage": fit.whole.coverage}
        tuned = [{"runtime": each.runtime, "setup": str(each.setup)} for each in profile.tuned]
        print_json(
            {"profile": profile.name, "file": str(path), "runtime": fit.runtime, "whole": spread, "tuned": tuned}
        )
        return
    rows = [
        (operator.family, str(len(operator.points)), f"{operator.low:.2f} to {operator.high:.2f}")
        for operator in fit.operators
        if not operator.family.startswith("class:")
    ]
    console().print(table(("operators", ">points", ">measured / predicted, 90 %"), rows, title=profile.description))
    for each in (fit, *profile.tuned):
        low, high = f"{each.whole.low:.2f}", f"{each.whole.high:.2f}"
        setup = f"{each.runtime}, {each.setup}"
        console().print(f"whole networks, {setup}: {low} to {high} of the prediction, 90 % of the time")
    console().print(f"wrote {path}: edgectl plan MODEL --device {path if path.parent != Path() else f'./{path}'} …")
