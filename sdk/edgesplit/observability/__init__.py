"""Observability on every tier: phases of a request, metrics, trace context, spans and log formats.

`phases` holds the phases of one request; `histogram` and `registry` count them; `metrics` defines every metric,
`prometheus` renders them and `metrics_server` serves them. `trace_context` carries W3C trace context, `tracing` exports
OpenTelemetry spans where that is configured, `log_format` writes log lines with trace and request ids, `redaction`
removes secrets, `doctor_findings` prints what a doctor command found. The choice of libraries: docs/decisions/0024. May
import the SDK's root modules and `edgesplit.http1`.
"""
