"""`edgectl infer`: one inference through a device's agent."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import numpy.typing as npt

from edgesplit.client.client import Client
from edgesplit.errors import UsageError
from edgesplit.input_spec import FRAME
from edgesplit.oip.report import phases
from edgesplit.plan import LOCAL
from edgesplit.quantities import format_size
from edgesplit_cli.local.model import read_npz
from edgesplit_cli.options.types import FILE, NEW_FILE, Number
from edgesplit_cli.output import bold_head, check_writable, console, json_option, ms, print_json
from edgesplit_cli.settings import connect
from edgesplit_cli.views.timeline import waterfall

MAX_PRINTED = 12
MAX_DEADLINE_S = 3600.0


@click.command()
@click.argument("model")
@click.argument("source", metavar="INPUT", type=FILE)
@click.option("--device", help="A device of this controller whose agent runs on this machine.")
@click.option("--url", help="The agent's address, http://… or unix:///…/agent.sock. [default: http://127.0.0.1:8600]")
@click.option(
    "--deadline", "deadline_s", type=Number(0, MAX_DEADLINE_S, min_open=True), default=5.0, show_default=True,
    help="Deadline of the request, in seconds.",
)  # fmt: skip
@click.option("--out", type=NEW_FILE, help="Write the outputs to this .npz file.")
@click.option("--timeline", "as_timeline", is_flag=True, help="Draw where the request's time went.")
@json_option
@click.pass_obj
def infer(
    data: Path, model: str, source: Path, device: str | None, url: str | None, deadline_s: float, out: Path | None,
    as_timeline: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run MODEL on INPUT: a JPEG, an .npy of its only input, or an .npz with one array per input."""
    if device is not None:
        url = str(connect(data).get(f"/v1/devices/{device}").get("local_url") or "") or None
        if url is None:
            raise UsageError(f"{device} has not reported its agent's address; is it online?")
    if out is not None:
        if out.suffix != ".npz":
            raise UsageError(f"--out needs a file that ends with .npz, not {out.name!r}")
        check_writable(out)
    client = Client(url or "http://127.0.0.1:8600")
    answer = client.infer(model, read_inputs(client, model, source), deadline_s=deadline_s)
    if out is not None:
        write_npz(out, answer.outputs)
    report = msgspec.to_builtins(answer.report) if answer.report else None
    phase_times = phases(answer.report) if answer.report else {}
    if as_json:
        outputs = {name: _to_dict(value) for name, value in answer.outputs.items()}
        print_json({"id": answer.id, "outputs": outputs, "report": report, "phases": phase_times})
        return
    for name, value in answer.outputs.items():
        console().print(bold_head(name, f" {value.dtype}{list(value.shape)}  {_text(value)}"))
    if report:
        console().print(_route_text(report))
        if report["reason"]:
            console().print(bold_head("why", f" {report['reason']}"))
    if as_timeline:
        for line in waterfall(phase_times):
            console().print(line)


def read_inputs(client: Client, model: str, source: Path) -> dict[str, Any]:
    """The content of the file, by the name of the model's input."""
    if source.suffix == ".npz":
        return dict(read_npz(source))
    if source.suffix == ".npy":
        names = [input_["name"] for input_ in client.metadata(model)["inputs"]]
        if len(names) != 1:
            raise UsageError(f"{model} has the inputs {names}: give an .npz with one array for each")
        return {names[0]: read_npy(source)}
    return {FRAME: source.read_bytes()}


def write_npz(file: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write one array per tensor, under its name whatever it is, as `read_npz` reads them; UsageError for text.

    Not `np.savez`: a tensor may be called `file`, which is its first parameter, and numpy 1 writes `allow_pickle` as an
    array.
    """
    text = [name for name, value in tensors.items() if value.dtype.hasobject]
    if text:
        raise UsageError(f"--out writes tensors of numbers, and {text[0]!r} is text: use --json")
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in tensors.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(value), allow_pickle=False)


def read_npy(file: Path) -> npt.NDArray[Any]:
    """The array of an .npy; UsageError where it does not hold one array of plain numbers."""
    try:
        array = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{file} is not a valid .npy file of numbers: {str(error).partition('. ')[0]}") from error
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{file} holds several arrays: name it .npz")
    return array


def _route_text(report: dict[str, Any]) -> str:
    """One line on where the answer was computed and how long each part took."""
    where = "on the device alone" if report["row"] == LOCAL else "beyond the link"
    if report["split_after"] and report["row"] != LOCAL:
        where = f"{report['row']} (after {report['split_after']})"
    if report["fallback"]:
        where = f"on the device alone, as a fallback ({report['cause']})"
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
