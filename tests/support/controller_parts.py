"""The parts of a controller without broker, API and processes, for tests that call them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from edgesplit_controller.app.assembly import Assembly, Foundations
from edgesplit_controller.controller import Controller
from edgesplit_controller.messaging.delivery import Delivery
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.pki.derived_secrets import DerivedSecrets
from edgesplit_controller.settings import Settings
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import Lease
from edgesplit_controller.tuf.repository import Repository
from edgesplit_controller.tuf.rotation import Rotation


def assembled(folder: Path, authority: Authority, stack: ExitStack) -> tuple[Controller, Delivery]:
    """As `up` puts them together on that folder; `stack` closes the database."""
    repository = Repository(folder / "tuf")
    (folder / "offload").mkdir()
    (folder / "offload" / "root.json").write_bytes(repository.root_bytes)
    database = Database(f"sqlite:///{folder / 'controller.db'}")
    stack.callback(database.close)
    made = Assembly(
        Foundations(
            Settings(data=folder), database, BlobStore(folder / "blobs"), authority, DerivedSecrets(folder / "keys"),
            repository, Rotation(repository), Lease(database, "controller"),
        )
    )  # fmt: skip
    return made.controller, made.delivery
