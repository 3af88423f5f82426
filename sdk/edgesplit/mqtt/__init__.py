"""The MQTT protocol between devices and controller: message formats, telemetry structs, and a session that reconnects.

May import the SDK's root modules only.
"""
