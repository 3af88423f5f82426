"""Everything that depends on the TFLite file format: reading, checking and writing its flatbuffer, grouping its
operators into layers, counting their work, a trial run in a sandboxed child process, and timing single layers. May
import `ir` and `sandbox` of the partitioner and the SDK (`edgesplit`), no other package of the partitioner."""
