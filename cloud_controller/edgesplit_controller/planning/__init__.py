"""Planning of models for device classes: measured and predicted costs, plans made by the partitioner, and their curves
over bandwidth. May import `model_registry`, `storage`, `errors`, `edgesplit_partitioner` and `edgesplit`."""
