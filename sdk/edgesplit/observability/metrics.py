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
    "edgesplit_agent_info", "gauge", "Always 1; the labels identify the agent.", ("device", "device_class", "version")
)
AGENT_REQUESTS = MetricFamily(
    "edgesplit_agent_requests_total",
    "counter",
    "Completed requests. outcome: answered, fallback (answered by the device because the cloud failed or was too "
    "late), busy, dropped, deadline, link, rejected (the application's error), failed. A request that was given a "
    "stale answer counts with the outcome that it would have had without.",
    ("model", "row", "outcome"),
)
AGENT_REQUEST_S = MetricFamily(
    "edgesplit_agent_request_seconds",
    "histogram",
    "Time from a request's arrival in the agent to its answer; answered requests only.",
    ("model", "row"),
)
AGENT_PHASE_S = MetricFamily(
    "edgesplit_agent_phase_seconds",
    "histogram",
    "That time by phase, for each phase that an answered request had. phase: queue (waiting for the device's "
    "processor), decode (the input), device (its slices), encode (the boundary), link (both directions together), "
    "remote_queue, remote_decode, remote_load, remote (its slices), hop_link and hop (the link from a gateway to the "
    "next tier, and time in that tier), remote_encode, answer_decode, waited (for a cloud that failed or was too "
    "late), tail (the local tail), other (the remainder).",
    ("model", "phase"),
)
AGENT_FALLBACKS = MetricFamily(
    "edgesplit_agent_fallbacks_total",
    "counter",
    "Requests that the device finished itself, by the cause at the cloud: timeout, refused, link, server.",
    ("model", "cause"),
)
AGENT_SWITCHES = MetricFamily(
    "edgesplit_agent_switches_total", "counter", "Switches to another row of the plan.", ("model",)
)
AGENT_EMULATION_OVERRUNS = MetricFamily(
    "edgesplit_agent_emulation_overruns_total",
    "counter",
    "Answers of an emulated device for which this host was slower than the device profile.",
    ("model",),
)
AGENT_UP_BYTES = MetricFamily(
    "edgesplit_agent_up_bytes_total", "counter", "Bytes of boundary tensors sent, as encoded for the link.", ("model",)
)
AGENT_DOWN_BYTES = MetricFamily(
    "edgesplit_agent_down_bytes_total", "counter", "Bytes of answers received from the cloud.", ("model",)
)
AGENT_HEDGES = MetricFamily(
    "edgesplit_agent_hedges_total",
    "counter",
    "Hedges by result: hedges (started), by_choice (started before the deadline required it), held_back (by the "
    "budget), device_won, cloud_won, cancelled.",
    ("what",),
)
AGENT_WASTED_S = MetricFamily(
    "edgesplit_agent_hedges_wasted_seconds_total", "counter", "Processor seconds of hedges that lost their race."
)
AGENT_WASTED_J = MetricFamily(
    "edgesplit_agent_hedges_wasted_joules_total",
    "counter",
    "Energy of the losing sides of races, estimated by the plan.",
)
AGENT_STALE = MetricFamily(
    "edgesplit_agent_stale_total", "counter", "Requests that were answered with the last good answer, marked as stale."
)
AGENT_DROPPED_FRAMES = MetricFamily(
    "edgesplit_agent_dropped_total",
    "counter",
    "Frames that were dropped in favour of others, by the policy that their application requested.",
)
AGENT_DEDUPLICATED = MetricFamily(
    "edgesplit_agent_deduplicated_total",
    "counter",
    "Retries under the same request id that were given the first request's answer; they count in no other metric.",
)
AGENT_WORKERS_LOST = MetricFamily(
    "edgesplit_agent_workers_lost_total",
    "counter",
    "Worker processes of a model that crashed or were killed, since its release was loaded.",
    ("model",),
)
AGENT_SERVING = MetricFamily(
    "edgesplit_agent_serving",
    "gauge",
    "1 for each model that this device serves, with the row in use (empty before the first request).",
    ("model", "row"),
)
AGENT_LINK_UP = MetricFamily(
    "edgesplit_agent_link_up_bytes_per_second", "gauge", "Estimated upload rate to the offload server."
)
AGENT_LINK_DOWN = MetricFamily(
    "edgesplit_agent_link_down_bytes_per_second", "gauge", "Estimated download rate from the offload server."
)
AGENT_LINK_RTT = MetricFamily(
    "edgesplit_agent_link_round_trip_seconds", "gauge", "Estimated round trip to the offload server."
)
AGENT_REMOTE_OK = MetricFamily(
    "edgesplit_agent_remote_usable",
    "gauge",
    "1 while requests may be sent to the offload server, otherwise 0.",
)
AGENT_SERVER_LOAD = MetricFamily(
    "edgesplit_agent_server_load_factor",
    "gauge",
    "Factor by which queueing prolongs the offload server's run times; 1 is an idle server.",
)
AGENT_SLOWDOWN = MetricFamily(
    "edgesplit_agent_slowdown_factor", "gauge", "This device's run times divided by those that the plan assumed."
)
AGENT_POWER_MODE = MetricFamily(
    "edgesplit_agent_power_mode",
    "gauge",
    "1 for the power mode in use: performance, balanced, saver.",
    ("mode",),
)
AGENT_BATTERY = MetricFamily("edgesplit_agent_battery_ratio", "gauge", "Charge of the batteries, where there are any.")
AGENT_WATTS = MetricFamily(
    "edgesplit_agent_power_watts", "gauge", "Power draw of the whole device, where a sensor measures it."
)
AGENT_CELSIUS = MetricFamily(
    "edgesplit_agent_temperature_celsius",
    "gauge",
    "Temperature of the hottest thermal zone, where a sensor measures it.",
)
AGENT_CLOCK = MetricFamily(
    "edgesplit_agent_clock_ratio", "gauge", "Currently allowed processor clock divided by the maximum one."
)
AGENT_UNDER_VOLTAGE = MetricFamily(
    "edgesplit_agent_under_voltage", "gauge", "1 while the supply voltage is too low, where the firmware reports it."
)
AGENT_CONNECTED = MetricFamily(
    "edgesplit_agent_broker_connected", "gauge", "1 while the agent is connected to the broker."
)

