"""Child processes in which an untrusted model is loaded: their resource limits, and the meaning of their exit status.
May import the SDK (`edgesplit`) only, no other package of the partitioner."""
