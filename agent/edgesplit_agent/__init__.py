"""The agent, which runs on the device: decides where each request runs, fetches and verifies releases, runs their
slices, offloads the rest, and rolls a bad release back. Its packages, from the ground up: `host`, `power`, `state`
and `worker`; `policy` and `releases`; `offload`, `self_update` and `telemetry`; `control` and `serving`; `service`
and `updates`. The module `agent` assembles them and `main` is the command line. It imports the SDK (`edgesplit`) and
no other room.
"""
