"""The version before and this one: each takes over from the other, with what the other left on disk.

`docs/compatibility.md` lists the commits of the versions; the newest one that is not this tree plays the older version.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect

from edgesplit.errors import TrustError
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import Ack, Backlog, Telemetry
from edgesplit_controller.backup.envelope import BackupKey, make_recipient
from edgesplit_controller.backup.restore import restore
from edgesplit_controller.messaging.broker import Broker
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Model
from support import REPOSITORY
from support.agent_engine import eventually
from support.small_controller import HERE, TinyRelease
from support.supervised_agent import AgentReleasingController, BuiltAgentRelease, SupervisedAgent

ROOMS = ("sdk", "partitioner", "agent", "offload", "cloud_controller", "provisioning", "cli", "device_profiles")
DATABASE_OF_BEFORE = """
import sys
from sqlalchemy import create_engine, text
from edgesplit_controller.messaging.broker import Broker
from edgesplit_controller.storage.database import Database
Database(sys.argv[1]).close()
with create_engine(sys.argv[1]).begin() as connection:
    connection.execute(text("INSERT INTO models (name, version, sha256, optimised_sha256, bytes, input_text, bindings,"
        " shown, created) VALUES ('digits', 1, 'a', 'b', 20, '', '{}', '{}', 1.5)"))
"""
BACKUPS_OF_BEFORE = """
import sys
from pathlib import Path
from edgesplit_controller.backup.create import make_backup
from edgesplit_controller.backup.envelope import BackupKey, parse_recipient
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.storage.database import Database
from edgesplit_controller.tuf.repository import Repository
folder = Path(sys.argv[1])
data = folder / "data"
Authority(data / "keys")
Repository(data / "tuf")
(data / "operator.token").write_text("op_old")
url = f"sqlite:///{data / 'controller.db'}"
Database(url).close()
public = parse_recipient(sys.argv[2])
openers = {"passphrase": BackupKey("correct horse"), "key": BackupKey(recipient=public), "nothing": BackupKey()}
for kind, key in openers.items():
    make_backup(data, url, folder / f"{kind}.backup", key, keys=kind != "nothing", blobs=True, now=5.0, scrypt_n=2)
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source tree of the version before."""
    page = (REPOSITORY / "docs" / "compatibility.md").read_text()
    commits = re.findall(r"^\| [0-9.]+ \| `?([0-9a-f]{40})`? \|$", page, re.MULTILINE)
    if not commits:
        pytest.skip("docs/compatibility.md lists no version yet")
    asked = subprocess.run(["git", "-C", str(REPOSITORY), "archive", commits[-1]], capture_output=True, check=False)
    if asked.returncode:
        pytest.skip(f"commit {commits[-1][:12]} of the version before is not at hand: {asked.stderr.decode().strip()}")
    tree = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(asked.stdout)) as archive:
        archive.extractall(tree, filter="data")
    return tree


class AcknowledgingController(AgentReleasingController):
    """A controller that acknowledges telemetry while `acknowledges` is true, and asks for it each second."""

    acknowledges = True

    def ingest(self, received: Sequence[tuple[str, messages.Message]]) -> None:
        """Record messages; acknowledge telemetry."""
        super().ingest(received)
        for device, message in received:
            if isinstance(message, Telemetry) and self.acknowledges:
                ack = Ack(session=message.session, sequence=message.sequence, telemetry_interval_s=1.0)
                self.delivery.acknowledge([(device, ack)])
            elif isinstance(message, Backlog):
                self.delivery.acknowledge([(device, Ack(batch=message.batch))])

    def replace_broker(self) -> None:
        """Start a broker at the port of the one that was stopped."""
        credentials = self.authority.issue_server("controller", ["localhost", HERE])
        self.broker = Broker(self.folder / "broker", credentials, self.broker.port)
        self.broker.start()

    def live(self) -> set[tuple[int, int]]:
        """Session and sequence number of each telemetry message that arrived live."""
        live = [message for _, message in list(self.received) if isinstance(message, Telemetry)]
        return {(message.session, message.sequence) for message in live}

    def from_backlog(self) -> set[tuple[int, int]]:
        """Session and sequence number of each telemetry message that arrived from a backlog."""
        batches = [message for _, message in list(self.received) if isinstance(message, Backlog)]
        return {(message.session, message.sequence) for batch in batches for message in batch.messages}


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[AcknowledgingController]:
    with AcknowledgingController(tmp_path / "controller") as running:
        yield running


def test_the_version_before_updates_itself_to_this_one_and_back(
    controller: AcknowledgingController, before: Path, tmp_path: Path
) -> None:
    """The older version, installed, installs this one by a signed release; this one installs the older one again. Both
    are found healthy and serve the same model."""
    model = TinyRelease(1)
    controller.deploy(model)
    with SupervisedAgent(controller, tmp_path) as agent:
        agent.start(tree=before)
        eventually("the version before serves the model", lambda: controller.has_reported_running(model), 90)
        this = BuiltAgentRelease(tmp_path, "9.1.0")
        controller.deploy_version(this, model)
        eventually("this version is found healthy", lambda: agent.is_running(this), 120)
        assert agent.version() == "9.1.0+device" and agent.is_serving()

        older = BuiltAgentRelease(tmp_path, "9.0.0", tree=before)
        controller.deploy_version(older, model)
        eventually("the version before is found healthy", lambda: agent.is_running(older), 120)
        assert agent.version() == "9.0.0+device" and agent.is_serving() and controller.enrolments == 1


@pytest.mark.parametrize("older_first", [True, False], ids=["update", "rollback"])
def test_no_stored_telemetry_is_lost_between_versions(
    controller: AcknowledgingController, before: Path, tmp_path: Path, older_first: bool
) -> None:
    """Telemetry that one version stored, as its broker was lost before it was acknowledged, is sent by the other."""
    first, second = (before, None) if older_first else (None, before)
    model = TinyRelease(1)
    controller.deploy(model)
    with SupervisedAgent(controller, tmp_path) as agent:
        agent.start(tree=first)
        eventually("it reports each second", lambda: len(controller.live()) > 1, 90)
        controller.acknowledges = False
        acknowledged = controller.live()
        eventually("some is not acknowledged", lambda: len(controller.live() - acknowledged) > 2, 30)
        controller.broker.stop()
        eventually("telemetry is stored", lambda: _stored_messages(agent) > 2, 60)
        agent.stop()  # writes what it holds to disk
        stored = controller.live() - acknowledged

        controller.acknowledges = True
        controller.replace_broker()
        agent.start(tree=second)
        eventually("the other version sends what was stored", lambda: stored <= controller.from_backlog(), 90)


def _stored_messages(agent: SupervisedAgent) -> int:
    """Telemetry messages that wait for a broker, by the agent's own status."""
    command = [sys.executable, "-m", "edgesplit_agent.main", "status", "--data", str(agent.data)]
    asked = subprocess.run(command, capture_output=True, check=True, timeout=60)
    return int(json.loads(asked.stdout)["backlog"].get("messages", 0))


