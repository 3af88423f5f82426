"""What operators and their tools ask besides inference, in the words of Triton's extensions: which models are here,
load and unload, statistics, log and trace settings, shared memory.

Changing something is for operators: a client whose certificate says so, or anybody where there are no certificates,
which is on loopback only. Of several serving processes each gets the same, and what is told is the sum.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from edgesplit.errors import MalformedMessage, NotFound, UsageError
from edgesplit.http1.server import Request, Response, error_response, json_response
from edgesplit.oip_server.triton_extensions import TRACE_SETTINGS, log_settings
from edgesplit_offload.models.repository import VERSION, Shelf
from edgesplit_offload.observability.statistics import Counts, Told, of_models, summed
from edgesplit_offload.processes.peers import Siblings

log = logging.getLogger(__name__)

OPERATOR = "operator"
"""The name in the certificate of who may change something: the controller issues it, and no device can have it."""
INDEX, LOAD, UNLOAD, STATISTICS, LOGGING = "index", "load", "unload", "statistics", "logging"
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
    ("GET", r"/v2/logging", "logging"),
    ("POST", r"/v2/logging", "set_logging"),
    ("GET", r"/v2/(?P<kind>system|cuda)sharedmemory(?:/region/(?P<region>[^/]+))?/status", "regions"),
    ("POST", r"/v2/(?P<kind>system|cuda)sharedmemory/region/(?P<region>[^/]+)/register", "register"),
    ("POST", r"/v2/(?P<kind>system|cuda)sharedmemory(?:/region/(?P<region>[^/]+))?/unregister", "unregister"),
)
Handler = Callable[[Request, Mapping[str, str]], Response]


class Management:
    """Answers these questions for a shelf of models."""

    def __init__(self, shelf: Shelf, counts: Counts, siblings: Siblings, *, mutual: bool) -> None:
        self._shelf = shelf
        self._counts = counts
        self._siblings = siblings
        self._mutual = mutual
        self._routes: list[tuple[str, re.Pattern[str], Handler]] = [
            (method, re.compile(path), getattr(self, f"_{name}")) for method, path, name in _ROUTES
        ]
        self.answerers: Mapping[str, Callable[[Any], Any]] = {
            INDEX: lambda _: shelf.models(),
            LOAD: lambda model: shelf.model(model).half.load(),
            UNLOAD: lambda model: shelf.model(model).half.unload(),
            STATISTICS: lambda _: counts.told(),
            LOGGING: _set_levels,
        }

    def answer(self, request: Request, path: str) -> Response | None:
        """The response; None where nothing of this is at that path."""
        methods = []
        for method, pattern, handle in self._routes:
            found = pattern.fullmatch(path)
            if found is None:
                continue
            if request.method == method:
                return handle(request, {key: text for key, text in found.groupdict().items() if text is not None})
            methods.append(method)
        return (
            error_response(405, f"use {' or '.join(methods)} here", {"allow": ", ".join(methods)}) if methods else None
        )

    # Models

    def _index(self, request: Request, _: Mapping[str, str]) -> Response:
        """READY: it runs, or is loaded when somebody asks; those that are not loaded have that as their reason."""
        only_ready = _asked(request).get("ready") is True
        models: dict[str, bool] = {}
        for told in self._siblings.ask(INDEX):
            for name, loaded in told.items():
                models[name] = models.get(name, False) or loaded
        entries = [
            {"name": name, "version": VERSION, "state": "READY", **({} if loaded else {"reason": "loaded on demand"})}
            for name, loaded in sorted(models.items())
            if loaded or not only_ready
        ]
        return json_response(200, entries)

    def _load(self, request: Request, found: Mapping[str, str]) -> Response:
        parameters = _asked(request).get("parameters") or {}
        if not isinstance(parameters, dict) or parameters.keys() - {"unload_dependents"}:
            raise UsageError("a model is a release's, as it was signed: no configuration or files can be given to it")
        return self._told_all(request, LOAD, found["model"])

    def _unload(self, request: Request, found: Mapping[str, str]) -> Response:
        """Lets go of its memory; the next request for it loads it again."""
        return self._told_all(request, UNLOAD, found["model"])

    def _told_all(self, request: Request, question: str, model: str) -> Response:
        if refusal := self._refusal(request):
            return refusal
        self._shelf.model(model)  # NotFound, before anybody else is asked
        self._siblings.ask(question, model)
        if question == LOAD:
            self._shelf.model(model).half.load()  # the others' errors are theirs, and in their logs; ours are told
        return Response()

    def _statistics(self, _: Request, found: Mapping[str, str]) -> Response:
        if found.get("version", VERSION) != VERSION:
            raise NotFound(f"model {found['model'][:200]!r} has no version {found['version'][:80]!r}")
        counted: list[Told] = summed(self._siblings.ask(STATISTICS))
        models = [self._shelf.model(found["model"]).name] if "model" in found else [one["name"] for one in counted]
        return json_response(200, of_models(models, counted))

    # Settings

    def _trace(self, _: Request, found: Mapping[str, str]) -> Response:
        if "model" in found:
            self._shelf.model(found["model"])
        return json_response(200, TRACE_SETTINGS)

    def _set_trace(self, request: Request, found: Mapping[str, str]) -> Response:
        """What is asked for is as it is already, or it is an error: nothing of it can be set while a server runs."""
        if refusal := self._refusal(request):
            return refusal
        for name, value in _asked(request).items():
            if name not in TRACE_SETTINGS:
                raise UsageError(f"unknown trace setting {name[:80]!r}; these are: {', '.join(TRACE_SETTINGS)}")
            if value is not None and value != TRACE_SETTINGS[name]:
                raise UsageError(f"{name} cannot be set while the server runs: traces are set up when it starts")
        return self._trace(request, found)

    def _logging(self, _: Request, __: Mapping[str, str]) -> Response:
        return json_response(200, log_settings())

    def _set_logging(self, request: Request, _: Mapping[str, str]) -> Response:
        if refusal := self._refusal(request):
            return refusal
        wanted = _checked_log_settings(_asked(request))
        self._siblings.ask(LOGGING, wanted)
        return json_response(200, log_settings())

    # Shared memory: a client on another machine has none with us

    def _regions(self, _: Request, found: Mapping[str, str]) -> Response:
        if "region" in found:
            raise NotFound(f"no shared memory region {found['region'][:80]!r} is registered: there is none here")
        return json_response(200, [])

    def _register(self, _: Request, found: Mapping[str, str]) -> Response:
        raise UsageError(
            f"{found['kind']} shared memory is not taken: clients of this server are on other machines. Send tensors as"
            " binary data; the agent on a device takes shared memory"
        )

    def _unregister(self, _: Request, __: Mapping[str, str]) -> Response:
        """As Triton: what is not registered is unregistered already."""
        return Response()

    def _refusal(self, request: Request) -> Response | None:
        if self._mutual and request.peer != OPERATOR:
            return error_response(403, f"only a client with the certificate of {OPERATOR!r} may change something here")
        return None


def _asked(request: Request) -> dict[str, Any]:
    """The request's JSON object; an empty body is an empty one."""
    try:
        value = msgspec.json.decode(request.body) if len(request.body) else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise MalformedMessage(f"body: {error}") from error
    if not isinstance(value, dict):
        raise MalformedMessage("body: not a JSON object")
    return value


def _checked_log_settings(wanted: Mapping[str, Any]) -> dict[str, Any]:
    kinds: dict[str, type] = {**dict.fromkeys([name for name, _ in _LEVELS], bool), "log_verbose_level": int}
    for name, value in wanted.items():
        if name not in kinds:
            raise UsageError(f"log setting {name[:80]!r} cannot be changed here; these can: {', '.join(kinds)}")
        if type(value) is not kinds[name]:
            raise UsageError(f"{name} must be of type {kinds[name].__name__}")
    return dict(wanted)


def _set_levels(wanted: Mapping[str, Any]) -> None:
    """The least that is asked for is logged, and all that is graver."""
    now = {**log_settings(), **wanted}
    least = next((needed for name, needed in _LEVELS if now[name]), logging.CRITICAL)
    logging.getLogger().setLevel(logging.DEBUG if now["log_verbose_level"] > 0 else least)
