"""What answers mean and what may be given as input: against a server that tells its model's interface, as agents do."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from edgesplit.client.async_client import AsyncClient
from edgesplit.client.client import Client
from edgesplit.client.model_interface import FRESH_S, InterfaceCache, ModelInterface
from edgesplit.errors import UsageError
from edgesplit.http1.response import Reply
from edgesplit.http1.server import Request, Response, Server, json_response
from edgesplit.input_spec import decode_picture, parse_input_spec
from edgesplit.oip import protocol as oip
from edgesplit.output_kind import OutputKind
from edgesplit.release.manifest import TensorSpec

BOXES = OutputKind(kind="boxes", outputs=("s", "b"), layout="scores+boxes", threshold=0.35, names=("cat",))
LABELS = OutputKind(kind="labels", outputs=("s",), names=("cat", "dog"))
OUTPUTS = {
    "s": np.array([[[0.07, 0.93]]], np.float32), "b": np.array([[[0.1, 0.1, 0.5, 0.5]]], np.float32),
}  # fmt: skip


def spec_of(text: str, side: int = 10) -> object:
    """The spec for a square tensor."""
    return msgspec.structs.replace(parse_input_spec(text), tensor="x", tensor_width=side, tensor_height=side)


@dataclass
class Told:
    """A server of one model with this interface: it keeps the inputs, and always answers the same."""

    interface: dict[str, object] = field(default_factory=dict)
    inputs: tuple[str, ...] = ("frame",)
    seen: list[dict[str, np.ndarray]] = field(default_factory=list)
    asked: int = 0

    def __call__(self, request: Request) -> Response:
        if request.method == "GET":
            self.asked += 1
            specs = [TensorSpec(name, "UINT8", (-1,)) for name in self.inputs]
            return json_response(200, oip.model_metadata("m", ["1"], specs, [], msgspec.to_builtins(self.interface)))
        inferred = oip.decode_request(request.body, oip.header_length(request.headers))
        self.seen.append({name: value.copy() for name, value in inferred.inputs.items()})
        buffers, length = oip.encode_response(oip.InferResponse("m", OUTPUTS, id=inferred.id), inferred.binary_outputs)
        return Response(200, {} if length is None else {oip.HEADER_LENGTH: str(length)}, buffers)


@pytest.fixture
def told() -> Told:
    return Told({"input_spec": spec_of("image/png 20x10"), "output_kind": BOXES})


@pytest.fixture
def server(told: Told) -> Iterator[Server]:
    running = Server(told)
    running.start()
    yield running
    running.stop(0.5)


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as own:
        yield own


def picture(width: int = 200, height: int = 100) -> Image.Image:
    """A picture with a gradient, so that a wrong order of its colours or axes is seen."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, :, 0], pixels[:, :, 1] = np.arange(width) % 256, (np.arange(height) % 256)[:, None]
    return Image.fromarray(pixels)


def encoded(image: Image.Image, format_: str = "PNG") -> bytes:
    """The picture in a file of that format."""
    image.save(content := io.BytesIO(), format_)
    return content.getvalue()


def test_an_answer_has_boxes_in_pixels_of_the_picture(client: Client, told: Told) -> None:
    """The interface is asked for when a box is, once for many answers; outputs are as the server gave them."""
    frame = encoded(picture())
    answers = [client.infer("m", {"frame": frame}) for _ in range(3)]
    assert told.asked == 0
    assert [str(box) for answer in answers for box in answer.boxes] == ["cat 0.93 at 20,10,100,50"] * 3
    assert told.asked == 1
    np.testing.assert_array_equal(answers[0].outputs["b"], OUTPUTS["b"])
    with pytest.raises(UsageError, match="gives no labels"):
        _ = answers[0].labels


def test_an_answer_without_a_kind_says_how_to_declare_one(client: Client, told: Told) -> None:
    """The outputs are there all the same."""
    told.interface = {}
    answer = client.infer("m", {"frame": b"x"})
    assert answer.kind is None
    with pytest.raises(UsageError, match="push it with --output"):
        _ = answer.boxes


def test_answers_of_a_stream_have_boxes_after_its_end(client: Client) -> None:
    """The stream's own connections are closed by then."""
    answers = list(client.stream("m", ({"frame": encoded(picture())} for _ in range(2))))
    assert [answer.boxes[0].name for answer in answers if not isinstance(answer, Exception)] == ["cat", "cat"]


def test_an_asynchronous_clients_answers_need_the_interface_once(server: Server, told: Told) -> None:
    """An attribute cannot wait: the error says what to await, and then labels are there."""
    told.interface = {"output_kind": LABELS}

    async def run() -> list[str]:
        async with AsyncClient(server.url) as client:
            answer = await client.infer("m", {"x": np.zeros(3, np.float32)})
            with pytest.raises(UsageError, match=r"await client.interface\(model\)"):
                _ = answer.labels
            await client.interface("m")
            return [str(label) for label in answer.labels]

    assert asyncio.run(run()) == ["dog 0.93", "cat 0.07"]


