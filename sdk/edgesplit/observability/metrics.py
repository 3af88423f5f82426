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
    "Always 1; the labels identify the agent.")
AGENT_REQUESTS = _counter("edgesplit_agent_requests_total", "model", "row", "outcome", help=
    "Completed requests. outcome: answered, fallback (answered by the device because the cloud failed or was too "
    "late), busy, dropped, deadline, link, rejected (the application's error), unsure (a cascade's answer that its "
    "request refuses), failed. A request that was given a stale answer counts with the outcome that it would have had "
    "without.")
AGENT_REQUEST_S = _histogram("edgesplit_agent_request_seconds", "model", "row", help=
    "Time from a request's arrival in the agent to its answer; answered requests only.")
AGENT_PHASE_S = _histogram("edgesplit_agent_phase_seconds", "model", "phase", help=
    "That time by phase, for each phase that an answered request had. phase: queue (waiting for the device's "
    "processor), decode (the input), device (its slices), encode (the boundary), link (both directions together), "
    "remote_queue, remote_decode, remote_load, remote (its slices), next_tier_link and "
    "next_tier (the link from a gateway to the next tier, and time in that tier), "
    "remote_encode, answer_decode, remote_wait (for a cloud that failed or was too "
    "late), local_finish (the local tail), other (the remainder).")
AGENT_FALLBACKS = _counter("edgesplit_agent_fallbacks_total", "model", "cause", help=
    "Requests that the device finished itself, by the cause at the cloud: timeout, refused, link, server.")
AGENT_SWITCHES = _counter("edgesplit_agent_switches_total", "model", help="Switches to another row of the plan.")
AGENT_EMULATION_OVERRUNS = _counter("edgesplit_agent_emulation_overruns_total", "model", help=
    "Answers of an emulated device for which this host was slower than the device profile.")
AGENT_UP_BYTES = _counter("edgesplit_agent_up_bytes_total", "model", help=
    "Bytes of boundary tensors sent, as encoded for the link.")
AGENT_DOWN_BYTES = _counter("edgesplit_agent_down_bytes_total", "model", help=
    "Bytes of answers received from the cloud.")
AGENT_HEDGES = _counter("edgesplit_agent_hedges_total", "what", help=
    "Hedges by result: hedges (started), by_choice (started before the deadline required it), held_back (by the "
    "budget), device_won, cloud_won, cancelled.")
AGENT_WASTED_S = _counter("edgesplit_agent_hedges_wasted_seconds_total", help=
    "Processor seconds of hedges that lost their race.")
AGENT_WASTED_J = _counter("edgesplit_agent_hedges_wasted_joules_total", help=
    "Energy of the losing sides of races, estimated by the plan.")
AGENT_STALE = _counter("edgesplit_agent_stale_total", help=
    "Requests that were answered with the last good answer, marked as stale.")
AGENT_REPEATED = _counter("edgesplit_agent_repeated_total", "model", help=
    "Frames that were given their stream's last answer, because they were still; they count in no metric of requests.")
AGENT_REPEAT_AUDITS = _counter("edgesplit_agent_repeat_audits_total", "model", "outcome", help=
    "Frames of streams that repeat answers, drawn for audit at random. outcome: same (the answer that was or would have"
    " been given is the model's), changed, unaudited (the model could not answer).")
AGENT_REPEAT_ALARMS = _counter("edgesplit_agent_repeat_alarms_total", "model", help=
    "Times that audits showed more changed answers than allowed, and a stream's threshold was tightened.")
AGENT_CASCADE_ANSWERS = _counter("edgesplit_agent_cascade_answers_total", "model", "outcome", help=
    "Requests that a cascade answered. outcome: sure (by its first variant), escalated (by the second one), unsure (the"
    " second one could not be asked in time: the first one's answer, or an error where the request refuses it).")
AGENT_CASCADE_AUDITS = _counter("edgesplit_agent_cascade_audits_total", "model", "outcome", help=
    "Frames of cascades, drawn for audit at random. outcome: same (escalated, or sure and the second variant answers"
    " the same), changed, unaudited (sure, and the second variant could not be asked).")
AGENT_CASCADE_ALARMS = _counter("edgesplit_agent_cascade_alarms_total", "model", help=
    "Times that audits showed more changed answers than allowed, and a cascade's threshold was tightened.")
AGENT_CASCADE_THRESHOLD = _gauge("edgesplit_agent_cascade_threshold", "model", help=
    "Least score of an answer that a cascade's first variant gives, as tightened by alarms; 1e15: it gives none.")
AGENT_DROPPED_FRAMES = _counter("edgesplit_agent_dropped_total", help=
    "Frames that were dropped in favour of others, by the policy that their application requested.")
AGENT_DEDUPLICATED = _counter("edgesplit_agent_deduplicated_total", help=
    "Retries under the same request id that were given the first request's answer; they count in no other metric.")
AGENT_WORKERS_LOST = _counter("edgesplit_agent_workers_lost_total", "model", help=
    "Worker processes of a model that crashed or were killed, since its release was loaded.")
