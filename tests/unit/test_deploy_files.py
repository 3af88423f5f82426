"""deploy/: everything that can be checked without a daemon or a cluster. Nothing here was run in docker or
Kubernetes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import check_jsonschema
import click
import jsonschema
import kubernetes_validate
import pytest
import yaml

from edgesplit_agent.main import build_parser as agent_parser
from edgesplit_cli.main import cli
from edgesplit_offload.options import parser as offload_parser
from support import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
IMAGES = sorted((DEPLOY / "images").glob("*.Dockerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((BASE / "kustomization.yaml").read_text())
METRICS = (REPOSITORY / "docs" / "metrics.md").read_text()
Doc = dict[str, Any]


def documents() -> Iterator[tuple[str, Doc]]:
    for name in KUSTOMIZATION["resources"]:
        for document in yaml.safe_load_all((BASE / name).read_text()):
            yield f"{document['kind']} {document['metadata']['name']}", document


DOCUMENTS = list(documents())
KINDS = {name: document for name, document in DOCUMENTS}  # noqa: C416 - for its type
WORKLOADS = [document for _, document in DOCUMENTS if document["kind"] in ("Deployment", "StatefulSet")]


def pods() -> list[tuple[str, Doc]]:
    return [(workload["metadata"]["name"], workload["spec"]["template"]) for workload in WORKLOADS]


def containers(pod: Doc) -> list[Doc]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


# ---- commands are ours ----------------------------------------------------------------------------------------------


def edgectl_commands(script: str) -> list[list[str]]:
    """The `edgectl` command lines of a shell script, its variables filled in."""
    joined = script.replace("\\\n", " ").replace("$$", "$").replace("$EDGESPLIT_HOST", "edge.example")
    lines = [line.strip().removeprefix("exec ") for line in joined.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("edgectl ")]


def accept(words: list[str]) -> None:
    """Parse a command line of edgectl as it would be, without running it."""
    command: click.Command = cli
    rest = list(words)
    while isinstance(command, click.Group):
        command = command.commands[rest.pop(0)]
    command.make_context("edgectl", rest)


SCRIPTS = [
    (f"kubernetes {name} {container['name']}", "\n".join(container.get("args", [])))
    for name, pod in pods()
    for container in containers(pod)
    if container["image"] == "edgesplit/controller"
] + [
    (f"compose {name}", "\n".join(service["command"]))
    for name, service in SERVICES.items()
    if service.get("image") == "edgesplit/controller"
]


@pytest.mark.parametrize(("where", "script"), SCRIPTS, ids=[where for where, _ in SCRIPTS])
def test_the_controllers_commands_are_valid(where: str, script: str) -> None:
    """Each option is one that `edgectl` has, with a value that it takes; and the shell can read the script."""
    commands = edgectl_commands(script)
    assert commands
    for words in commands:
        accept(words)
    subprocess.run(["sh", "-n", "-c", script.replace("$$", "$")], check=True)


def test_an_invalid_command_is_detected() -> None:
    """The parsing of the other tests can fail."""
    with pytest.raises(click.UsageError):
        accept(["up", "--no-such-option"])
    with pytest.raises(click.UsageError):
        accept(["offload", "credentials", "--out", "x"])


def dockerfile(path: Path) -> list[tuple[str, str]]:
    """Instructions with their arguments, lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in text.splitlines()) if word
    ]


def exec_form(path: Path, instruction: str) -> list[str]:
    found: list[str] = json.loads(next(rest for word, rest in reversed(dockerfile(path)) if word == instruction))
    return found


def test_the_images_commands_are_valid() -> None:
    """ENTRYPOINT and CMD of each image, and the arguments of the pods that run it."""
    for path in IMAGES:
        words, entry = exec_form(path, "CMD"), exec_form(path, "ENTRYPOINT")
        name = path.name.partition(".")[0]
        if name == "controller":
            assert entry == ["edgectl"]
            accept(words)
        elif name == "offload":
            assert entry == ["python", "-m", "edgesplit_offload.main"]
            offload_parser().parse_args(words)
        else:
            assert entry == ["edgesplit-agent"]
            agent_parser().parse_args(words)
    (offload,) = KINDS["Deployment offload"]["spec"]["template"]["spec"]["containers"]
    offload_parser().parse_args(offload["args"])


