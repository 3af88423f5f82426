"""How often digits.onnx is right on the held-out frames. Needs numpy, pillow and onnxruntime only.

python evaluate.py
python evaluate.py --model digits.tflite        the same network as TFLite; needs ai-edge-litert instead
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def read_frame(file: Path | BinaryIO) -> NDArray[np.float32]:
    """A JPEG as the model wants it: (1, 3, 128, 128), RGB, scaled to 0..1."""
    pixels = np.asarray(Image.open(file).convert("RGB"), dtype=np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))[None] / np.float32(255)


def opened(model: Path) -> Callable[[NDArray[np.float32]], int]:
    """The model as a function from a frame to a digit."""
    if model.suffix == ".tflite":
        from ai_edge_litert.interpreter import Interpreter

        interpreter = Interpreter(model_path=str(model), num_threads=1)
        interpreter.allocate_tensors()
        taken, given = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]

        def ask(frame: NDArray[np.float32]) -> int:
            interpreter.set_tensor(taken, np.ascontiguousarray(frame.transpose(0, 2, 3, 1)))
            interpreter.invoke()
            return int(interpreter.get_tensor(given).argmax())

        return ask
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return lambda frame: int(session.run(None, {"image": frame})[0].argmax())


def mistakes(model: Path, frames: Path) -> dict[str, int]:
    """What the model took each frame for that it got wrong."""
    ask = opened(model)
    labels: dict[str, int] = json.loads((frames / "labels.json").read_text())
    answers = {name: ask(read_frame(frames / name)) for name in labels}
    return {name: answer for name, answer in answers.items() if answer != labels[name]}


def accuracy(model: Path, frames: Path) -> float:
    """The part of the frames that the model gets right, 0..1."""
    labels = json.loads((frames / "labels.json").read_text())
    return (len(labels) - len(mistakes(model, frames))) / len(labels)


def main() -> None:
    """Print the accuracy, and each frame that was taken for another digit."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=here / "digits.onnx")
    parser.add_argument("--frames", type=Path, default=here / "frames", help="folder with JPEGs and labels.json")
    chosen = parser.parse_args()
    wrong = mistakes(chosen.model, chosen.frames)
    total = len(json.loads((chosen.frames / "labels.json").read_text()))
    print(f"{total - len(wrong)} of {total} right: {(total - len(wrong)) / total:.1%}")
    for name, answer in sorted(wrong.items()):
        print(f"{name} was taken for {answer}")


if __name__ == "__main__":
    main()
