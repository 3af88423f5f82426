"""Many devices at a gateway whose link to the cloud lies, breaks and comes back: each is answered once, and rightly."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edgesplit.http1.server import Request, Response
from edgesplit.offload_client.pool import HOP_CAUSE_HEADER
from support.agent_engine import eventually
from support.two_tier_servers import OUT, PATIENCE_S, SPOILT, GatewayHarness, outputs

DEVICES, EACH = 8, int(os.environ.get("EDGESPLIT_GATEWAY_REQUESTS", "15"))
TURNED_AWAY = (503, 504)


def test_a_faulty_link_to_the_cloud_spoils_no_answer(tmp_path: Path) -> None:
    """Devices ask at once, for rows that split, pass through and end at the gateway, while the cloud's answers are
    good, forged, cut short, or its server listens no more. Each request gets the whole model's answer under its own id,
    or is turned away in time; afterwards the cloud helps again."""
    seed = int(os.environ["EDGESPLIT_SEED"])
    print(f"seed {seed}")
    harness, lock, draw = GatewayHarness(tmp_path), threading.Lock(), random.Random(seed)
    scripts = [lambda request, good: good, *(script for script, _ in SPOILT.values())]

    def lie(request: Request, good: Response) -> Response:
        with lock:
            script = draw.choice(scripts) if draw.random() < 0.5 else scripts[0]
        return script(request, good) if request.method == "POST" and good.status == 200 else good

    def device(number: int) -> Counter[str]:
        seen: Counter[str] = Counter()
        rows = random.Random(seed + number)
        for count in range(EACH):
            row, name = rows.choice(("split", "cloud", "edge")), f"{number}-{count}"
            reply = harness.ask(row, name=name)
            if reply.status in TURNED_AWAY:
                seen["turned away"] += 1
                continue
            assert outputs(reply, name)["out"] == OUT, (row, name)
            seen[reply.headers.get(HOP_CAUSE_HEADER, "helped")] += 1
        return seen

    try:
        harness.proxy.script = lie
        with ThreadPoolExecutor(DEVICES + 1) as threads:
            asking = [threads.submit(device, number) for number in range(DEVICES)]
            harness.proxy.go()
            harness.proxy.come_back()
            seen = sum((one.result() for one in asking), Counter[str]())
        assert seen.total() == DEVICES * EACH
        assert seen["helped"] > 0
        harness.proxy.script = scripts[0]
        eventually("the cloud's help again", lambda: harness.cause() == "", PATIENCE_S)
    finally:
        harness.stop()
