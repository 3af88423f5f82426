"""Compressed variants of a model (int8, fp16), and the gate that every variant passes before it may take the model's
place: the share of answers that it changes, bounded on samples that chose nothing. May import `bounds`, `ir`,
`onnx_format`, `tflite_format`, `profiling`, `sandbox` and the module `model_loader` of the partitioner, and the SDK
(`edgesplit`)."""