# The offload server

OFFLOAD_INFO = MetricFamily(
    "edgesplit_offload_info",
    "gauge",
    "Always 1; the labels identify the offload server.",
    ("version",),
    aggregation="max",
)
OFFLOAD_REQUESTS = MetricFamily(
    "edgesplit_offload_requests_total",
    "counter",
    "Completed inference requests. outcome: answered, busy, deadline, gone (the client stopped waiting), rejected (the "
    "client's error), refused (the client is not authorised), failed. model and row are empty where a request names a "
    "model that is not served here; model is (relayed) for a request that a gateway forwards whole.",
    ("model", "row", "outcome"),
)
OFFLOAD_REQUEST_S = MetricFamily(
    "edgesplit_offload_request_seconds",
    "histogram",
    "Time from the last byte of an inference request to the first byte of its answer; answered requests only.",
    ("model", "row"),
)
OFFLOAD_PHASE_S = MetricFamily(
    "edgesplit_offload_phase_seconds",
    "histogram",
    "That time by phase. phase: decode (body and boundary codecs), load (a model that was not loaded), queue, run, "
    "hop (a gateway's wait for the next tier), encode.",
    ("model", "phase"),
)
OFFLOAD_BATCH = MetricFamily(
    "edgesplit_offload_batch_size",
    "histogram",
    "Requests that shared a run, observed once for each answered request.",
    ("model",),
    bounds=BATCH_SIZE_BOUNDS,
)
OFFLOAD_RECEIVED = MetricFamily(
    "edgesplit_offload_received_bytes_total",
    "counter",
    "Bytes of request bodies, as received.",
    ("model",),
)
OFFLOAD_SENT = MetricFamily("edgesplit_offload_sent_bytes_total", "counter", "Bytes of answer bodies.", ("model",))
OFFLOAD_RUNNING = MetricFamily("edgesplit_offload_running", "gauge", "Requests that are running now.")
OFFLOAD_WAITING = MetricFamily("edgesplit_offload_waiting", "gauge", "Requests in the queue now.")
OFFLOAD_LOAD = MetricFamily(
    "edgesplit_offload_load_factor",
    "gauge",
    "Factor by which queueing prolongs run times, smoothed, at least 1; the highest of several processes.",
    aggregation="max",
)
OFFLOAD_LOADED_BYTES = MetricFamily("edgesplit_offload_loaded_bytes", "gauge", "Estimated memory of the loaded slices.")
OFFLOAD_LOADED_MODELS = MetricFamily(
    "edgesplit_offload_loaded_models", "gauge", "Models that can run without being loaded first."
)
OFFLOAD_PROCESSES = MetricFamily("edgesplit_offload_processes", "gauge", "Serving processes of this server.")

