"""Decisions of the agent per request: row selection, completion-time model, hedge timing and budget, link estimation.

Pure functions and immutable values, with two thread-safe holders of state (`RowSelector`, `HedgeBudget`) and two
that are not (`Calibration`, `CascadeAudit`); no network, no clock. May import `power` and `state` of the agent, and the
plan, `answers`, `mqtt` and `oip` of the SDK.
"""
