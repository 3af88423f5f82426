"""Answers Open Inference Protocol bodies that operators send through the controller.

They share nothing with the applications of the device: no stream, no stale answer, no request id, no shared memory; and
their requests have precedence. Of a request's options those count that say which answers may be given. An answer is
data, too: an output that may not leave the device is not sent.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgesplit.errors import UsageError
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import InferOptions, from_parameters
from edgesplit.oip.report import to_parameters
from edgesplit.release.privacy_floor import PrivacyFloor, private_tensors
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.serving.engine import Engine, find_release
from edgesplit_agent.serving.request import served_name


class RemoteRequests:
    """Runs remote requests on the engine. `floor` is the device's own privacy floor."""

    def __init__(self, engine: Engine, floor: PrivacyFloor) -> None:
        self._engine = engine
        self._floor = floor

    def answer(self, model: str, body: bytes, json_bytes: int | None, deadline_s: float) -> tuple[bytes, int | None]:
        """Run `model` (`name` or `name@version`) on a request's body; returns the answer's body and the length of its
        JSON part. Raises what `Engine.infer` does, MalformedMessage, and UsageError for outputs that must stay here."""
        release, name = find_release(model, self._engine.serving), served_name(model)
        request = oip.decode_request(body, json_bytes)
        names = oip.pick_outputs({spec.name: spec.name for spec in release.outputs}, request.outputs)
        self._check_may_leave(release, names)
        options = answer_limits(from_parameters(request.parameters))
        answer = self._engine.infer(name, request.inputs, deadline_s=deadline_s, options=options, background=True)
        response = oip.InferResponse(
            model=name, version=release.version, id=request.id, outputs=oip.pick_outputs(answer.outputs, tuple(names)),
            parameters=to_parameters(answer.report),
        )  # fmt: skip
        buffers, length = oip.encode_response(response, request.binary_outputs)
        return b"".join(buffers), length

    def _check_may_leave(self, release: LoadedRelease, outputs: Iterable[str]) -> None:
        """UsageError if one of the outputs must stay on this device."""
        private = private_tensors(release.plan, release.manifest, self._floor)
        if kept := sorted(private.intersection(outputs)):
            raise UsageError(f"{', '.join(kept)} may never leave this device: run `edgectl infer` on the device itself")


def answer_limits(options: InferOptions) -> InferOptions:
    """Those of the options that say which answers may be given."""
    return InferOptions(least_accuracy=options.least_accuracy, refuse_unsure=options.refuse_unsure)