def test_the_database_of_the_version_before_opens_with_its_rows(before: Path, tmp_path: Path) -> None:
    """It is migrated to this version's tables."""
    url = f"sqlite:///{tmp_path / 'controller.db'}"
    path = os.pathsep.join(str(before / room) for room in ROOMS)
    command = [sys.executable, "-c", DATABASE_OF_BEFORE, url]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path}, timeout=120)
    database = Database(url)
    with database.read() as session:
        model = session.get(Model, 1)
        assert model is not None and (model.name, model.bytes) == ("digits", 20)
    database.close()
    engine = create_engine(url)
    assert "telemetry" in inspect(engine).get_table_names()
    engine.dispose()


def test_backups_of_the_version_before_are_restored(before: Path, tmp_path: Path) -> None:
    """One that a passphrase opens restores by its passphrase; the others only with the explicit option. The owner's
    token does not come back."""
    path = os.pathsep.join(str(before / room) for room in ROOMS)
    public = make_recipient(tmp_path / "other.pem")
    command = [sys.executable, "-c", BACKUPS_OF_BEFORE, str(tmp_path), public]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path}, timeout=120)
    data = tmp_path / "data"
    for kind, key, keys in (
        ("passphrase", BackupKey("correct horse"), True), ("key", BackupKey(key_file=tmp_path / "other.pem"), True),
        ("nothing", BackupKey(), False),
    ):  # fmt: skip
        back, file = tmp_path / f"back-{kind}", tmp_path / f"{kind}.backup"
        if not keys:
            shutil.copytree(data / "keys", back / "keys")
            shutil.copytree(data / "tuf" / "keys", back / "tuf" / "keys")
        if kind != "passphrase":
            with pytest.raises(TrustError, match=r"not signed.*--unverified"):
                restore(file, back, key, database_url="", now=1.0)
        restored = restore(file, back, key, database_url="", now=1.0, unverified=kind != "passphrase")
        assert restored.origin == ("passphrase" if kind == "passphrase" else "unverified")
        assert (back / "keys" / "ca.key").is_file() and not (back / "operator.token").exists()
        Database(f"sqlite:///{back / 'controller.db'}").close()
