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

VALID: dict[str, st.SearchStrategy[Any]] = {
    "block_size": st.sampled_from([4, 8, 16, 32, 64, 128, 256, "auto"]),
    "num_blocks": st.none() | st.integers(1, 10**9),
    "memory_fraction": st.none() | st.floats(0, 1, exclude_min=True),
    "prefix_caching": st.booleans(),
    "kv_dtype": st.sampled_from([None, "int8", "fp8_e4m3", "fp8_e5m2"]),
    "max_num_batched_tokens": st.integers(1, 10**9),
    "max_chunk_tokens": st.none() | st.integers(1, 10**9),
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


def test_every_knob_is_drawn() -> None:
    assert list(VALID) == [field.name for field in dataclasses.fields(PagedConfig)]


OPTIONS = st.fixed_dictionaries({}, optional=VALID).filter(
    lambda options: (
        (options.get("prefix_caching", True) or options.get("prefix_tiers") is None)
        and (options.get("kv_dtype") is None or options.get("storage", "blocks") == "blocks")
        and (options.get("block_size") != "auto" or options.get("num_blocks") is None)
    )
)


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


@pytest.mark.parametrize("value", [0, -0.5, 1.5, float("nan"), True, "0.5"])
def test_a_fraction_is_above_0_and_at_most_1(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`memory_fraction` is .*above 0 and at most 1"):
        PagedConfig(memory_fraction=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefix_caching", 1),
        ("capture", None),
        ("preemption", "never"),
        ("cache_salt", ""),
        ("kv_dtype", "int4"),
    ],
)
def test_other_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is {value!r}"):
        PagedConfig(**{name: value})


def test_unknown_keys_and_other_types_are_named() -> None:
    with pytest.raises(
        ValueError, match="`cache_config` has no option `blocksize`: did you mean `block_size`"
    ):
        PagedConfig.coerce({"blocksize": 8})
    for name in ("max_new_tokens", "num_beams"):
        with pytest.raises(
            ValueError,
            match=f"no option `{name}`: `{name}` is an argument of `generate`. The options",
        ):
            PagedConfig.coerce({name: 8})
    with pytest.raises(ValueError, match="`cache_config` is 16: it must be None"):
        PagedConfig.coerce(16)  # type: ignore[arg-type]
    assert PagedConfig.coerce(None) == PagedConfig()


def test_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PagedConfig().block_size = 8  # type: ignore[misc]


def test_numbers_of_numpy_can_be_saved() -> None:
    made = PagedConfig(block_size=np.int64(32), memory_fraction=np.float32(0.5))
    assert (
        json.loads(json.dumps(made.to_dict()))
        == PagedConfig(block_size=32, memory_fraction=0.5).to_dict()
    )


@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), float("inf"), True, "60"])
def test_idle_seconds_are_finite_and_not_negative(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"`idle_release_seconds` is .*None or a finite number of at least 0"
    ):
        PagedConfig(idle_release_seconds=value)


def test_tiers_are_given_as_a_folder_or_as_a_dict() -> None:
    tiers = PrefixTiers("folder", disk_bytes=1 << 30)
    assert PagedConfig(prefix_tiers="folder").prefix_tiers == PrefixTiers("folder")
    assert (
        PagedConfig(prefix_tiers={"disk_path": "folder", "disk_bytes": 1 << 30}).prefix_tiers
        == tiers
    )
    saved = json.loads(json.dumps(PagedConfig(prefix_tiers=tiers).to_dict()))
    assert PagedConfig(**saved).prefix_tiers == tiers


@pytest.mark.parametrize(
    ("cls", "name", "values"),
    [
        (
            PagedConfig,
            "prefix_tiers",
            ["folder", Path("folder"), {"disk_path": "folder"}, PrefixTiers("folder"), None],
        ),
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


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"path": "folder"},
            (
                "`prefix_tiers` has no option `path`. The options are disk_path, disk_bytes,"
                " host_bytes"
            ),
        ),
        (7, "`prefix_tiers` is 7: it must be None, a folder's path or a `PrefixTiers`"),
        ("", "`disk_path` is ''"),
        ({"disk_bytes": -1}, "`disk_bytes` is -1: .*at least 0"),
        ({"host_bytes": 0.5}, "`host_bytes` is 0.5"),
    ],
)
def test_bad_tiers_are_named(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PagedConfig(prefix_tiers=value)


def test_tiers_need_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match=r"`prefix_tiers` is .*None with `prefix_caching=False`"):
        PagedConfig(prefix_caching=False, prefix_tiers="folder")


@pytest.mark.parametrize("name", ["block_size", "kv_dtype", "storage", "prefix_tiers"])
def test_a_list_in_the_environment_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(config.CONFIG_VARIABLE, json.dumps({name: [1]}))
    with pytest.raises(
        ValueError,
        match=rf"{config.CONFIG_VARIABLE} sets invalid defaults: `{name}` is \[1\]: it must be ",
    ):
        runpy.run_path(config.__file__)


@pytest.mark.parametrize("value", ['"folder"', '{"disk_path": "folder"}'])
def test_tiers_are_set_by_the_environment(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.CONFIG_VARIABLE, f'{{"prefix_tiers": {value}}}')
    made = runpy.run_path(config.__file__)["PagedConfig"]()
    assert made.prefix_tiers.disk_path == "folder" and hash(made)
