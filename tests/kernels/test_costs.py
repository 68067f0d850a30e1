"""Tables of attention time by block size: the table that a device gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_paged import config, kernels
from hf_paged.kernels import costs

CPU = torch.device("cpu")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(costs, "FOLDER", tmp_path)
    monkeypatch.delenv(kernels.BACKEND_VARIABLE, raising=False)
    return tmp_path


def write(folder: Path, name: str, **tables: dict[str, float]) -> None:
    found = {key.replace("_", "/", 1): times for key, times in tables.items()}
    (folder / f"{name}.json").write_text(json.dumps({"costs": found}))


def test_the_machines_own_table_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "machine_name", lambda device: "mine")
    monkeypatch.setattr(costs, "LEVELS", ["better", "worse"])
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "gather")
    write(folder, "better", gather_float32={"16": 2}, gather_int8={"8": 3})
    write(folder, "worse", gather_int8={"8": 4}, gather_bfloat16={"8": 5})
    write(folder, "mine", gather_float32={"16": 1, "32": 0.5})
    half = torch.bfloat16
    for arguments, times, reason in (
        ((CPU, torch.float32), {16: 1.0, 32: 0.5}, "times of gather/float32 on mine"),
        ((CPU, half, "int8"), {8: 3.0}, "times of gather/int8 on better"),
        ((CPU, half), {8: 5.0}, "times of gather/bfloat16 on worse"),
        ((CPU, torch.float64), {}, "no times of gather/float64 were measured on mine"),
        ((torch.device("meta"), half), {}, ""),
    ):
        found, why = costs.find_costs(*arguments)
        assert found == times and reason in why and (times or "benchmarks.tune" in why), why


def test_a_kernel_is_asked_for_that_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = ("cpp", "gather", "reference")
    tables = {f"{name}_float32": {"16": time} for time, name in enumerate(backends, 1)}
    write(folder, costs.machine_name(CPU), **tables)
    for time, name in enumerate(backends, 1):
        monkeypatch.setattr(kernels.cpp, "is_available", lambda name=name: name == "cpp")
        monkeypatch.setenv(kernels.BACKEND_VARIABLE, "reference" if name == "reference" else "")
        assert costs.find_costs(CPU, torch.float32)[0] == {16: time}


def test_a_processor_is_named_by_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [(level, set(flags.split()), "x86_64") for level, (_, flags) in costs.LEVELS.items()]
    others = [("x86_64", set[str](), "x86_64"), ("aarch64", set[str](), "aarch64")]
    for name, flags, machine in levels + others:
        monkeypatch.setattr(costs, "cpu_flags", lambda flags=flags: flags)
        monkeypatch.setattr(costs.platform, "machine", lambda machine=machine: machine)
        assert costs.machine_name(CPU) == name


def test_tables_that_ship_name_sizes_that_may_be_chosen() -> None:
    tables = [costs._load_table(path) for path in costs.FOLDER.glob("*.json")]
    assert tables
    for times in (times for table in tables for times in table.values()):
        assert config.PagedConfig.block_size in times and min(times.values()) > 0
        assert all(config.PagedConfig(block_size=size) for size in times)
