"""Figures for notebooks and scripts. The libraries that draw are imported when a picture or a table is asked for."""

from __future__ import annotations

import functools
import importlib
import io
from typing import Any

WIDTH, DPI = 8.0, 100  # inches; 800 pixels


def require(module: str) -> Any:
    """The module. Raises `ImportError`, naming the extra that brings it, where its library is not installed."""
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != library:  # it is there, and lacks something itself
            raise
        raise ImportError(f'this needs {library}: pip install "hf_paged[viz]"', name=library) from error


def new_axes(height: float) -> Any:
    """Axes in a figure of their own, 800 pixels wide and `height` inches high."""
    figure_class = _shown_in_notebooks(require("matplotlib.figure").Figure)
    return figure_class(figsize=(WIDTH, height), dpi=DPI, layout="constrained").add_subplot()


@functools.cache
def _shown_in_notebooks(figure_class: Any) -> Any:
    class Picture(figure_class):
        """A figure that notebooks show though pyplot, which would show it a second time, does not know of it."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return Picture


def add_legend(ax: Any, handles: list[Any], columns: int) -> None:
    """A legend without a frame above the axes."""
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "frameon": False}
    ax.legend(handles=handles, ncols=columns, fontsize=8.5, handlelength=1.1, columnspacing=1.0, **place)
