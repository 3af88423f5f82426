"""Costs of a small chain that a plan cuts in its middle."""

from __future__ import annotations

from edgesplit_partitioner import Costs, load_costs


def chain_costs() -> Costs:
    """Three layers of which the cut after the second is best on LTE."""
    return load_costs(
        {
            "model": "doorbell@1",
            "tiers": ["device", "cloud"],
            "inputs": {"frame": {"bytes": 96_000}},
            "outputs": ["scores"],
            "idle_watts": {"device": 2.0},
            "layers": [
                {
                    "name": "early",
                    "reads": ["frame"],
                    "writes": {"t1": {"bytes": 88_000}},
                    "seconds": {"device": 0.06, "cloud": 0.004},
                    "joules": {"device": 0.3},
                    "weight_bytes": 1_000,
                },
                {
                    "name": "narrow",
                    "reads": ["t1"],
                    "writes": {"t2": {"bytes": 8_000}},
                    "seconds": {"device": 0.03, "cloud": 0.003},
                    "joules": {"device": 0.1},
                    "weight_bytes": 5_000,
                },
                {
                    "name": "head",
                    "reads": ["t2"],
                    "writes": {"scores": {"bytes": 40}},
                    "seconds": {"device": 0.4, "cloud": 0.012},
                    "joules": {"device": 2.0},
                    "weight_bytes": 90_000,
                },
            ],
        }
    )
