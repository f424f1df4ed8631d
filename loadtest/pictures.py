"""How all pictures are drawn: as SVG whose text stays text, and the same figures give the same file."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure


def svg_style() -> AbstractContextManager[None]:
    """The settings to draw and to save under."""
    return rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "dflash", "font.size": 9, "axes.titlesize": 10}
    )


def save_svg(figure: Figure, path: Path) -> None:
    """Write a figure; makes its folder. White behind it, so that it reads on dark pages too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with svg_style():
        figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")
