"""What an agent takes on a device: installed bytes by part; memory, processor and wake-ups while nothing is asked.

    bench/footprint.py [--python 3.11] [--wheelhouse DIR] [--seconds 60] [--json FILE]

Makes a kit for this machine and installs it by its own install.sh into a scratch folder, then starts that agent against
a controller of its own. Idle means: enrolled, connected to its broker, no request. Memory is /proc's: RSS counts shared
pages whole, PSS by share. The figures are of this machine; another architecture's wheels differ by some per cent.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from record import Target, finish, make_parser

from edgesplit.client.client import Client
from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.settings import cache_folder
from edgesplit.errors import EdgeError
from edgesplit_cli.demo.processes import DemoProcess
from edgesplit_cli.demo.run import digits_folder, free_port
from edgesplit_cli.demo.scenario import INPUT_SPEC
from edgesplit_provisioning.kit import Target as Device
from edgesplit_provisioning.kit import build_kit

ENGINES = ("onnxruntime", "ai-edge-litert")
INSTALLED_MB, RESIDENT_MB, CORE = 80.0, 65.0, 0.01
SETTLE_S = 15.0
TIMEOUT_S = 120.0
SIZES = """
import json, os, sysconfig
from importlib import metadata
site, owner, distributions = sysconfig.get_paths()["purelib"], {}, {}
for distribution in metadata.distributions():
    name = distribution.metadata["Name"].lower().replace("_", "-").replace(".", "-")
    distributions[name] = {"bytes": 0, "needs": distribution.requires or [], "version": distribution.version}
    for file in distribution.files or ():
        owner[os.path.normpath(str(one.locate_file(file)))] = name
for where, _, names in os.walk(site):
    for name in names:
        path = os.path.join(where, name)
        folder, base = os.path.split(path)
        source = os.path.join(os.path.dirname(folder), base.split(".")[0] + ".py")
        held = owner.get(path) or (owner.get(source) if folder.endswith("__pycache__") else None) or "(other)"
        distributions.setdefault(held, {"bytes": 0, "needs": [], "version": ""})["bytes"] += os.path.getsize(path)
print(json.dumps(distributions))
"""


@dataclass(frozen=True, slots=True)
class IdleUsage:
    """Memory, processor use and wake-ups of an idle agent's processes over a while."""

    rss_mb: float
    pss_mb: float
    core: float
    """Used fraction of one core."""
    wakes_per_s: float
    """Voluntary context switches of all threads per second."""
    processes: int