# The controller

CONTROLLER_INFO = MetricFamily(
    "edgesplit_controller_info", "gauge", "Always 1; the labels identify the controller.", ("version",)
)
CONTROLLER_REQUESTS = MetricFamily(
    "edgesplit_controller_requests_total",
    "counter",
    "Requests to the API, by the route's template (empty: no such route) and the status class of the answer (2xx to "
    "5xx).",
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
    "Devices by condition, that is, by what is wrong with them: under-voltage, throttled, low disk, clock wrong, "
    "failing release, copied, flooding, …",
    ("kind",),
)
CONTROLLER_RUNNING = MetricFamily(
    "edgesplit_controller_running",
    "gauge",
    "Online devices by model and reported state of its release: running, trial, fetching, failed, …",
    ("model", "state"),
)
CONTROLLER_ROLLOUTS = MetricFamily(
    "edgesplit_controller_rollouts",
    "gauge",
    "Rollouts by state: scheduled, waiting, running, paused, … and the states of ended ones.",
    ("state",),
)
CONTROLLER_ROLLOUT_DEVICES = MetricFamily(
    "edgesplit_controller_rollout_devices",
    "gauge",
    "Devices of rollouts that have not ended, by state: queued, assigned, fetching, trial, succeeded, failed, …",
    ("state",),
)
CONTROLLER_MESSAGES = MetricFamily(
    "edgesplit_controller_messages_total",
    "counter",
    "Messages from devices. outcome: new, again (a duplicate), earlier (out of order), older session, revoked, "
    "unknown, dropped (malformed, or over the device's rate limit).",
    ("kind", "outcome"),
)
CONTROLLER_BACKLOG_AGE_S = MetricFamily(
    "edgesplit_controller_late_telemetry_seconds",
    "histogram",
    "Age of telemetry from a device's backlog when it arrived: it was measured while the link was down.",
    bounds=(1.0, 10.0, 60.0, 600.0, 3_600.0, 21_600.0, 86_400.0, 604_800.0),
)
CONTROLLER_INGEST_S = MetricFamily(
    "edgesplit_controller_ingest_seconds", "histogram", "Time to process a batch of messages from devices."
)
CONTROLLER_WAITING = MetricFamily(
    "edgesplit_controller_waiting",
    "gauge",
    "Length of each queue now. queue: said (messages), asked (fetch requests), chunks, heavy (plans and deployments).",
    ("queue",),
)
CONTROLLER_STATEMENT_S = MetricFamily(
    "edgesplit_controller_database_statement_seconds",
    "histogram",
    "Time of database statements. kind: select, insert, update, delete, other.",
    ("kind",),
)
CONTROLLER_ROLLUP_BACKLOG = MetricFamily(
    "edgesplit_controller_rollup_backlog",
    "gauge",
    "Telemetry messages that are not yet aggregated into minutes and hours.",
)
CONTROLLER_BROKER = MetricFamily(
    "edgesplit_controller_broker_connected", "gauge", "1 while the controller is connected to the broker."
)

FAMILIES: tuple[MetricFamily, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, MetricFamily)
)
"""All metric families in the order above."""
FAMILY_BY_NAME = {family.name: family for family in FAMILIES}
"""All metric families by name."""
