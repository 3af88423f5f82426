"""`edgectl doctor`: diagnoses the controller from an operator's machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from edgesplit.observability.doctor_findings import exit_code, format_findings
from edgesplit_cli.output import json_option


@click.command()
@json_option
@click.pass_obj
def doctor(data: Path, as_json: bool) -> None:
    """Check everything that a controller depends on, and say what to do about what is wrong.

    Credentials, the network path to the controller and its certificate, access, versions, broker, offload server,
    database, disk, signing keys. Ends with 1 where something is bad. On a device: edgesplit-agent doctor.
    """
    from edgesplit_cli.doctor import examine

    findings = list(examine(data))
    click.echo(format_findings(findings, as_json=as_json))
    sys.exit(exit_code(findings))
