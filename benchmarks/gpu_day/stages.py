"""The stages of a run, in the order of what they tell."""

from __future__ import annotations

from dataclasses import dataclass

MINUTES = 9.0
"""Length of the run that the stages' seconds are of."""


@dataclass(frozen=True)
class Stage:
    """
    Args:
        function (`str`): As `module:function`; it takes a [`Record`].
        seconds (`float`): Its part of a run of `MINUTES` minutes, without the imports; 0: all that
            is left.
        is_beside (`bool`): Whether it runs beside the stages after it, up to the first that
            `is_timed`.
        is_timed (`bool`): Whether it measures time, so that nothing else may run.
        is_interpreted (`bool`): Whether its kernels run in Triton's interpreter where there is no
            GPU.
        has_cpp (`bool`): Whether it also uses the C++ kernels on a machine with a GPU. They take
            long to build.
    """

    name: str
    title: str
    function: str
    seconds: float
    is_beside: bool = False
    is_timed: bool = False
    is_interpreted: bool = False
    has_cpp: bool = False


STAGES = (
    Stage("0", "kernels compiled ahead", "benchmarks.gpu_day.compiling:run", 90, is_beside=True),
    Stage(
        "a",
        "every kernel once, against its reference",
        "benchmarks.gpu_day.kernels:run",
        30,
        is_interpreted=True,
    ),
    Stage("b", "tokens equal to plain generate's, float32", "benchmarks.gpu_day.parity:run", 150),
    Stage("c", "attention alone", "benchmarks.gpu_day.attention:run", 40, is_timed=True),
    Stage("d", "steps of random models", "benchmarks.gpu_day.steps:run", 80, is_timed=True),
    Stage("e", "whole calls", "benchmarks.gpu_day.calls:run", 100, is_timed=True),
    Stage("f", "pytest -m gpu", "benchmarks.gpu_day.suite:run", 0, has_cpp=True),
)
