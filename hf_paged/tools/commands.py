"""
Commands of hf_paged. `python -m hf_paged COMMAND --help` explains one.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import logging
import os
import platform
import re
import shutil
import signal
import sys
import sysconfig
import warnings
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import __version__

try:
    from .. import config
    from ..config import PagedConfig
except ValueError as error:  # an invalid default that the environment sets
    print(f"python -m hf_paged: {error}", file=sys.stderr)
    sys.exit(2)

STARTUP_FOLDER = Path(__file__).resolve().with_name("startup")  # contains `sitecustomize`
# by option of the command `run`: the option of `install` that it sets
INSTALL_OPTIONS = {"engine": "continuous_batching", "paged": "by_default"}

# An engine shares its cores with the web server, so one thread of a parallel loop may have no core.
# By default, the other threads then spin for milliseconds on cores that this thread needs. 10,000
# spins take microseconds, after which the threads sleep (manual of libgomp, GOMP_SPINCOUNT).
SERVER_ENVIRONMENT = {"GOMP_SPINCOUNT": "10000"}

RUN = """
Runs a program unchanged. hf_paged is imported in it, and in the Python processes that it starts, as
soon as they have imported transformers' models. TOOL is a console script of this Python environment
(lm_eval, trl, accelerate, torchrun, transformers), a script of yours (train.py), an executable file
(job.sh), a module, with or without -m, or a program on PATH (bash, make). The program gets all
arguments after TOOL. This process becomes the program, so exit status, output and signals are the
program's.

    python -m hf_paged run lm_eval --model hf --gen_kwargs cache_implementation=paged ...
    python -m hf_paged run --paged --set block_size=32 accelerate launch --num_processes 2 eval.py
    python -m hf_paged run --engine transformers serve MODEL
    python -m hf_paged run --paged make evaluation
"""


def parse_setting(text: str) -> tuple[str, Any]:
    """Parses `"block_size=32"` into a name and a value: a Python literal, otherwise text."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def scripts_path() -> str:
    """Returns the folders of console scripts of this environment and of the user's site, joined as
    in PATH."""
    folders = (
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")),
    )
    return os.pathsep.join(folders)


def command_of(tool: str, is_module: bool) -> list[str]:
    """Returns the command that starts a tool: a console script of this environment, a file, a
    module or a program on PATH, in this order; with `is_module`, only a module. Raises `ValueError`
    if there is none, if the file cannot be run, or if a script passes flags to Python that would
    prevent the import of hf_paged. Imports nothing."""
    is_name = not is_module and os.path.basename(tool) == tool
    if is_name:
        script = shutil.which(tool, path=scripts_path())
        if script:
            return command_of_program(script)
    if not is_module and os.path.isfile(tool):
        return command_of_file(tool)
    if is_runnable(tool):
        return [sys.executable, "-m", tool]
    if is_name:
        program = shutil.which(tool)
        if program:
            return command_of_program(program)
    if is_module:
        raise ValueError(f"no module {tool!r} that can be run is installed for {sys.executable}")
    folders = scripts_path().split(os.pathsep)
    names = [path.name for folder in folders for path in Path(folder).glob("*")]
    similar_names = ", ".join(difflib.get_close_matches(tool, names))
    hint = "install it, or write the path of a script"
    if similar_names:
        hint = f"did you mean {similar_names}?"
    raise ValueError(
        f"{tool!r} is not a console script or module of {sys.executable}, not a file, and not a"
        f" program on PATH: {hint}"
    )


def is_runnable(module: str) -> bool:
    """Whether `python -m` can run the module or, if it is a package, its `__main__`. Imports
    nothing."""
    first, *parts = module.split(".")
    try:
        spec = find_spec(first)
    except (ImportError, ValueError):  # the name is invalid
        return False
    name = first
    while spec is not None and (parts or spec.submodule_search_locations is not None):
        part = parts.pop(0) if parts else "__main__"
        name = f"{name}.{part}"
        folders = spec.submodule_search_locations
        if folders is None:
            return False
        spec = PathFinder.find_spec(name, folders)
    return spec is not None


def interpreter(path: str) -> str:
    """Returns the interpreter that a file's `#!` line names, with its flags; empty if there is no
    such line."""
    with open(path, "rb") as file:
        first = file.readline(1024)
    if not first.startswith(b"#!"):
        return ""
    return first[2:].decode(errors="replace").strip()


