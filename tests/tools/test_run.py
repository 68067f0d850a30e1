"""`python -m hf_paged run`: programs unaware of hf_paged, their children, and errors before the
start."""

from __future__ import annotations

import json
import os
import pydoc
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.tools.commands import command_of, environment, main
from tests.support import models

ROOT = Path(hf_paged.__file__).parents[1]
TIME_LIMIT = 300  # seconds, for busy machines
STARTED = "-X", "importtime", "-m", "hf_paged", "run"  # says what is imported
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}

# A user's script that does not import hf_paged. It reports its environment and the outcome of a
# call.
SCRIPT = f"""
import json, os, sys
import torch
from transformers import AutoModelForCausalLM

def report(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = model.generate(torch.tensor([[5, 6, 7], [9, 8, 7]]), **{OPTIONS})
    ours = sys.modules.get("hf_paged")
    return {{
        "argv": sys.argv[1:],
        "tokens": tokens.tolist(),
        "file": ours and ours.__file__,
        "road": ours and ours.last_route(model).road,
        "block_size": ours and ours.PagedConfig().block_size,
        "rank": os.environ.get("RANK"),
    }}

if __name__ == "__main__":
    with open(sys.argv[1] + "/" + os.environ.get("RANK", "0") + ".json", "w") as file:
        json.dump(report(sys.argv[2]), file)
    sys.exit(int(sys.argv[3]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a script, and a model in a folder."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "script.py").write_text(SCRIPT)
    models.get("llama").save_pretrained(folder / "model")
    return folder


def run(
    *arguments: Any,
    cwd: Path = ROOT,
    command: tuple[str, ...] = ("-m", "hf_paged", "run"),
    **env: str,
) -> Any:
    return subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        encoding="utf-8",
        timeout=TIME_LIMIT,
    )


def assert_told(path: Path, block_size: int) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text())
    prompts = torch.tensor([[5, 6, 7], [9, 8, 7]])
    assert told["tokens"] == models.get("llama").generate(prompts, **OPTIONS).tolist()
    assert (told["road"], told["block_size"]) == ("engine", block_size)
    return told


@pytest.mark.slow
def test_a_script_as_it_is(folder: Path, tmp_path: Path) -> None:
    """Its arguments, its exit status; all its calls of `generate` are paged, with the configured
    block size. So is a program that names its interpreter, whose Python gets the settings."""
    script, arguments = folder / "script.py", (tmp_path, folder / "model", "7", "--set")
    asked = "--paged", "--set", "block_size=32"
    ended = run(*asked, script, *arguments)
    assert ended.returncode == 7, ended.stderr
    told = assert_told(tmp_path / "0.json", 32)
    assert told["argv"] == [*map(str, arguments)]
    assert Path(told["file"]).parents[1] == ROOT
    (tmp_path / "0.json").unlink()
    job = tmp_path / "job.sh"
    job.write_text(f'#!/bin/sh\nshift\nexec "{sys.executable}" "{script}" "$@"\n')
    ended = run(*asked, job, "x", *arguments)
    assert ended.returncode == 2, ended.stderr
    assert re.search(r"job.sh' is neither a Python script.*chmod", ended.stderr), ended.stderr
    job.chmod(0o755)
    ended = run(*asked, job, "x", *arguments)
    assert ended.returncode == 7, ended.stderr
    assert_told(tmp_path / "0.json", 32)


@pytest.mark.slow
def test_accelerate_launch(folder: Path, tmp_path: Path) -> None:
    """A console script that starts Python again, twice: both get `run`'s settings."""
    # accelerate's way to run several processes on one machine; without a GPU they compute on the
    # CPU
    launch = "accelerate launch --multi_gpu --num_processes 2 --num_machines 1"
    launch += " --mixed_precision no --dynamo_backend no --main_process_port 0"
    program = *launch.split(), folder / "script.py", tmp_path, folder / "model", "0"
    ended = run("--paged", "--set=block_size=64", *program)
    assert ended.returncode == 0, ended.stderr
    for rank in ("0", "1"):
        assert assert_told(tmp_path / f"{rank}.json", 64)["rank"] == rank


