"""The first minutes on a GPU: whether everything works, and how fast. `python -m
benchmarks.gpu_day`."""
