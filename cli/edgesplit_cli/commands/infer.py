"""`edgectl infer`: one inference through a device's agent."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec
import numpy.typing as npt
from rich.text import Text

from edgesplit.cascade import format_score
from edgesplit.client.answer import Answer, Source
from edgesplit.client.client import Client
from edgesplit.client.model_interface import ModelInterface
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import UsageError
from edgesplit.input_spec import FRAME
from edgesplit.oip.options import InferOptions
from edgesplit.oip.report import from_parameters, phases
from edgesplit.plan import LOCAL, variant_name
from edgesplit.quantities import format_size
from edgesplit.terminal_text import printable
from edgesplit_cli.local.drawing import ENDINGS, draw
from edgesplit_cli.local.model import read_tensors, write_npz
from edgesplit_cli.options.completion import complete_devices, complete_models
from edgesplit_cli.options.types import FILE, FRACTION, NEW_FILE, Number
from edgesplit_cli.output import bold_head, check_writable, console, json_option, ms, print_json
from edgesplit_cli.settings import connect, segment
from edgesplit_cli.views.reading import reading_json, reading_lines
from edgesplit_cli.views.timeline import waterfall

MAX_PRINTED = 12
MAX_DEADLINE_S = 3600.0
DEFAULT_URL = "http://127.0.0.1:8600"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
PROBE_S = 2.0
"""Timeout, in seconds, of the question whether a device's agent runs on this machine."""
MAX_STATUS_BYTES = 16 * 2**20


