"""Child processes in which an untrusted model is loaded: their time and resource limits, and what their end means.
May import the SDK (`edgesplit`) only, no other package of the partitioner."""
