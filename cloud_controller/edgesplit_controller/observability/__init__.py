"""Prometheus metrics of the controller: API requests, ingested messages, SQL statements, queue lengths and fleet
counts. May import `fleet`, `history`, `rollout` and `edgesplit`; only `app` and `api` import it."""