def command_of_program(path: str) -> list[str]:
    """Returns the command for a console script or a program on PATH. Raises `ValueError` for a
    Python script whose `#!` line makes Python ignore PYTHONPATH or skip `site`."""
    flags = re.search(r"python[\d.]* .*?(-[a-zA-Z]*[IES])", interpreter(path))
    if flags:
        raise ValueError(
            f"the first line of {path} passes {flags[1]} to Python, which then ignores PYTHONPATH"
            f" or skips `site`, so hf_paged would not be imported: pass `python {path}` as TOOL"
        )
    return [path]


def command_of_file(path: str) -> list[str]:
    """Returns the command for a file: Python scripts run in this environment, executable files
    directly. Raises `ValueError` for other files."""
    program = interpreter(path)
    _, suffix = os.path.splitext(path)
    if suffix.startswith(".py") or re.search(r"\bpython[\d.]*( |$)", program):
        return [sys.executable, path]
    content = Path(path).read_bytes()
    if os.access(path, os.X_OK) and (program or b"\0" in content):  # a binary has NUL bytes
        return [path]
    with contextlib.suppress(SyntaxError, ValueError):
        if not program:
            ast.parse(content)
            return [sys.executable, path]
    raise ValueError(
        f"{path!r} is neither a Python script nor an executable file whose first line (`#!`) names"
        " its interpreter: add that line, and make the file executable with `chmod +x`"
    )


def environment(settings: dict[str, Any], options: list[str]) -> dict[str, str]:
    """Returns the environment for a program that imports hf_paged: the environment of this process,
    with `settings` as defaults of `PagedConfig` and `options` of `install` added."""
    outer_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(STARTUP_FOLDER), *filter(None, outer_paths)]
    outer_settings = json.loads(os.environ.get(config.CONFIG_VARIABLE) or "{}")
    outer_options = os.environ.get(config.INSTALL_VARIABLE, "").split(",")
    all_options = [*filter(None, outer_options), *options]
    is_server = INSTALL_OPTIONS["engine"] in options and "OMP_WAIT_POLICY" not in os.environ
    return {
        **(SERVER_ENVIRONMENT if is_server else {}),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        config.CONFIG_VARIABLE: json.dumps({**outer_settings, **settings}),
        config.INSTALL_VARIABLE: ",".join(dict.fromkeys(all_options)),
    }


def versions() -> str:
    """Returns the versions of hf_paged and Python, and of torch, transformers and Triton if they
    are installed."""
    dependencies = [f"Python {platform.python_version()}"]
    for name in ("triton", "transformers", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            dependencies.insert(0, f"{name} {metadata.version(name)}")
    return f"hf_paged {__version__} ({', '.join(dependencies)})"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command in `arguments` and returns the exit status; without a command, prints help.
    `run` replaces this process with the program, or prints an error and exits with status 2."""
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments[:1] == ["inspect"]:
        logging.disable(logging.WARNING)  # of libraries that transformers imports
        warnings.simplefilter("ignore")
        from ..generation.install import install
        from . import inspect

        install()
        return inspect.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m hf_paged", description=__doc__)
    parser.add_argument(
        "--version",
        action="store_true",
        help="print the versions of hf_paged and of its dependencies",
    )
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a program in which hf_paged is imported",
        description=RUN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands.add_parser(
        "inspect", help="report a model's K/V memory, how many sequences fit, its route and kernels"
    )
    run.add_argument(
        "--engine",
        action="store_true",
        help="run transformers' continuous batching on hf_paged's engine",
    )
    run.add_argument(
        "--paged",
        action="store_true",
        help="also use paged memory in calls of `generate` that name no cache",
    )
    run.add_argument(
        "--set",
        action="append",
        type=parse_setting,
        default=[],
        metavar="NAME=VALUE",
        help=(
            "a default of PagedConfig, such as block_size=32; may be repeated; the cache_config of"
            " a call takes precedence"
        ),
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="TOOL is a module")
    run.add_argument("tool", metavar="TOOL")
    run.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.version:
        print(versions())
        return 0
    if options.command is None:
        parser.print_help()
        return 0
    settings = dict(options.set)
    try:
        PagedConfig.coerce(settings)
    except ValueError as error:
        run.error(f"argument --set: {error}")
    try:
        command = command_of(options.tool, options.is_module)
    except ValueError as error:
        run.error(str(error))
    install_options = [name for option, name in INSTALL_OPTIONS.items() if getattr(options, option)]
    sys.stdout.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # ignored by Python; the program would inherit that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execve(
            command[0],
            [*command, *options.arguments],
            environment(settings, install_options),
        )
    except OSError as error:  # built for another machine, or its interpreter is missing
        run.error(f"{command[0]!r} cannot be run: {error}")
