"""Deploys a release at once, with the statements of one rollout step, for tests of statements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edgesplit_controller.releases.director import Director
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Deployment


def deploy(
    database: Database, director: Director, release: str, model: str, devices: Iterable[str], **options: Any
) -> Mapping[str, int]:
    """Assign a release of `model` (`name@version`) to these devices in one transaction; each one's counter."""
    names = sorted(devices)
    with database.write() as session:
        made = Deployment(
            release=release, model=model, targets=names, devices=names, options=options, created=0.0,
        )  # fmt: skip
        session.add(made)
        session.flush()
        return {name: director.assign(session, name, model.partition("@")[0], release, made.id) for name in names}
