"""The demo, end to end: real controller, broker, offload server and agents as processes; the devices and their links
are emulated and marked as such. It runs the product's own commands and prints each."""

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
from edgesplit_cli import output as cli_output
from edgesplit_cli.demo.application import Frame, FrameSender, load_frames
from edgesplit_cli.demo.display import Display
from edgesplit_cli.demo.picture import draw
from edgesplit_cli.demo.processes import DemoProcess, Supervisor
from edgesplit_cli.demo.scenario import (
    DEVICES,
    FAMILY,
    INPUT_SPEC,
    KILLED_DEVICE,
    MODEL,
    SAMPLES,
    SLOWED_DEVICE,
    STUDENT,
    DemoDevice,
    Event,
    scenario_events,
)
from edgesplit_cli.demo.summary import closing_sentence, demo_summary, problems, summary_table
from edgesplit_cli.settings import connect

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
T = TypeVar("T")
TELEMETRY_TIMEOUT_S = 6.0
"""Seconds until a device's last telemetry is waited for no longer: three times its interval."""
START_TIMEOUT_S = 60.0
"""Seconds that a component may take to start."""
MAX_TRIES = 5
RETRIED_EXIT_CODES = (LinkError.exit_code, -signal.SIGKILL)
"""Exit codes of a command that was interrupted by a killed component, so that it is retried."""


