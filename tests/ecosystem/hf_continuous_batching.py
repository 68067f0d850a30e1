"""
Runs transformers' tests of continuous batching, from a checkout, against the managers of hf_paged.

    python -m tests.ecosystem.hf_continuous_batching PATH_OF_A_CHECKOUT [pytest arguments]

Hub models become tiny ones with random weights, since the tests compare `generate` with
`generate_batch`. `NOT_OURS` lists the tests that do not apply, and why; all others run, on the CPU
if there is no GPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import models

FILE = "tests/generation/test_continuous_batching.py"

_INTERNAL = (
    "tests parts of transformers' own loop (allocators, scheduler, processors, statuses), which is"
    " not run"
)
_OFFLOADS = "asserts that transformers' offloading ran"
NOT_OURS: dict[str, str] = {
    "ContinuousBatchingNoAcceleratorTest::*": _INTERNAL,
    "ContinuousBatchingPauseTest::*": (
        f"{_INTERNAL}; ours: test_a_manager_does_not_end_in_a_pause, "
        "test_a_pause_that_cannot_be_raises"
    ),
    "TestMemoryHandlerPrediction::*": "predicts the bytes of transformers' own buffers",
    "ContinuousBatchingTensorParallelTest::*": (
        "needs several GPUs; tensor parallelism is not served"
    ),
    "*::test_switch_to_cb_friendly_attn*": (
        "asks for transformers' paged attention functions, which are not used"
    ),
    "*::test_prefix_sharing": (
        "counts hits in transformers' own allocator; ours: test_a_manager_is_kept_..."
    ),
    "*::test_block_sharing_with_hybrid_model": "counts hits in transformers' own allocator",
    "*::test_continuous_batching_few_blocks": f"{_OFFLOADS}; ours: test_few_blocks_preempt",
    "*::test_cpu_offloading_parity*": f"{_OFFLOADS}; ours: test_few_blocks_preempt",
    "*::test_flash_attn_with_kvcache_parity*": (
        "compares two kernels of transformers' own loop on a GPU"
    ),
    "*::test_decode_fast_path_wide_batch_parity*": (
        "compares two kernels of transformers' own loop on a GPU"
    ),
    "*::test_memory_footprint_*": "needs a GPU, and bounds transformers' own buffers",
    "*::test_cuda_graph_capture_on_non_default_device": (
        "needs two GPUs, and reads transformers' own cache"
    ),
    "*::test_per_request_logits_processors*": (
        "makes a greedy manager keep the processors of sampling, by a change of "
        "its configuration after it was made; ours: test_each_request_has_its_own_options"
    ),
}
"""Patterns of test ids, and why they do not apply."""
OURS = ("ContinuousBatchingNoAcceleratorTest::test_continuous_batching_no_accelerators",)
"""Patterns of those that apply all the same."""


def reason_against(node_id: str) -> str | None:
    name = node_id.partition("::")[2]
    if any(fnmatch.fnmatch(name, pattern) for pattern in OURS):
        return None
    return next(
        (reason for pattern, reason in NOT_OURS.items() if fnmatch.fnmatch(name, pattern)), None
    )


class _Models:
    """Makes `from_pretrained` return a tiny model of the right family, the same one for the same
    name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> str:
        if os.path.isdir(name):
            return name
        family = next(
            (each for each in ("gemma3", "gemma2") if each in name.replace("-", "")), "llama"
        )
        folder = self._folder / name.replace("/", "--")
        if not folder.exists():
            window = {"sliding_window": 64} if family.startswith("gemma") else {}
            model: Any = models.build(family, **window)
            # the tests strip padding by its token
            model.get_output_embeddings().weight.data[models.PAD] = 0
            model.generation_config.pad_token_id = models.PAD
            tokenizer: Any = models.tokenizer()
            # about as many tokens as the original tokenizers give, so that few blocks hold a prompt
            tokenizer.chat_template = (
                "{% for message in messages %}{{ message['content'][:100] }}{% endfor %}"
            )
            for part in (model, tokenizer):
                part.save_pretrained(folder)
        return str(folder)


class Plugin:
    """Pytest hook: skips tests that do not apply, with the reason."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if (reason := reason_against(item.nodeid)) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _prepare(folder: Path) -> None:
    """Patches transformers, before the tests are imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["RUN_SLOW"] = "1"
    import transformers
    from transformers import testing_utils

    import hf_paged
    from hf_paged.native.continuous_batching import PagedBatchingManager

    hf_paged.install(continuous_batching=True)
    tiny = _Models(folder)
    for owner in (
        transformers.AutoModelForCausalLM,
        transformers.AutoTokenizer,
        transformers.AutoConfig,
    ):
        original = owner.from_pretrained

        def from_pretrained(name: str, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            return _original(tiny.path(name), *args, **kwargs)

        owner.from_pretrained = staticmethod(from_pretrained)
    if not torch.cuda.is_available():
        for decorator in ("require_torch_accelerator", "require_deterministic_for_xpu"):
            setattr(testing_utils, decorator, lambda test: test)
    # attributes of transformers' loop that tests read, with values for ours
    manager: Any = PagedBatchingManager
    # processors that its loop cannot run; ours runs all
    manager.logit_processor = SimpleNamespace(clear=lambda: None)
    manager.current_batch = property(lambda self: self.engine.stats().num_steps)
    manager.batch_processor = property(
        lambda self: SimpleNamespace(has_pending_requests=lambda: self.engine.has_unfinished)
    )
    manager.output_router = property(
        lambda self: SimpleNamespace(
            output_queue=SimpleNamespace(empty=lambda: not self._thread.outputs)
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit status is pytest's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkout", type=Path, help="a checkout of transformers, of the version that is installed"
    )
    args, others = parser.parse_known_args(argv)
    path = args.checkout / FILE
    if not path.exists():
        parser.error(
            f"{path} does not exist: the wheels and source archives of PyPI leave it out, take a"
            " git checkout"
        )
    if importlib.util.find_spec("parameterized") is None:
        parser.error("these tests need `pip install parameterized`")
    sys.path.insert(0, str(args.checkout))  # its tests import one another
    with tempfile.TemporaryDirectory() as folder:
        _prepare(Path(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # the checkout has a package of that name
        options = [
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            f"--rootdir={args.checkout}",
            "-c",
            os.devnull,
            *others,
        ]
        return int(pytest.main([str(path), *options], plugins=[Plugin()]))


if __name__ == "__main__":
    sys.exit(main())
