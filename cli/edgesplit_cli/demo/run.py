"""The demo, end to end: real controller, broker, offload server and agents as processes; the devices and their links
are emulated and say so. The chain is driven by the product's own commands, each printed as it is run."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import EdgeError, LinkError, UsageError
from edgesplit.input_spec import InputSpec
from edgesplit.link_emulation import ShapedLink
from edgesplit.links import parse_link
from edgesplit.plan import Link
from edgesplit_cli import output as show
from edgesplit_cli.demo.application import Books, Frame, Stream, load_frames
from edgesplit_cli.demo.display import Display
from edgesplit_cli.demo.picture import draw
from edgesplit_cli.demo.processes import Child, Watch
from edgesplit_cli.demo.scenario import DEVICES, DROPPED, INPUT_SPEC, KILLED, MODEL, DemoDevice, Event, timeline
from edgesplit_cli.demo.summary import problems, summary_table, whole_summary
from edgesplit_cli.settings import connect

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
T = TypeVar("T")
START_S = 60.0
MOST_TRIES = 5
TRY_AGAIN = (LinkError.exit_code, -signal.SIGKILL)
"""Ends of a command that only say that something was killed under it."""


def run_demo(*, keep: bool, json_file: Path | None, picture: Path, folder: Path | None, pace: float) -> None:
    """Run the whole story; EdgeError if it did not show what it promises."""
    console = show.console()
    data = folder or Path(tempfile.mkdtemp(prefix="edgesplit-demo-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    demo = Demo(console, data, pace)
    with alone_on(data):
        _told(demo, keep=keep, json_file=json_file, picture=picture, forget=data if folder is None else None)


def _told(demo: Demo, *, keep: bool, json_file: Path | None, picture: Path, forget: Path | None) -> None:
    try:
        demo.prepare()
        summary = demo.tell(picture)
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(summary, indent=2) + "\n")
        demo.conclude(summary, picture, json_file)
        if keep:
            demo.stay()
    finally:
        demo.close()
        if forget is not None and not keep:
            shutil.rmtree(forget, ignore_errors=True)


@contextmanager
def alone_on(data: Path) -> Iterator[None]:
    """One demo per folder: a second one would start its agents on the first one's. UsageError where one runs."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(data / "demo.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write in {data}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise UsageError(f"another demo runs on {data}: give this one a --folder of its own") from error
    try:
        yield
    finally:
        os.close(descriptor)