def main(words: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    parser.add_argument("--python", default=here, help="that the kit is for (default: this)")
    parser.add_argument("--wheelhouse", type=Path, metavar="DIR", help="take wheels from there alone")
    parser.add_argument("--seconds", type=float, default=60.0, help="of idling that are watched (default 60)")
    options = parser.parse_args(words)
    try:
        with tempfile.TemporaryDirectory(prefix="edgesplit-footprint-") as folder:
            results = measure(Path(folder), options.python, options.wheelhouse, options.seconds)
    except EdgeError as error:
        print(f"footprint: {error}", file=sys.stderr)
        return error.exit_code
    show(results)
    finish(results, targets(results), options.json)
    return 0


def measure(folder: Path, python: str, wheelhouse: Path | None, seconds: float) -> dict[str, Any]:
    """Install, deploy and measure, in order; returns all results."""
    kit = build_kit(
        Device(python, platform.machine()), extras=("tflite",), cache=cache_folder(), wheelhouse=wheelhouse,
        progress=lambda text: print(f"  {text}", file=sys.stderr),
    )  # fmt: skip
    place = folder / "kit"
    place.mkdir()
    for name, file in kit.files.items():
        shutil.copyfile(file, place / name)
    me = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    where = ["--prefix", str(folder / "opt"), "--data", str(folder / "data"), "--user", me, "--no-service"]
    subprocess.run(["sh", str(place / "install.sh"), *where], check=True, stdout=subprocess.DEVNULL)
    installed = folder / "opt" / "current" / "bin"
    parts = installed_parts(installed / "python")
    with running(folder, installed / "edgesplit-agent") as (api, url, pid):
        waiting = measure_idle(pid, seconds)
        deploy(folder, api)
        wait_until("the model serves", lambda: any(model["version"] for model in status(url)["models"]))
        frame = next(iter(sorted((digits_folder() / "frames").glob("*.jpg")))).read_bytes()
        Client(url).infer("digits", {"frame": frame}, deadline_s=30.0)
        serving = measure_idle(pid, seconds)
    return {
        "kit_bytes": kit.bytes, "parts": parts, "waiting": asdict(waiting), "serving": asdict(serving),
        "seconds": seconds,
    }  # fmt: skip


def installed_parts(python: Path) -> list[dict[str, Any]]:
    """Installed bytes of each distribution including compiled modules, and whether only an engine needs it."""
    raw = subprocess.run([str(python), "-c", SIZES], capture_output=True, text=True, check=True).stdout
    distributions: dict[str, dict[str, Any]] = json.loads(raw)
    ours = needed(distributions, "edgesplit", {"agent"}, set(ENGINES))
    return sorted(
        (
            {
                "name": name,
                "version": entry["version"],
                "bytes": entry["bytes"],
                "runtime": name not in {*ours, "(other)"},
            }
            for name, entry in distributions.items()
        ),
        key=lambda entry: -entry["bytes"],
    )


def needed(distributions: dict[str, dict[str, Any]], top: str, extras: set[str], without: set[str]) -> set[str]:
    """Names of the distributions that `top` needs, directly or indirectly, without following `without`."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    have: set[str] = set()
    queue = [(top, frozenset(extras))]
    while queue:
        name, wanted = queue.pop()
        if name in have or name in without or name not in distributions:
            continue
        have.add(name)
        for text in distributions[name]["needs"]:
            one = Requirement(text)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                queue.append((canonicalize_name(one.name), frozenset(one.extras)))
    return have


@contextlib.contextmanager
def running(folder: Path, agent: Path) -> Iterator[tuple[ControllerClient, str, int]]:
    """Run a controller and the installed agent until the agent is online: yields the API, the agent's address and
    process id."""
    data = folder / "cloud"
    edgectl = [sys.executable, "-m", "edgesplit_cli.main", "--data", str(data)]
    ports = ["--api-port", "0", "--mqtt-port", "0", "--offload-port", "0"]
    cloud = DemoProcess("up", [*edgectl, "up", *ports], folder / "up.log")
    cloud.start()
    wait_until(
        "the controller answers",
        lambda: (data / "controller.json").exists() and ControllerClient.connect(data).get("/v1/health"),
    )
    claim = folder / "data" / "claim.json"
    subprocess.run(
        [*edgectl, "device", "claim", "bench", "--profile", "generic-x86", "--out", str(claim)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    port = free_port()
    words = ["run", "--data", str(folder / "data"), "--claim", str(claim), "--port", str(port)]
    device = DemoProcess("agent", [str(agent), *words], folder / "agent.log")
    device.start()
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until("the agent is online", lambda: status(url)["broker"]["connected"])
        yield ControllerClient.connect(data), url, int(device.pid or 0)
    finally:
        device.stop()
        cloud.stop()


def deploy(folder: Path, api: ControllerClient) -> None:
    """Deploy the digits model to run on the device alone."""
    edgectl = [sys.executable, "-m", "edgesplit_cli.main", "--data", str(folder / "cloud")]
    model = str(digits_folder() / "digits.onnx")
    for words in (
        ["model", "push", model, "--name", "digits", "--input", INPUT_SPEC],
        ["deploy", "digits", "--partition", "device", "--to", "bench"],
    ):
        subprocess.run([*edgectl, *words], check=True, stdout=subprocess.DEVNULL)


def status(url: str) -> dict[str, Any]:
    from urllib.request import urlopen

    with urlopen(f"{url}/edgesplit/status", timeout=5) as answer:
        parsed: dict[str, Any] = json.loads(answer.read())
    return parsed


def wait_until(what: str, holds: Any) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        try:
            if holds():
                return
        except (EdgeError, OSError, KeyError):
            pass
        time.sleep(0.2)
    raise SystemExit(f"never came: {what}")


def measure_idle(pid: int, seconds: float) -> IdleUsage:
    """Measure the agent and its workers over `seconds`, after they have settled."""
    time.sleep(SETTLE_S)
    pids = process_tree(pid)
    before, wakes, began = sum(map(cpu_s, pids)), sum(map(switches, pids)), time.monotonic()
    time.sleep(seconds)
    taken = time.monotonic() - began
    memory = [kilobytes(usage) for usage in pids]
    return IdleUsage(
        rss_mb=sum(usage["Rss"] for usage in memory) * 1024 / 1e6,
        pss_mb=sum(usage["Pss"] for usage in memory) * 1024 / 1e6,
        core=(sum(map(cpu_s, pids)) - before) / taken, wakes_per_s=(sum(map(switches, pids)) - wakes) / taken,
        processes=len(pids),
    )  # fmt: skip


def process_tree(pid: int) -> list[int]:
    """Process ids of the process and all its descendants."""
    children = [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]
    return [pid, *(descendant for child in children for descendant in process_tree(child))]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def switches(pid: int) -> int:
    return sum(
        int(line.split()[1])
        for task in Path(f"/proc/{pid}/task").iterdir()
        for line in (task / "status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


def kilobytes(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.split(":")[0] in ("Rss", "Pss")}


def installed_without_engines(results: dict[str, Any]) -> float:
    """Installed megabytes without the engines."""
    return float(sum(part["bytes"] for part in results["parts"] if not part["runtime"]) / 1e6)


def targets(results: dict[str, Any]) -> list[Target]:
    return [
        Target("installed beside the runtimes, MB", installed_without_engines(results), INSTALLED_MB),
        Target("resident idle before a runtime is loaded, MB", results["waiting"]["rss_mb"], RESIDENT_MB),
        Target("idle before a runtime is loaded, part of a core", results["waiting"]["core"], CORE),
        Target("idle with a model loaded, part of a core", results["serving"]["core"], CORE),
    ]


def show(results: dict[str, Any]) -> None:
    """Print the tables as docs/footprint.md has them."""
    print("| part | version | installed MB | |\n|---|---|---:|---|")
    for part in results["parts"]:
        mark = "runtime" if part["runtime"] else ""
        print(f"| {part['name']} | {part['version']} | {part['bytes'] / 1e6:.1f} | {mark} |")
    print(f"| all beside the runtimes | | {installed_without_engines(results):.1f} | |")
    print(f"\nkit: {results['kit_bytes'] / 1e6:.1f} MB; idle for {results['seconds']:g} s each:\n")
    print("| | processes | RSS MB | PSS MB | of a core | wake-ups a second |\n|---|---:|---:|---:|---:|---:|")
    for name in ("waiting", "serving"):
        one = results[name]
        print(
            f"| {name} | {one['processes']} | {one['rss_mb']:.1f} | {one['pss_mb']:.1f} | {one['core']:.2%} "
            f"| {one['wakes_per_s']:.1f} |"
        )


if __name__ == "__main__":
    sys.exit(main())
