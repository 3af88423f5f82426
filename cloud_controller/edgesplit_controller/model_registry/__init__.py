"""Registry of pushed models with their input specs and samples, and the golden pairs computed from whole models. May
import `storage`, `errors`, `edgesplit_partitioner` and `edgesplit`."""
