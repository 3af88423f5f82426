"""The dialogue of `edgectl flash`: asks, shows what will be written, draws progress and reports, for SD cards and for
Jetsons. Imports `output`, `options` and `progress` of this room, and `edgesplit_provisioning`, which does the work."""
