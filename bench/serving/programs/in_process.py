"""`session.run` without any server: the upper bound for every server. Counts as `load.py` does, with the same job and
output."""

from __future__ import annotations

import json
import sys
import threading
import time

import numpy as np
import onnxruntime


def main() -> None:
    """Run `connections` threads with one session, each run with as many inferences as `batch` says."""
    job = json.loads(sys.stdin.readline())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    if job["exact"]:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(job["model"], options, providers=["CPUExecutionProvider"])
    sample = np.load(job["sample"])
    batch = job["batch"]
    name, feed = session.get_inputs()[0].name, np.concatenate([sample] * batch)
    session.run(None, {name: feed})
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter() + job["warm_s"]
    end, latencies = begin + job["seconds"], []

    def run() -> None:
        while (start := time.perf_counter()) < end:
            session.run(None, {name: feed})
            now = time.perf_counter()
            if begin <= now <= end:
                latencies.extend([now - start] * batch)

    threads = [threading.Thread(target=run) for _ in range(job["connections"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"latencies_s": sorted(latencies), "refused": 0, "problem": ""}), flush=True)


if __name__ == "__main__":
    main()
