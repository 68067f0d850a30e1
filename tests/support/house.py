"""Measures the code: `python -m tests.support.house [--json FILE] [--against FILE]` prints a table
beside earlier figures.

Counts are exact and the same on every machine: tokens of source, calls of a decode step,
conditionals that ask about a feature. Docstrings and comments are free. Complexity is ruff's
(C901); the rest is read from the syntax trees here.
"""

import ast
import collections
import io
import json
import re
import subprocess
import sys
import token
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_paged.rooms import ROOMS
from tests.support import tools
from tests.support.tools import ROOT

PACKAGE = ROOT / "hf_paged"
BASELINE = Path(__file__).with_name("house.json")
MAX_COMPLEXITY = 12  # of a function, as McCabe counts it
MAX_LINES = 500  # of a file
NUM_HOT_FILES = 10  # those that run the most functions in a decode step of 64 rows
STEPS = 5  # whose calls are counted

# A capability, and the identifiers that name it. A file touches it if one of its identifiers
# matches.
FEATURES = {
    "speculation": r"specul|draft|ngram|assist|propos",
    "adapters": r"adapter|lora",
    "tiers": r"tier|spill",
    "ranks": r"(^|_)ranks?(_|$)|shard|mirror",
    "images": r"image|pixel|media|picture|video",
    "states": r"(^|_)states?(_|$)|snapshot|recurrent",
    "virtual storage": r"virtual|mapping",
    "grammars": r"grammar|schema",
}


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


def identifiers(tree: ast.AST) -> Iterator[str]:
    names = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}
    names |= dict.fromkeys((ast.FunctionDef, ast.ClassDef), "name")
    for node in ast.walk(tree):
        if type(node) in names:
            yield getattr(node, names[type(node)])


def features_of(tree: ast.AST) -> set[str]:
    names = "\n".join({name.lower() for name in identifiers(tree)})
    return {
        feature for feature, pattern in FEATURES.items() if re.search(pattern, names, re.MULTILINE)
    }


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def imported_paths(path: Path, tree: ast.AST) -> Iterator[Path]:
    """The files of the package that a file imports, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for target in [folder, *(folder / alias.name for alias in node.names)]:
                if target.with_suffix(".py").is_file():
                    yield target.with_suffix(".py")


def read_source(counts: dict[str, Any]) -> None:
    tokens, lines, words, touched, touched_in_core = (collections.Counter() for _ in range(5))
    core_imports = attributes_set = longest = long_files = 0
    for path in sources():
        source, room = path.read_text(), room_of(path)
        tree, counted = ast.parse(source), tokens_of(source)
        tokens[room] += len(counted)
        lines[room] += len({item.start[0] for item in counted})
        long_files += source.count("\n") > MAX_LINES
        touched.update(features := features_of(tree))
        if room == "core":
            touched_in_core.update(features)
            rooms = map(room_of, set(imported_paths(path, tree)))
            core_imports += sum(room not in ("core", "kernels") for room in rooms)
        words["Any"] += sum(item.string == "Any" for item in counted)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                longest = max(longest, (node.end_lineno or 0) - node.lineno + 1)
            elif isinstance(node, ast.ExceptHandler):
                names = {None} if node.type is None else set(identifiers(node.type))
                words["broad excepts"] += bool(names & {None, "Exception", "BaseException"})
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                words["locks made"] += name.endswith(("Lock", "Condition", "Semaphore"))
            elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                owners = [t.value for t in targets if isinstance(t, ast.Attribute)]
                names = [owner.id for owner in owners if isinstance(owner, ast.Name)]
                attributes_set += sum(name not in ("self", "cls") for name in names)
    counts["tokens"] = sum(tokens.values())
    counts["tokens a line"] = round(sum(tokens.values()) / sum(lines.values()), 2)
    counts |= {f"tokens of {room}": tokens[room] for room in ["core", *ROOMS, "kernels"]}
    counts |= {f"files that name {feature}": touched[feature] for feature in FEATURES}
    counts |= {f"files of the core that name {name}": touched_in_core[name] for name in FEATURES}
    counts["imports from the core into a room"] = core_imports
    counts["attributes set from outside"] = attributes_set
    counts |= dict(sorted(words.items()))
    counts["lines of the longest function"] = longest
    counts[f"files of more than {MAX_LINES} lines"] = long_files
    counts["lines of C++"] = sum(path.read_text().count("\n") for path in PACKAGE.rglob("*.cpp"))


def read_complexity(counts: dict[str, Any]) -> None:
    limit = f"lint.mccabe.max-complexity={MAX_COMPLEXITY}"
    form = ("--output-format", "json", "--exit-zero", "--config", limit)
    command = tools.module("ruff", "check", "--select", "C901", *form, PACKAGE)
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
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
    hot = collections.Counter[str]()
    for (file, _), _count in steps.functions.items():
        hot[file] += PACKAGE.as_posix() in file
    files = [Path(file).read_text() for file, _ in hot.most_common(NUM_HOT_FILES)]
    asked = [condition for source in files for condition in conditions(ast.parse(source))]
    counts[f"conditionals of the {NUM_HOT_FILES} hot files"] = len(asked)
    counts["of them about a feature"] = sum(bool(features_of(condition)) for condition in asked)
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
