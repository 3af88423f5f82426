"""Decisions of the agent per request: row selection, completion-time model, hedge timing and budget, link estimation.

Pure functions and immutable values, with two thread-safe holders of state (`RowSelector`, `HedgeBudget`) and one
that is not (`Calibration`); no network, no clock. May import `power` of the agent, and the plan and `oip` of the SDK.
"""