def test_an_interface_is_asked_for_again_after_a_while() -> None:
    """A deployment may have changed it; what was known last stays readable."""
    now = [100.0]
    cache = InterfaceCache(now=lambda: now[0])
    reply = Reply(200, {}, msgspec.json.encode({"inputs": [{"name": "frame"}], "edgesplit": {"output_kind": LABELS}}))
    assert cache.keep("/v2/models/m", reply) == ModelInterface(output_kind=LABELS, inputs=("frame",))
    now[0] += FRESH_S - 1
    assert cache.find("/v2/models/m") is not None
    now[0] += 1
    assert cache.find("/v2/models/m") is None and cache.last("/v2/models/m") is not None


def given_frames(tmp_path: Path) -> dict[str, object]:
    """One picture in every form that is accepted."""
    image = picture()
    path = tmp_path / "a.png"
    path.write_bytes(encoded(image))
    return {
        "bytes": path.read_bytes(), "path": path, "text": str(path), "file": path.open("rb"), "picture": image,
        "array": np.asarray(image), "by name": {"frame": image},
    }  # fmt: skip


@pytest.mark.parametrize("form", ["bytes", "path", "text", "file", "picture", "array", "by name"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_picture_is_accepted_in_every_form(
    form: str, asynchronous: bool, server: Server, told: Told, tmp_path: Path
) -> None:
    """What arrives has its pixels: PNG is lossless."""
    given = given_frames(tmp_path)[form]

    async def run() -> None:
        async with AsyncClient(server.url) as client:
            await client.infer("m", given)  # type: ignore[arg-type]

    if asynchronous:
        asyncio.run(run())
    else:
        with Client(server.url) as client:
            client.infer("m", given)  # type: ignore[arg-type]
    spec = told.interface["input_spec"]
    arrived = decode_picture(spec, told.seen[0]["frame"].tobytes())  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.asarray(arrived), np.asarray(picture()))


def test_a_stream_accepts_what_infer_does(client: Client, told: Told) -> None:
    """Each frame in another form."""
    frames = [picture(), np.asarray(picture()), {"frame": encoded(picture())}]
    assert len(list(client.stream("m", frames))) == 3
    assert len({seen["frame"].tobytes() for seen in told.seen}) == 1


def test_raw_frames_are_made_of_pictures_of_their_size(client: Client, told: Told) -> None:
    """In the pixel format of the model; another size is not resized behind the application's back."""
    told.interface = {"input_spec": spec_of("image/raw 20x10 nv12")}
    client.infer("m", picture(20, 10))
    assert told.seen[0]["frame"].size == 20 * 10 * 3 // 2
    with pytest.raises(UsageError, match="raw frames of 20x10 pixels, and the picture has 200x100"):
        client.infer("m", picture())


def test_an_array_is_the_only_input(client: Client, told: Told, tmp_path: Path) -> None:
    """As it is, or from an .npy or .npz."""
    told.interface, told.inputs = {}, ("x",)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(tmp_path / "x.npy", array)
    np.savez(tmp_path / "x.npz", x=array)
    for given in (array, tmp_path / "x.npy", tmp_path / "x.npz"):
        client.infer("m", given)
        np.testing.assert_array_equal(told.seen[-1]["x"], array)


def test_an_array_for_several_inputs_is_asked_for_by_name(client: Client, told: Told) -> None:
    """Which one it is cannot be known; the error tells their names."""
    told.interface, told.inputs = {}, ("x", "state")
    with pytest.raises(UsageError, match=r"inputs x, state: give them by name, as in \{'x': …, 'state': …\}"):
        client.infer("m", np.zeros(3))


def test_sound_is_given_as_samples(client: Client, told: Told) -> None:
    """16 bits each; other numbers would be taken for something else."""
    told.interface = {"input_spec": msgspec.structs.replace(parse_input_spec("audio/pcm16 16k 4"), tensor="x")}
    client.infer("m", np.array([1, -2, 3, -4], np.int16))
    assert told.seen[0]["frame"].tobytes() == b"\x01\x00\xfe\xff\x03\x00\xfc\xff"
    with pytest.raises(UsageError, match=r"samples as int16 \[4\], not float32 \[4\]"):
        client.infer("m", np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (np.zeros((3, 4), np.float32), r"uint8 \[height, width, 3\] in RGB.* not float32 \[3, 4\]"),
        (np.zeros((4, 4, 4), np.uint8), r"not uint8 \[4, 4, 4\]"), (io.StringIO("x"), "mode 'rb'"),
        ([1, 2], "by name, not as one list"), ("/nowhere/a.png", "No such file"), (7, "by name, not as one int"),
    ],
)  # fmt: skip
def test_what_cannot_be_the_input_says_what_can(client: Client, given: object, why: str) -> None:
    """Before anything is sent."""
    with pytest.raises(UsageError, match=why):
        client.infer("m", given)  # type: ignore[arg-type]


def test_a_picture_for_a_model_of_tensors_is_refused(client: Client, told: Told) -> None:
    """The inputs are named."""
    told.interface, told.inputs = {}, ("x",)
    with pytest.raises(UsageError, match="takes tensors; its inputs are x"):
        client.infer("m", picture())
