"""Models in processes of their own: what a model does to its process, it does to nothing else.

The agent's side is `hosted` (a worker that is replaced when it is lost), `process` (one of its lives) and `tensor_room`
(the memory that both see); the process's side is `child`. Between them: `talk` (messages) and `placing` (tensors in
shared memory). What decides is in `judging`, pure.
"""