class Demo:
    """The processes, links and streams of one run."""

    def __init__(self, console: Console, data: Path, pace: float) -> None:
        self.console = console
        self.data = data
        self.events = timeline(pace)
        self.watch = Watch(lambda text: self._say(text))
        self.links: dict[str, list[ShapedLink]] = {}
        self.children: dict[str, Child] = {}
        self.urls: dict[str, str] = {}
        self.plans: dict[str, Any] = {}
        self.frames: list[Frame] = []
        self.mqtt_port, self.offload_port = free_port(), free_port()
        self._say: Callable[[str], None] = lambda text: console.print(text, style="yellow")

    # ---- before the story -------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Everything up to three devices that run their part of the model."""
        self.console.print(
            show.headed("edgesplit demo", f": three emulated devices, one model. State and logs in {self.data}")
        )
        (self.data / "logs").mkdir(parents=True, exist_ok=True)
        self._start_cloud()
        self._push()
        for device in DEVICES:
            self._enrol(device)
        self._deploy()

    def _start_cloud(self) -> None:
        ports = ["--api-port", "0", "--mqtt-port", str(self.mqtt_port), "--offload-port", str(self.offload_port)]
        self._child("controller", self._edgectl("up", "--no-offload", *ports))
        self._until("the controller answers", self._controller_answers)
        self._child("offload", self._edgectl("offload", "serve", "--port", str(self.offload_port)))
        self._until("the offload server answers", lambda: _answers(self.offload_port))

    def _controller_answers(self) -> bool:
        return bool(connect(self.data).get("/v1/health"))

    def _push(self) -> None:
        digits = digits_folder()
        self._command("model", "push", str(digits / "digits.onnx"), "--name", MODEL, "--input", INPUT_SPEC)
        self._command("profile", MODEL, "--samples", str(digits / "frames"), "--lossless", quiet=True)
        shown = self._ask(lambda api: api.get(f"/v1/models/{MODEL}"))
        whole = self._ask(lambda api: api.download(f"/v1/models/{MODEL}/optimised"))
        self.frames = load_frames(digits / "frames", whole, msgspec.convert(shown["input_spec"], InputSpec))

    def _enrol(self, device: DemoDevice) -> None:
        """Claim the device, shape its link, start its agent."""
        claim = self.data / f"{device.name}.claim.json"
        options = ["--profile", device.profile, "--link", device.link, "--out", str(claim)]
        self._command("device", "claim", device.name, *options, quiet=True)
        port = free_port()
        link = parse_link(device.link)
        shaped = [
            ShapedLink("127.0.0.1", self.offload_port, link),
            ShapedLink("127.0.0.1", self.mqtt_port, link),
        ]
        for one in shaped:
            one.start()
        self.links[device.name] = shaped
        self.urls[device.name] = f"http://127.0.0.1:{port}"
        folder = self.data / "devices" / device.name
        argv = [sys.executable, "-m", "edgesplit_agent.main", "run", "--data", str(folder), "--claim", str(claim)]
        argv += ["--port", str(port), "--emulate", "--health-seconds", "1", "--die-with-parent", str(os.getpid())]
        argv += ["--offload", f"127.0.0.1:{shaped[0].port}", "--broker", f"127.0.0.1:{shaped[1].port}"]
        self._child(device.name, argv)

    def _deploy(self) -> None:
        self._until("all devices are online", self._all_online)
        guarded = [device for device in DEVICES if device.keep_raw_input]
        free = [device for device in DEVICES if not device.keep_raw_input]
        for devices, limits in ((free, []), (guarded, ["--keep-raw-input"])):
            to = [word for device in devices for word in ("--to", device.name)]
            self._command("deploy", MODEL, "--partition", "auto", *to, *limits, "--wait", "120")
        for device in DEVICES:
            body: dict[str, Any] = {"model": MODEL, "device": device.profile, "link": device.link}
            body["limits"] = {"keep_raw_input": device.keep_raw_input}
            self.plans[device.name] = self._ask(partial(ControllerClient.post, path="/v1/plans", body=body))
        self._command("device", "list")

    def _all_online(self) -> bool:
        states = {one["name"]: one["state"] for one in connect(self.data).get("/v1/devices")}
        return all(states.get(device.name) == "online" for device in DEVICES)

    # ---- the story --------------------------------------------------------------------------------------------

    def tell(self, picture: Path) -> dict[str, Any]:
        """Stream frames, let things happen, keep the books; returns the summary."""
        began = monotonic()
        streams = {device: Stream(device.name, self.urls[device.name], self.frames, began) for device in DEVICES}
        with Display(self.console, streams, self.events[-1].at_s, lambda: monotonic() - began) as display:
            self._say = display.say
            for stream in streams.values():
                stream.start()
            self._live_through(display, began)
            for stream in streams.values():
                stream.finish()
            for stream in streams.values():
                stream.join()
        self._say = self.console.print
        books = {device: stream.books for device, stream in streams.items()}
        restarts = {name: child.restarts for name, child in self.children.items()}
        plans = {
            name: {key: made[key] for key in ("best", "seconds", "gain", "certificate", "ranges")}
            for name, made in self.plans.items()
        }
        summary = whole_summary(books, self.events, plans, restarts)
        self._draw(books, picture)
        return summary

    def _live_through(self, display: Display, began: float) -> None:
        waiting = list(self.events)
        tick = 0.1
        while waiting:
            while waiting and monotonic() - began >= waiting[0].at_s:
                event = waiting.pop(0)
                display.say(event.text)
                self._happen(event)
            self.watch.tend()
            display.refresh()
            time.sleep(tick)

    def _happen(self, event: Event) -> None:
        """Do to the processes and links what the story says."""
        if event.kind == "link-drop":
            self._shape(DROPPED, parse_link(_link_of(DROPPED) + "/10"))
        elif event.kind == "link-back":
            self._shape(DROPPED, parse_link(_link_of(DROPPED)))
        elif event.kind == "offload-killed":
            self.watch.hold(self.children["offload"])
        elif event.kind == "offload-back":
            self.watch.resume(self.children["offload"])
        elif event.kind == "agent-killed":
            self.children[KILLED].kill()

    def _shape(self, device: str, link: Link) -> None:
        for one in self.links[device]:
            one.set_link(link)

    def _draw(self, books: dict[DemoDevice, Books], picture: Path) -> None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(books, self.events, picture)

    # ---- afterwards -------------------------------------------------------------------------------------------

    def conclude(self, summary: dict[str, Any], picture: Path, json_file: Path | None) -> None:
        """Print the summary; EdgeError if it is not what was promised."""
        self.console.print(summary_table(summary))
        self.console.print(f"picture: {picture}" + (f"   summary: {json_file}" if json_file else ""))
        found = problems(summary)
        if found:
            raise EdgeError("the demo did not show what it should:\n  " + "\n  ".join(found))
        self.console.print("Every request was answered once, and as the whole model answers.", style="green")

    def stay(self) -> None:
        """Leave everything running until Ctrl-C."""
        self.console.print(
            f"Running on. Try: edgectl --data {self.data} device list --watch   (Ctrl-C stops everything)"
        )
        try:
            while True:
                self.watch.tend()
                time.sleep(0.5)
        except KeyboardInterrupt:
            self.console.print("stopping")

    def close(self) -> None:
        """Stop every process and link."""
        self.watch.stop()
        for shaped in self.links.values():
            for one in shaped:
                one.stop()

    # ---- doing ------------------------------------------------------------------------------------------------

    def _edgectl(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "edgesplit_cli.main", "--data", str(self.data), *words]

    def _child(self, name: str, argv: list[str]) -> None:
        self.children[name] = self.watch.add(Child(name, argv, self.data / "logs" / f"{name}.log", ONE_THREAD))

    def _command(self, *words: str, quiet: bool = False) -> None:
        """Run one of our commands and show it; its failure is ours, but for a controller or command that was killed."""
        shown = " ".join(f"'{word}'" if " " in word else word for word in words)
        self.console.print(f"$ edgectl {shown}", style="cyan", soft_wrap=True)
        code, output, errors = self._run(words)
        for _ in range(MOST_TRIES - 1):
            if code not in TRY_AGAIN:
                break
            self._until("the controller answers", self._controller_answers)
            code, output, errors = self._run(words)
        if code:
            raise EdgeError(f"`edgectl {shown}` failed: {errors.strip() or output.strip()}")
        if not quiet and output.strip():
            self.console.print(output.rstrip(), markup=False, soft_wrap=True)

    def _run(self, words: tuple[str, ...]) -> tuple[int, str, str]:
        """One try of a command, while whatever dies meanwhile is started again."""
        environment = {**os.environ, "COLUMNS": "150"}
        pipe = subprocess.PIPE
        with subprocess.Popen(self._edgectl(*words), stdout=pipe, stderr=pipe, text=True, env=environment) as command:
            while True:
                try:
                    output, errors = command.communicate(timeout=0.2)
                    return command.returncode, output, errors
                except subprocess.TimeoutExpired:
                    self.watch.tend()

    def _ask(self, question: Callable[[ControllerClient], T]) -> T:
        """The controller's answer, asked again while it is being restarted."""
        answers: list[T] = []

        def answered() -> bool:
            answers.append(question(connect(self.data)))
            return True

        self._until("the controller answers", answered)
        return answers[-1]

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait for something to become true, restarting what dies meanwhile."""
        until = monotonic() + START_S
        while not _holds(holds):
            self.watch.tend()
            if monotonic() > until:
                ends = "\n".join(f"--- {child.log}\n{child.last_words(8)}" for child in self.children.values())
                raise EdgeError(f"waited {START_S:.0f} s in vain until {what}; the logs end:\n{ends}")
            time.sleep(0.1)


def _holds(what: Callable[[], bool]) -> bool:
    """Is it true? Not while the controller, or the file that tells where it is, is away."""
    try:
        return what()
    except (LinkError, UsageError):
        return False


@contextmanager
def _reserved() -> Iterator[socket.socket]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with _reserved() as probe:
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _link_of(name: str) -> str:
    return next(device.link for device in DEVICES if device.name == name)


def digits_folder() -> Path:
    """Where the digits model and its held-out frames are: in the checkout, or in the wheel."""
    for folder in (Path(__file__).parent / "digits", Path(__file__).parents[3] / "examples" / "digits"):
        if (folder / "digits.onnx").exists():
            return folder
    raise UsageError("examples/digits/digits.onnx is missing: run the demo from a checkout or an installed wheel")
