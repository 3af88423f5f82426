"""One broker for a module of TUF scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.tuf_repository import Case, TufHarness


@pytest.fixture(scope="module")
def tuf_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TufHarness]:
    """A broker, the controller's session and a device's."""
    world = TufHarness(tmp_path_factory.mktemp("tuf"))
    yield world
    world.close()


@pytest.fixture()
def case(tuf_world: TufHarness, tmp_path: Path) -> Case:
    """A repository of its own and a device that has only its first root."""
    return tuf_world.case(tmp_path)
