"""The agent as a service: its systemd unit, the watchdog, a supervisor for machines without systemd, enrolment that
waits for a claim, and the checks of `edgesplit-agent doctor`. May import the agent's packages `control`, `host`,
`power`, `releases`, `self_update`, `serving` and `state`, and the SDK.
"""
