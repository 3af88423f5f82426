"""The agent's connection to the controller: enrolment and certificate renewal over HTTPS; the MQTT session with
telemetry and log bundles; fetching of metadata and chunks over MQTT; and a gateway's offload server. May import the
agent's packages `host`, `state` and `telemetry`, and the SDK.
"""
