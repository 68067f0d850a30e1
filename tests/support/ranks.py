"""Cases that two processes run together, each with a shard of one model. `run` starts them under
torchrun and returns the results of each process. Run as a module, it is such a process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.ranks import processes
from tests.support import models, tools
from tests.support.engine_helpers import MANY_ENDS, lone_run, tokens_of
from tests.support.models import Options, Rows
from tests.support.rooms import fix_prices

BLOCK_SIZE = models.BLOCK_SIZE
# fits two of four prompts at a time
SHORT = {"block_size": BLOCK_SIZE, "num_blocks": 14, "prefix_caching": False}
PROMPTS = [models.token_ids(1, length, seed=length)[0].tolist() for length in (5, 11, 19, 30)]
SHARED = models.token_ids(1, 4 * BLOCK_SIZE, seed=7)[0].tolist()
REPEATING = [(prompt * 4)[: 3 * len(prompt) + 2] for prompt in PROMPTS]  # whose n-grams give drafts
ONE_ROW: dict[str, Options] = {
    "greedy": {"do_sample": False, "max_new_tokens": 30},
    "sample": {"do_sample": True, "max_new_tokens": 30},
}
OPTIONS: dict[str, Options] = {
    "greedy": {"do_sample": False, "max_new_tokens": 12},
    "samples": {
        **dict(do_sample=True, max_new_tokens=10, num_return_sequences=3),
        "eos_token_id": MANY_ENDS,
    },
    "beams": dict(do_sample=False, max_new_tokens=10, num_beams=4, num_return_sequences=2),
}


def load(folder: str, **options: Any) -> Any:
    config = DistributedConfig(tp_plan="auto", tp_size=int(os.environ["WORLD_SIZE"]))
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, **options)
    return model.eval()


def led(model: Any, work: Callable[[PagedEngine], Any], **config: Any) -> Any:
    """Result of `work` on an engine in process 0, served by the other processes."""
    if dist.get_rank():
        hf_paged.serve_rank(model)
        return None
    with PagedEngine(model, PagedConfig(**{"block_size": BLOCK_SIZE, **config})) as engine:
        found = work(engine)
        engine.check_integrity()
    return found


def plain(model: Any, prompt: list[int], options: Options, seed: int = 0, **more: Any) -> Rows:
    """New tokens of `generate` on one prompt, each row up to its end."""
    ends = options.get("eos_token_id", [])
    return [
        row[: next((n for n, token in enumerate(row, 1) if token in ends), len(row))]
        for row in lone_run(model, prompt, options, seed, **more)
    ]


def greedy_rows(
    model: Any, prompts: Rows, options: Options = OPTIONS["greedy"], **more: Any
) -> Rows:
    return [plain(model, prompt, options, **more)[0] for prompt in prompts]


def greedy_of(
    engine: PagedEngine, prompts: Rows, options: Any = OPTIONS["greedy"], **more: Any
) -> Rows:
    """As `greedy_rows`, by an engine in one call."""
    return [rows[0] for rows in tokens_of(engine.generate(prompts, options, **more))]


def whole_batch(model: Any, prompts: Rows, **options: Any) -> Rows:
    """Output of one `generate` call of the prompts' first five tokens."""
    ids = torch.tensor([prompt[:5] for prompt in prompts])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()


# -- cases: functions of a model's shard with a JSON result --------------------------------------


def plain_calls(model: Any, **more: Any) -> Any:
    return {
        name: [plain(model, prompt, options, **more) for prompt in PROMPTS]
        for name, options in OPTIONS.items()
    }


def paged_calls(model: Any) -> Any:
    found = plain_calls(model, **models.PAGED)
    route = hf_paged.last_route(model)
    hf_paged.check_integrity(model)
    return {**found, "road": route.road, "reason": route.reason}


def engine_calls(model: Any) -> Any:
    def work(engine: PagedEngine) -> Any:
        seeds = [0] * len(PROMPTS)
        found: Options = {
            name: tokens_of(engine.generate(PROMPTS, options, seed=seeds))
            for name, options in OPTIONS.items()
        }
        return {**found, "route": engine.route.reason, "used": engine.stats().used_blocks}

    return led(model, work)


