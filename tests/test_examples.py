"""The examples as users run them: scripts as programs, the notebook in a separate kernel."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"
TIME_LIMIT = 300  # seconds, for busy machines
PNG = "image/png"

# Expected output of a run, beside exit status 0, which means that all tokens equal plain
# `generate`'s.
EXPECTED = {
    "accelerate_batch.py": [
        r"process 0: 13 prompts, \d+ tokens",
        r"13 of 13 results equal those of one process",
        r"13 of 13 results equal plain",
    ],
    "batch_generation.py": [
        r"24 prompts of \d+ to \d+ tokens",
        r"prefix hits: [1-9]\d* of 24 prompts",
        r"requests finished +24\n",
        r"of them found in the prefix cache +[1-9][\d,]* \(\d+%\)",
        r"16 of 16 results drawn at random equal plain",
    ],
    "beam_search.py": [
        r"paged: [\d,]+ KiB at most \([1-4]\d%\)",
        r"\n  [.c1-9+]*[89+][.c1-9+]*\n",  # the block map has blocks that 8 beams hold
        r"\(plain -\d+\.\d+\): \w+",
        r"equal to plain generate: generate yes, 8 beams yes, 4 samples yes, greedy yes, 3 beams"
        r" yes, scores yes",
    ],
    "chats.py": [
        r"its first token had \d+\.\d%; the best were .*%, .*%, .*%",
        r"asked again, [1-9]\d* tokens of the chats were found in the prefix cache",
        r"equal to plain generate: yes, yes, yes\n",
    ],
    "grpo.py": [
        r"step 1: mean reward .*, pool 0 bytes",
        r"road: engine\nat most [0-9.]+ MiB",
        r"equal to plain generate: rollouts yes, losses yes\n",
    ],
    "pictures.py": [r"memory\.png: [1-9]\d kB\ntimeline\.png: [1-9]\d kB\n"],
    "quickstart.py": [
        r"greedy, 4 ragged prompts .* yes\n",
        r"8 samples of one prompt .* yes\n",
        r"6 beams of one prompt .* yes\n",
        r"\nThe paged cache gave the same tokens in [\d.]+ s instead of [\d.]+ s, and .* in \d+% of"
        r" the memory\.\n$",
    ],
    "streaming.py": [
        r"(?s)\(length\).*\(length\).*\(length\).*\(length\)",
        r"48 tokens in \d+ steps",
        r"\(blocks: [2-9], now [1-8]\)\n +\(cancelled\)\n",
        r"equal to plain generate: yes, yes, yes, yes\n",
    ],
}

# need packages that may be missing: tests/ecosystem runs them
ELSEWHERE = {"chat.py", "structured_output.py"}


def environment(tmp_path: Path) -> dict[str, str]:
    """This process's environment, with its modules, one thread, and no files left in the user's
    folders."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "jupyter"),
    }


def assert_runs(script: str, expected: list[str], tmp_path: Path, *launcher: str) -> None:
    run = subprocess.run(
        [sys.executable, *launcher, str(Path("examples") / script), "--quick"],
        cwd=ROOT,
        env=environment(tmp_path),
        capture_output=True,
        encoding="utf-8",
        timeout=TIME_LIMIT,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for pattern in expected:
        assert re.search(pattern, run.stdout), f"{pattern!r} is not in:\n{run.stdout}"


def assert_shows(notebook: Any) -> None:
    """The block map and the timeline, each once, and the engine itself; no error."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    for kind, count in ((PNG, 2), ("text/html", 1)):
        assert len([output for output in outputs if kind in output.get("data", {})]) == count


def test_words_of_the_learned_topics_are_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a model that writes tokens of them spells words right."""
    for name, value in (("HF_HUB_OFFLINE", "1"), ("OMP_WAIT_POLICY", "passive")):
        # the import sets them
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    tiny_model = importlib.import_module("tiny_model")
    text = " ".join(tiny_model.MANUAL[name] for name in tiny_model.LEARNED)
    words = re.findall(r" [A-Za-z]{3,}", text)
    split = [ids for ids in tiny_model.train_tokenizer()(words)["input_ids"] if len(ids) > 1]
    assert len(words) > 1000 and len(split) < len(words) / 500


def test_every_script_is_run() -> None:
    paths = EXAMPLES.glob("*.py")
    scripts = {path.name for path in paths if "__main__" in path.read_text(encoding="utf-8")}
    assert scripts == set(EXPECTED) | ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize("script", EXPECTED)
def test_script(script: str, tmp_path: Path) -> None:
    assert_runs(script, EXPECTED[script], tmp_path)


@pytest.mark.slow
def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's launcher, without GPUs: each process serves a part, and the results are in
    prompt order."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launcher = "-m accelerate.commands.launch --multi_gpu --num_processes 2".split()
    parts = [r"process 0: 7 prompts", r"process 1: 6 prompts"]
    expected = [*parts, *EXPECTED["accelerate_batch.py"][1:]]
    assert_runs("accelerate_batch.py", expected, tmp_path, *launcher)


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path) -> None:
    """Runs in a folder with only the imported module; a failing cell raises."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    shutil.copy(EXAMPLES / "tiny_model.py", tmp_path)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    (parameters,) = tagged
    assert parameters.source.count("QUICK = False") == 1
    parameters.source = parameters.source.replace("QUICK = False", "QUICK = True")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    place = {"metadata": {"path": str(tmp_path)}}
    options = {"timeout": TIME_LIMIT, "kernel_name": "python3", "resources": place}
    nbclient.NotebookClient(notebook, **options).execute(env=environment(tmp_path))
    assert_shows(notebook)


def test_notebook_is_committed_with_its_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [x for cell in cells for x in cell.outputs if x.get("name") == "stderr"]
    assert_shows(notebook)