@click.command()
@click.argument("model", shell_complete=complete_models)
@click.argument("source", metavar="INPUT", type=FILE)
@click.option("--device", help="A device of this controller, here or elsewhere.", shell_complete=complete_devices)
@click.option(
    "--via", type=click.Choice(("direct", "controller")),
    help="With --device: the way to it. [default: direct where its agent runs on this machine, else controller]",
)  # fmt: skip
@click.option("--url", help="The agent's address, http://… or unix:///…/agent.sock. [default: http://127.0.0.1:8600]")
@click.option(
    "--deadline", "deadline_s", type=Number(0, MAX_DEADLINE_S, min_open=True), default=5.0, show_default=True,
    help="Deadline of the request, in seconds; an application's `Client.infer` has 2 by default.",
)  # fmt: skip
@click.option(
    "--least-accuracy", type=FRACTION, metavar="SHARE",
    help="Of a family: no variant of less accuracy answers, as in 70%; an error where none can.",
)  # fmt: skip
@click.option(
    "--refuse-unsure", is_flag=True,
    help="Of a cascade, asked directly: exit 17 instead of an unsure answer, where the second variant cannot be asked.",
)  # fmt: skip
@click.option("--out", type=NEW_FILE, help="Write the outputs to this .npz file.")
@click.option("--draw", "drawing", type=NEW_FILE, help="Draw what was found onto the picture: a .jpg, .png or .webp.")
@click.option("--timeline", "as_timeline", is_flag=True, help="Draw where the request's time went.")
@json_option
@click.pass_obj
def infer(
    data: Path, model: str, source: Path, device: str | None, via: str | None, url: str | None, deadline_s: float,
    least_accuracy: float | None, refuse_unsure: bool, out: Path | None, drawing: Path | None, as_timeline: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Run MODEL (NAME, or NAME@VERSION) on INPUT: a JPEG, an .npy of its only input, or an .npz with one array per
    input.

    With --device, a device elsewhere is asked through the controller and the broker, with at most 2 MiB of input and of
    output, when its applications leave it time.

    A model that was pushed with --output or --preset answers in words, too: `cat 0.93 at 12,40,200,180` (left, top,
    right and bottom, in pixels of the picture).
    """
    if via is not None and device is None:
        raise UsageError("--via needs --device")
    if out is not None:
        if out.suffix != ".npz":
            raise UsageError(f"--out needs a file that ends with .npz, not {out.name!r}")
        check_writable(out)
    if drawing is not None:
        if drawing.suffix.lower() not in ENDINGS:
            raise UsageError(f"--draw needs a file that ends with {', '.join(ENDINGS)}, not {drawing.name!r}")
        check_writable(drawing)
    options = InferOptions(least_accuracy=least_accuracy or 0.0, refuse_unsure=refuse_unsure)
    if device is None:
        answer = _ask_agent(url or DEFAULT_URL, model, source, deadline_s, options)
    else:
        answer = _ask_device(connect(data), device, via, model, source, deadline_s, options, quiet=as_json)
    if out is not None:
        write_npz(out, answer.outputs)
    if drawing is not None:
        draw(answer, drawing)
    report = printable(msgspec.to_builtins(answer.report)) if answer.report else None
    phase_times = phases(answer.report) if answer.report else {}
    if as_json:
        outputs = {name: _to_dict(value) for name, value in answer.outputs.items()}
        read = reading_json(answer)
        print_json({"id": answer.id, **read, "outputs": outputs, "report": report, "phases": phase_times})
        return
    for found in reading_lines(answer):
        console().print(Text(found))
    for name, value in answer.outputs.items():
        console().print(bold_head(printable(name), f" {value.dtype}{list(value.shape)}  {_text(value)}"))
    if report:
        console().print(_route_text(report))
        if report["score"] is not None or report["escalated"]:
            console().print(_cascade_text(report))
        if report["reason"]:
            console().print(bold_head("why", f" {printable(report['reason'])}"))
    if as_timeline:
        for line in waterfall(phase_times):
            console().print(line)


def _ask_device(
    api: ControllerClient, device: str, via: str | None, model: str, source: Path, deadline_s: float,
    options: InferOptions, *, quiet: bool,
) -> Answer:  # fmt: skip
    """The answer of a device; standard error says which way it was asked."""
    url = _find_agent(api, device, via)
    click.echo(f"{device}: asked {'through the controller' if url is None else f'at {url}'}", err=True)
    if url is not None:
        return _ask_agent(url, model, source, deadline_s, options)
    if options.refuse_unsure:
        raise UsageError("--refuse-unsure is for a device that is asked directly: run this on the device itself")
    return _ask_controller(api, device, model, source, deadline_s, options, quiet=quiet)


def _ask_agent(url: str, model: str, source: Path, deadline_s: float, options: InferOptions) -> Answer:
    """The answer of the agent at this address."""
    client = Client(url)
    inputs = read_inputs(source, model, lambda: client.metadata(model))
    return client.infer(model, inputs, deadline_s=deadline_s, options=options)


def _find_agent(api: ControllerClient, device: str, via: str | None) -> str | None:
    """Address of the device's agent if it runs on this machine; None: ask through the controller. UsageError where the
    operator wants it otherwise."""
    if via == "controller":
        return None
    url = str(api.get(f"/v1/devices/{segment(device)}").get("local_url") or "")
    if _is_agent_of(device, url):
        return url
    if via == "direct":
        raise UsageError(f"the agent of {device} does not run on this machine: leave out --via direct")
    return None


def _is_agent_of(device: str, url: str) -> bool:
    """Whether the agent of this device answers at `url`, on this machine: another device may have the same address on
    its own machine, and no other address is tried, because the device itself reported it."""
    try:
        address = urlsplit(url)
        if address.scheme != "http" or address.hostname not in LOCAL_HOSTS:
            return False
        with closing(http.client.HTTPConnection(address.hostname, address.port or 80, timeout=PROBE_S)) as connection:
            connection.request("GET", "/edgesplit/status")
            status = json.loads(connection.getresponse().read(MAX_STATUS_BYTES))
        return isinstance(status, dict) and status.get("device") == device
    except (OSError, http.client.HTTPException, ValueError):
        return False


def _ask_controller(
    api: ControllerClient, device: str, model: str, source: Path, deadline_s: float, options: InferOptions, *,
    quiet: bool,
) -> Answer:  # fmt: skip
    """The device's answer, through controller and broker; a terminal shows how far it is."""
    inputs = read_inputs(source, model, lambda: api.get(f"/v1/models/{segment(model)}"))
    with console(quiet=quiet).status(Text(f"{device}: sending")) as status:
        response = api.infer(
            device, model, inputs, deadline_s=deadline_s, options=options,
            on_progress=lambda state: status.update(Text(f"{device}: {state}")),
        )  # fmt: skip
    asked = Source(lambda: _interface_of(api, model), inputs.get(FRAME))
    return Answer(response.outputs, from_parameters(dict(response.parameters)), response.id, source=asked)


def _interface_of(api: ControllerClient, model: str) -> ModelInterface:
    """What the model takes and gives, as the controller has it."""
    stored = api.get(f"/v1/models/{segment(model)}")
    return msgspec.convert({name: stored.get(name) for name in ("input_spec", "output_kind")}, ModelInterface)


def read_inputs(source: Path, model: str, metadata: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The content of the file, by the name of the model's input. `metadata` returns the model's `inputs`, where they
    are needed."""
    if source.suffix == ".npz":
        return read_tensors(source)
    if source.suffix == ".npy":
        return read_tensors(source, [input_["name"] for input_ in metadata()["inputs"]])
    return {FRAME: source.read_bytes()}


def _route_text(report: dict[str, Any]) -> str:
    """One line on where the answer was computed and how long each part took."""
    alone = report["row"] == variant_name(report["variant"], LOCAL)
    where = "on the device alone" if alone else "beyond the link"
    if report["split_after"] and not alone:
        where = f"{report['row']} (after {report['split_after']})"
    if report["fallback"]:
        where = f"on the device alone, as a fallback ({report['cause']})"
    if report["variant"]:
        accurate = f" ({report['accuracy']:.1%} accurate)" if report["accuracy"] else ""
        where += f", by {report['variant']}{accurate}"
    parts = f"device {ms(report['device_s'])} ms, link {ms(report['link_s'])} ms, remote {ms(report['remote_s'])} ms"
    if report["next_tier_s"] > 0:
        cloud = f"{ms(report['next_tier_server_s'])} ms in the cloud"
        alone = f"then the gateway finished it locally ({report['next_tier_cause']})"
        rest = alone if report["next_tier_cause"] else cloud
        parts += f" (of it {ms(report['next_tier_s'])} ms beyond the gateway, {rest})"
    emulated = " (emulated device)" if report["emulated"] else ""
    sent = f"{format_size(report['up_bytes'])} up; predicted {ms(report['predicted_s'])} ms"
    trace = f"; trace {report['trace_id']}" if report["trace_id"] else ""
    return f"{ms(report['latency_s'])} ms {where}: {parts}, {sent}{emulated}{trace}"


def _cascade_text(report: dict[str, Any]) -> str:
    """One line on who of a cascade answered, and how sure the first variant was."""
    score = f"score {format_score(report['score'])}" if report["score"] is not None else "no score"
    first, second = ("first", "second") if report["variant"] else ("exit", "rest")
    if report["escalated"]:
        return f"answered by {report['variant'] or 'the whole model'}, as the {first} was not sure ({score})"
    unsure = f"; unsure, and the {second} could not be asked in time" if report["unsure"] else ""
    return f"answered by {report['variant'] or 'the exit'}, {score}{unsure}"


def _to_dict(value: npt.NDArray[Any]) -> dict[str, Any]:
    flat = value.reshape(-1)
    top1 = int(flat.argmax()) if flat.size else None
    summary = {"shape": list(value.shape), "datatype": str(value.dtype), "top1": top1}
    return summary | ({"values": flat.tolist()} if flat.size <= 1000 else {})


def _text(value: npt.NDArray[Any]) -> str:
    flat = value.reshape(-1)
    if flat.size <= MAX_PRINTED:
        return " ".join(f"{number:.4g}" for number in flat.tolist()) + (
            f"  top-1: {int(flat.argmax())}" if flat.size > 1 else ""
        )
    return f"top-1: {int(flat.argmax())} ({float(flat.max()):.4g}), min {float(flat.min()):.4g}"
