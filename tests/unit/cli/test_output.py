"""Tables for people: what a device, a model file or a fleet puts into them is bounded, and JSON is complete."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from edgesplit.terminal_text import MAX_CHARS, printable, shorten
from edgesplit_cli.output import MAX_CELL_CHARS, MAX_ROWS, print_json, table
from edgesplit_cli.views.device import MODELS_IN_TABLE, MODELS_ON_PAGE, device_table, model_lines
from support import REPOSITORY


def text_of(renderable: Any, width: int = 140) -> str:
    """What is printed of it, without colours."""
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False).print(renderable)
    return out.getvalue()


def device(name: str, models: int, version: str = "0.3.0") -> dict[str, Any]:
    """A device as the API lists it."""
    running = [{"model": f"m{at}", "release": "a" * 64, "state": "running"} for at in range(models)]
    return {
        "name": name,
        "state": "online",
        "device_class": "raspberrypi4",
        "agent_version": version,
        "models": running,
    }


def test_one_device_cannot_make_the_list_of_devices_useless() -> None:
    """1,200 models and a version of 100,000 letters, stored before messages were bounded: its lines are few and short,
    and the others are printed."""
    printed = text_of(device_table(printable([device("bad", 1_200, "9" * 100_000), device("good", 1)])))
    assert printed.count("bad") <= 2 * (MODELS_IN_TABLE + 2) and "good" in printed
    assert "1,184 more" in re.sub(r"\s+", " ", printed)
    assert len(printed) < 200_000


def test_the_list_of_a_large_fleet_says_how_many_more() -> None:
    """The rows beyond the limit are counted."""
    printed = text_of(device_table([device(f"cam-{at}", 1) for at in range(3_000)]))
    assert "cam-999 " in printed and "cam-1000 " not in printed
    assert f"… and {3_000 - MAX_ROWS:,} more rows; --json prints all of them" in printed


def test_the_newest_lines_of_a_long_log_are_printed() -> None:
    """Where the newest line is the last one, the first are left out."""
    printed = text_of(table((">line",), [(f"line-{at}",) for at in range(MAX_ROWS + 2)], newest_last=True))
    assert "line-1001" in printed and "line-1\n" not in printed and "… and 2 older rows" in printed


def test_the_page_of_a_device_says_how_many_more() -> None:
    """3,000 models."""
    lines = model_lines(device("cam", 3_000))
    assert len(lines) == MODELS_ON_PAGE + 1 and "2,800 more" in lines[-1].plain


def test_json_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the tables leave out."""
    whole = [device("cam", 3_000, "9" * 100_000)]
    print_json(whole)
    assert json.loads(capsys.readouterr().out) == whole


def test_cells_of_every_table_are_cut() -> None:
    """Text and styled text; what fits stays unchanged."""
    long, fitting = "x" * 10_000, "y" * MAX_CELL_CHARS
    printed = text_of(table(("a", "b", ">c"), [(long, Text(long, "red"), fitting)]), width=5_000)
    assert printed.count("x") == 2 * (MAX_CELL_CHARS - 1) and printed.count("y") == MAX_CELL_CHARS
    assert printed.count("…") == 2


def test_text_of_devices_is_cut_where_it_is_made_printable() -> None:
    """At any depth, names of fields too."""
    assert printable({"k" * 9_000: ["v" * 9_000]}) == {
        shorten("k" * 9_000, MAX_CHARS): [shorten("v" * 9_000, MAX_CHARS)]
    }
    assert len(printable("v" * 9_000)) == MAX_CHARS and printable("v" * MAX_CHARS) == "v" * MAX_CHARS


@pytest.mark.parametrize(("text", "most", "cut"), [("abc", 3, "abc"), ("abcd", 3, "ab…"), ("ab", 1, "…"), ("a", 0, "")])
def test_shortened_text_is_no_longer_than_asked(text: str, most: int, cut: str) -> None:
    """The mark that something is missing is counted."""
    assert shorten(text, most) == cut


def test_every_table_is_made_by_the_bounded_function() -> None:
    """No command makes a table of its own."""
    sources = [
        path for path in (REPOSITORY / "cli").rglob("*.py") if path != REPOSITORY / "cli/edgesplit_cli/output.py"
    ]
    own = [str(path) for path in sources if "rich.table" in Path(path).read_text(encoding="utf-8")]
    assert own == [] and len(sources) > 50
