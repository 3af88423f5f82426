"""Click parameter type for addresses."""

from __future__ import annotations

from typing import Any

import click

from edgesplit.errors import UsageError
from edgesplit.links import parse_metrics_address


class MetricsAddress(click.ParamType[tuple[str, int]]):
    """ADDRESS:PORT of a metrics endpoint."""

    name = "ADDRESS:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """The address and the port."""
        try:
            return parse_metrics_address(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)

    @staticmethod
    def text(address: tuple[str, int] | None) -> str:
        """The address as an argument of a child process; empty for None."""
        if address is None:
            return ""
        return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"


METRICS = MetricsAddress()
