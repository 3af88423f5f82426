"""Operators' API beside inference, in the format of Triton's extensions: model index, load and unload, statistics, log
and trace settings, shared memory; and the server's status, for the controller.

Changes are for operators: clients with the operator certificate, or every client on a server without certificates,
which listens on loopback only. Devices see the models that they may use. With several serving processes every one of
them gets the change, and figures are summed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from edgesplit.decoding import decode_json
from edgesplit.errors import NotFound, UsageError
from edgesplit.http1.admission import CERTIFICATE, Refusals, flooding_clients, sum_refusals
from edgesplit.http1.head import Refused
from edgesplit.http1.server import Request, Response, error_response, json_response
from edgesplit.oip_server.statistics import StatisticsEntry
from edgesplit.oip_server.triton_extensions import TRACE_SETTINGS, log_settings
from edgesplit_offload.models.permissions import OPERATOR, ReleasePermissions
from edgesplit_offload.models.repository import VERSION, ModelRepository
from edgesplit_offload.observability.statistics import StatisticsRecorder, of_models, sum_processes
from edgesplit_offload.processes.peers import PeerProcesses

log = logging.getLogger(__name__)

INDEX, LOAD, UNLOAD, STATISTICS, LOGGING, REFUSALS = "index", "load", "unload", "statistics", "logging", "refusals"
STATUS_PATH = "/v2/edgesplit/status"
_LEVELS: tuple[tuple[str, int], ...] = (
    ("log_info", logging.INFO),
    ("log_warning", logging.WARNING),
    ("log_error", logging.ERROR),
)
_ROUTES: tuple[tuple[str, str, str], ...] = (
    ("POST", r"/v2/repository/index", "index"),
    ("POST", r"/v2/repository/models/(?P<model>[^/]+)/load", "load"),
    ("POST", r"/v2/repository/models/(?P<model>[^/]+)/unload", "unload"),
    ("GET", r"/v2/models/stats", "statistics"),
    ("GET", r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/stats", "statistics"),
    ("GET", r"/v2(?:/models/(?P<model>[^/]+))?/trace/setting", "trace"),
    ("POST", r"/v2(?:/models/(?P<model>[^/]+))?/trace/setting", "set_trace"),
    ("GET", STATUS_PATH, "status"),
    ("GET", r"/v2/logging", "logging"),
    ("POST", r"/v2/logging", "set_logging"),
    ("GET", r"/v2/(?P<kind>system|cuda)sharedmemory(?:/region/(?P<region>[^/]+))?/status", "regions"),
    ("POST", r"/v2/(?P<kind>system|cuda)sharedmemory/region/(?P<region>[^/]+)/register", "register"),
    ("POST", r"/v2/(?P<kind>system|cuda)sharedmemory(?:/region/(?P<region>[^/]+))?/unregister", "unregister"),
)
_PATTERNS = tuple((method, re.compile(path), name) for method, path, name in _ROUTES)
_CHANGES = ("load", "unload", "set_trace", "set_logging")
_ONLY_OPERATORS = f"only a client with the certificate of {OPERATOR!r} may make changes here"
Handler = Callable[[Request, Mapping[str, str]], Response]


class Management:
    """Answers the management requests for a repository of models."""

    def __init__(
        self, models: ModelRepository, statistics: StatisticsRecorder, peers: PeerProcesses, *, mutual: bool,
        permissions: ReleasePermissions, refusals: Callable[[], Refusals], list_expires: Callable[[], float | None],
        keeps_network: Callable[[], str], own_client: str = "",
    ) -> None:  # fmt: skip
        """`refusals` returns the recent refusals of this process, `list_expires` the Unix time at which the revocation
        list expires (None: there is none), `keeps_network` why this process can open connections. `own_client`: the
        name in the certificate by which a gateway's agent asks."""
        self._models = models
        self._model_statistics = statistics
        self._peers = peers
        self._mutual = mutual
        self._permissions = permissions
        self._keeps_network = keeps_network
        self._status_readers = {OPERATOR, own_client} - {""}
        self._list_expires = list_expires
        self._routes: list[tuple[str, re.Pattern[str], Handler]] = [
            (method, pattern, getattr(self, f"_{name}")) for method, pattern, name in _PATTERNS
        ]
        self.answerers: Mapping[str, Callable[[Any], Any]] = {
            INDEX: lambda _: models.models(), LOAD: lambda model: models.model(model).half.load(),
            UNLOAD: lambda model: models.model(model).half.unload(), STATISTICS: lambda _: statistics.snapshot(),
            LOGGING: _set_levels, REFUSALS: lambda _: {client: dict(reasons) for client, reasons in refusals().items()},
        }  # fmt: skip

    def answer(self, request: Request, path: str) -> Response | None:
        """The response; None if the path is not one of these."""
        methods = []
        for method, pattern, handle in self._routes:
            match = pattern.fullmatch(path)
            if match is None:
                continue
            if request.method == method:
                return handle(request, {key: text for key, text in match.groupdict().items() if text is not None})
            methods.append(method)
        allowed = {"allow": ", ".join(methods)}
        return error_response(405, f"use {' or '.join(methods)} here", allowed) if methods else None

    def check_head(self, method: str, path: str, peer: str | None) -> bool:
        """Whether the path is one of these. Raises Refused for a method that it does not have (405), and for a change
        by a client that is no operator (403)."""
        matching = {route_method: name for route_method, pattern, name in _PATTERNS if pattern.fullmatch(path)}
        if matching and method not in matching:
            raise Refused(405, f"use {' or '.join(matching)} here")
        if matching.get(method) in _CHANGES and self._mutual and peer != OPERATOR:
            raise Refused(403, _ONLY_OPERATORS)
        return bool(matching)

    # Models

    def _index(self, request: Request, _: Mapping[str, str]) -> Response:
        """Every model is READY: loaded, or loaded on demand, which is then its `reason`."""
        only_ready = _parse_object(request).get("ready") is True
        models: dict[str, bool] = {}
        for states in self._peers.ask(INDEX):
            for name, loaded in states.items():
                models[name] = models.get(name, False) or loaded
        entries = [
            {"name": name, "version": VERSION, "state": "READY", **({} if loaded else {"reason": "loaded on demand"})}
            for name, loaded in sorted(models.items())
            if (loaded or not only_ready) and self._permissions.allows_model(name, request.peer)
        ]
        return json_response(200, entries)

    def _load(self, request: Request, groups: Mapping[str, str]) -> Response:
        parameters = _parse_object(request).get("parameters") or {}
        if not isinstance(parameters, dict) or parameters.keys() - {"unload_dependents"}:
            raise UsageError("a model is part of a signed release: its configuration and files cannot be replaced")
        return self._ask_all(request, LOAD, groups["model"])

    def _unload(self, request: Request, groups: Mapping[str, str]) -> Response:
        """Frees the model's memory; the next request for it loads it again."""
        return self._ask_all(request, UNLOAD, groups["model"])

    def _ask_all(self, request: Request, question: str, model: str) -> Response:
        """Have every serving process load or unload the model; answered when each has done it."""
        if refusal := self._refusal(request):
            return refusal
        self._models.model(model)  # raises NotFound before the other processes are asked
        self._peers.change(question, model)
        return Response()

    def _statistics(self, request: Request, groups: Mapping[str, str]) -> Response:
        if groups.get("version", VERSION) != VERSION:
            raise NotFound(f"model {groups['model'][:200]!r} has no version {groups['version'][:80]!r}")
        if "model" in groups:
            self._permissions.check_model(groups["model"], request.peer)
        counted: list[StatisticsEntry] = sum_processes(self._peers.ask(STATISTICS))
        models = (
            [self._models.model(groups["model"]).name]
            if "model" in groups
            else [entry["name"] for entry in counted if self._permissions.allows_model(entry["name"], request.peer)]
        )
        return json_response(200, of_models(models, counted))

    def _status(self, request: Request, _: Mapping[str, str]) -> Response:
        """What the controller shows of this server: `refused_clients` names the certificates that are refused again
        and again, `revocation_list_expires` is a Unix time or null, `keeps_network` says why it is not confined."""
        if self._mutual and request.peer not in self._status_readers:
            return error_response(403, "this is for the controller")
        floods = flooding_clients(sum_refusals(self._peers.ask(REFUSALS)))
        refused = [
            {"device": client.removeprefix(CERTIFICATE), "refused": count, "reasons": reasons}
            for client, (count, reasons) in sorted(floods.items())
            if client.startswith(CERTIFICATE)
        ]
        status = {
            "refused_clients": refused, "revocation_list_expires": self._list_expires(),
            "keeps_network": self._keeps_network(),
        }  # fmt: skip
        return json_response(200, status)

    # Settings

    def _trace(self, request: Request, groups: Mapping[str, str]) -> Response:
        if "model" in groups:
            self._permissions.check_model(groups["model"], request.peer)
            self._models.model(groups["model"])
        return json_response(200, TRACE_SETTINGS)

    def _set_trace(self, request: Request, groups: Mapping[str, str]) -> Response:
        """Accept settings that equal the current ones; UsageError for any change, because traces are configured at
        start."""
        if refusal := self._refusal(request):
            return refusal
        for name, value in _parse_object(request).items():
            if name not in TRACE_SETTINGS:
                raise UsageError(f"unknown trace setting {name[:80]!r}; these are: {', '.join(TRACE_SETTINGS)}")
            if value is not None and value != TRACE_SETTINGS[name]:
                raise UsageError(f"{name} cannot be set while the server runs: traces are set up when it starts")
        return self._trace(request, groups)

    def _logging(self, _: Request, __: Mapping[str, str]) -> Response:
        return json_response(200, log_settings())

    def _set_logging(self, request: Request, _: Mapping[str, str]) -> Response:
        if refusal := self._refusal(request):
            return refusal
        wanted = _checked_log_settings(_parse_object(request))
        self._peers.ask(LOGGING, wanted)
        return json_response(200, log_settings())

    # Shared memory: a client on another machine has none with us

    def _regions(self, _: Request, groups: Mapping[str, str]) -> Response:
        if "region" in groups:
            raise NotFound(f"no shared memory region {groups['region'][:80]!r} is registered: this server has none")
        return json_response(200, [])

    def _register(self, _: Request, groups: Mapping[str, str]) -> Response:
        raise UsageError(
            f"{groups['kind']} shared memory is not supported: clients of this server are on other machines. Send"
            " tensors as"
            " binary data; the agent on a device supports shared memory"
        )

    def _unregister(self, _: Request, __: Mapping[str, str]) -> Response:
        """As in Triton, unregistering what is not registered succeeds."""
        return Response()

    def _refusal(self, request: Request) -> Response | None:
        if self._mutual and request.peer != OPERATOR:
            return error_response(403, _ONLY_OPERATORS)
        return None


def _parse_object(request: Request) -> dict[str, Any]:
    """The request's JSON object; empty for an empty body."""
    return decode_json(request.body, dict[str, Any], "body") if len(request.body) else {}


def _checked_log_settings(wanted: Mapping[str, Any]) -> dict[str, Any]:
    kinds: dict[str, type] = {**dict.fromkeys([name for name, _ in _LEVELS], bool), "log_verbose_level": int}
    for name, value in wanted.items():
        if name not in kinds:
            raise UsageError(f"log setting {name[:80]!r} cannot be changed here; these can: {', '.join(kinds)}")
        if type(value) is not kinds[name]:
            raise UsageError(f"{name} must be of type {kinds[name].__name__}")
    return dict(wanted)


def _set_levels(wanted: Mapping[str, Any]) -> None:
    """Set the log level to the least severe one that is enabled."""
    now = {**log_settings(), **wanted}
    least = next((needed for name, needed in _LEVELS if now[name]), logging.CRITICAL)
    logging.getLogger().setLevel(logging.DEBUG if now["log_verbose_level"] > 0 else least)
