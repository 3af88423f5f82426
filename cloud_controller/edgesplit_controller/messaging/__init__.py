"""MQTT side of the controller: the embedded or external broker, the worker threads that ingest device messages and
publish chunks and statements, flood control, and the sharding of chunks over processes. May import `pki`, `storage`,
`settings` and `edgesplit`."""
