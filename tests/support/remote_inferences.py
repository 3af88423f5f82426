"""The device's side of inferences through the controller, for devices whose answers a test writes."""

from __future__ import annotations

import numpy as np

from edgesplit.mqtt import messages
from edgesplit.mqtt.remote_inference import (
    AnswerHead,
    BodyHead,
    InferenceJob,
    Reply,
    Request,
    SignedJob,
    pieces,
)
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import Signed
from support.controller_process import Device


def listen(device: Device) -> None:
    """Hear what is asked from now on."""
    device.session.subscribe([messages.topic(device.name, "infer")], qos=1)
    device.fetch("metadata/timestamp.json", 100_000)  # its answer comes after the subscription


def next_request(device: Device) -> Request:
    return messages.decode(device.next(messages.topic(device.name, "infer"))[0], Request)  # type: ignore[arg-type]


def received(device: Device) -> InferenceJob:
    """The next job; its body is dropped."""
    while not isinstance(message := next_request(device), SignedJob):
        pass
    return messages.decode(messages.decode(message.signed, Signed).payload, InferenceJob)


def reply(device: Device, job: InferenceJob, *said: Reply, as_: str = "") -> None:
    topic = messages.infer_reply_topic(as_ or device.name, job.process)
    for message in said:
        device.session.publish(topic, messages.encode(message), qos=1, wait_s=10)


def answer(job: InferenceJob, value: float) -> list[Reply]:
    response = oip.InferResponse("digits", {"y": np.full((1, 4), value, np.float32)})
    buffers, length = oip.encode_response(response)
    body = b"".join(buffers)
    return [AnswerHead(job.id, BodyHead.of(body, length)), *pieces(job.id, body)]