REWARDS = """
import gc, json, os, sys
from transformers import PreTrainedModel

def reward(completions, **others):
    ours = sys.modules.get("hf_paged")
    models = [each for each in gc.get_objects() if isinstance(each, PreTrainedModel)] if ours else []
    roads = {ours.last_route(model).road for model in models if ours.last_route(model)}
    with open(os.environ["REWARDS"], "a") as file:
        file.write(json.dumps([completions, sorted(roads)]) + "\\n")
    return [float(len(set(text))) for text in completions]
"""


@pytest.mark.slow
def test_trl(folder: Path, tmp_path: Path) -> None:
    """`trl grpo` trains in a child process: rollouts of paged calls equal plain ones."""
    pytest.importorskip("trl")
    models.tokenizer().save_pretrained(folder / "model")
    (folder / "rewards.py").write_text(REWARDS)
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"prompt": text}) for text in models.corpus()[:4]]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))

    def rollouts(name: str, *options: str, run_with: tuple[str, ...]) -> list[Any]:
        grpo = f"""grpo --model_name_or_path {folder / "model"} --dataset_name {tmp_path / "data"} --use_cpu
            --reward_funcs rewards.reward --output_dir {tmp_path / name} --per_device_train_batch_size 4
            --num_generations 4 --max_completion_length 8 --report_to none --save_strategy no --bf16 false
            --gradient_checkpointing false --dtype float32 --max_steps 2 --seed 3"""
        path = tmp_path / f"{name}.jsonl"
        env = {"REWARDS": str(path), "PYTHONPATH": str(folder), "HF_HOME": str(tmp_path)}
        ended = run(*grpo.split(), *options, command=("-m", *run_with), **env)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return [json.loads(line) for line in path.read_text().splitlines()]

    plain = rollouts("plain", run_with=("trl.cli.main",))
    asked = "--cache_implementation", "paged"
    paged = rollouts("paged", *asked, run_with=("hf_paged", "run", "trl"))
    assert [texts for texts, _ in paged] == [texts for texts, _ in plain] and len(plain) == 2
    assert [roads for _, roads in plain] == [[], []] and paged[-1][1] == ["engine"]


def test_a_closed_pipe_ends_a_program_as_without_run() -> None:
    ended = run("bash", "-c", 'yes | head -1; echo "${PIPESTATUS[0]}"')
    assert (ended.stdout.split(), ended.stderr) == (["y", "141"], "")  # 128 + SIGPIPE


@pytest.mark.slow
def test_a_traceback_is_the_programs_own(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("def inner():\n    raise KeyError('mine')\ninner()\n")
    plain, ended = run(script, command=()), run(script)
    assert ended.returncode == plain.returncode == 1
    assert ended.stderr.endswith(plain.stderr)
    assert "Traceback" not in ended.stderr.removesuffix(plain.stderr)


PROBE = """
import sys, sitecustomize
print("torch" in sys.modules, "hf_paged" in sys.modules, getattr(sitecustomize, "theirs", None), len(sys.argv))
"""


def test_a_child_without_models_imports_nothing(tmp_path: Path) -> None:
    """... and an existing `sitecustomize` runs, too."""
    (tmp_path / "sitecustomize.py").write_text("theirs = 'here'\n")
    env = environment({}, [])
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    ended = run("-c", PROBE, command=(), **env)
    assert ended.stdout == "False False here 1\n", ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "import transformers.models.llama.modeling_llama",
        (
            "import transformers.generation.utils; from transformers import AutoModel;"
            " AutoModel.from_pretrained; from transformers import PreTrainedModel"
        ),
        "import hf_paged",
        "from transformers import Trainer",
    ],
)
def test_whichever_module_is_first(first: str, tmp_path: Path) -> None:
    code = f"{first}\nimport sys; print(sys.modules['hf_paged'].__file__)"
    ended = run("-c", code, command=(), cwd=tmp_path, **environment({}, []))
    assert ended.stdout == f"{hf_paged.__file__}\n", ended.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--set", "block=3", "x"], "--set: .*has no option `block`.*block_size, num_blocks"),
        (["--set", "block_size=33", "x"], "--set: `block_size` is 33"),
        (["--set", "block_size", "x"], "--set: 'block_size' is not NAME=VALUE"),
        (["acelerate"], "'acelerate' is not a console script.*on PATH: did you mean accelerate"),
        (["-m", "json"], "no module 'json' that can be run"),
        (["-m", "no.such.module"], "no module 'no.such.module'"),
        (["--sett", "a=b", "x"], "usage"),
        ([], "usage"),
    ],
)
def test_refused_before_anything_starts(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["run", *arguments])
    assert raised.value.code == 2
    assert re.search(error, capsys.readouterr().err)


