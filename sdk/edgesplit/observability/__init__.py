"""What is seen of a request, on whichever tier it runs: where its time went, under which trace, counted for Prometheus.

`timeline` keeps the phases of one request; `histogram` and `ledger` count them; `families` names every metric, and
`exposition` writes them as Prometheus reads them. `trace` carries W3C trace context, `spans` makes OpenTelemetry spans
of timelines where that is configured, `logs` writes log lines that name trace and request. The choice of libraries:
docs/decisions/0024.
"""
