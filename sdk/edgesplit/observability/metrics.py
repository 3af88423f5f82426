"""Definitions of all Prometheus metrics: name, help text and labels. docs/metrics.md is generated from them.

Units are seconds and bytes. Label values come from what an operator deployed or from the fixed sets below, never from a
request: no id, no address, no path. `model` is `name@version`; `row` is a row of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgesplit.observability.histogram import BATCH_SIZE_BOUNDS, SECONDS_BOUNDS

MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric family: a number, or a histogram, for each combination of its labels."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = SECONDS_BOUNDS
    """Bucket bounds of a histogram."""
    aggregation: Literal["sum", "max"] = "sum"
    """How the gauges of several processes are combined; counters and histograms are always summed."""


def _counter(name: str, *labels: str, help: str) -> MetricFamily:
    return MetricFamily(name, "counter", help, labels)


def _gauge(name: str, *labels: str, help: str, aggregation: Literal["sum", "max"] = "sum") -> MetricFamily:
    return MetricFamily(name, "gauge", help, labels, aggregation=aggregation)


def _histogram(name: str, *labels: str, help: str, bounds: tuple[float, ...] = SECONDS_BOUNDS) -> MetricFamily:
    return MetricFamily(name, "histogram", help, labels, bounds)


# fmt: off
# The agent

AGENT_INFO = _gauge("edgesplit_agent_info", "device", "device_class", "version", help=
    "Always 1; says which agent this is.")
AGENT_REQUESTS = _counter("edgesplit_agent_requests_total", "model", "row", "outcome", help=
    "Requests that came to an end. outcome: answered, fallback (answered alone: the cloud did not help), busy, "
    "dropped, deadline, link, rejected (the application's fault), failed. One that was then given a stale answer "
    "counts as what it would have been without.")
AGENT_REQUEST_S = _histogram("edgesplit_agent_request_seconds", "model", "row", help=
    "From a request's arrival in the agent to its answer; answered requests only.")
AGENT_PHASE_S = _histogram("edgesplit_agent_phase_seconds", "model", "phase", help=
    "Where that time went, for each phase that an answered request had. phase: queue (waiting for the device's "
    "processor), decode (the input), device (its slices), encode (the boundary), link (both ways, not separable), "
    "remote_queue, remote_decode, remote_load, remote (its slices), hop_link and hop (link to and seconds in the tier"
    " beyond a gateway), remote_encode, answer_decode, waited (for a cloud that did not help), tail (finishing "
    "alone), other (what no phase explains).")
AGENT_FALLBACKS = _counter("edgesplit_agent_fallbacks_total", "model", "cause", help=
    "Requests that the device finished alone, by what the cloud did: timeout, refused, link, server.")
AGENT_SWITCHES = _counter("edgesplit_agent_switches_total", "model", help=
    "Times that another row of the plan was used than before.")
AGENT_EMULATION_OVERRUNS = _counter("edgesplit_agent_emulation_overruns_total", "model", help=
    "Answers of an emulated device for which this host was slower than the device profile.")
AGENT_UP_BYTES = _counter("edgesplit_agent_up_bytes_total", "model", help=
    "Bytes of boundary tensors sent, as they travelled.")
AGENT_DOWN_BYTES = _counter("edgesplit_agent_down_bytes_total", "model", help=
    "Bytes of answers received from the cloud.")
AGENT_HEDGES = _counter("edgesplit_agent_hedges_total", "what", help=
    "What became of hedges: hedges (begun), by_choice (of those: before the deadline forced it), held_back (by the "
    "budget), device_won, cloud_won, cancelled.")
AGENT_WASTED_S = _counter("edgesplit_agent_hedges_wasted_seconds_total", help=
    "The processor's seconds in hedges that lost.")
AGENT_WASTED_J = _counter("edgesplit_agent_hedges_wasted_joules_total", help=
    "Energy in what lost a race, estimated by the plan.")
AGENT_STALE = _counter("edgesplit_agent_stale_total", help=
    "Requests that were given the last good answer, marked stale.")
AGENT_DROPPED_FRAMES = _counter("edgesplit_agent_dropped_total", help=
    "Frames that gave way to others, as their application asked.")
AGENT_DEDUPLICATED = _counter("edgesplit_agent_deduplicated_total", help=
    "Requests sent again under their id that were given the first one's answer; they count nowhere else.")
AGENT_WORKERS_LOST = _counter("edgesplit_agent_workers_lost_total", "model", help=
    "Processes that ran a model and ended, or were ended, before their time; since its release was loaded.")
AGENT_SERVING = _gauge("edgesplit_agent_serving", "model", "row", help=
    "1 for each model that this device answers, with the row in use (empty before the first request).")
AGENT_LINK_UP = _gauge("edgesplit_agent_link_up_bytes_per_second", help=
    "Estimated rate of the link to the offload server.")
AGENT_LINK_DOWN = _gauge("edgesplit_agent_link_down_bytes_per_second", help=
    "Estimated rate of the link from the offload server.")
AGENT_LINK_RTT = _gauge("edgesplit_agent_link_round_trip_seconds", help="Estimated round trip of that link.")
AGENT_REMOTE_OK = _gauge("edgesplit_agent_remote_usable", help=
    "1 where requests may go to the offload server, 0 where they may not.")
AGENT_SERVER_LOAD = _gauge("edgesplit_agent_server_load_factor", help=
    "What waiting in the offload server makes of its seconds, from 1.")
AGENT_SLOWDOWN = _gauge("edgesplit_agent_slowdown_factor", help=
    "This device's seconds beside those that the plan was made with.")
AGENT_POWER_MODE = _gauge("edgesplit_agent_power_mode", "mode", help=
    "1 for the mode in use: performance, balanced, saver.")
AGENT_BATTERY = _gauge("edgesplit_agent_battery_ratio", help="Charge of the batteries, where there are any.")
AGENT_WATTS = _gauge("edgesplit_agent_power_watts", help="What the whole device draws, where a sensor tells.")
AGENT_CELSIUS = _gauge("edgesplit_agent_temperature_celsius", help="Of the hottest zone, where a sensor tells.")
AGENT_CLOCK = _gauge("edgesplit_agent_clock_ratio", help=
    "What the processor's clock may reach now, as a part of what it could.")
AGENT_UNDER_VOLTAGE = _gauge("edgesplit_agent_under_voltage", help=
    "1 while the supply is too weak, where the firmware tells.")
AGENT_CONNECTED = _gauge("edgesplit_agent_broker_connected", help="1 while the agent has its broker session.")

# The offload server

OFFLOAD_INFO = _gauge("edgesplit_offload_info", "version", aggregation="max", help=
    "Always 1; says which offload server this is.")
OFFLOAD_REQUESTS = _counter("edgesplit_offload_requests_total", "model", "row", "outcome", help=
    "Inference requests that came to an end. outcome: answered, busy, deadline, gone (nobody waited any more), "
    "rejected (the client's fault), refused (it may not ask), failed; model and row are empty where a request named "
    "none that is here; a gateway counts what it hands on whole as (relayed).")
OFFLOAD_REQUEST_S = _histogram("edgesplit_offload_request_seconds", "model", "row", help=
    "From an inference request's last byte received to its answer's first byte; answered requests only.")
OFFLOAD_PHASE_S = _histogram("edgesplit_offload_phase_seconds", "model", "phase", help=
    "Where that time went. phase: decode (body and boundary codecs), load (a model that was not), queue, run, hop (a "
    "gateway's wait for the next tier), encode.")
OFFLOAD_BATCH = _histogram("edgesplit_offload_batch_size", "model", bounds=BATCH_SIZE_BOUNDS, help=
    "How many requests ran together, seen from each answered one.")
OFFLOAD_RECEIVED = _counter("edgesplit_offload_received_bytes_total", "model", help=
    "Bytes of requests' bodies, as they came.")
OFFLOAD_SENT = _counter("edgesplit_offload_sent_bytes_total", "model", help="Bytes of the answers' bodies.")
OFFLOAD_RUNNING = _gauge("edgesplit_offload_running", help="Requests that run now.")
OFFLOAD_WAITING = _gauge("edgesplit_offload_waiting", help="Requests that wait for their turn now.")
OFFLOAD_LOAD = _gauge("edgesplit_offload_load_factor", aggregation="max", help=
    "What waiting makes of a run's seconds, smoothed, from 1; of several processes the highest.")
OFFLOAD_LOADED_BYTES = _gauge("edgesplit_offload_loaded_bytes", help="Estimated memory of the slices that are loaded.")
OFFLOAD_LOADED_MODELS = _gauge("edgesplit_offload_loaded_models", help="Models that can be run without loading.")
OFFLOAD_PROCESSES = _gauge("edgesplit_offload_processes", help="Serving processes of this server.")

# The controller

CONTROLLER_INFO = _gauge("edgesplit_controller_info", "version", help="Always 1; says which controller this is.")
CONTROLLER_REQUESTS = _counter("edgesplit_controller_requests_total", "method", "route", "status", help=
    "Requests to the API, by the route's template (empty: no such route) and the class of the answer (2xx to 5xx).")
CONTROLLER_REQUEST_S = _histogram("edgesplit_controller_request_seconds", "method", "route", help=
    "Time to answer a request to the API.")
CONTROLLER_DEVICES = _gauge("edgesplit_controller_devices", "state", help=
    "Devices by state: online, stale, offline, claimed, revoked.")

CONTROLLER_CONDITIONS = _gauge("edgesplit_controller_conditions", "kind", help=
    "Devices with this wrong: under-voltage, throttled, low disk, clock wrong, failing release, copied, flooding, …")
CONTROLLER_RUNNING = _gauge("edgesplit_controller_running", "model", "state", help=
    "Devices that are online, by model and by what their release is in: running, trial, fetching, failed, …")
CONTROLLER_ROLLOUTS = _gauge("edgesplit_controller_rollouts", "state", help=
    "Rollouts by state: scheduled, waiting, running, paused, … and those that have ended.")
CONTROLLER_ROLLOUT_DEVICES = _gauge("edgesplit_controller_rollout_devices", "state", help=
    "Devices of rollouts that have not ended, by where they stand: queued, told, fetching, trial, succeeded, failed, "
    "…")
CONTROLLER_MESSAGES = _counter("edgesplit_controller_messages_total", "kind", "outcome", help=
    "What devices said. outcome: new, again (it came twice), earlier (out of order), older session, revoked, unknown,"
    " dropped (malformed, or more than a device may).")
CONTROLLER_BACKLOG_AGE_S = _histogram("edgesplit_controller_late_telemetry_seconds", help=
    "How long ago telemetry was measured that came late, because the device's link was gone.",
    bounds=(1.0, 10.0, 60.0, 600.0, 3_600.0, 21_600.0, 86_400.0, 604_800.0))
CONTROLLER_INGEST_S = _histogram("edgesplit_controller_ingest_seconds", help=
    "Time to take in a batch of what devices said.")
CONTROLLER_WAITING = _gauge("edgesplit_controller_waiting", "queue", help=
    "What waits for its turn now. queue: said (messages), asked (fetches), chunks, heavy (plans and deployments).")
CONTROLLER_STATEMENT_S = _histogram("edgesplit_controller_database_statement_seconds", "kind", help=
    "Time of the database's statements. kind: select, insert, update, delete, other.")
CONTROLLER_ROLLUP_BACKLOG = _gauge("edgesplit_controller_rollup_backlog", help=
    "Telemetry messages that minutes and hours lack still.")
CONTROLLER_BROKER = _gauge("edgesplit_controller_broker_connected", help="1 while our broker session is there.")

# fmt: on

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, MetricFamily))
"""All metric families in the order above."""
FAMILY_BY_NAME = {family.name: family for family in FAMILIES}
"""All metric families by name."""
