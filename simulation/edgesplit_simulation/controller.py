"""The controller of a simulated fleet: the real parts over a real database and a real TUF repository, on a hub's time,
at a broker that is in this process.

What `edgectl up` puts around them is not here: no HTTP, no mosquitto, no processes. `kill` is SIGKILL: nothing is
written any more, the next `start` finds what is on disk. `backup` and `restore` copy the whole folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from edgesplit.errors import EdgeError
from edgesplit.mqtt import messages
from edgesplit.testing.in_memory_broker import LocalBroker, LocalSession
from edgesplit.testing.virtual_time import Hub
from edgesplit.trust.identity import Claim, Enrolled, EnrolmentRequest, decode_document, encode_document
from edgesplit_controller.fleet.devices import ClaimWish, Devices
from edgesplit_controller.fleet.gateways import Gateways
from edgesplit_controller.messaging.broker import CONTROLLER
from edgesplit_controller.messaging.delivery import SUBSCRIPTIONS, Delivery, Sources
from edgesplit_controller.messaging.statement_publisher import Stating
from edgesplit_controller.model_registry.registry import Registry
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.planning.planner_service import Planning, Wish
from edgesplit_controller.releases.build import Releasing
from edgesplit_controller.releases.content_keys import load_or_make_content_keys
from edgesplit_controller.releases.director import Director
from edgesplit_controller.rollout.engine import Rollouts, Wanted
from edgesplit_controller.rollout.release_health import of_members
from edgesplit_controller.rollout.request import PLAIN, Asked
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.database import Database, Model
from edgesplit_controller.tuf.repository import Repository
from edgesplit_simulation.releases import SimulatedRelease

TEND_S = 60.0
STEP_S = 2.0
"""Between two steps of the rollouts, where devices say nothing new..."""
NEWS_S = 0.5
"""...and after they did."""
FOLLOW_STEPS = 30
WAKES_S = 0.2
"""How late the controller's workers wake: what comes meanwhile is taken in together."""
STATEMENT_S = 30 * 86_400


