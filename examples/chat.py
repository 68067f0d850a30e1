"""A chat in the browser: answers stream from one `PagedEngine`, with its stats and blocks beside
them.

Answers of all visitors run in the same batch; a stopped answer, or a closed page, frees its blocks.
The next turn of a conversation finds the earlier turns in the prefix cache. MODEL is a folder or
name of a model with a chat template; without MODEL, a small model is trained, which can only rave
about Python.

    pip install gradio
    python examples/chat.py [MODEL] [--port 7860] [--train-seconds 60] [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from typing import Any

import tiny_model  # before transformers: it sets the environment

import hf_paged

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ '\n' }}{% endfor %}"
MAX_PROMPT_TOKENS = 600  # per conversation; the oldest turns are left out


def build_page(engine: hf_paged.PagedEngine, generation: dict[str, Any]) -> Any:
    """The page, a `gradio.Blocks`: a chat, and the engine's stats, updated twice a second."""
    import gradio

    async def answer(message: str, history: list[dict[str, Any]]) -> AsyncIterator[str]:
        turns = [{"role": turn["role"], "content": text_of(turn)} for turn in history]
        turns.append({"role": "user", "content": message})
        ids = prompt_of(engine.tokenizer, turns)
        text = ""
        # closing this generator cancels the request
        async for output in engine.astream([ids], generation):
            text += output.text or ""
            yield text
            if output.result is not None and output.result.error is not None:
                raise gradio.Error(str(output.result.error))

    with gradio.Blocks(title="hf_paged") as page:
        with gradio.Row():
            with gradio.Column(scale=3):
                gradio.ChatInterface(answer, concurrency_limit=None, title="Chat")
            with gradio.Column(scale=2):
                gradio.Markdown("### The engine")
                figures = gradio.HTML(engine._repr_html_(), elem_id="engine")
        gradio.Timer(0.5).tick(engine._repr_html_, outputs=figures, show_progress="hidden")
    return page


def text_of(turn: dict[str, Any]) -> str:
    """Text of a turn, which gradio stores as text or as a list of parts."""
    content = turn["content"]
    return (
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    )


def prompt_of(tokenizer: Any, turns: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, ready for the next answer."""
    while True:
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        if len(inputs["input_ids"]) <= MAX_PROMPT_TOKENS or len(turns) == 1:
            return inputs["input_ids"]
        turns = turns[2:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", nargs="?", help="a folder, or a name that transformers loads")
    parser.add_argument("--port", type=int, default=7860)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--num-blocks", type=int, default=512)
    tiny_model.add_arguments(parser, seconds=60)
    arguments = parser.parse_args()
    generation: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens}
    if arguments.model is None:
        model, tokenizer = tiny_model.from_arguments(arguments)
        tokenizer.chat_template = TEMPLATE
        generation |= {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype="auto", device_map="auto"
        )
    config = hf_paged.PagedConfig(num_blocks=arguments.num_blocks)
    with hf_paged.PagedEngine(model, config, tokenizer=tokenizer) as engine:
        build_page(engine, generation).launch(server_port=arguments.port)


if __name__ == "__main__":
    main()
