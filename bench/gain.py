"""What choosing gains over the better of all-local and all-remote, on trained models, links and device profiles:
splitting, and where some answers may change, also compressed variants, cascades and lossy codecs (`changed_ways`).

Planned on one half of the samples: bytes, codecs' seconds and losses, and layers timed in runs of their own. Judged on
the other half's: the cut's seconds there beside those of the pure modes there, all-remote with every codec and with the
JPEG where frames are given. The device's seconds are the profile's in both; with `--predict-cloud` the cloud's are
those of the profile generic-x86. Every cell is published, those without gain too, with the reason. The sums here are
this script's own, not the planner's.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import msgspec
from gain_cells import SAMPLES_OF, ModelCells
from gain_picture import draw_gains
from gain_report import Cell, format_cells, print_measures, print_summary, summary_of, targets_of, three_measures
from record import finish, make_parser
from trained import Skipped, TrainedModel, left_out, load_models, model_names

from edgesplit import __version__
from edgesplit.device_profile import list_profiles

ALLOWED = (0.01, 0.02, 0.05)
SAMPLES = 16


def kept_cells(model: TrainedModel, options: Namespace) -> list[Cell]:
    """The model's cells; with `--work` those of an earlier run with the same options, where there are any."""
    profiles, runs = options.profile or list_profiles(), 0 if options.predict_cloud else options.runs
    made_by = [__version__, options.samples, runs, list(options.allowed), profiles]
    file = options.work / f"{model.name}-{model.given}.json" if options.work else None
    if file is not None and file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["made_by"] == made_by:
            return msgspec.convert(kept["cells"], list[Cell])
    cells = list(ModelCells(model, runs, options.samples, options.allowed).cells(profiles))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"made_by": made_by, "cells": [asdict(cell) for cell in cells]}
        file.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return cells


def run(options: Namespace) -> tuple[list[Cell], tuple[str, ...]]:
    """The cells of every model that was asked for, and what was left out."""
    cells: list[Cell] = []
    skipped: list[Skipped] = []
    for model in load_models(options.samples, options.model, tflite=True, counts=SAMPLES_OF):
        if isinstance(model, Skipped):
            skipped.append(model)
            print(f"skipped: {model.name}: {model.why}", flush=True)
            continue
        start = time.perf_counter()
        cells += kept_cells(model, options)
        print(f"{model.name} ({model.given}): {time.perf_counter() - start:.0f} s", flush=True)
    missing = left_out(skipped, options.model)
    if options.profile:
        missing += (f"profiles other than {', '.join(options.profile)} (not asked for)",)
    return cells, missing


def read_kept(folder: Path) -> tuple[list[Cell], tuple[str, ...]]:
    """The cells that earlier runs kept there, and the models of which there are none."""
    cells: list[Cell] = []
    missing: list[str] = []
    for name, given in model_names():
        file = folder / f"{name}-{given}.json"
        if file.is_file():
            cells += msgspec.convert(json.loads(file.read_text(encoding="utf-8"))["cells"], list[Cell])
        elif not name.endswith("_edgetpu.tflite"):  # needs an accelerator
            missing.append(f"{name} ({given}, not in {folder})")
    return cells, tuple(missing)


def main() -> int:
    """Measure, plan, judge, print, draw and write."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", action="append", default=[], help="only this one; may be given several times")
    parser.add_argument("--profile", action="append", default=[], help="only this one; default: all that ship")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"planned on, both halves together [{SAMPLES}]")
    parser.add_argument("--runs", type=int, default=30, help="timed runs of the whole model per half [30]")
    parser.add_argument("--predict-cloud", action="store_true", help="predict the cloud's seconds: on a busy machine")
    parser.add_argument("--allowed", nargs="*", type=float, default=ALLOWED, help="changed shares [0.01 0.02 0.05]")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep each model's cells there, and take kept ones")
    parser.add_argument("--report", action="store_true", help="measure nothing: report what is kept in --work")
    parser.add_argument("--table", type=Path, help="where the table of all cells is written")
    parser.add_argument("--svg", type=Path, help="where the picture is drawn")
    options = parser.parse_args()
    if options.report and not options.work:
        parser.error("--report needs --work DIR")
    if options.report:
        cells, missing = read_kept(options.work)
    else:
        cells, missing = run(options)
    table, summaries, measures = format_cells(cells), summary_of(cells), three_measures(cells)
    print(table)
    print_summary(summaries)
    print_measures(measures)
    if options.table:
        options.table.write_text(table + "\n", encoding="utf-8")
    if options.svg:
        draw_gains(
            {
                allowed: [cell.gain for cell in cells if cell.allowed == allowed]
                for allowed in sorted({cell.allowed for cell in cells})
            },
            options.svg,
        )
    results = {
        "samples": options.samples, "cloud": "predicted" if options.predict_cloud else "measured",
        "summary": summaries, "measures": measures, "cells": [asdict(cell) for cell in cells],
        "left_out": missing,
    }  # fmt: skip
    finish(results, targets_of(cells, missing), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
