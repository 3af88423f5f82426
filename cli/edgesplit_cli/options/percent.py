"""Parses a fraction written as `0.5%` or `0.005`."""

from __future__ import annotations

import click


def parse_share(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """Callback of `click.option`: parse a value as a number from 0 to 1; BadParameter otherwise."""
    if text is None:
        return None
    try:
        fraction = float(text.strip().removesuffix("%")) / (100.0 if text.strip().endswith("%") else 1.0)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no share; write 0.5% or 0.005") from None
    if not 0.0 <= fraction <= 1.0:
        hint = f"; is {text.strip()}% meant?" if 1.0 < fraction <= 100.0 and "%" not in text else ""
        raise click.BadParameter(f"{text!r} is not between 0% and 100%{hint}")
    return fraction
