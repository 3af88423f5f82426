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


# The agent

AGENT_INFO = MetricFamily(
    "edgesplit_agent_info", "gauge", "Always 1; says which agent this is.", ("device", "device_class", "version")
)
AGENT_REQUESTS = MetricFamily(
    "edgesplit_agent_requests_total",
    "counter",
    "Requests that came to an end. outcome: answered, fallback (answered alone: the cloud did not help), busy, "
    "dropped, deadline, link, rejected (the application's fault), failed. One that was then given a stale answer "
    "counts as what it would have been without.",
    ("model", "row", "outcome"),
)
AGENT_REQUEST_S = MetricFamily(
    "edgesplit_agent_request_seconds",
    "histogram",
    "From a request's arrival in the agent to its answer; answered requests only.",
    ("model", "row"),
)
AGENT_PHASE_S = MetricFamily(
    "edgesplit_agent_phase_seconds",
    "histogram",
    "Where that time went, for each phase that an answered request had. phase: queue (waiting for the device's "
    "processor), decode (the input), device (its slices), encode (the boundary), link (both ways, not separable), "
    "remote_queue, remote_decode, remote_load, remote (its slices), hop_link and hop (link to and seconds in the tier "
    "beyond a gateway), remote_encode, answer_decode, waited (for a cloud that did not help), tail (finishing alone), "
    "other (what no phase explains).",
    ("model", "phase"),
)
AGENT_FALLBACKS = MetricFamily(
    "edgesplit_agent_fallbacks_total",
    "counter",
    "Requests that the device finished alone, by what the cloud did: timeout, refused, link, server.",
    ("model", "cause"),
)
AGENT_SWITCHES = MetricFamily(
    "edgesplit_agent_switches_total", "counter", "Times that another row of the plan was used than before.", ("model",)
)
AGENT_EMULATION_OVERRUNS = MetricFamily(
    "edgesplit_agent_emulation_overruns_total",
    "counter",
    "Answers of an emulated device for which this host was slower than the device profile.",
    ("model",),
)
AGENT_UP_BYTES = MetricFamily(
    "edgesplit_agent_up_bytes_total", "counter", "Bytes of boundary tensors sent, as they travelled.", ("model",)
)
AGENT_DOWN_BYTES = MetricFamily(
    "edgesplit_agent_down_bytes_total", "counter", "Bytes of answers received from the cloud.", ("model",)
)
AGENT_HEDGES = MetricFamily(
    "edgesplit_agent_hedges_total",
    "counter",
    "What became of hedges: hedges (begun), by_choice (of those: before the deadline forced it), held_back (by the "
    "budget), device_won, cloud_won, cancelled.",
    ("what",),
)
AGENT_WASTED_S = MetricFamily(
    "edgesplit_agent_hedges_wasted_seconds_total", "counter", "The processor's seconds in hedges that lost."
)
AGENT_WASTED_J = MetricFamily(
    "edgesplit_agent_hedges_wasted_joules_total", "counter", "Energy in what lost a race, estimated by the plan."
)
AGENT_STALE = MetricFamily(
    "edgesplit_agent_stale_total", "counter", "Requests that were given the last good answer, marked stale."
)
AGENT_DROPPED_FRAMES = MetricFamily(
    "edgesplit_agent_dropped_total", "counter", "Frames that gave way to others, as their application asked."
)
AGENT_DEDUPLICATED = MetricFamily(
    "edgesplit_agent_deduplicated_total",
    "counter",
    "Requests sent again under their id that were given the first one's answer; they count nowhere else.",
)
AGENT_WORKERS_LOST = MetricFamily(
    "edgesplit_agent_workers_lost_total",
    "counter",
    "Processes that ran a model and ended, or were ended, before their time; since its release was loaded.",
    ("model",),
)
AGENT_SERVING = MetricFamily(
    "edgesplit_agent_serving",
    "gauge",
    "1 for each model that this device answers, with the row in use (empty before the first request).",
    ("model", "row"),
)
AGENT_LINK_UP = MetricFamily(
    "edgesplit_agent_link_up_bytes_per_second", "gauge", "Estimated rate of the link to the offload server."
)
AGENT_LINK_DOWN = MetricFamily(
    "edgesplit_agent_link_down_bytes_per_second", "gauge", "Estimated rate of the link from the offload server."
)
AGENT_LINK_RTT = MetricFamily("edgesplit_agent_link_round_trip_seconds", "gauge", "Estimated round trip of that link.")
AGENT_REMOTE_OK = MetricFamily(
    "edgesplit_agent_remote_usable", "gauge", "1 where requests may go to the offload server, 0 where they may not."
)
AGENT_SERVER_LOAD = MetricFamily(
    "edgesplit_agent_server_load_factor", "gauge", "What waiting in the offload server makes of its seconds, from 1."
)
AGENT_SLOWDOWN = MetricFamily(
    "edgesplit_agent_slowdown_factor", "gauge", "This device's seconds beside those that the plan was made with."
)
AGENT_POWER_MODE = MetricFamily(
    "edgesplit_agent_power_mode",
    "gauge",
    "1 for the mode in use: performance, balanced, saver.",
    ("mode",),
)
AGENT_BATTERY = MetricFamily("edgesplit_agent_battery_ratio", "gauge", "Charge of the batteries, where there are any.")
AGENT_WATTS = MetricFamily("edgesplit_agent_power_watts", "gauge", "What the whole device draws, where a sensor tells.")
AGENT_CELSIUS = MetricFamily(
    "edgesplit_agent_temperature_celsius", "gauge", "Of the hottest zone, where a sensor tells."
)
AGENT_CLOCK = MetricFamily(
    "edgesplit_agent_clock_ratio", "gauge", "What the processor's clock may reach now, as a part of what it could."
)
AGENT_UNDER_VOLTAGE = MetricFamily(
    "edgesplit_agent_under_voltage", "gauge", "1 while the supply is too weak, where the firmware tells."
)
AGENT_CONNECTED = MetricFamily("edgesplit_agent_broker_connected", "gauge", "1 while the agent has its broker session.")