def run_demo(*, keep: bool, json_file: Path | None, picture: Path, folder: Path | None, time_scale: float) -> None:
    """Run the whole demo; EdgeError if its result is not what it should show."""
    console = cli_output.console()
    data = folder or Path(tempfile.mkdtemp(prefix="edgesplit-demo-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    demo = Demo(console, data, time_scale)
    with locked(data):
        _run_to_end(demo, keep=keep, json_file=json_file, picture=picture, remove=data if folder is None else None)


def _run_to_end(demo: Demo, *, keep: bool, json_file: Path | None, picture: Path, remove: Path | None) -> None:
    try:
        demo.prepare()
        summary = demo.run_scenario(picture)
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(summary, indent=2) + "\n")
        demo.print_result(summary, picture, json_file)
        if keep:
            demo.keep_running()
    finally:
        demo.close()
        if remove is not None and not keep:
            shutil.rmtree(remove, ignore_errors=True)


@contextmanager
def locked(data: Path) -> Iterator[None]:
    """Lock the folder, since a second demo would start agents on the first one's state. UsageError where one runs."""
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

    def __init__(self, console: Console, data: Path, time_scale: float) -> None:
        self.console = console
        self.data = data
        self.events = scenario_events(time_scale)
        self.supervisor = Supervisor(lambda text: self._announce(text))
        self.links: dict[str, list[ShapedLink]] = {}
        self.children: dict[str, DemoProcess] = {}
        self.urls: dict[str, str] = {}
        self.plans: dict[str, Any] = {}
        self.frames: list[Frame] = []
        argv = [sys.executable, str(digits_folder() / "samples.py"), str(data / "samples"), "--count", str(SAMPLES)]
        self.samples = DemoProcess("samples", argv, data / "logs" / "samples.log", ONE_THREAD)
        self.mqtt_port, self.offload_port = free_port(), free_port()
        self._announce: Callable[[str], None] = lambda text: console.print(text, style="yellow")

    # ---- preparation -------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Start everything, up to three devices that run their part of the model."""
        text = f": three emulated devices, one task. State and logs in {self.data}"
        self.console.print(cli_output.bold_head("edgesplit demo", text))
        (self.data / "logs").mkdir(parents=True, exist_ok=True)
        self._start_samples()
        self._start_cloud()
        for device in DEVICES:  # their agents start while the models are pushed
            self._enrol(device)
        self._push(MODEL)
        self._command("profile", MODEL, "--samples", str(digits_folder() / "frames"), "--lossless", quiet=True)
        self._push(STUDENT, quiet=True)
        self._create_family()
        self._load_frames()
        self._deploy()

    def _start_samples(self) -> None:
        """Begin to make the labelled frames that the family is created with, beside the steps before that one."""
        self.console.print(f"$ python {' '.join(self.samples.argv[1:])} &", style="cyan", soft_wrap=True)
        self.samples.start()

    def _start_cloud(self) -> None:
        ports = ["--api-port", "0", "--mqtt-port", str(self.mqtt_port), "--offload-port", str(self.offload_port)]
        self._start_child("controller", self._edgectl("up", "--no-offload", *ports))
        self._wait_until("the controller answers", self._controller_answers)
        self._start_child("offload", self._edgectl("offload", "serve", "--port", str(self.offload_port)))
        self._wait_until("the offload server answers", lambda: _answers(self.offload_port))

    def _controller_answers(self) -> bool:
        return bool(connect(self.data).get("/v1/health"))

    def _push(self, name: str, *, quiet: bool = False) -> None:
        file = str(digits_folder() / f"{name}.onnx")
        self._command("model", "push", file, "--name", name, "--input", INPUT_SPEC, quiet=quiet)

    def _create_family(self) -> None:
        self._wait_until("the labelled frames are made", lambda: not self.samples.is_running)
        folder = self.data / "samples"
        if not (folder / "labels.json").exists():  # samples.py writes it last
            raise EdgeError(f"no labelled frames were made; the log ends:\n{self.samples.log_tail(8)}")
        variants = ("--variant", STUDENT, "--variant", MODEL)
        self._command("family", "create", FAMILY, *variants, "--samples", str(folder))

    def _load_frames(self) -> None:
        """Read the frames that are streamed, with what both whole models answer to them."""
        model = self._query(lambda api: api.get(f"/v1/models/{MODEL}"))
        whole = {
            name: self._query(partial(ControllerClient.download, path=f"/v1/models/{name}/optimised"))
            for name in (MODEL, STUDENT)
        }
        spec = msgspec.convert(model["input_spec"], InputSpec)
        self.frames = load_frames(digits_folder() / "frames", whole, spec)

    def _enrol(self, device: DemoDevice) -> None:
        """Claim the device, shape its link, start its agent."""
        claim = self.data / f"{device.name}.claim.json"
        options = ["--profile", device.profile, "--link", device.link, "--out", str(claim)]
        self._command("device", "claim", device.name, *options, quiet=True)
        port = free_port()
        link = parse_link(device.link)
        shaped = [ShapedLink("127.0.0.1", self.offload_port, link), ShapedLink("127.0.0.1", self.mqtt_port, link)]
        for link_emulator in shaped:
            link_emulator.start()
        self.links[device.name] = shaped
        self.urls[device.name] = f"http://127.0.0.1:{port}"
        folder = self.data / "devices" / device.name
        argv = [sys.executable, "-m", "edgesplit_agent.main", "run", "--data", str(folder), "--claim", str(claim)]
        argv += ["--port", str(port), "--emulate", "--health-seconds", "1", "--die-with-parent", str(os.getpid())]
        argv += ["--offload", f"127.0.0.1:{shaped[0].port}", "--broker", f"127.0.0.1:{shaped[1].port}"]
        self._start_child(device.name, argv)

    def _deploy(self) -> None:
        self._wait_until("all devices are online", self._all_online)
        for device in DEVICES:
            self.plans[device.name] = self._plan(device)
            self._command("deploy", device.model, "--to", device.name, *device.plan_options, "--wait", "120")
        self._command("device", "list")

    def _plan(self, device: DemoDevice) -> dict[str, Any]:
        """The plan of what the device runs, for the summary."""
        if device.has_cascade:
            return self._plan_cascade(device)
        body: dict[str, Any] = {"model": MODEL, "device": device.profile, "link": device.link}
        body["limits"] = {"keep_raw_input": device.keep_raw_input}
        plan = self._query(partial(ControllerClient.post, path="/v1/plans", body=body))
        return {key: plan[key] for key in ("best", "seconds", "gain", "certificate", "ranges")}

    def _plan_cascade(self, device: DemoDevice) -> dict[str, Any]:
        """The plan of a cascade; prints what it costs beside the row that would be chosen without it."""
        where = ("--device", device.profile, "--link", device.link)
        printed = self._command("plan", device.model, *where, *device.plan_options, "--json", quiet=True)
        planned = json.loads(printed)["cascade"]
        for sentence in (planned["text"], planned["escalation"], planned["gain_text"]):
            self.console.print(f"  {sentence}", markup=False, soft_wrap=True)
        kept = ("cascade", "alone", "way", "gain", "text")
        return {"best": planned["second_row"]} | {name: planned[name] for name in kept}

    def _all_online(self) -> bool:
        states = {entry["name"]: entry["state"] for entry in connect(self.data).get("/v1/devices")}
        return all(states.get(device.name) == "online" for device in DEVICES)

    # ---- the scenario --------------------------------------------------------------------------------------------

    def run_scenario(self, picture: Path) -> dict[str, Any]:
        """Send frames, apply the events, record the outcomes; returns the summary."""
        started_at = monotonic()
        streams = {device: FrameSender(device, self.urls[device.name], self.frames, started_at) for device in DEVICES}
        with Display(self.console, streams, self.events[-1].at_s, lambda: monotonic() - started_at) as display:
            self._announce = display.announce
            for stream in streams.values():
                stream.start()
            self._run_events(display, started_at)
            for stream in streams.values():
                stream.finish()
            for stream in streams.values():
                stream.join()
        self._announce = self.console.print
        logs = {device: stream.log for device, stream in streams.items()}
        restarts = {name: child.restarts for name, child in self.children.items()}
        counts = {
            device.name: self._cascade_counts(device, len(log.samples))
            for device, log in logs.items() if device.has_cascade
        }  # fmt: skip
        summary = demo_summary(logs, self.events, self.plans, restarts, counts)
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(logs, self.events, picture)
        return summary

    def _cascade_counts(self, device: DemoDevice, answered: int) -> dict[str, Any] | None:
        """What the device's cascade counted, as telemetry brought it; None where nothing came. Waits for the window
        with the last of `answered` requests."""
        deadline = monotonic() + TELEMETRY_TIMEOUT_S
        while True:
            view = self._query(lambda api: api.get(f"/v1/devices/{device.name}"))
            counts: dict[str, Any] | None = next((audits["cascade"] for audits in view["audits"]), None)
            if counts and counts["sure"] + counts["escalated"] + counts["unsure"] >= answered:
                return counts
            if monotonic() > deadline:
                return counts
            self.supervisor.restart_dead()
            time.sleep(0.2)

    def _run_events(self, display: Display, started_at: float) -> None:
        waiting = list(self.events)
        while waiting:
            while waiting and monotonic() - started_at >= waiting[0].at_s:
                event = waiting.pop(0)
                display.announce(event.text)
                self._apply(event)
            self.supervisor.restart_dead()
            display.refresh()
            time.sleep(0.1)

    def _apply(self, event: Event) -> None:
        """Apply an event to processes and links."""
        if event.kind == "link-drop":
            self._set_link(SLOWED_DEVICE, parse_link(_link_of(SLOWED_DEVICE) + "/10"))
        elif event.kind == "link-back":
            self._set_link(SLOWED_DEVICE, parse_link(_link_of(SLOWED_DEVICE)))
        elif event.kind == "offload-killed":
            self.supervisor.hold(self.children["offload"])
        elif event.kind == "offload-back":
            self.supervisor.resume(self.children["offload"])
        elif event.kind == "agent-killed":
            self.children[KILLED_DEVICE].kill()

    def _set_link(self, device: str, link: Link) -> None:
        for link_emulator in self.links[device]:
            link_emulator.set_link(link)

    # ---- the result -------------------------------------------------------------------------------------------

    def print_result(self, summary: dict[str, Any], picture: Path, json_file: Path | None) -> None:
        """Print the summary; EdgeError if it is not as it should be."""
        self.console.print(summary_table(summary))
        self.console.print(f"picture: {picture}" + (f"   summary: {json_file}" if json_file else ""))
        failures = problems(summary)
        if failures:
            raise EdgeError("the demo failed:\n  " + "\n  ".join(failures))
        self.console.print(closing_sentence(summary), style="green")

    def keep_running(self) -> None:
        """Leave everything running until Ctrl-C."""
        self.console.print(
            f"Still running. Try: edgectl --data {self.data} device list --watch   (Ctrl-C stops everything)"
        )
        try:
            while True:
                self.supervisor.restart_dead()
                time.sleep(0.5)
        except KeyboardInterrupt:
            self.console.print("stopping")

    def close(self) -> None:
        """Stop every process and link."""
        self.supervisor.stop()
        self.samples.stop()
        for shaped in self.links.values():
            for link_emulator in shaped:
                link_emulator.stop()

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _edgectl(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "edgesplit_cli.main", "--data", str(self.data), *arguments]

    def _start_child(self, name: str, argv: list[str]) -> None:
        self.children[name] = self.supervisor.add(
            DemoProcess(name, argv, self.data / "logs" / f"{name}.log", ONE_THREAD)
        )

    def _command(self, *arguments: str, quiet: bool = False) -> str:
        """Print and run an edgectl command and return its output; retried where a component was killed meanwhile,
        EdgeError on any other failure."""
        command_line = " ".join(f"'{argument}'" if " " in argument else argument for argument in arguments)
        self.console.print(f"$ edgectl {command_line}", style="cyan", soft_wrap=True)
        tries = 1
        while (result := self._run(arguments))[0] in RETRIED_EXIT_CODES and tries < MAX_TRIES:
            self._wait_until("the controller answers", self._controller_answers)
            tries += 1
        code, output, errors = result
        if code:
            raise EdgeError(f"`edgectl {command_line}` failed: {errors.strip() or output.strip()}")
        if not quiet and output.strip():
            self.console.print(output.rstrip(), markup=False, soft_wrap=True)
        return output

    def _run(self, arguments: tuple[str, ...]) -> tuple[int, str, str]:
        """Run a command once, restarting children that die meanwhile."""
        argv, pipe, environment = self._edgectl(*arguments), subprocess.PIPE, {**os.environ, "COLUMNS": "150"}
        with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=environment) as command:
            while True:
                try:
                    output, errors = command.communicate(timeout=0.2)
                    return command.returncode, output, errors
                except subprocess.TimeoutExpired:
                    self.supervisor.restart_dead()

    def _query(self, request: Callable[[ControllerClient], T]) -> T:
        """The controller's answer, retried while the controller restarts."""
        answers: list[T] = []

        def answered() -> bool:
            answers.append(request(connect(self.data)))
            return True

        self._wait_until("the controller answers", answered)
        return answers[-1]

    def _wait_until(self, description: str, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, restarting children that die meanwhile; EdgeError after `START_TIMEOUT_S`."""
        deadline = monotonic() + START_TIMEOUT_S
        while not _is_true(condition):
            self.supervisor.restart_dead()
            if monotonic() > deadline:
                log_tails = "\n".join(f"--- {child.log}\n{child.log_tail(8)}" for child in self.children.values())
                raise EdgeError(
                    f"waited {START_TIMEOUT_S:.0f} s without success until {description}; the logs end:\n{log_tails}"
                )
            time.sleep(0.1)


def _is_true(condition: Callable[[], bool]) -> bool:
    """The condition's value; False while the controller, or the file with its address, is not available."""
    try:
        return condition()
    except (LinkError, UsageError):
        return False


def free_port() -> int:
    """A TCP port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
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
    """Folder of the digits model and its held-out frames, in the checkout or in the wheel."""
    for folder in (Path(__file__).parent / "digits", Path(__file__).parents[3] / "examples" / "digits"):
        if (folder / "digits.onnx").exists():
            return folder
    raise UsageError("examples/digits/digits.onnx is missing: run the demo from a checkout or an installed wheel")