AGENT_SERVING = _gauge("edgesplit_agent_serving", "model", "row", help=
    "1 for each model that this device serves, with the row in use (empty before the first request).")
AGENT_LINK_UP = _gauge("edgesplit_agent_link_up_bytes_per_second", help="Estimated upload rate to the offload server.")
AGENT_LINK_DOWN = _gauge("edgesplit_agent_link_down_bytes_per_second", help=
    "Estimated download rate from the offload server.")
AGENT_LINK_RTT = _gauge("edgesplit_agent_link_round_trip_seconds", help="Estimated round trip to the offload server.")
AGENT_REMOTE_OK = _gauge("edgesplit_agent_remote_usable", help=
    "1 while requests may be sent to the offload server, otherwise 0.")
AGENT_SERVER_LOAD = _gauge("edgesplit_agent_server_load_factor", help=
    "Factor by which queueing prolongs the offload server's run times; 1 is an idle server.")
AGENT_SLOWDOWN = _gauge("edgesplit_agent_slowdown_factor", help=
    "This device's run times divided by those that the plan assumed.")
AGENT_POWER_MODE = _gauge("edgesplit_agent_power_mode", "mode", help=
    "1 for the power mode in use: performance, balanced, saver.")
AGENT_BATTERY = _gauge("edgesplit_agent_battery_ratio", help="Charge of the batteries, where there are any.")
AGENT_WATTS = _gauge("edgesplit_agent_power_watts", help="Power draw of the whole device, where a sensor measures it.")
AGENT_CELSIUS = _gauge("edgesplit_agent_temperature_celsius", help=
    "Temperature of the hottest thermal zone, where a sensor measures it.")
AGENT_CLOCK = _gauge("edgesplit_agent_clock_ratio", help=
    "Currently allowed processor clock divided by the maximum one.")
AGENT_UNDER_VOLTAGE = _gauge("edgesplit_agent_under_voltage", help=
    "1 while the supply voltage is too low, where the firmware reports it.")
AGENT_REMOTE_INFERENCES = _counter("edgesplit_agent_remote_inferences_total", "outcome", help=
    "Inferences that operators sent through the controller; they are counted as requests too. outcome: as there, but "
    "no fallback.")
AGENT_CONNECTED = _gauge("edgesplit_agent_broker_connected", help="1 while the agent is connected to the broker.")

# The offload server

OFFLOAD_INFO = _gauge("edgesplit_offload_info", "version", aggregation="max", help=
    "Always 1; the labels identify the offload server.")
OFFLOAD_REQUESTS = _counter("edgesplit_offload_requests_total", "model", "row", "outcome", help=
    "Completed inference requests. outcome: answered, busy, deadline, gone (the client stopped waiting), rejected "
    "(the client's error), refused (the client is not authorised), failed. model and row are empty where a request "
    "names a model that is not served here; model is (relayed) for a request that a gateway forwards whole.")
OFFLOAD_REQUEST_S = _histogram("edgesplit_offload_request_seconds", "model", "row", help=
    "Time from the last byte of an inference request to the first byte of its answer; answered requests only.")
OFFLOAD_PHASE_S = _histogram("edgesplit_offload_phase_seconds", "model", "phase", help=
    "That time by phase. phase: decode (body and boundary codecs), load (a model that was not loaded), queue, run, "
    "next_tier (a gateway's wait for the next tier), encode.")
OFFLOAD_BATCH = _histogram("edgesplit_offload_batch_size", "model", bounds=BATCH_SIZE_BOUNDS, help=
    "Requests that shared a run, observed once for each answered request.")
OFFLOAD_RECEIVED = _counter("edgesplit_offload_received_bytes_total", "model", help=
    "Bytes of request bodies, as received.")
OFFLOAD_SENT = _counter("edgesplit_offload_sent_bytes_total", "model", help="Bytes of answer bodies.")
OFFLOAD_REFUSED = _counter("edgesplit_offload_refused_total", "client", "reason", help=
    "Connections and requests refused before they were let in, or closed for it. client: the name in the certificate "
    "(a device), empty without one; the log has the address. reason: connections (its share of them is used up), "
    "displaced (its connection gave way to another), bytes (its share of the bytes of bodies is used up), full (the "
    "server's bytes are), slow (header block or body), revoked, forbidden (the route is not this client's, or does not "
    "exist), malformed.")
OFFLOAD_RUNNING = _gauge("edgesplit_offload_running", help="Requests that are running now.")
OFFLOAD_WAITING = _gauge("edgesplit_offload_waiting", help="Requests in the queue now.")
OFFLOAD_LOAD = _gauge("edgesplit_offload_load_factor", aggregation="max", help=
    "Factor by which queueing prolongs run times, smoothed, at least 1; the highest of several processes.")
OFFLOAD_LOADED_BYTES = _gauge("edgesplit_offload_loaded_bytes", help="Estimated memory of the loaded slices.")
OFFLOAD_LOADED_MODELS = _gauge("edgesplit_offload_loaded_models", help=
    "Models that can run without being loaded first.")
