"""`--agent-options`: what the agent of a new device is started with."""

from __future__ import annotations

import click

from edgesplit_provisioning.agent_options import checked_options


def _checked(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The options if the agent would take them; UsageError otherwise."""
    if value is None:
        return None
    from edgesplit_agent.main import check_words  # needed by nothing else of these commands

    options = checked_options(value)
    check_words(options.split())
    return options


agent_options = click.option(
    "--agent-options", metavar="OPTIONS", callback=_checked,
    help="Options of `edgesplit-agent run` that the service there gets; an empty text takes them away.",
)  # fmt: skip