def preemptions(engine: PagedEngine) -> dict[str, int]:
    stats = engine.stats()
    return {"preemptions": stats.num_preemptions, "swaps": stats.num_swaps}


def preempted(model: Any) -> Any:
    """Two of four prompts fit: each preemption method, on an engine and in `generate`."""
    # no two logits of a greedy step are nearer than 0.01: a shard's sums are rounded otherwise than
    # a whole product's
    prompts = [models.token_ids(1, len(x), seed=26 + len(x))[0].tolist() for x in PROMPTS]
    options = ONE_ROW["greedy"]
    found: Options = {"plain": greedy_rows(model, prompts, options)}
    found["plain rows"] = whole_batch(model, prompts, **options)

    def work(engine: PagedEngine) -> Any:
        return {"tokens": greedy_of(engine, prompts, options), **preemptions(engine)}

    for how in ("recompute", "swap", "auto"):
        config = {**SHORT, "preemption": how}
        found[how] = led(model, work, **config)
        paged = {"cache_implementation": "paged", "cache_config": config}
        found[f"{how} rows"] = whole_batch(model, prompts, **options, **paged)
    return found


def prefix_hits(model: Any) -> Any:
    prompts = [[*SHARED, *prompt] for prompt in PROMPTS]

    def work(engine: PagedEngine) -> Any:
        one_by_one = [greedy_of(engine, [prompt])[0] for prompt in prompts]
        return {"tokens": one_by_one, "hits": engine.stats().num_prefix_hit_tokens}

    found: Options = {"engine": led(model, work)}
    for when in ("", " after"):
        found[f"plain{when}"] = greedy_rows(model, prompts)
        found[f"generate{when}"] = greedy_rows(model, prompts, **models.PAGED)
        change_one_shard(model)
    return found


def changed_weights(model: Any) -> Any:
    """Only the second process changes its weights while blocks are cached."""
    prompts, num_orders = [[*SHARED, *PROMPTS[0]]], 0
    (before,), receive = greedy_rows(model, prompts), processes.Ranks.receive

    def work(engine: PagedEngine) -> Any:
        return [greedy_of(engine, prompts)[0] for _ in range(2)]

    def observed(ranks: Any) -> bytes:
        """Changes them while it receives an engine message, that is between engine calls."""
        nonlocal num_orders
        message = receive(ranks)
        num_orders += b"choose_layout" in message
        if b"choose_layout" in message and num_orders == 2:
            change_one_shard(model)
        return message

    with mock.patch.object(processes.Ranks, "receive", observed if dist.get_rank() else receive):
        found = led(model, work)
    return {"before": before, "after": greedy_rows(model, prompts)[0], "engine": found}


def change_one_shard(model: Any) -> None:
    if dist.get_rank():
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.to_local().mul_(-1)


def memory(model: Any) -> Any:
    """Bytes of the blocks of one call in this process."""
    hf_paged.free(model)
    greedy_rows(model, PROMPTS[:1], **models.PAGED)
    stats = hf_paged.memory_stats(model)
    return {"bytes": stats.peak_bytes, "blocks": stats.peak_blocks}


Case = tuple[str, list[int], Options, int]
NUM_RANDOM = 500