class SimulatedController:
    """One controller on one folder. `start` before anything else."""

    def __init__(
        self,
        folder: Path,
        hub: Hub,
        broker: LocalBroker,
        *,
        url: str = "",
        stale_after_s: float = 10.0,
        tend_s: float = TEND_S,
        step_s: float = STEP_S,
        wakes_s: float = WAKES_S,
        keeps: bool = False,
    ) -> None:
        """`url`: of the database; empty: SQLite in the folder. `keeps`: tell devices what of theirs is stored, which
        those wait for that keep what they measure."""
        self.folder = folder
        self.keeps = keeps
        self.hub = hub
        self.broker = broker
        self.url = url
        self.starts = 0
        self._stale_after_s = stale_after_s
        self._tend_s = tend_s
        self._step_s = step_s
        self._wakes_s = wakes_s
        self._steps = 0
        self._restored = False
        self._session: LocalSession | None = None
        self._tasks: list[tuple[float, Callable[[SimulatedController], None]]] = []
        broker.let_in = self._let_in

    @property
    def is_running(self) -> bool:
        """It was started, and not killed since."""
        return self._session is not None

    def start(self) -> None:
        """Assemble the parts over what is in the folder, as `edgectl up` does, and connect."""
        now, folder = self.hub.time, self.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        self.authority = Authority(folder / "keys")
        self.repository = Repository(folder / "tuf", now=now)
        self.repository.renew()
        self.database = Database(self.url or f"sqlite:///{folder / 'controller.db'}")
        self.blobs = BlobStore(folder / "blobs")
        self.registry = Registry(self.database, self.blobs, now=now)
        self.devices = Devices(self.database, stale_after_s=self._stale_after_s, now=now)
        self.releasing = Releasing(
            self.database, self.blobs, self.registry, Planning(self.database, self.registry, now=now), self.repository,
            offload_releases=folder / "offload" / "releases",
            content_keys=load_or_make_content_keys(folder / "keys" / "content.key"), now=now,
        )  # fmt: skip
        gateways = Gateways(self.database, now=now, split_of=self.releasing.split_by_gateway)
        self.director = Director(
            self.database, self.repository.sign_statement, statement_s=STATEMENT_S, now=now, tiers=gateways
        )
        self.rollouts = Rollouts(
            self.database, self.director, now=now, announce=lambda told: self.delivery.tell(told), evidences=of_members
        )
        self.delivery = Delivery(
            Sources(
                metadata=self.repository.read,
                chunk=self.blobs.get,
                release_chunks=self.releasing.chunks_of,
                hear=self._hear,
                statements=self.director.statements,
                flooding=self._flooding,
                confirm=Stating(self.database).confirm,
            ),
            self.hub.late(self._wakes_s),
        )
        if self._restored:  # what devices were told since is not known: say everything anew, under counters of today
            self.director.restate()
            self._restored = False
        self._connect()
        self.rollouts.excuse_absence()
        self._every(self._step_s, self._step)
        self._every(self._tend_s, self._tend)
        for seconds, act in self._tasks:
            self._every(seconds, lambda act=act: act(self))  # type: ignore[misc]

    def every(self, seconds: float, act: Callable[[SimulatedController], None]) -> None:
        """Do that, now and then, for as long as the controller runs, and again after each start. It must not wait."""
        self._tasks.append((seconds, act))
        if self.is_running:
            self._every(seconds, lambda: act(self))

    def kill(self) -> None:
        """End it as SIGKILL does."""
        session, self._session = self._session, None
        if session is None:
            return
        session.vanish()
        self.broker.leave(session, will=False)
        self.delivery.stop()
        self.database.close()

    def backup(self, to: Path) -> None:
        """Copy everything, as an operator's backup does. The controller must not run, or must be idle."""
        shutil.copytree(self.folder, to, dirs_exist_ok=False)

    def restore(self, backup: Path, *, restate: bool = True) -> None:
        """Put a backup in place of what is here; the controller must not run. At its next start it states everything
        anew, unless it is not to know that it was restored."""
        shutil.rmtree(self.folder)
        shutil.copytree(backup, self.folder)
        self._restored = restate

    # What operators and devices ask

    def claim(self, wish: ClaimWish) -> Claim:
        """A one-time claim."""
        token, expires = self.devices.claim(wish)
        return Claim(
            device=wish.device, device_class=wish.device_class, token=token, controller_url="https://simulated",
            ca_pem=self.authority.ca_pem, tuf_root=self.repository.root_bytes.decode(), expires=expires,
        )  # fmt: skip

    def enrol(self, request: bytes) -> bytes:
        """The answer to a device's request, as the API gives it."""
        asked = decode_document(request, EnrolmentRequest)
        let_in = self.devices.enrol(
            asked.token, asked.csr_pem.encode(), self.authority.sign_request, asked.encryption_key
        )
        if let_in.fresh:
            self.delivery.forget([let_in.device])
        enrolled = Enrolled(
            device=let_in.device, certificate_pem=let_in.certificate.decode(), ca_pem=self.authority.ca_pem,
            broker_host="simulated", broker_port=1, offload_url="https://simulated",
        )  # fmt: skip
        return encode_document(enrolled)

    def publish(self, release: SimulatedRelease) -> str:
        """Sign a release and make it known; its digest."""
        model = self._model(release)
        self.blobs.put_all(release.chunks.values())
        self.releasing.publish(model, self.blobs.put(release.raw), Wish())
        return release.digest

    def deploy(self, release: SimulatedRelease, devices: Collection[str], asked: Asked = PLAIN) -> int:
        """Begin to bring it to these devices; the rollout's number."""
        chosen = [one for one in self.devices.all() if one.name in set(devices)]
        model = f"{release.model}@{release.version}"
        wanted = Wanted(release.digest, model, chosen, targets=sorted(devices), asked=asked)
        return self.rollouts.make(wanted).number

    def revoke(self, device: str) -> None:
        """Take a device's right away."""
        self.devices.revoke(device)
        self.delivery.tell([device])
        self.broker.end(device)

    # Inside

    def _connect(self) -> None:
        session = self._session = self.broker.session(
            CONTROLLER, on_message=self.delivery.on_message, on_connect=self.delivery.on_connect
        )
        self.broker.on_client = self.delivery.connected
        session.subscribe(SUBSCRIPTIONS, qos=1)
        self.delivery.start(session)
        session.start()

    def _every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self._every(seconds, act)

        self._after(seconds, again)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        """Unless the controller has been killed by then."""
        started = self.starts

        def begin() -> None:
            if self.is_running and self.starts == started:
                act()

        self.hub.call_later(seconds, begin)

    def _step(self) -> None:
        """As `RolloutLoop` does; once in a while devices that know more are followed."""
        while self.rollouts.step_all():
            pass
        self._steps += 1
        if self._steps % FOLLOW_STEPS == 0:
            self.rollouts.follow()
            self.rollouts.catch_up()

    def _tend(self) -> None:
        self.repository.refresh_timestamp()
        if renewed := self.director.renew():
            self.delivery.tell(renewed)
        self.devices.end_holds()

    def _hear(self, said: list[tuple[str, messages.Message]]) -> None:
        taken = self.devices.hear(said)
        if self.keeps:
            self.delivery.keep(taken.kept)
        for device in taken.intruders:
            self.broker.end(device)
        if any(isinstance(message, messages.Reported) for _, message in said):
            self.delivery.tell(self.director.settle())
            self._after(NEWS_S, self._step)

    def _flooding(self, device: str, dropped: int) -> None:
        if self.devices.hold(device, dropped):
            self.broker.end(device)

    def _let_in(self, client: str) -> str:
        """As the broker does by the revocation list."""
        if client == CONTROLLER or not self.is_running:
            return ""
        try:
            return "certificate revoked" if self.devices.get(client).revoked else ""
        except EdgeError:
            return "unknown certificate"

    def _model(self, release: SimulatedRelease) -> Model:
        """The row of a model that nobody can compute."""
        with self.database.write() as session:
            model = Model(
                name=release.model, version=release.version, sha256=release.digest, optimised_sha256=release.digest,
                bytes=sum(map(len, release.chunks.values())), input_text="", bindings={},
                shown={"inputs": [], "outputs": [], "layers": [], "format": "simulated"}, created=self.hub.time(),
            )  # fmt: skip
            session.add(model)
            session.flush()
            return model
