"""The agent's connection to the controller: enrolment and certificate renewal over HTTPS; the MQTT session with
telemetry and log bundles; fetching of metadata and chunks over MQTT; and a gateway's offload server. May import the
agent's packages `host`, `state` and `telemetry`, and the SDK (`enrolment` also imports the back-off of `updates`,
which is to move to the SDK).
"""
