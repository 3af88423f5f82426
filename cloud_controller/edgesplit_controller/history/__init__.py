"""Telemetry history: raw device telemetry rolled up into buckets of a minute, an hour, a day and a month, and their
queries. May import `storage` and `edgesplit`."""
