"""Benchmarks of single features: first calls, threads, products, rollouts, drafts, tiers, adapters,
shards, virtual storage, models beyond plain decoders."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import report
from benchmarks.first_call import PROMPT_TOKENS, ROWS, TARGET_FACTOR, TARGET_SECONDS, limit
from benchmarks.first_call import table as first_call_table
from benchmarks.grpo import TARGET
from benchmarks.grpo import table as rollout_table
from benchmarks.linears import TARGET as PRODUCT_TARGET
from benchmarks.linears import TURNS as PRODUCT_TURNS
from benchmarks.linears import table as product_table
from benchmarks.lora import pooled as lora_rows
from benchmarks.parallel import COMPUTED, LENGTH, MAX_ROWS
from benchmarks.parallel import pooled as parallel_rows
from benchmarks.sections import Data, flow, machine_of, picture_of
from benchmarks.side_by_side import table as side_by_side_table
from benchmarks.speculation import STAGES
from benchmarks.speculation import pooled as speculation_rows
from benchmarks.threads import table as thread_table
from benchmarks.tiers import pooled as tiers_rows
from benchmarks.virtual import pooled as virtual_rows

THREADS, GRPO, SIDE_BY_SIDE = "threads-cpu-llama-100m", "grpo-cpu-llama-24m", "side_by_side-cpu"
FIRST_CALL = "first_call-cpu-llama-100m"
BATCHES = "grpo-cpu-llama-24m-avx2"
SPECULATION = ("speculation-cpu-1", "speculation-cpu-2")
DRAFT_STAGES = "speculation-stages-cpu"
TIERS = ("tiers-cpu-1", "tiers-cpu-2", "tiers-w3-cpu-1", "tiers-w3-cpu-2")
LORA, PARALLEL, VIRTUAL = (
    tuple(f"{name}-cpu-{run}" for run in (1, 2)) for name in ("lora", "parallel", "virtual")
)
LINEARS = ("linears-cpu", "linears-cpu-avx2")


def first_call(data: Data) -> str:
    """Table of `benchmarks.first_call`."""
    plain = data["rows"][0]
    said = flow(
        f"""**The first call** of a process, {ROWS} prompts of {PROMPT_TOKENS} tokens, {data["new_tokens"]} new,
        `{data["model"]}` in {data["dtype"]}: `python -m benchmarks.first_call`, {machine_of(data["machine"])}; medians
        of {plain["turns"]} processes (compiling: of one). The wheel contains compiled kernels. The target for a
        first paged call is {TARGET_FACTOR:g} times plain's time plus {TARGET_SECONDS:g} s, here
        {limit(data["rows"]):.2f} s. `last_route(model).setup_seconds` lists the parts:"""
    )
    return f"{said}\n\n{first_call_table(data['rows'])}"


def threads(data: Data) -> str:
    """Table of `benchmarks.threads`."""
    said = flow(
        f"""**Threads**: 8 threads that each call `generate` with one prompt of 8 to 64 tokens, for
        {data["rows"][0]["new_tokens"]} new ones, against the same calls one after another,
        `python -m benchmarks.threads`, {machine_of(data["machine"])}; {data["rows"][0]["turns"]} turns in two
        processes, medians, 95% intervals. The target in bfloat16 is 2.5 times the throughput of calls one after
        another:"""
    )
    return f"{said}\n\n{thread_table(data['rows'])}"


def products(data: Data) -> str:
    """Table of `benchmarks.linears`."""
    said = flow(
        f"""**Products of few rows**: the linear layers of one decode step in bfloat16, one by one, by `F.linear`
        and by the C++ kernel that reads the weights in place (path: {data["path"]}), `python -m benchmarks.linears`,
        {machine_of(data["machine"])}; {PRODUCT_TURNS} turns, medians, 95% intervals. The floor is the weights over
        the best streaming read of the run, {data["bandwidth_gb_s"]} GB/s. Targets: {PRODUCT_TARGET} up to 64 rows with
        AMX, 1.05 up to 32 without. Above 256 rows with AMX, or 64 without, steps leave products to PyTorch; where
        PyTorch has none in bfloat16, products of more than 128 rows are computed in float32:"""
    )
    return f"{said}\n\n{product_table(data['rows'])}"


def rollouts(data: Data) -> str:
    """Table of `benchmarks.grpo`."""
    row = data["rows"][0]
    said = flow(
        f"""**Rollouts**: TRL's `GRPOTrainer` with a random model in float32, prompts of up to {row["length"]} tokens,
        `python -m benchmarks.grpo`, {machine_of(data["machine"])}; {row["turns"]} turns, medians, 95%
        intervals. The target for the rollouts is {TARGET} times the speed of plain ones, by `generate_batch` at most
        1.2 times their time:"""
    )
    return f"{said}\n\n{rollout_table(data['rows'])}"


def speculation(runs: Sequence[Data]) -> str:
    """Table of `benchmarks.speculation`."""
    evens = [note for data in runs for note in data["notes"] if "break-even" in note]
    said = flow(
        f"""**Several tokens per step**: `PagedEngine` with `speculation="ngram"`, or with assistants, over the same
        engine without, float32, `python -m benchmarks.speculation`, {machine_of(runs[0]["machine"])}; alternating turns
        of {len(runs)} runs, 95% intervals. The benchmark trains the models and generates from held-out texts. A target
        is met where the interval reaches it. {" ".join(f"{note}." for note in evens)}"""
    )
    return f"{said}\n\n{report.markdown(speculation_rows(runs))}"


def draft_stages(data: Data) -> str:
    """Time of the stages of a turn with an assistant."""
    said = flow(f"""**Where the time goes with an assistant of a tenth of the size** (8 rows,
        `python -m benchmarks.speculation --only stages`, {machine_of(data["machine"])}, medians of turns). A step of
        the target that verifies candidates computes more tokens than one without, and takes proportionally longer
        where arithmetic is the bottleneck:""")
    return f"{said}\n\n{report.markdown(data['stages'], STAGES)}"


def tiers(runs: Sequence[Data]) -> str:
    """Table of `benchmarks.tiers`, over the turns of all runs."""
    said = flow(
        f"""**Prefixes from disk** (`prefix_tiers`), against computing them, float32, `python -m benchmarks.tiers`,
        {machine_of(runs[0]["facts"])}; alternating turns, 95% intervals. A target is met where the interval reaches
        it:"""
    )
    return f"{said}\n\n{report.markdown(tiers_rows(runs))}"


def lora(runs: Sequence[Data]) -> str:
    """Table of `benchmarks.lora`, over the turns of all runs."""
    said = flow(
        f"""**Adapters**: {runs[0]["title"]}, `PagedEngine`, greedy, `python -m benchmarks.lora`,
        {machine_of(runs[0]["facts"])}; alternating turns in {len(runs)} processes, 95% intervals. A
        target is met where the interval reaches it:"""
    )
    picture = picture_of(LORA[0], "Tokens a second with adapters, in one forward and apart")
    return "\n\n".join([said, report.markdown(lora_rows(runs)), *picture])


def virtual(runs: Sequence[Data]) -> str:
    """Table of `benchmarks.virtual`, over the turns of all runs."""
    said = flow(
        f"""**Rows at contiguous addresses** (`storage="virtual"`, vAttention): times relative to the base that each
        line names, and bytes relative to contiguous tensors, `python -m benchmarks.virtual`,
        {machine_of(runs[0]["machine"])}; alternating turns in {len(runs)} processes, 95% intervals. A target is met
        where the interval reaches it:"""
    )
    return f"{said}\n\n{report.markdown(virtual_rows(runs))}"


def parallel(runs: Sequence[Data]) -> str:
    """Tables of `benchmarks.parallel`."""
    first = runs[0]
    said = flow(
        f"""**A model sharded over processes** (`tp_plan="auto"`, gloo) that share one machine's cores,
        `{first["model"]}`, float32, `python -m benchmarks.parallel`, {machine_of(first["facts"])}; medians of the
        turns, with minimum and maximum, and the memory that each process holds:"""
    )
    more = flow(
        f"""The second table of `benchmarks.parallel`, **computed from data sheets, not measured** (A100 with 80 GB,
        at most {MAX_ROWS} rows of {LENGTH} tokens; the ratio is the throughput over that of as many independent
        GPUs):"""
    )
    computed = report.markdown(first["computed"], COMPUTED)
    picture = picture_of(PARALLEL[0], "Computed: tokens a second of 7B to 65B over GPUs")
    return "\n\n".join([said, report.markdown(parallel_rows(runs)), more, computed, *picture])


def side_by_side(data: Data) -> str:
    """Tables of `benchmarks.side_by_side`, one per run."""
    parts = [
        flow(
            """**Beyond plain decoders**: 16 prompts of different lengths, with pictures or sound where the model
            takes them, `python -m benchmarks.side_by_side`: medians of turns in two processes and 95% intervals
            of our time over that of plain `generate` on the padded batch. A target is met where the interval reaches
            it."""
        )
    ]
    for run in data["runs"]:
        turns = " or ".join(map(str, sorted({row["turns"] for row in run["rows"]})))
        parts += [f"{machine_of(run['machine'])}; {turns} turns:", side_by_side_table(run["rows"])]
    return "\n\n".join(parts)
