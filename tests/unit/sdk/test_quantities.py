"""Quantities as people write them: what is accepted, what is refused and how, and that formats round-trip."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import UsageError
from edgesplit.quantities import (
    ABOVE_ZERO,
    DATA_RATE,
    DURATION,
    ENERGY,
    POWER,
    SIZE,
    Quantity,
    format_duration,
    format_size,
    parse_daily_span,
    parse_duration,
    parse_energy,
    parse_fraction,
    parse_frequency,
    parse_percentage,
    parse_power,
    parse_rate,
    parse_size,
)

Parse = Callable[[str], object]
ACCEPTED: list[tuple[Parse, str, object]] = [
    (parse_size, "2GB", 2 * 10**9), (parse_size, "500 mb", 5 * 10**8), (parse_size, "1.5GiB", 3 * 2**29),
    (parse_size, "64k", 64_000), (parse_size, "123", 123), (parse_size, "7B", 7), (parse_size, ".5 kB", 500),
    (parse_size, "1ti", 2**40), (parse_size, "1.1GB", 1_100_000_000), (partial(parse_size, least=0), "0", 0),
    (parse_duration, "90s", 90.0), (parse_duration, "10m", 600.0), (parse_duration, "10min", 600.0),
    (parse_duration, "1.5h", 5_400.0), (parse_duration, "30d", 2_592_000.0), (parse_duration, "1y", 31_536_000.0),
    (parse_duration, "100ms", 0.1), (parse_duration, "250 us", 0.00025), (parse_duration, "1h30m", 5_400.0),
    (parse_duration, " 1 h 30 m ", 5_400.0), (parse_duration, "0s", 0.0),
    (parse_rate, "2mbit", 250_000.0), (parse_rate, " 64 kbit/s ", 8_000.0), (parse_rate, "1Gbitps", 125e6),
    (parse_frequency, "0.5/d", 0.5 / 86_400), (parse_frequency, "3/h", 3 / 3_600), (parse_frequency, "120 / min", 2.0),
    (parse_power, "4W", 4.0), (parse_power, "3500mW", 3.5), (parse_power, " 2.5 w ", 2.5),
    (parse_energy, "0.5J", 0.5), (parse_energy, "20mJ", 0.02), (parse_energy, "5uJ", 5e-6),
    (parse_percentage, "20%", 0.2), (parse_percentage, "57 %", 0.57), (parse_percentage, "0%", 0.0),
    (parse_fraction, " 0.5% ", 0.005), (parse_fraction, "0.005", 0.005), (parse_fraction, "3.9e-5", 3.9e-5),
    (parse_daily_span, "01:00-05:00", (60, 300)), (parse_daily_span, "22:30 - 6:00", (1_350, 360)),
    (parse_daily_span, "20:00-24:00", (1_200, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "text", "value"), ACCEPTED)
def test_accepted_spellings(parse: Parse, text: str, value: object) -> None:
    """In the unit that the parser documents."""
    assert parse(text) == (pytest.approx(value) if isinstance(value, float) else value)


REFUSED: list[tuple[Parse, list[str], str]] = [
    (parse_size, ["", "GB", "-1GB", "0", "2 GBit", "1e9", "1ib", "1 2GB", "nan"],
     "at least 1B, at most 1000TB, as in 2GB or 64KiB"),
    (parse_duration, ["", "10", "10 minutes", "1h30", "nan", "s", "1.2.3s", "-5s", "soon"],
     "with us, ms, s, m, h, d or y, as in 90s or 1h30m"),
    (partial(parse_duration, most=60.0), ["61s", "2m", "9" * 400 + "s"], "at most 1m"),
    (parse_rate, ["", "2", "fast", "0mbit", "2mbit/40ms", "5MB/s"], "kbit, mbit or gbit, above 0, at most 8000gbit"),
    (parse_frequency, ["often", "0/d", "5/week", "3", "-1/d"], "/d, /h, /m or /s, above 0"),
    (partial(parse_power, least=ABOVE_ZERO, most=1_000.0),
     ["4", "0W", "-1W", "nanW", "1e3W", "2000W", "W", "4 V", "٤W"], "with mW or W, above 0, at most 1000W, as in 4W"),
    (parse_energy, ["5W", "J", "5"], "with uJ, mJ or J"),
    (parse_percentage, ["120%", "0.2", "%"], "with %, at most 100%, as in"),
    (partial(parse_percentage, least=ABOVE_ZERO), ["0%"], "above 0"),
    (parse_fraction, ["much", "-1%", "101%", "2"], "alone or with %, at most 100%, as in 0.5% or 0.005"),
    (parse_daily_span, ["", "1-5", "01:00", "25:00-03:00", "01:60-02:00", "03:00-03:00", "01:00-24:30"], "01:00-05:00"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("parse", "text", "hint"), [(parse, text, hint) for parse, texts, hint in REFUSED for text in texts]
)
def test_refusals_name_units_bounds_and_an_example(parse: Parse, text: str, hint: str) -> None:
    """All in one form, with the text that was refused."""
    with pytest.raises(UsageError) as refused:
        parse(text)
    assert str(refused.value).startswith("not a") and repr(text[:80]) in str(refused.value)
    assert hint in str(refused.value)


@pytest.mark.parametrize("quantity", [SIZE, DURATION, DATA_RATE, POWER, ENERGY])
@given(value=st.floats(1e-6, 1e13))
def test_formatted_quantity_round_trips(quantity: Quantity, value: float) -> None:
    """To seven significant digits."""
    assert quantity.parse(quantity.format(value)) == pytest.approx(value, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.15, "150ms"), (2.5, "2.5s"), (45.9, "45s"), (600, "10m"), (5_400, "1h30m"), (7_776_000, "90d"),
     (90_061, "1d1h1m1s")],
)  # fmt: skip
def test_duration_formats(seconds: float, text: str) -> None:
    """Whole units, largest first; read back to the second."""
    assert format_duration(seconds) == text
    assert parse_duration(text) == pytest.approx(int(seconds) if seconds >= 10 else seconds)


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (1_023, "1023 B"), (1_536, "1.5 KiB"), (3 * 2**19, "1.5 MiB"), (5 * 2**40, "5120.0 GiB")],
)
def test_size_formats(count: float | None, text: str) -> None:
    """In binary units, read back."""
    assert format_size(count) == text
    assert count is None or parse_size(text, least=0) == count
