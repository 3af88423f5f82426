"""Servers side by side under the same load: what `bench/offload.py` starts, asks and counts."""
