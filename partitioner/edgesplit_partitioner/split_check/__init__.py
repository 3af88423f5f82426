"""Runs a model whole and split at every boundary, in child processes, and compares the outputs (`edgectl check`). May
import `ir`, `onnx_format`, `profiling`, `sandbox` and the module `slicing` of the partitioner, and the SDK
(`edgesplit`)."""
