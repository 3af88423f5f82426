"""The security and conformance pages point at tests: each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = ["docs/security.md", "docs/conformance.md"]
NAMED = re.compile(r"`(?:(test_\w+\.py)::)?(test_\w+)`")


def named_tests(page: str) -> list[tuple[str, str]]:
    """File and function of every test that the page names; a name without a file is of the file named before it in
    its line."""
    found = []
    for line in (REPOSITORY / page).read_text().splitlines():
        file = ""
        for given, name in NAMED.findall(line):
            file = given or file
            found.append((file, name))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    """A claim without its test is only a claim."""
    sources: dict[str, str] = {}
    for path in (REPOSITORY / "tests").rglob("test_*.py"):  # two folders may have a file of one name
        sources[path.name] = sources.get(path.name, "") + path.read_text()
    named = named_tests(page)
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in sources.get(file, "")]
    assert len(named) > 40 and not missing


def test_the_page_lists_every_parser_that_is_tried() -> None:
    """The names in the table of parsers are those of the tests, so that a reader can run one."""
    page = (REPOSITORY / "docs" / "security.md").read_text()
    source = (REPOSITORY / "tests" / "faults" / "test_fuzz_parsers.py").read_text()
    table = source.partition("NAMES = [")[2].partition("]")[0]
    known = set(re.findall(r'"([^"]+)"', table))
    for line in page.splitlines():
        for cell in re.findall(r"parsers, (`.*?)(?:;| \|$)", line):
            said = set(re.findall(r"`([^`]+)`", cell))
            assert said <= known, said - known
