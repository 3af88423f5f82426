"""The offload server: runs the remote halves of releases, in the cloud or on a gateway, by the Open Inference Protocol.

A room of its own: it may import the SDK, and of the SDK's packages not the clients of applications or the controller.
"""