# The offload server

OFFLOAD_INFO = MetricFamily(
    "edgesplit_offload_info", "gauge", "Always 1; says which offload server this is.", ("version",), aggregation="max"
)
OFFLOAD_REQUESTS = MetricFamily(
    "edgesplit_offload_requests_total",
    "counter",
    "Inference requests that came to an end. outcome: answered, busy, deadline, gone (nobody waited any more), "
    "rejected (the client's fault), refused (it may not ask), failed; model and row are empty where a request named "
    "none that is here; a gateway counts what it hands on whole as (relayed).",
    ("model", "row", "outcome"),
)
OFFLOAD_REQUEST_S = MetricFamily(
    "edgesplit_offload_request_seconds",
    "histogram",
    "From an inference request's last byte received to its answer's first byte; answered requests only.",
    ("model", "row"),
)
OFFLOAD_PHASE_S = MetricFamily(
    "edgesplit_offload_phase_seconds",
    "histogram",
    "Where that time went. phase: decode (body and boundary codecs), load (a model that was not), queue, run, hop (a "
    "gateway's wait for the next tier), encode.",
    ("model", "phase"),
)
OFFLOAD_BATCH = MetricFamily(
    "edgesplit_offload_batch_size",
    "histogram",
    "How many requests ran together, seen from each answered one.",
    ("model",),
    bounds=BATCH_SIZE_BOUNDS,
)
OFFLOAD_RECEIVED = MetricFamily(
    "edgesplit_offload_received_bytes_total",
    "counter",
    "Bytes of requests' bodies, as they came.",
    ("model",),
)
OFFLOAD_SENT = MetricFamily(
    "edgesplit_offload_sent_bytes_total", "counter", "Bytes of the answers' bodies.", ("model",)
)
OFFLOAD_RUNNING = MetricFamily("edgesplit_offload_running", "gauge", "Requests that run now.")
OFFLOAD_WAITING = MetricFamily("edgesplit_offload_waiting", "gauge", "Requests that wait for their turn now.")
OFFLOAD_LOAD = MetricFamily(
    "edgesplit_offload_load_factor",
    "gauge",
    "What waiting makes of a run's seconds, smoothed, from 1; of several processes the highest.",
    aggregation="max",
)
OFFLOAD_LOADED_BYTES = MetricFamily(
    "edgesplit_offload_loaded_bytes", "gauge", "Estimated memory of the slices that are loaded."
)
OFFLOAD_LOADED_MODELS = MetricFamily(
    "edgesplit_offload_loaded_models", "gauge", "Models that can be run without loading."
)
OFFLOAD_PROCESSES = MetricFamily("edgesplit_offload_processes", "gauge", "Serving processes of this server.")

