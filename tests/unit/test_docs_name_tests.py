"""Every test that the security and conformance pages name exists."""

from __future__ import annotations

import re

import pytest

from support import REPOSITORY

PAGES = ["docs/security.md", "docs/conformance.md"]
NAMED = re.compile(r"`(?:((?:[\w/]+/)?test_\w+\.py)::)?(test_\w+)`")


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
def test_every_test_named_in_the_docs_exists(page: str) -> None:
    """Files are named below `tests/unit`, or by their name alone in another folder of tests."""
    tests = REPOSITORY / "tests"
    sources = {str(path.relative_to(tests / "unit")): path.read_text() for path in tests.glob("unit/**/test_*.py")}
    for folder in ("arm64", "conformance", "faults", "integration"):
        for path in (tests / folder).glob("test_*.py"):
            sources[path.name] = sources.get(path.name, "") + path.read_text()
    named = named_tests(page)
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in sources.get(file, "")]
    assert len(named) > 40 and not missing


def test_the_security_page_names_existing_parser_tests() -> None:
    """The names in the table of parsers are those of the tests, so that a reader can run one."""
    page = (REPOSITORY / "docs" / "security.md").read_text()
    source = (REPOSITORY / "tests" / "faults" / "test_fuzz_parsers.py").read_text()
    table = source.partition("NAMES = [")[2].partition("]")[0]
    known = set(re.findall(r'"([^"]+)"', table))
    for line in page.splitlines():
        for cell in re.findall(r"parsers, (`.*?)(?:;| \|$)", line):
            said = set(re.findall(r"`([^`]+)`", cell))
            assert said <= known, said - known