OFFLOAD_PROCESSES = _gauge("edgesplit_offload_processes", help="Serving processes of this server.")

# The controller

CONTROLLER_INFO = _gauge("edgesplit_controller_info", "version", help="Always 1; the labels identify the controller.")
CONTROLLER_REQUESTS = _counter("edgesplit_controller_requests_total", "method", "route", "status", help=
    "Requests to the API, by the route's template (empty: no such route) and the status class of the answer (2xx to "
    "5xx).")
CONTROLLER_REQUEST_S = _histogram("edgesplit_controller_request_seconds", "method", "route", help=
    "Time to answer a request to the API.")
CONTROLLER_DEVICES = _gauge("edgesplit_controller_devices", "state", help=
    "Devices by state: online, stale, offline, claimed, revoked.")

CONTROLLER_CONDITIONS = _gauge("edgesplit_controller_conditions", "kind", help=
    "Devices by condition, that is, by what is wrong with them: under-voltage, throttled, low disk, clock wrong, "
    "failing release, copied, flooding, …")
CONTROLLER_RUNNING = _gauge("edgesplit_controller_running", "model", "state", help=
    "Online devices by model and reported state of its release: running, trial, fetching, failed, …")
CONTROLLER_ROLLOUTS = _gauge("edgesplit_controller_rollouts", "state", help=
    "Rollouts by state: scheduled, waiting, running, paused, … and the states of ended ones.")
CONTROLLER_ROLLOUT_DEVICES = _gauge("edgesplit_controller_rollout_devices", "state", help=
    "Devices of rollouts that have not ended, by state: queued, assigned, fetching, trial, succeeded, failed, …")
CONTROLLER_MESSAGES = _counter("edgesplit_controller_messages_total", "kind", "outcome", help=
    "Messages from devices. outcome: new, duplicate, out of order, older session, revoked, "
    "unknown, dropped (malformed, or over the device's rate limit).")
CONTROLLER_CASCADE_ANSWERS = _counter("edgesplit_controller_cascade_answers_total", "model", "outcome", help=
    "Requests that devices answered by a cascade, of the telemetry that this process stored. outcome: sure (by the "
    "first variant), escalated (by the second one), unsure.")
CONTROLLER_CASCADE_AUDITS = _counter("edgesplit_controller_cascade_audits_total", "model", "outcome", help=
    "Frames of cascades that devices drew for audit. outcome: same, changed, unaudited.")
CONTROLLER_CASCADE_ALARMS = _counter("edgesplit_controller_cascade_alarms_total", "model", help=
    "Times that a device's audits showed more changed answers than allowed, and its threshold was tightened.")
CONTROLLER_REPEATED = _counter("edgesplit_controller_repeated_total", "model", help=
    "Frames that devices gave their stream's last answer, because they were still.")
CONTROLLER_REPEAT_AUDITS = _counter("edgesplit_controller_repeat_audits_total", "model", "outcome", help=
    "Frames of streams that repeat answers, drawn for audit on devices. outcome: same, changed, unaudited.")
CONTROLLER_REPEAT_ALARMS = _counter("edgesplit_controller_repeat_alarms_total", "model", help=
    "Times that audits on a device showed more changed answers than allowed, and a stream's threshold was tightened.")
CONTROLLER_REMOTE_INFERENCES = _counter("edgesplit_controller_remote_inferences_total", "outcome", help=
    "Inferences that operators sent to devices through this process. outcome: answered, failed, cancelled.")
CONTROLLER_REMOTE_INFERENCE_S = _histogram("edgesplit_controller_remote_inference_seconds", help=
    "Time from an operator's request to the device's answer; answered ones only.")
CONTROLLER_BACKLOG_AGE_S = _histogram("edgesplit_controller_late_telemetry_seconds",
    bounds=(1.0, 10.0, 60.0, 600.0, 3_600.0, 21_600.0, 86_400.0, 604_800.0), help=
    "Age of telemetry from a device's backlog when it arrived: it was measured while the link was down.")
CONTROLLER_INGEST_S = _histogram("edgesplit_controller_ingest_seconds", help=
    "Time to process a batch of messages from devices.")
CONTROLLER_WAITING = _gauge("edgesplit_controller_waiting", "queue", help=
    "Length of each queue now. queue: messages, requests (to fetch), chunks, heavy (plans and deployments).")
CONTROLLER_STATEMENT_S = _histogram("edgesplit_controller_database_statement_seconds", "kind", help=
    "Time of database statements. kind: select, insert, update, delete, other.")
CONTROLLER_ROLLUP_BACKLOG = _gauge("edgesplit_controller_rollup_backlog", help=
    "Telemetry messages that are not yet aggregated into minutes and hours.")
CONTROLLER_BROKER = _gauge("edgesplit_controller_broker_connected", help=
    "1 while the controller is connected to the broker.")

# fmt: on

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, MetricFamily))
"""All metric families in the order above."""
FAMILY_BY_NAME = {family.name: family for family in FAMILIES}
"""All metric families by name."""
