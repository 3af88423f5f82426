"""Everything that depends on the ONNX file format: checking and optimising a model that was pushed, grouping its
operators into layers, counting their work, writing slices and model archives, and exporting a row's remote half as one
ONNX file. May import `ir` and `sandbox` of the partitioner and the SDK (`edgesplit`), no other package of the
partitioner."""
