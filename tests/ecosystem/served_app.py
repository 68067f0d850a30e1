"""The app of `transformers serve` on the engine, in this process, with tiny models in folders."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import ContinuousBatchingConfig, PreTrainedTokenizerFast
from transformers.cli.serving import chat_completion, completion, response, utils
from transformers.cli.serving.model_manager import ModelManager

from hf_paged.tools import serving

from ..support import models
from ..support.architecture_configs import tiny_model

# by `serving.install`
REPLACED = ("CBGenerateManager", "GenerateManager", "GenerationState", "set_torch_seed")
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
PARTS_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image'"
    " %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %} {% endfor %}"
)


class App:
    """The app, and a client for it that needs no network."""

    def __init__(self, folder: Path, client: Any, manager: ModelManager, state: Any) -> None:
        self.model, self.client, self.manager, self.state = str(folder), client, manager, state

    def post(self, endpoint: str = "chat/completions", headers: Any = None, **body: Any) -> Any:
        return self.client.post(
            f"/v1/{endpoint}", json={"model": self.model, **body}, headers=headers
        )

    def chat(self, content: Any = "abc", headers: Any = None, **body: Any) -> Any:
        """The answer's JSON; greedy, 6 tokens, unless told otherwise."""
        messages = [{"role": "user", "content": content}]
        answer = self.post(
            headers=headers, **{"messages": messages, "temperature": 0, "max_tokens": 6, **body}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def engine(self) -> Any:
        (engine,) = self.state.engines().values()
        return engine


@contextlib.contextmanager
def served(folder: Path, **config: Any) -> Iterator[App]:
    """Serves the model in a folder; `config` are fields of `ContinuousBatchingConfig`."""
    from fastapi.testclient import TestClient

    before = {name: getattr(utils, name) for name in REPLACED}
    build_server = serving.server.build_server
    serving.install()
    try:
        manager = ModelManager(device="cpu", model_timeout=-1)
        state = serving.EngineGenerationState(
            cb_config=ContinuousBatchingConfig(**config) if config else None
        )
        handlers = {
            "chat_handler": chat_completion.ChatCompletionHandler(manager, state),
            "completion_handler": completion.CompletionHandler(manager, state),
            "response_handler": response.ResponseHandler(manager, state),
        }
        others = dict.fromkeys(("transcription_handler", "systemone_handler"))
        app = serving.build_server(manager, generation_state=state, **handlers, **others)
        with TestClient(app) as client:
            yield App(folder, client, manager, state)
        state.shutdown()
    finally:
        serving.server.build_server = build_server
        for name, value in before.items():
            setattr(utils, name, value)


def characters(num_tokens: int, image_token: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for every printable ASCII character, and `num_tokens` in all."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    names = [*special, *(chr(i) for i in range(32, 127)), "\n"]
    names += [f"<{i}>" for i in range(len(names), num_tokens)]
    if image_token is not None:
        names[image_token] = "<image>"
    vocab = {{" ": "\u0120", "\n": "\u010a"}.get(name, name): i for i, name in enumerate(names)}
    made = Tokenizer(BPE(vocab, [], unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    if image_token is not None:
        tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    return tokenizer


def save_text_model(folder: Path, **config: Any) -> Any:
    """A Llama that answers in characters, without EOS."""
    tokenizer = characters(models.VOCAB_SIZE)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model = models.build("llama", **config)
    model.save_pretrained(folder)
    return model


def save_media_model(folder: Path) -> Any:
    """A LLaVA with its processor."""
    model = tiny_model(transformers.LlavaForConditionalGeneration)
    vision, text = model.config.vision_config, model.config.get_text_config()
    size = {"height": vision.image_size, "width": vision.image_size}
    images = transformers.CLIPImageProcessor(
        size={"shortest_edge": vision.image_size}, crop_size=size
    )
    processor = transformers.LlavaProcessor(
        images,
        characters(text.vocab_size, model.config.image_token_id),
        patch_size=vision.patch_size,
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        chat_template=PARTS_TEMPLATE,
    )
    processor.save_pretrained(folder)
    model.save_pretrained(folder)
    return model


def picture(seed: int) -> str:
    """A random picture as a data: URL."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def plain(model: Any, prompt: Any, **options: Any) -> list[int]:
    """New tokens of plain `generate`."""
    inputs = prompt if isinstance(prompt, dict) else {"input_ids": torch.tensor([prompt])}
    with torch.no_grad():
        ids = model.generate(**inputs, **{"max_new_tokens": 6, "do_sample": False, **options})
    return list(ids[0, inputs["input_ids"].shape[1] :].tolist())
