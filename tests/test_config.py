"""`PagedConfig`: accepted values survive a round trip through a dict, errors name refused ones."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged import PagedConfig, PrefixTiers, VirtualStorage, config

COUNTS = st.none() | st.integers(1, 10**9)
VALID: dict[str, st.SearchStrategy[Any]] = {
    "block_size": st.sampled_from([4, 8, 16, 32, 64, 128, 256, "auto"]),
    "num_blocks": COUNTS,
    "memory_fraction": st.none() | st.floats(0, 1, exclude_min=True),
    "prefix_caching": st.booleans(),
    "kv_dtype": st.sampled_from([None, "int8", "fp8_e4m3", "fp8_e5m2"]),
    "max_num_batched_tokens": st.integers(1, 10**9),
    "max_chunk_tokens": COUNTS,
    "max_num_seqs": st.integers(1, 10**9),
    "preemption": st.sampled_from(["auto", "recompute", "swap"]),
    "capture": st.booleans(),
    "batch_invariant": st.booleans(),
    "cache_salt": st.none() | st.text("aé ", min_size=1),
    "idle_release_seconds": st.none() | st.floats(0, 1e9) | st.integers(0, 10**9),
    "speculation": st.sampled_from([None, "ngram"]),
    "prefix_tiers": st.none()
    | st.builds(PrefixTiers, st.none() | st.text(min_size=1), st.integers(0, 10**12)),
    "storage": st.just("blocks")
    | st.builds(VirtualStorage, st.none() | st.just(1 << 16), st.booleans(), st.integers(1)),
}
OPTIONS = st.fixed_dictionaries({}, optional=VALID).filter(
    lambda options: (
        (options.get("prefix_caching", True) or options.get("prefix_tiers") is None)
        and (options.get("kv_dtype") is None or options.get("storage", "blocks") == "blocks")
        and (options.get("block_size") != "auto" or options.get("num_blocks") is None)
    )
)


def test_every_knob_is_drawn() -> None:
    assert list(VALID) == [field.name for field in dataclasses.fields(PagedConfig)]


@pytest.mark.slow
@given(OPTIONS)
def test_a_saved_config_is_the_same_config(options: dict[str, Any]) -> None:
    made = PagedConfig(**options)
    assert PagedConfig.coerce(json.loads(json.dumps(made.to_dict()))) == made
    assert PagedConfig.coerce(options) == made and PagedConfig.coerce(made) is made
    assert {name: getattr(made, name) for name in options} == options


@given(st.integers() | st.floats() | st.booleans() | st.text("16 ") | st.none())
def test_block_sizes_are_powers_of_two(size: Any) -> None:
    if type(size) is int and size in (4, 8, 16, 32, 64, 128, 256):
        assert PagedConfig(block_size=size).block_size == size
    else:
        with pytest.raises(ValueError, match=r"`block_size` is .*power of two from 4 to 256"):
            PagedConfig(block_size=size)


@given(
    st.sampled_from(["num_blocks", "max_num_batched_tokens", "max_chunk_tokens", "max_num_seqs"]),
    st.integers(max_value=0) | st.floats() | st.booleans() | st.text("4 "),
)
def test_counts_are_positive(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is .*: .*at least 1"):
        PagedConfig(**{name: value})


FRACTION = "`memory_fraction` is .*above 0 and at most 1"
SECONDS = "`idle_release_seconds` is .*None or a finite number of at least 0"
TIERS = "`prefix_tiers` has no option `path`. The options are disk_path, disk_bytes, host_bytes"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("memory_fraction", x, FRACTION) for x in (0, -0.5, 1.01, float("nan"), True, "0.5")),
        *(("idle_release_seconds", x, SECONDS) for x in (-1, -0.5, float("nan"), float("inf"))),
        *(("idle_release_seconds", x, SECONDS) for x in (True, "60")),
        ("prefix_caching", 1, "`prefix_caching` is 1"),
        ("capture", None, "`capture` is None"),
        ("preemption", "never", "`preemption` is 'never'"),
        ("cache_salt", "", "`cache_salt` is ''"),
        ("kv_dtype", "int4", "`kv_dtype` is 'int4'"),
        ("prefix_tiers", {"path": "folder"}, TIERS),
        ("prefix_tiers", 7, "`prefix_tiers` is 7: it must be None, a folder's path or a `PrefixT"),
        ("prefix_tiers", "", "`disk_path` is ''"),
        ("prefix_tiers", {"disk_bytes": -1}, "`disk_bytes` is -1: .*at least 0"),
        ("prefix_tiers", {"host_bytes": 0.5}, "`host_bytes` is 0.5"),
    ],
)
def test_bad_values_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedConfig(**{name: value})


def test_unknown_keys_and_other_types_are_named() -> None:
    named = {
        "blocksize": "`cache_config` has no option `blocksize`: did you mean `block_size`",
        "max_new_tokens": "no option `max_new_tokens`: `max_new_tokens` is an argument of `generat",
        "num_beams": "no option `num_beams`: `num_beams` is an argument of `generate`. The options",
    }
    for name, message in named.items():
        with pytest.raises(ValueError, match=message):
            PagedConfig.coerce({name: 8})
    with pytest.raises(ValueError, match="`block_size` instead of `blocksize`, `capture` instead"):
        PagedConfig.coerce({"blocksize": 8, "captures": True})
    with pytest.raises(ValueError, match="`cache_config` is 16: it must be None"):
        PagedConfig.coerce(16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`prefix_tiers` is .*None with `prefix_caching=False`"):
        PagedConfig(prefix_caching=False, prefix_tiers="folder")
    assert PagedConfig.coerce(None) == PagedConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        PagedConfig().block_size = 8  # type: ignore[misc]


def test_numbers_of_numpy_can_be_saved() -> None:
    made = PagedConfig(block_size=np.int64(32), memory_fraction=np.float32(0.5))
    saved = json.loads(json.dumps(made.to_dict()))
    assert saved == PagedConfig(block_size=32, memory_fraction=0.5).to_dict()


def test_tiers_are_given_as_a_folder_or_as_a_dict() -> None:
    tiers, given = PrefixTiers("folder", 1 << 30), {"disk_path": "folder", "disk_bytes": 1 << 30}
    assert PagedConfig(prefix_tiers="folder").prefix_tiers == PrefixTiers("folder")
    assert PagedConfig(prefix_tiers=given).prefix_tiers == tiers
    saved = json.loads(json.dumps(PagedConfig(prefix_tiers=tiers).to_dict()))
    assert PagedConfig(**saved).prefix_tiers == tiers


@pytest.mark.parametrize(
    ("cls", "name", "values"),
    [
        (PagedConfig, "prefix_tiers", ["f", Path("f"), {"disk_path": "f"}, PrefixTiers("f"), None]),
        (PagedConfig, "storage", ["virtual", {"blocks_ahead": 2}, VirtualStorage()]),
        (PrefixTiers, "disk_path", ["folder", Path("folder"), None]),
    ],
)
def test_annotations_admit_what_the_constructor_takes(
    cls: Any, name: str, values: list[Any]
) -> None:
    types = tuple(get_origin(each) or each for each in get_args(get_type_hints(cls)[name]))
    for value in values:
        cls(**{name: value})
        assert isinstance(value, types)


def test_defaults_are_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list is refused by name."""
    for name in ("block_size", "kv_dtype", "storage", "prefix_tiers"):
        monkeypatch.setenv(config.CONFIG_VARIABLE, json.dumps({name: [1]}))
        message = rf"{config.CONFIG_VARIABLE} sets invalid defaults: `{name}` is \[1\]: it must be "
        with pytest.raises(ValueError, match=message):
            runpy.run_path(config.__file__)
    for value in ("folder", {"disk_path": "folder"}):
        monkeypatch.setenv(config.CONFIG_VARIABLE, json.dumps({"prefix_tiers": value}))
        made = runpy.run_path(config.__file__)["PagedConfig"]()
        assert made.prefix_tiers.disk_path == "folder" and hash(made)