def test_the_units_command_is_valid() -> None:
    """And systemd, where it is here, finds nothing to complain of but the missing program."""
    unit = (DEPLOY / "systemd" / "edgesplit-controller.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, flags=re.MULTILINE)
    program, *words = shlex.split(line.replace("${EDGESPLIT_HOST}", "edge.example"))
    assert program.endswith("/bin/edgectl")
    accept(words)


def test_the_unit_allows_the_controller_to_count_and_cut_its_brokers_connections() -> None:
    """Without netlink sockets floods stay unseen; without pidfd_getfd, which is in no group of services, uncut."""
    unit = (DEPLOY / "systemd" / "edgesplit-controller.service").read_text()
    settings = dict(re.findall(r"^(RestrictAddressFamilies|SystemCallFilter)=(.*)$", unit, flags=re.MULTILINE))
    assert "AF_NETLINK" in settings["RestrictAddressFamilies"].split()
    assert {"@system-service", "pidfd_getfd"} <= set(settings["SystemCallFilter"].split())


def test_systemd_verifies_the_unit() -> None:
    """`systemd-analyze verify`, as far as a machine without the program can."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    unit = DEPLOY / "systemd" / "edgesplit-controller.service"
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if "edgesplit-controller" in line]
    assert all("is not executable" in line for line in said), done.stderr


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "document"), DOCUMENTS, ids=[name for name, _ in DOCUMENTS])
def test_each_kubernetes_manifest_matches_its_schema(name: str, document: Doc) -> None:
    """By the schemas of the newest Kubernetes that the validator knows; strictly: no unknown field."""
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_an_invalid_kubernetes_manifest_is_detected() -> None:
    """The schema validation of the other tests can fail."""
    spoiled = json.loads(json.dumps(KINDS["Deployment offload"]))
    spoiled["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(spoiled, kubernetes_validate.latest_version(), strict=True)


def test_the_kustomization_lists_every_file_and_no_secret() -> None:
    """The kustomization lists all there is; secrets are made from files that are not kept here."""
    listed = {*KUSTOMIZATION["resources"], "kustomization.yaml", "broker.sh", "secrets"}
    assert {path.name for path in BASE.iterdir()} == listed
    assert not [name for name, _ in DOCUMENTS if name.startswith("Secret")]
    for folder in (BASE / "secrets", DEPLOY / "compose" / "secrets"):
        assert (folder / ".gitignore").read_text() == "*\n!.gitignore\n"


def test_the_base_is_built_by_kustomize(tmp_path: Path) -> None:
    """What `kubectl apply -k` would send: all of it, in the namespace, and each of it valid."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    folder = shutil.copytree(BASE, tmp_path / "base")
    (folder / "secrets" / "database-password").write_text("for this test")
    built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    found = [document for document in yaml.safe_load_all(built.stdout) if document]
    assert len(found) == len(DOCUMENTS) + 3
    for one in found:
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
        assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == "edgesplit"


@pytest.mark.parametrize(("name", "pod"), pods(), ids=[name for name, _ in pods()])
def test_pods_have_minimal_privileges(name: str, pod: Doc) -> None:
    """The `restricted` standard, a root that cannot be written, no token of the cluster's, bounded memory."""
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(pod):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys() and "memory" in container["resources"][
            "limits"
        ]
    for container in spec["containers"]:
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()


@pytest.mark.parametrize(("name", "pod"), pods(), ids=[name for name, _ in pods()])
def test_everything_a_pod_references_exists(name: str, pod: Doc) -> None:
    """Volumes, claims, maps, secrets, ports of probes."""
    workload = next(workload for workload in WORKLOADS if workload["metadata"]["name"] == name)
    claims = {volume["metadata"]["name"] for volume in workload["spec"].get("volumeClaimTemplates", [])}
    volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])} | claims
    for container in containers(pod):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        ports = {port["name"] for port in container.get("ports", [])}
        probes = [container[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe") if kind in container]
        asked = [probe[how]["port"] for probe in probes for how in ("httpGet", "tcpSocket") if how in probe]
        assert set(asked) <= ports
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {}).get("configMapKeyRef")
            assert source is None or source == {"name": "edgesplit", "key": "host"}
    maps = {entry["name"] for entry in KUSTOMIZATION["configMapGenerator"]}
    secrets = {entry["name"] for entry in KUSTOMIZATION["secretGenerator"]}
    for volume in pod["spec"].get("volumes", []):
        if "persistentVolumeClaim" in volume:
            assert f"PersistentVolumeClaim {volume['persistentVolumeClaim']['claimName']}" in KINDS
        if "configMap" in volume:
            assert volume["configMap"]["name"] in maps
        if "secret" in volume:
            assert volume["secret"]["secretName"] in secrets


def selected(labels: Doc) -> list[Doc]:
    return [pod for _, pod in pods() if labels.items() <= pod["metadata"]["labels"].items()]


def test_services_budgets_and_policies_select_existing_pods() -> None:
    """By their labels; and the ports that services and policies name are ports of those pods."""
    for name, manifest in DOCUMENTS:
        if manifest["kind"] == "Service":
            (port,) = manifest["spec"]["ports"]
            found = selected(manifest["spec"]["selector"])
            assert found, name
            for pod in found:
                assert port["targetPort"] in {
                    open_port["name"] for open_port in pod["spec"]["containers"][0]["ports"]
                }, name
        elif manifest["kind"] == "PodDisruptionBudget":
            assert selected(manifest["spec"]["selector"]["matchLabels"]), name
        elif manifest["kind"] == "NetworkPolicy" and manifest["spec"]["podSelector"]:
            found = selected(manifest["spec"]["podSelector"]["matchLabels"])
            open_ports = {port["containerPort"] for pod in found for port in pod["spec"]["containers"][0]["ports"]}
            asked = {port["port"] for rule in manifest["spec"]["ingress"] for port in rule["ports"]}
            assert found and asked == open_ports, name
    assert KINDS["NetworkPolicy default-deny"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    guarded = {document["metadata"]["name"] for _, document in DOCUMENTS if document["kind"] == "NetworkPolicy"}
    assert {pod["metadata"]["labels"]["app.kubernetes.io/name"] for _, pod in pods()} <= guarded


def test_two_controllers_run_and_offload_servers_autoscale() -> None:
    """One first process and at least one further; by processor and by a metric that the server really has."""
    controllers = [workload for workload in WORKLOADS if workload["metadata"]["name"].startswith("controller")]
    assert sum(controller["spec"]["replicas"] for controller in controllers) >= 2
    assert KINDS["Deployment controller"]["spec"]["strategy"] == {"type": "Recreate"}
    scaler = KINDS["HorizontalPodAutoscaler offload"]["spec"]
    assert scaler["minReplicas"] >= 2 and "replicas" not in KINDS["Deployment offload"]["spec"]
    (metric,) = [metric_["pods"]["metric"]["name"] for metric_ in scaler["metrics"] if metric_["type"] == "Pods"]
    assert f"| `{metric}` | gauge |" in METRICS


def test_offload_servers_mount_only_their_own_keys() -> None:
    """Neither in the cluster nor in compose is the controller's folder given to them."""
    (claim,) = [
        volume["persistentVolumeClaim"]
        for volume in KINDS["Deployment offload"]["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert claim == {"claimName": "offload", "readOnly": True}
    for name in ("offload-1", "offload-2"):
        assert SERVICES[name]["volumes"] == ["offload:/offload:ro", "tls:/tls:ro"]


# ---- compose --------------------------------------------------------------------------------------------------------


def test_the_compose_file_matches_its_schema() -> None:
    """By the schema of the Compose Specification, as check-jsonschema carries it."""
    schema = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    validator = jsonschema.validators.validator_for(json.loads(schema.read_text()))
    validator(json.loads(schema.read_text())).validate(COMPOSE)


@pytest.mark.parametrize("name", SERVICES)
def test_everything_a_compose_service_references_exists(name: str) -> None:
    """Services, volumes, networks, secrets, files."""
    one = SERVICES[name]
    assert set(one.get("depends_on", ())) <= set(SERVICES)
    assert set(one.get("networks", ())) <= set(COMPOSE["networks"])
    assert set(one.get("secrets", ())) <= set(COMPOSE["secrets"])
    for mount in one.get("volumes", ()):
        source = mount.partition(":")[0]
        assert (DEPLOY / "compose" / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
    if "build" in one:
        context = DEPLOY / "compose" / one["build"]["context"]
        assert (context / one["build"]["dockerfile"]).is_file()
    else:
        variable, image, tag = re.fullmatch(r"\$\{(\w+):-([^:@]+):([^:@]+)\}", one["image"]).groups()  # type: ignore[union-attr]
        assert variable.startswith("EDGESPLIT_") and variable.endswith("_IMAGE") and tag != "latest", image
    assert "no-new-privileges:true" in one.get("security_opt", []) or one.get("network_mode") == "none"


def test_ports_are_the_same_everywhere() -> None:
    """In images, compose, Kubernetes, the addresses advertised to devices, and Prometheus."""
    exposed = {path.name.partition(".")[0]: set(map(int, expose(path))) for path in IMAGES}
    ports = {
        name: {port["containerPort"] for container in pod["spec"]["containers"] for port in container["ports"]}
        for name, pod in pods()
    }
    assert ports["controller"] == ports["controller-further"] <= exposed["controller"]
    assert ports["offload"] == exposed["offload"]
    assert SERVICES["controller"]["ports"] == ["8443:8443"] and SERVICES["offload"]["ports"] == ["8500:8500"]
    assert {8443, 9100} == ports["controller"] and {8500, 9101} == ports["offload"] and ports["broker"] == {8883}
    haproxy = (DEPLOY / "compose" / "haproxy.cfg").read_text()
    assert set(re.findall(r"server (\S+) \1:8500", haproxy)) == {"offload-1", "offload-2"} and "bind :8500" in haproxy
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in scraped for config in job["static_configs"] for target in config["targets"]}
    assert targets == {"controller:9100", "offload-1:9101", "offload-2:9101"} and "controller" in SERVICES
    for name, pod in pods():
        port = pod["metadata"].get("annotations", {}).get("prometheus.io/port")
        assert port is None or int(port) in ports[name]


def expose(path: Path) -> list[str]:
    return next(rest for word, rest in dockerfile(path) if word == "EXPOSE").split()


# ---- images ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", IMAGES, ids=[image.name for image in IMAGES])
def test_images_build_from_existing_sources_and_run_unprivileged(path: Path) -> None:
    """Sources are there and let in, the base has a version, the last stage is not root's, and it says how it is."""
    lines = dockerfile(path)
    let_in = {
        pattern.removeprefix("!") for pattern in (REPOSITORY / ".dockerignore").read_text().split() if pattern[0] == "!"
    }
    for word, rest in lines:
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (REPOSITORY / source).exists() and {source, source.partition("/")[0]} & let_in, source
        if word == "ARG":
            name, _, version = rest.partition("=")
            assert name in ("PYTHON", "NODE") and ":" in version and not version.endswith("latest")
        if word == "FROM":
            assert rest.startswith(("${PYTHON}", "${NODE} AS"))
    last = [word for word, _ in lines][len(lines) - [word for word, _ in reversed(lines)].index("FROM") :]
    assert {"USER", "HEALTHCHECK", "ENTRYPOINT", "CMD"} <= set(last) and dict(lines)["USER"] == "10001:10001"


def test_hadolint_accepts_every_dockerfile() -> None:
    """hadolint, on every Dockerfile."""
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("no hadolint here: its wheel is for x86-64 Linux")
    done = subprocess.run([linter, *map(str, IMAGES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


# ---- Prometheus -----------------------------------------------------------------------------------------------------


def known_metrics() -> dict[str, set[str]]:
    """By name, its labels; each sample of an emulated agent has one more."""
    rows = re.findall(r"^\| `(edgesplit_\w+)` \| \w+ \| ([^|]*) \|", METRICS, flags=re.MULTILINE)
    return {name: {*re.findall(r"`(\w+)`", labels), "emulated"} for name, labels in rows}


def test_alerts_use_existing_metrics() -> None:
    """Names and labels of docs/metrics.md; each rule says how bad it is and what it means."""
    known = known_metrics()
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        used = re.findall(r"(edgesplit_\w+)(?:\{([^}]*)\})?", rule["expr"])
        assert used, rule["alert"]
        for name, chosen in used:
            assert name in known, name
            assert set(re.findall(r"(\w+)\s*(?:=~|!=|=)", chosen)) <= known[name], rule["alert"]
        for labels in re.findall(r"by \(([^)]*)\)", rule["expr"]):
            assert all(set(re.split(r",\s*", labels)) <= known[name] | {"device", "instance"} for name, _ in used)
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