def random_cases(chance: random.Random) -> tuple[list[Case], set[int]]:
    """Requests of all kinds, (name, prompt, options, seed), and the numbers of those to cancel."""
    cases: list[Case] = []
    for number in range(NUM_RANDOM):
        words = range(models.FIRST_WORD, models.VOCAB_SIZE)
        prompt = [chance.choice(words) for _ in range(chance.randrange(1, 40))]
        if chance.random() < 0.3:
            prompt = SHARED[: chance.randrange(1, len(SHARED))] + prompt
        options = dict(OPTIONS[chance.choice(list(OPTIONS))])
        options["max_new_tokens"] = chance.randrange(1, 20)
        cases.append((f"r{number}", prompt, options, number))
    return cases, set(chance.sample(range(NUM_RANDOM), NUM_RANDOM // 20))


def random_requests(model: Any) -> Any:
    """They arrive, end and are cancelled, with too little memory."""
    chance = random.Random(0)
    cases, cancelled = random_cases(chance)

    def work(engine: PagedEngine) -> Any:
        left, found = list(enumerate(cases)), {}
        while left or engine.has_unfinished:
            for _ in range(chance.randrange(0, 6)):
                if left:
                    number, (name, prompt, options, seed) = left.pop(0)
                    engine.add_request(
                        prompt, options, request_id=name, seed=seed, priority=number % 3
                    )
                    if number in cancelled:
                        engine.cancel(name)
            for output in engine.step():
                if output.result is not None and output.result.finish_reason != "cancelled":
                    found[output.request_id] = tokens_of([output.result])[0]
        return {"tokens": found, **preemptions(engine)}

    return led(model, work, num_blocks=60, max_num_batched_tokens=64, max_num_seqs=24)


def random_plain_calls(model: Any) -> Any:
    """What transformers' own code makes of the requests that are not cancelled, by name."""
    cases, cancelled = random_cases(random.Random(0))
    return {
        name: plain(model, prompt, options, seed)
        for number, (name, prompt, options, seed) in enumerate(cases)
        if number not in cancelled
    }


def slow_rank(model: Any) -> Any:
    """The second process delays each forward by 50 ms."""
    with before_forwards(model, 1, lambda: time.sleep(0.05)):
        return engine_calls(model)


@contextlib.contextmanager
def before_forwards(model: Any, rank: int, work: Callable[[], Any]) -> Iterator[None]:
    """Within it, one process does something before each forward."""
    forward = model.model.forward

    def forward_after(*args: Any, **kwargs: Any) -> Any:
        work()
        return forward(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        if dist.get_rank() == rank:
            stack.enter_context(mock.patch.object(model.model, "forward", forward_after))
        yield


def killed(model: Any, rank: int = 1) -> Any:
    """The second process, or another, exits in the middle of a call. The other one reports what
    it finds: torchrun ends it as soon as it has seen the first end, which may be before it has."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    count = iter(range(1000))
    with before_forwards(model, rank, lambda: os._exit(9) if next(count) == 40 else None):
        try:
            led(model, lambda engine: engine.generate(PROMPTS, {"max_new_tokens": 200}))
        except hf_paged.RankLostError as error:
            return {"error": str(error)}
    return None


def killed_leader(model: Any) -> Any:
    return killed(model, rank=0)


def refusals(model: Any) -> Any:
    """Requests refused before a forward; then the engine still serves."""
    found: dict[str, str] = {}

    def refused(name: str, call: Callable[..., Any], *given: Any, **more: Any) -> None:
        try:
            call(*given, **more)
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)

    if dist.get_rank():
        refused("other rank", PagedEngine, model)
    else:
        refused("serve", hf_paged.serve_rank, model)

    def work(engine: PagedEngine) -> Any:
        refused("second engine", PagedEngine, model)
        refused("generate", greedy_rows, model, PROMPTS[:1], **models.PAGED)
        pixels = {"pixel_values": torch.zeros(1, 3, 4, 4)}
        refused("inputs", engine.add_request, [5, 6], inputs=pixels)
        refused("prefix", engine.save_prefix, SHARED, "nowhere.safetensors")
        refused("sharded assistant", engine.add_request, [5, 6], assistant_model=model)
        return tokens_of(engine.generate(PROMPTS, OPTIONS["greedy"]))

    def one(engine: PagedEngine) -> Any:
        return repr(engine.generate(PROMPTS[:1], OPTIONS["greedy"])[0].error)

    tokens = led(model, work)
    found["invariant"] = led(model, one, batch_invariant=True)
    return {"refused": found, "tokens": tokens}


def uneven_heads(model: Any) -> Any:
    """A number of processes that does not divide the K/V heads: refused before any allocation."""
    found = []
    engine = hf_paged.serve_rank if dist.get_rank() else PagedEngine
    paged = functools.partial(greedy_rows, prompts=PROMPTS[:1], **models.PAGED)
    for call in (engine, paged):
        try:
            call(model)
        except ValueError as error:
            found.append(str(error))
    return {"errors": found, "held": hf_paged.memory_stats(model).held_bytes}


def other_seeds(model: Any) -> Any:
    """Processes with different random draws raise an error instead of hanging."""
    try:
        plain(model, PROMPTS[0], OPTIONS["samples"], seed=dist.get_rank(), **models.PAGED)
    except hf_paged.RankLostError as error:
        return str(error)
    return None


def failing_forward(model: Any) -> Any:
    """A forward that fails in all processes fails its requests; the next ones are served."""
    forward, fails = model.lm_head.forward, [False]

    def failing(x: Any) -> Any:
        flag = torch.tensor([float(fails[0])])
        dist.broadcast(flag, 0)  # process 0 decides whether this forward fails
        if flag.item():
            raise RuntimeError("a fault")
        return forward(x)

    def work(engine: PagedEngine) -> Any:
        first = greedy_of(engine, PROMPTS[:1])
        fails[0] = True
        error = repr(engine.generate([PROMPTS[1]], OPTIONS["greedy"])[0].error)
        fails[0] = False
        return {"first": first, "error": error, "then": greedy_of(engine, PROMPTS[:1])}

    with mock.patch.object(model.lm_head, "forward", failing):
        return led(model, work, prefix_caching=False)


# -- adapters ------------------------------------------------------------------------------------


def folders() -> list[str]:
    """Folders of the adapters that `run` was given, sorted by name."""
    return sorted(str(path) for path in Path(sys.argv[1], "adapters").iterdir() if path.is_dir())


# index of the adapter that also covers the head: PEFT (0.21) cannot load it on a sharded head
HEADED = 1


@functools.cache
def with_adapters(model: Any) -> Any:
    """The model with the adapters loaded by PEFT, in every process."""
    import peft

    made = None
    for number, folder in enumerate(folders()):
        if number == HEADED:
            continue
        if made is None:
            made = peft.PeftModel.from_pretrained(model, folder, adapter_name=f"a{number}")
        else:
            made.load_adapter(folder, f"a{number}")
    return made.eval()


def rows_of_adapters(engine: PagedEngine, adapters: list[str]) -> Options:
    """Requests of each kind with each adapter, mixed: tokens by adapter."""
    runner, num_rows = engine._core.get_loop().executor.runner, list[int]()
    run = runner.run
    runner.run = lambda items, *rest: (num_rows.append(len(items)), run(items, *rest))[1]
    calls = [*itertools.product(adapters, OPTIONS, PROMPTS)]
    results = engine.generate(
        [prompt for *_, prompt in calls],
        [OPTIONS[name] for _, name, _ in calls],
        adapter=[adapter for adapter, *_ in calls],
        seed=[0] * len(calls),
    )
    tokens: Options = {adapter: {name: [] for name in OPTIONS} for adapter in adapters}
    hits = []
    for (adapter, name, prompt), result in zip(calls, results):
        tokens[adapter][name] += tokens_of([result])
        if name == "greedy" and prompt is PROMPTS[-1]:
            hits.append(result.num_prefix_hit_tokens)
    stats = engine.stats()
    counts = {"loads": stats.num_adapter_loads, "evictions": stats.num_adapter_evictions}
    share = {"forwards a step": len(num_rows) / stats.num_steps}
    return {"tokens": list(tokens.values()), "hits": hits, **counts, **share}


def adapter_folders(model: Any) -> Any:
    """Requests with adapters in folders and without, twice; with room for few adapters; with one
    that the second process cannot read."""
    names = [*folders(), "__base__"]
    found: Options = {}

    def twice(engine: PagedEngine) -> Any:
        return [rows_of_adapters(engine, names) for _ in range(2)]

    def one_by_one(engine: PagedEngine) -> Any:
        tokens = [
            tokens_of(engine.generate(PROMPTS[:2], OPTIONS["greedy"], adapter=[name] * 2))
            for name in 2 * names
        ]
        return {"tokens": tokens, "evictions": engine.stats().num_adapter_evictions}

    found["together"] = led(model, twice)
    found["short"] = led(model, one_by_one, num_blocks=16, prefix_caching=False)

    from hf_paged.adapters import files as adapter_files

    load = adapter_files.load_adapter

    def fail(model: Any, file: Any) -> Any:
        if file.path == os.path.realpath(names[1]):
            raise adapter_files.AdapterError(file, "no such folder here")
        return load(model, file)

    def unread(engine: PagedEngine) -> Any:
        results = engine.generate(PROMPTS[:1] * len(names), OPTIONS["greedy"], adapter=names)
        return [repr(result.error) if result.error else tokens_of([result]) for result in results]

    with mock.patch.object(adapter_files, "load_adapter", fail if dist.get_rank() else load):
        found["unread"] = led(model, unread)
    return found


def rows_by_names(model: Any, names: list[str], **more: Any) -> Any:
    """Output of one `generate` call whose rows use the last of these adapters."""
    names = names[-len(PROMPTS) :]
    return whole_batch(model, PROMPTS, **OPTIONS["greedy"], adapter_names=names, **more)


def own_adapters(model: Any) -> Any:
    """Requests with the model's loaded adapters, by name; `adapter_names` of `generate` in each
    process."""
    made = with_adapters(model)
    names = [*made.peft_config, "__base__"]
    found: Options = {"plain": []}
    for name in names:
        with made.disable_adapter() if name == "__base__" else contextlib.nullcontext():
            if name != "__base__":
                made.set_adapter(name)
            found["plain"].append(plain_calls(made))
    made.set_adapter("a0")
    found["engine"] = led(made, lambda engine: rows_of_adapters(engine, names))
    found["rows"] = rows_by_names(made, names, **models.PAGED)
    found["road"] = hf_paged.last_route(model).road
    return found


def drafts(model: Any) -> Any:
    """Rows with n-gram drafts, or drafts of a smaller model in process 0; last, n-gram drafts with
    adapters."""

    def work(engine: PagedEngine, kinds: Any = ONE_ROW, assisted: bool = False, **more: Any) -> Any:
        if assisted:
            more["assistant_model"] = models.get_assistant("llama")  # exists only in this process
        more["seed"] = [0] * len(REPEATING)
        tokens = {
            name: tokens_of(engine.generate(REPEATING, ONE_ROW[name], **more)) for name in kinds
        }
        return {**tokens, "accepted": engine.stats().num_accepted_tokens}

    def played(speculation: str | None = "ngram", **more: Any) -> Any:
        return led(model, functools.partial(work, **more), speculation=speculation)

    names = [*folders(), "__base__"][-len(REPEATING) :]
    assisted = played(None, kinds=["greedy"], assisted=True)
    return {"ngrams": played(), "assistant": assisted, "adapters": played(adapter=names)}


CASES: dict[str, Callable[[Any], Any]] = {
    each.__name__: each
    for each in (
        *(plain_calls, paged_calls, engine_calls, preempted, prefix_hits, changed_weights, memory),
        *(random_requests, random_plain_calls, slow_rank, killed, killed_leader, refusals),
        *(other_seeds, failing_forward, adapter_folders, own_adapters, drafts, uneven_heads),
    )
}


def run(
    model: Any, *cases: str, world_size: int = 2, timeout: float = 300.0, adapters: Any = None
) -> list[Options]:
    """Results of each process for these cases, by name; a case that a process did not finish is
    missing. The adapters of the PEFT model `adapters` are saved for the cases (`folders`)."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if adapters is not None:
            adapters.save_pretrained(Path(folder, "adapters"), save_embedding_layers=False)
        start = ("--standalone", f"--nproc_per_node={world_size}", "-m", "tests.support.ranks")
        quiet = {"TRANSFORMERS_VERBOSITY": "error"}
        quiet["PYTHONFAULTHANDLER"] = "1"  # a process that crashes says where
        program = "torch.distributed.run"
        done = tools.run_apart(program, *start, folder, *cases, timeout=timeout, **quiet)
        found = []
        for rank in range(world_size):
            path = Path(folder, f"{rank}.json")
            found.append(json.loads(path.read_text()) if path.exists() else {})
        if not any(found):
            raise AssertionError(done.stderr[-4000:])
        return found


def main() -> None:
    folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    fix_prices()
    model = load(folder)
    model.generation_config = GenerationConfig(**model.generation_config.to_dict())
    found: Options = {}
    for name in names:
        found[name] = CASES[name](model)
        Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