def test_what_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A console script takes precedence over a file of that name, then a path, a module, a program
    on PATH."""
    monkeypatch.chdir(tmp_path)
    for name in ("accelerate", "mine.py"):
        (tmp_path / name).touch()
    (tmp_path / "sh").mkdir()  # no module that can be run
    python = sys.executable
    for (name, is_module), command in {
        ("accelerate", False): [str(Path(python).with_name("accelerate"))],
        ("./accelerate", False): [python, "./accelerate"],
        ("mine.py", False): [python, "mine.py"],
        ("json.tool", False): [python, "-m", "json.tool"],
        ("json.tool", True): [python, "-m", "json.tool"],
        ("torch.distributed.run", True): [python, "-m", "torch.distributed.run"],
        ("sh", False): [shutil.which("sh")],
    }.items():
        assert command_of(name, is_module) == command


@pytest.mark.parametrize(
    ("content", "is_executable", "is_python"),
    [
        ("#!/usr/bin/env python3\nnot Python", False, True),
        ("print(1)", True, True),  # the system could not run it, either
        ("#!/opt/python/bin/sh\n", True, False),
        ("a b", True, None),
        ("#!/bin/sh\nls", False, None),
        ("\0ELF", True, False),
    ],
)
def test_what_runs_a_file(
    content: str, is_executable: bool, is_python: bool | None, tmp_path: Path
) -> None:
    path = tmp_path / "job"
    path.write_text(content)
    path.chmod(0o755 if is_executable else 0o644)
    if is_python is None:
        with pytest.raises(ValueError, match="is neither a Python script"):
            command_of(str(path), False)
    else:
        assert command_of(str(path), False) == [sys.executable, str(path)][0 if is_python else 1 :]


def test_a_console_script_that_reads_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tool"
    path.touch(0o755)
    monkeypatch.setattr("hf_paged.tools.commands.scripts_path", lambda: str(tmp_path))
    for interpreter in ("/opt/python3.11/bin/python3.11", "/usr/bin/env -S python3 -s"):
        path.write_text(f"#!{interpreter}\n")
        assert command_of("tool", False) == [str(path)]
    for flags in ("-I", "-sE", "-u -S"):
        path.write_text(f"#!/usr/bin/env -S python3 {flags}\n")
        with pytest.raises(ValueError, match="hf_paged would not be imported"):
            command_of("tool", False)


def test_help_lists_the_commands_and_version_names_what_it_runs_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"(?m)^  +run +run a program.*\n +inspect +report a model", printed)
    assert "--version" in printed
    assert main(["--version"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"hf_paged {hf_paged.__version__} (")
    assert f"torch {metadata.version('torch')}" in printed


@pytest.mark.slow
def test_inspect_is_the_module_of_that_name() -> None:
    ended = run("llama", "--length", "0", command=("-m", "hf_paged", "inspect"))
    assert ended.returncode == 2, ended.stderr
    # no warning of an import
    assert re.fullmatch("python -m hf_paged inspect: `length` is 0.*\n", ended.stderr)


def test_a_program_starts_without_torch() -> None:
    """... and without transformers; any program on PATH runs."""
    printing = "sh", "-c", "echo $HF_PAGED_CONFIG; exit 7"
    ended = run("--set", "block_size=32", *printing, command=STARTED)
    assert (ended.returncode, ended.stdout) == (7, '{"block_size": 32}\n'), ended.stderr
    refused = run("-m", "torch.distributed.missing", command=STARTED)
    assert refused.returncode == 2 and "no module 'torch.distributed.missing'" in refused.stderr
    for stderr in (ended.stderr, refused.stderr):
        imported = {line.rpartition("|")[2].strip() for line in stderr.splitlines()}
        assert {"hf_paged", "hf_paged.config"} <= imported
        assert not {"torch", "transformers", "numpy"} & imported


@pytest.mark.parametrize(
    ("command", "argv", "is_command"),
    [
        ("python -m hf_paged run tool -m pkg", "-m run tool -m pkg", True),
        ("python -X importtime -mhf_paged", "-m", True),
        ("python -m hf_paged.inspect llama", "-m llama", False),
        ("python -m package hf_paged", "-m hf_paged", False),  # imports hf_paged in its `__init__`
        ("python script.py -m hf_paged", "script.py -m hf_paged", False),
        ("python -m pytest -m hf_paged", "/site/pytest/__main__.py -m hf_paged", False),
        ("python -c code", "-c", False),
    ],
)
def test_importing_installs_except_for_the_command(
    command: str, argv: str, is_command: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", command.split())
    monkeypatch.setattr(sys, "argv", argv.split())
    assert hf_paged._is_command() == is_command


def test_help_of_the_package_is_short_and_names_all_that_is_public() -> None:
    text = pydoc.render_doc(hf_paged, renderer=pydoc.plaintext)
    assert len(text.splitlines()) < 200 and "HF_PAGED" not in text
    public = [name for name, x in vars(hf_paged).items() if not isinstance(x, ModuleType)]
    names = [name for name in public if name[0] != "_"]
    assert "PagedEngine" in names
    for name in names:
        assert re.search(rf"\b{name}\b", hf_paged.__doc__ or ""), name


@pytest.mark.slow
def test_a_star_import_takes_the_public_names_and_no_modules() -> None:
    # in another process, as modules that are imported later stand in the package
    code = "from hf_paged import *; import hf_paged.config, hf_paged.cache.memory as memory"
    program = f"{code}; print(*(name for name in vars() if name[:1] != '_'))"
    ended = run("-c", program, command=())
    listing = (hf_paged.__doc__ or "").partition("The public names")[2].splitlines()
    public = {name for line in listing[1:] for name in re.findall(r"\w+", line[:29])}
    assert set(ended.stdout.split()) == public | {"hf_paged", "memory"}
    assert hf_paged.config is sys.modules["hf_paged.config"] and not hasattr(hf_paged, "no_module")


def test_runs_within_runs_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment({"block_size": 32, "num_blocks": 9}, ["by_default"]).items():
        monkeypatch.setenv(name, value)
    inner = environment({"num_blocks": 7}, ["by_default"])
    assert json.loads(inner["HF_PAGED_CONFIG"]) == {"block_size": 32, "num_blocks": 7}
    assert inner["HF_PAGED_INSTALL"] == "by_default"
    assert inner["PYTHONPATH"].count("startup") == 1


def test_threads_of_a_server_do_not_wait_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would hold the cores that the web server needs. What the user has set stays."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert environment({}, ["continuous_batching"])["GOMP_SPINCOUNT"] == "10000"
    assert "GOMP_SPINCOUNT" not in environment({}, ["by_default"])
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert environment({}, ["continuous_batching"])["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in environment({}, ["continuous_batching"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("CONFIG", '{"blocks": 1}'), ("INSTALL", "every")])
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    variable = f"HF_PAGED_{name}"
    ended = run("-c", "import hf_paged", command=(), **{variable: value})
    assert ended.returncode == 1 and f"ValueError: {variable} " in ended.stderr


@pytest.mark.slow_cases('{"blocks": 1}')
@pytest.mark.parametrize(
    "value", ["{", "[]", '{"blocks": 1}', '{"block_size": 33}', '{"prefix_tiers": 7}']
)
def test_a_wrong_default_ends_the_command_in_a_line(value: str) -> None:
    ended = run("true", HF_PAGED_CONFIG=value)
    assert ended.returncode == 2
    assert re.fullmatch("python -m hf_paged: HF_PAGED_CONFIG .*\n", ended.stderr)
