"""
Commands of hf_paged:

    python -m hf_paged run [--engine] [--paged] [--set NAME=VALUE] TOOL [ARGUMENTS]    run a program with hf_paged
    python -m hf_paged.inspect MODEL                                                   report a model's K/V memory

Each prints its help with --help.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import config
from .config import PagedConfig
from .generation import install

STARTUP = Path(__file__).resolve().with_name("tools") / "startup"  # contains `sitecustomize`
OPTIONS = {"engine": "continuous_batching", "paged": "by_default"}  # of `install`

RUN = """
Runs a program unchanged, with hf_paged imported in it, and in the Python processes that it starts, once they use
models of transformers. TOOL is a console script of this Python environment (lm_eval, trl, accelerate, torchrun,
transformers), a script of yours (train.py), an executable file (job.sh) or a module, also as -m MODULE. All that
follows TOOL is the program's own. Its exit status, its output and its signals are its own, too: this process becomes
the program.

    python -m hf_paged run lm_eval --model hf --gen_kwargs cache_implementation=paged ...
    python -m hf_paged run --paged --set block_size=32 accelerate launch --num_processes 2 evaluate.py
    python -m hf_paged run --engine transformers serve MODEL
"""


def setting(text: str) -> tuple[str, Any]:
    """Parses `"block_size=32"` into a name and a value: a Python literal, else text."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def scripts() -> str:
    """Returns the script folders of this environment and of the user's site, as a path list."""
    own = sysconfig.get_path("scripts"), sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))
    return os.pathsep.join(own)


def command_of(tool: str, is_module: bool) -> list[str]:
    """Returns the command that starts a tool. Raises `ValueError` if there is no such console script, file or module,
    if a file cannot be run, or if a console script's Python flags would keep hf_paged from being loaded."""
    if not is_module:
        if os.path.basename(tool) == tool and (script := shutil.which(tool, path=scripts())):
            if flags := re.search(r"python[\d.]* .*?(-[a-zA-Z]*[IES])", interpreter(script)):
                raise ValueError(
                    f"Python reads no PYTHONPATH or no site with {flags[1]}, which is in the first line of {script}, "
                    f"and would run it without hf_paged: run `python {script}` in its place"
                )
            return [script]
        if os.path.isfile(tool):
            return command_of_file(tool)
    try:
        if find_spec(tool) is not None:
            return [sys.executable, "-m", tool]
    except (ImportError, ValueError):  # its package is missing, or the name is invalid
        pass
    if is_module:
        raise ValueError(f"no module {tool!r} is installed for {sys.executable}")
    names = [path.name for folder in scripts().split(os.pathsep) for path in Path(folder).glob("*")]
    meant = ", ".join(difflib.get_close_matches(tool, names)) or "install it, or write the path of a script"
    raise ValueError(f"{tool!r} is no console script, file or module of {sys.executable}: {meant}?")


def interpreter(path: str) -> str:
    """Returns the interpreter in a file's `#!` line; empty if there is none."""
    with open(path, "rb") as file:
        first = file.readline(1024)
    return first[2:].decode(errors="replace").strip() if first.startswith(b"#!") else ""


def command_of_file(path: str) -> list[str]:
    """Returns the command for a file: Python scripts run in this environment, executable files directly. Raises
    `ValueError` for other files."""
    named = interpreter(path)
    if os.path.splitext(path)[1].startswith(".py") or re.search(r"\bpython[\d.]*( |$)", named):
        return [sys.executable, path]
    content = Path(path).read_bytes()
    if os.access(path, os.X_OK) and (named or b"\0" in content):  # a binary
        return [path]
    try:
        if not named:
            ast.parse(content)
            return [sys.executable, path]
    except (SyntaxError, ValueError):
        pass
    raise ValueError(
        f"{path!r} is no Python script, and no executable file that names its interpreter in its first line (`#!`): "
        "`chmod +x` makes a script with that line one"
    )


def environment(settings: dict[str, Any], options: list[str]) -> dict[str, str]:
    """Returns the environment for a program in which `hf_paged` has these defaults and these options of `install`."""
    paths = [str(STARTUP), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    known = json.loads(os.environ.get(config.VARIABLE) or "{}"), os.environ.get(install.VARIABLE, "").split(",")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        config.VARIABLE: json.dumps({**known[0], **settings}),
        install.VARIABLE: ",".join(dict.fromkeys([*filter(None, known[1]), *options])),
    }


def main(arguments: list[str] | None = None) -> int:
    """Replaces this process by the program, or prints the error and exits with 2; prints help without a command."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_paged", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    run = parser.add_subparsers(dest="command", metavar="run").add_parser(
        "run", description=RUN, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    run.add_argument(
        "--engine", action="store_true", help="transformers' continuous batching runs on hf_paged's engine"
    )
    run.add_argument("--paged", action="store_true", help="also calls of generate that name no cache are paged")
    run.add_argument(
        "--set",
        action="append",
        type=setting,
        default=[],
        metavar="NAME=VALUE",
        help="a default of PagedConfig, as block_size=32; may be repeated; a cache_config of a call comes first",
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="TOOL is a module")
    run.add_argument("tool", metavar="TOOL")
    run.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
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
    names = [name for option, name in OPTIONS.items() if getattr(options, option)]
    sys.stdout.flush()
    try:
        os.execve(command[0], [*command, *options.arguments], environment(settings, names))
    except OSError as error:  # built for another machine, or its interpreter is missing
        run.error(f"{command[0]!r} cannot be run: {error}")


if __name__ == "__main__":
    sys.exit(main())
