"""Fault injection: parses faults files and applies their faults to a fleet. Imports `edgesplit` and, from this room,
the fleets, `device` and `releases`."""
