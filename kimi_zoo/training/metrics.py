"""`metrics.jsonl`, a line per step, and the picture of the losses."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final


@final
class MetricsLog:
    """`metrics.jsonl`, and the picture made from it."""

    def __init__(self, output: Path, on_metrics: Callable[[dict[str, Any]], None], *, writes: bool = True):
        """**Arguments:** `writes`: whether this process writes the files; one of several does."""
        self._writes = writes
        self._path = output / "metrics.jsonl"
        self._picture = output / "loss.png"
        self._on_metrics = on_metrics
        self._file: Any = None
        self.lines: list[dict[str, Any]] = []

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file is not None:
            self._file.close()

    def keep(self, step: int) -> None:
        """Forgets what a run that was stopped wrote behind its last checkpoint."""
        lines = self._path.read_text().splitlines() if self._path.exists() and step else []
        for text in lines:
            try:
                line = json.loads(text)
            except ValueError:
                break  # the process died while it wrote
            if line["step"] <= step:
                self.lines.append(line)
        if not self._writes:
            return
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        os.replace(temporary, self._path)
        self._file = open(self._path, "a")  # noqa: SIM115

    def write(self, line: dict[str, Any]) -> None:
        """Adds a line."""
        self.lines.append(line)
        if not self._writes:
            return
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._on_metrics(line)

    def draw(self) -> None:
        """Draws the losses."""
        if self._writes:
            draw_losses(self.lines, self._picture)


def draw_losses(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """A picture of training and validation loss against steps."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.subplots()
        for name, style, label in (("loss", "-", "training batch"), ("validation_loss", "o-", "held out")):
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            if name == "validation_loss" and lines and "initial_validation_loss" in lines[0]:
                points.insert(0, (0, lines[0]["initial_validation_loss"]))
            if points:
                axes.plot(*zip(*points, strict=True), style, linewidth=0.9, markersize=3, label=label)
        axes.set(xlabel="step", ylabel="loss, nats per token")
        if axes.lines:
            axes.legend(frameon=False)
        temporary = path.with_suffix(".tmp")
        figure.savefig(temporary, format="png", dpi=120)
    os.replace(temporary, path)
