"""Worker processes: each release runs its slices in a process of its own, so that a crash, hang or memory leak of a
model affects nothing else (docs/decisions/0020-workers.md).

On the agent's side: `supervised_host` (a worker that is replaced when it is lost), `process` (one worker process),
`tensor_allocator` (shared memory for tensors). On the worker's side: `child`. Between them: `ipc` (messages) and
`tensor_refs` (tensors in shared memory). `direct` is lanes, on both sides: direct channels from applications to the
worker. `watchdog_policy` decides, as pure functions, when a worker must be killed. May import the SDK, and
no other package of the agent.
"""
