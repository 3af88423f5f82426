"""`edgectl doctor`: what ails the controller, as far as an operator can see."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from edgesplit_agent.service.doctor_findings import exit_code, printed
from edgesplit_cli.output import json_option


@click.command()
@json_option
@click.pass_obj
def doctor(data: Path, as_json: bool) -> None:
    """Look at everything that a controller stands on, and say what to do about what is wrong.

    Credentials, the way to the controller and its certificate, access, versions, broker, offload server, database,
    disk, signing keys. Ends with 1 where something is bad. On a device: edgesplit-agent doctor.
    """
    from edgesplit_cli.doctor import examine

    found = list(examine(data))
    click.echo(printed(found, as_json=as_json))
    sys.exit(exit_code(found))
