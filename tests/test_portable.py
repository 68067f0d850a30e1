"""Hosts without a compiler, Triton, fork or POSIX users and limits: the import and the portable
path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

HOSTS = {
    "linux-aarch64": "import platform; platform.machine = lambda: 'aarch64'",
    "macos": """
import platform
sys.platform = "darwin"
platform.machine = platform.processor = lambda: "arm64"
""",
    "windows": """
import builtins, signal
sys.platform = "win32"
del os.geteuid, os.getuid, os.register_at_fork, os.fork, signal.SIGALRM
real_import = builtins.__import__
def restricted(name, globals=None, *rest, **named):
    if name in ("resource", "fcntl") and (globals or {}).get("__name__", "").startswith("hf_paged"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return real_import(name, globals, *rest, **named)
builtins.__import__ = restricted
""",
}
"""Restrictions applied after importing torch and transformers, before hf_paged."""

SCRIPT = """
import importlib.abc, os, sys
class NoTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTriton())
import torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM
HOST
import hf_paged
from hf_paged.kernels import cpp
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, eos_token_id=None, **sizes)).eval()
ids = torch.randint(3, 64, (3, 40), generator=torch.Generator().manual_seed(1))
mask = torch.ones_like(ids)
mask[1, :7] = 0
modes = [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}]
for mode in modes:
    options = {"max_new_tokens": 8, "do_sample": False, **mode}
    torch.manual_seed(2)
    expected = model.generate(ids, attention_mask=mask, **options)
    paged = dict(cache_implementation="paged")
    torch.manual_seed(2)
    assert torch.equal(expected, model.generate(ids, attention_mask=mask, **options, **paged)), mode
    if not mode.get("do_sample"):  # also where rows take turns
        paged["cache_config"] = {"num_blocks": 12}
        assert torch.equal(expected, model.generate(ids, attention_mask=mask, **options, **paged)), mode
with hf_paged.PagedEngine(model, {"num_blocks": 12}) as engine:
    for row, result in zip(ids, engine.generate(ids.tolist(), {"max_new_tokens": 8, "do_sample": False})):
        assert result.token_ids == model.generate(row[None], max_new_tokens=8, do_sample=False)[0, 40:].tolist()
hf_paged.check_integrity(model)
assert not cpp.is_available() and "triton" not in sys.modules
print("portable")
"""


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_the_portable_path_on_other_hosts(host: str, tmp_path: Path) -> None:
    compilers = ("CXX", "CC", "HF_PAGED_ATTENTION")
    environment = {name: value for name, value in os.environ.items() if name not in compilers}
    cache = str(tmp_path / "cache")
    environment |= {"PATH": str(tmp_path), "HF_PAGED_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("HOST", HOSTS[host])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "portable" in done.stdout, done.stderr[-3000:]
    assert "portable path" in done.stderr  # the log says why it is slow
