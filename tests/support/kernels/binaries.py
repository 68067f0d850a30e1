"""Reads the resource use of compiled kernels from their code: NVIDIA's with the `cuobjdump` that
Triton ships, AMD's from the assembler text."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Instruction(NamedTuple):
    text: str
    label: str = ""  # label of this instruction
    branch: str = ""  # label of the branch target
    ends: bool = False  # whether the program ends here unconditionally


class Usage(NamedTuple):
    """Registers per thread; bytes of stack and of spilled registers per thread; bytes of shared
    memory per block, as far as the binary states them."""

    registers: int
    stack: int
    spilled: int
    shared: int


def read(asm: dict[str, Any]) -> tuple[Usage, list[Instruction]]:
    """Reads a kernel compiled by Triton; `asm` holds its code by stage name."""
    return _read_nvidia(asm["cubin"]) if "cubin" in asm else _read_amd(asm["amdgcn"])


def main_loop(code: list[Instruction]) -> int:
    """Instructions of the longest loop, from a backward branch's target to the branch; 0 without
    loops. Branches behind the program's end jump back into it and are not loops."""
    at = {instruction.label: i for i, instruction in enumerate(code) if instruction.label}
    longest = 0
    for end, instruction in enumerate(code):
        start = at.get(instruction.branch, end + 1)
        if start < end and not any(inner.ends for inner in code[start:end]):
            longest = max(longest, end + 1 - start)
    return longest


def count(code: Iterable[Instruction], patterns: dict[str, str]) -> dict[str, int]:
    """Number of instructions that match each pattern, by pattern name; zero counts are left out."""
    texts = [instruction.text for instruction in code]
    found = {
        name: sum(bool(re.search(pattern, text)) for text in texts)
        for name, pattern in patterns.items()
    }
    return {name: number for name, number in sorted(found.items()) if number}


def _read_nvidia(cubin: bytes) -> tuple[Usage, list[Instruction]]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run(
                [tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    line = next(line for line in usage.splitlines() if "REG:" in line)
    found = {
        name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", line)
    }
    return Usage(found["REG"], found["STACK"], found["LOCAL"], found["SHARED"]), parse_sass(sass)


def parse_sass(sass: str) -> list[Instruction]:
    """Parses `cuobjdump --dump-sass`: an instruction's line begins with its address in a
    comment."""
    code = []
    for address, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(\S[^;]*);", sass, re.MULTILINE):
        branch = re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", text)
        target = f"{int(branch[1], 16):x}" if branch else ""
        code.append(
            Instruction(
                text.strip(), f"{int(address, 16):x}", target, text.startswith(("EXIT", "RET"))
            )
        )
    return code


def _read_amd(assembler: str) -> tuple[Usage, list[Instruction]]:
    def figure(name: str) -> int:
        return int(re.findall(rf"^\s*\.{name}:\s*(\d+)", assembler, re.MULTILINE)[-1])

    spilled = 4 * figure("vgpr_spill_count")
    usage = Usage(
        figure("vgpr_count"),
        figure("private_segment_fixed_size"),
        spilled,
        figure("group_segment_fixed_size"),
    )
    return usage, parse_amdgcn(assembler)


def parse_amdgcn(assembler: str) -> list[Instruction]:
    """Parses LLVM's text for AMD chips: labels on separate lines, one tab-indented instruction per
    line."""
    code: list[Instruction] = []
    label = ""
    for line in assembler.splitlines():
        found = re.match(r"(\.LBB\w+):", line)
        if found:
            label = found[1]
        elif re.match(r"\t[a-z]\w*\b(?!:)", line):
            text = line.split(";")[0].strip()
            branch = re.match(r"s_c?branch\w*\s+(\.LBB\w+)", text)
            code.append(
                Instruction(text, label, branch[1] if branch else "", text.startswith("s_endpgm"))
            )
            label = ""
    return code
