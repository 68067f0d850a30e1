"""Measures the code: `python -m tests.support.house [--json FILE] [--against FILE]` prints a table
beside earlier figures.

Counts are exact and the same on every machine: tokens of source, calls of a decode step. Docstrings
and comments are free. Complexity is ruff's (C901).
"""

import ast
import collections
import io
import json
import re
import sys
import token
import tokenize
from pathlib import Path
from typing import Any

from hf_paged.rooms import ROOMS
from tests.support import tools
from tests.support.tools import ROOT

PACKAGE = ROOT / "hf_paged"
BASELINE = Path(__file__).with_name("house.json")
MAX_COMPLEXITY = 12  # of a function, as McCabe counts it
MAX_LINES = 500  # of a file
STEPS = 5  # whose calls are counted


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def room_of(path: Path) -> str:
    """The room of a file of the package, `core` if it stands in none."""
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if name in ("inspect", "__main__"):
        return "tools"
    return name if name in (*ROOMS, "kernels") else "core"


def tokens_of(source: str) -> list[tokenize.TokenInfo]:
    """Names, operators, numbers, and strings that are no docstrings."""
    before, counted = token.INDENT, []
    for item in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = before in (token.INDENT, token.DEDENT, token.NEWLINE, tokenize.NL)
        if item.type in (token.NAME, token.OP, token.NUMBER) or (
            item.type == token.STRING and not is_docstring
        ):
            counted.append(item)
        if item.type not in (tokenize.NL, tokenize.COMMENT):
            before = item.type
    return counted


def read_source(counts: dict[str, Any]) -> None:
    tokens, lines = collections.Counter[str](), 0
    longest = long_files = num_any = 0
    for path in sources():
        source = path.read_text()
        counted = tokens_of(source)
        tokens[room_of(path)] += len(counted)
        lines += len({item.start[0] for item in counted})
        long_files += source.count("\n") > MAX_LINES
        num_any += sum(item.string == "Any" for item in counted)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                longest = max(longest, (node.end_lineno or 0) - node.lineno + 1)
    counts["tokens"] = tokens.total()
    counts["tokens a line"] = round(tokens.total() / lines, 2)
    counts |= {f"tokens of {room}": tokens[room] for room in ["core", *ROOMS, "kernels"]}
    counts["Any"] = num_any
    counts["lines of the longest function"] = longest
    counts[f"files of more than {MAX_LINES} lines"] = long_files
    counts["lines of C++"] = sum(path.read_text().count("\n") for path in PACKAGE.rglob("*.cpp"))


def read_complexity(counts: dict[str, Any]) -> None:
    limit = f"lint.mccabe.max-complexity={MAX_COMPLEXITY}"
    form = ("--output-format", "json", "--exit-zero", "--config", limit)
    answer = tools.run_apart("ruff", "check", "--select", "C901", *form, PACKAGE)
    messages = [item["message"] for item in json.loads(answer.stdout)]
    found = [re.search(r"\((\d+) >", message) for message in messages]
    values = [int(match[1]) for match in found if match]
    counts[f"functions of a complexity above {MAX_COMPLEXITY}"] = len(values)
    counts["highest complexity"] = max(values, default=MAX_COMPLEXITY)


class Profile:
    """Python and C calls of what runs inside, and the functions called."""

    def __init__(self) -> None:
        self.python = self.c = 0
        self.functions = collections.Counter[tuple[str, str]]()

    def __enter__(self) -> "Profile":
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.c -= 1  # this very call

    def _count(self, frame: Any, event: str, arg: object) -> None:
        if event == "call":
            self.python += 1
            self.functions[frame.f_code.co_filename, frame.f_code.co_qualname] += 1
        elif event == "c_call":
            self.c += 1

    def report(self, counts: dict[str, Any], name: str, times: int = 1) -> None:
        counts[f"{name}: files"] = len({file for file, _ in self.functions})
        counts[f"{name}: functions"] = len(self.functions)
        counts[f"{name}: Python calls"] = round(self.python / times)
        counts[f"{name}: C calls"] = round(self.c / times)


def read_calls(counts: dict[str, Any]) -> None:
    """Calls of a warm engine and a warm `generate` on a tiny Llama, whose steps are recorded."""
    import torch

    import hf_paged
    from tests.support import models

    model: Any = models.build("llama").to(torch.bfloat16)
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for rows in (1, 64):
        prompts = [models.token_ids(1, 20 + n % 7, seed=n)[0].tolist() for n in range(rows)]
        with hf_paged.PagedEngine(model) as engine:
            engine.generate(prompts, options)
            with Profile() as added:
                for prompt in prompts:
                    engine.add_request(prompt, options)
            for _ in range(2 * STEPS):  # prompts, and decodes until nothing is recorded
                engine.step()
            with Profile() as steps:
                for _ in range(STEPS):
                    engine.step()
        steps.report(counts, f"decode step of {rows} row{'s' * (rows > 1)}", STEPS)
    added.report(counts, "add_request", len(prompts))
    inputs = torch.tensor([prompts[0]])
    for _ in range(4):
        with Profile() as call:
            model.generate(inputs, cache_implementation="paged", **options | {"max_new_tokens": 8})
    call.report(counts, "generate of 8 tokens")


def main() -> None:
    against = BASELINE, "figures to compare with"
    args = tools.parser(__doc__, json=Path, against=against).parse_args()
    counts: dict[str, Any] = {}
    read_source(counts)
    read_complexity(counts)
    read_calls(counts)
    before = json.loads(args.against.read_text()) if args.against.is_file() else {}
    width = max(map(len, counts))
    for name, value in counts.items():
        print(f"{name:{width}} {value:>9} {before.get(name, ''):>9}")
    if args.json:
        args.json.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
