"""Finishes inferences: the far halves of releases over the Open Inference Protocol, in the cloud or on a gateway."""