# The controller

CONTROLLER_INFO = MetricFamily(
    "edgesplit_controller_info", "gauge", "Always 1; says which controller this is.", ("version",)
)
CONTROLLER_REQUESTS = MetricFamily(
    "edgesplit_controller_requests_total",
    "counter",
    "Requests to the API, by the route's template (empty: no such route) and the class of the answer (2xx to 5xx).",
    ("method", "route", "status"),
)
CONTROLLER_REQUEST_S = MetricFamily(
    "edgesplit_controller_request_seconds", "histogram", "Time to answer a request to the API.", ("method", "route")
)
CONTROLLER_DEVICES = MetricFamily(
    "edgesplit_controller_devices", "gauge", "Devices by state: online, stale, offline, claimed, revoked.", ("state",)
)

CONTROLLER_CONDITIONS = MetricFamily(
    "edgesplit_controller_conditions",
    "gauge",
    "Devices with this wrong: under-voltage, throttled, low disk, clock wrong, failing release, copied, flooding, …",
    ("kind",),
)
CONTROLLER_RUNNING = MetricFamily(
    "edgesplit_controller_running",
    "gauge",
    "Devices that are online, by model and by what their release is in: running, trial, fetching, failed, …",
    ("model", "state"),
)
CONTROLLER_ROLLOUTS = MetricFamily(
    "edgesplit_controller_rollouts",
    "gauge",
    "Rollouts by state: scheduled, waiting, running, paused, … and those that have ended.",
    ("state",),
)
CONTROLLER_ROLLOUT_DEVICES = MetricFamily(
    "edgesplit_controller_rollout_devices",
    "gauge",
    "Devices of rollouts that have not ended, by where they stand: queued, told, fetching, trial, succeeded, failed, …",
    ("state",),
)
CONTROLLER_MESSAGES = MetricFamily(
    "edgesplit_controller_messages_total",
    "counter",
    "What devices said. outcome: new, again (it came twice), earlier (out of order), older session, revoked, unknown, "
    "dropped (malformed, or more than a device may).",
    ("kind", "outcome"),
)
CONTROLLER_BACKLOG_AGE_S = MetricFamily(
    "edgesplit_controller_late_telemetry_seconds",
    "histogram",
    "How long ago telemetry was measured that came late, because the device's link was gone.",
    bounds=(1.0, 10.0, 60.0, 600.0, 3_600.0, 21_600.0, 86_400.0, 604_800.0),
)
CONTROLLER_INGEST_S = MetricFamily(
    "edgesplit_controller_ingest_seconds", "histogram", "Time to take in a batch of what devices said."
)
CONTROLLER_WAITING = MetricFamily(
    "edgesplit_controller_waiting",
    "gauge",
    "What waits for its turn now. queue: said (messages), asked (fetches), chunks, heavy (plans and deployments).",
    ("queue",),
)
CONTROLLER_STATEMENT_S = MetricFamily(
    "edgesplit_controller_database_statement_seconds",
    "histogram",
    "Time of the database's statements. kind: select, insert, update, delete, other.",
    ("kind",),
)
CONTROLLER_ROLLUP_BACKLOG = MetricFamily(
    "edgesplit_controller_rollup_backlog", "gauge", "Telemetry messages that minutes and hours lack still."
)
CONTROLLER_BROKER = MetricFamily(
    "edgesplit_controller_broker_connected", "gauge", "1 while our broker session is there."
)

FAMILIES: tuple[MetricFamily, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, MetricFamily)
)
"""All metric families in the order above."""
FAMILY_BY_NAME = {family.name: family for family in FAMILIES}
"""All metric families by name."""
