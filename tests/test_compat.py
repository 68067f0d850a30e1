"""Private names of transformers are accessed through `hf_paged.compat`; a missing one is named."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin

import hf_paged
from hf_paged import compat
from tests.support import models

PACKAGE = Path(compat.__file__).parent
NAME = re.compile(r'"(_[a-z][a-z_]+|ALL_CACHE_IMPLEMENTATIONS)"')
NAMES = set(NAME.findall(Path(compat.__file__).read_text()))


@pytest.mark.parametrize(
    "owner, name",
    [
        (GenerationMixin, "_sample"),
        (GenerationMixin, "_update_finished_beams"),
        (PreTrainedModel, "_supports_sdpa"),
        (configuration_utils, "ALL_CACHE_IMPLEMENTATIONS"),
    ],
)
def test_a_version_that_lacks_a_name_is_told_of_it(
    owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    message = rf"^transformers [\d.]+\S* has no \S*\.{name}, which hf_paged uses: install"
    with pytest.raises(ImportError, match=message):
        runpy.run_module(compat.__name__)


def test_what_a_newer_version_passes_beside_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = models.get("llama"), []

    def newer(
        self,
        generation_config,
        model_kwargs,
        mode,
        batch_size,
        max_cache_length,
        layout,
        device=None,
    ):
        seen.append((layout, device))
        own(self, generation_config, model_kwargs, mode, batch_size, max_cache_length)

    config, inputs = GenerationConfig(cache_implementation="paged"), {}
    hf_paged.uninstall()
    own = GenerationMixin._prepare_cache_for_generation
    with monkeypatch.context() as patch:
        patch.setattr(GenerationMixin, "_prepare_cache_for_generation", newer)
        hf_paged.install()
        model._prepare_cache_for_generation(
            config, inputs, None, 1, max_cache_length=16, layout="rows", device="cpu"
        )
        hf_paged.uninstall()
    hf_paged.install()
    assert seen == [("rows", "cpu")] and type(inputs[compat.OUTPUT_CACHE]) is hf_paged.PagedCache


@pytest.mark.slow
def test_no_other_module_names_them() -> None:
    assert len(NAMES) > 25
    for path in PACKAGE.rglob("*.py"):
        if path.samefile(compat.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_attribute = isinstance(node, ast.Attribute)
            name = node.attr if is_attribute else getattr(node, "value", None)
            own = is_attribute and ast.unparse(node.value) == "self"
            place = f"{path}:{getattr(node, 'lineno', 0)}: {name}"
            assert own or not isinstance(name, str) or name not in NAMES, place
