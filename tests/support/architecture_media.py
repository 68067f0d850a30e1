"""Images, video and sound for each tiny architecture, as its processor would return them.

Two rows with different pictures (clips, sounds), of different size if the class takes any size,
between text. A row has as many placeholders as the model makes embeddings of its picture, so the
arithmetic of processors is not repeated here.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from tests.support.models import left_padded

Tensors = dict[str, Any]  # a few classes take lists of numbers
Row = Callable[[PretrainedConfig, int], Tensors]  # the media of a row, the first or the second
MEDIA_TYPES = {"image": 1, "video": 2, "audio": 3}  # in `mm_token_type_ids`
TEXT_AROUND = [(6, 4), (2, 3)]  # tokens before and after the medium of each row
STARTS = {
    "image": ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index"),
    "video": ("vision_start_token_id", "video_start_token_id"),
    "audio": ("audio_start_token_id", "audio_bos_token_id", "boa_token_id"),
}
ENDS = {
    "image": ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index"),
    "video": ("vision_end_token_id", "video_end_token_id"),
    "audio": ("audio_end_token_id", "audio_eos_token_id", "eoa_token_id", "eoa_token_index"),
}
FRAME_BY_FRAME = (
    "cohere_compass",
    "cosmos3",
    "gemma4",
    "glm",
    "qwen3_5",
    "qwen3_vl",
    "qwen4",
)  # a time stamp before each frame
IMAGES_AS_FRAMES = ("glm",)  # their videos have the placeholders of images
NOT_FOR_FEATURES = ("image_num_crops", "video_second_per_grid")
MEDIA_ARGUMENTS = set(
    "pixel_values pixel_values_videos image_pixel_values flattened_patches input_features"
    " input_values audio_input_features protein_input_ids".split()
)
NOT_GIVEN = {  # arguments of `forward` that `media_inputs` does not give
    "Apertus1p5ForConditionalGeneration": (
        "codes of pictures are a range of its vocabulary, which a tiny one lacks"
    ),
    "EvollaForProteinText2Text": (
        "plain `generate` fails at the second token where it has a protein"
    ),
    "PI0ForConditionalGeneration": "has no `generate`",
    "VibeVoiceForConditionalGeneration": "needs diffusers",
}
MASKS_OF_SOUND = ("input_features_mask", "feature_attention_mask")


def takes_media(model_class: type[PreTrainedModel]) -> bool:
    """Whether `media_inputs` should return inputs for this class."""
    arguments = set(inspect.signature(model_class.forward).parameters)
    return bool(arguments & MEDIA_ARGUMENTS) and model_class.__name__ not in NOT_GIVEN


def media_inputs(model: PreTrainedModel) -> dict[str, Tensors]:
    """Inputs of `generate` for every medium of this model."""
    if calls := _calls(model):
        return {medium: build(model.config) for medium, build in calls.items()}
    if hasattr(model, "thinker"):
        return media_inputs(model.thinker)
    return {
        medium: _prompts(model, medium, [build(model.config, row) for row in range(2)])
        for medium, build in _builders(model)
    }


def media_rows(model: PreTrainedModel) -> dict[str, list[Tensors]]:
    """Three prompts per medium, a row each; the last has a picture, clip or sound of the first
    one's size. Empty for classes whose inputs are made for a whole batch."""
    if _calls(model) or hasattr(model, "thinker"):
        return {}
    found, around = {}, (*TEXT_AROUND, TEXT_AROUND[1])
    for medium, build in _builders(model):
        first, second = (build(model.config, row) for row in range(2))
        is_float = {
            key: isinstance(x, torch.Tensor) and x.is_floating_point() for key, x in first.items()
        }
        third = {key: -x if is_float[key] else x for key, x in first.items()}
        pairs = zip((first, second, third), around)
        found[medium] = [_prompts(model, medium, [media], [texts]) for media, texts in pairs]
    return found


def _calls(model: PreTrainedModel) -> dict[str, Callable[[PretrainedConfig], Tensors]]:
    name = type(model).__name__
    return {medium: CALLS[name, medium] for medium in MEDIA_TYPES if (name, medium) in CALLS}


def _builders(model: PreTrainedModel) -> Iterator[tuple[str, Row]]:
    """The media that the model takes, each with what makes a row of it."""
    for medium in MEDIA_TYPES:
        build = ROWS.get((type(model).__name__, medium)) or _general_row(model, medium)
        has_none = medium == "audio" and getattr(model.config, "audio_config", 0) is None
        if build is not None and not has_none:
            yield medium, build


def _general_row(model: PreTrainedModel, medium: str) -> Row | None:
    method = _features_method(model, medium)
    if method is None:
        return None
    parameters = inspect.signature(method).parameters
    takes = {*parameters, *inspect.signature(model.forward).parameters}
    if medium == "video":
        return grid_of_frames if "video_grid_thw" in takes else None
    if medium == "audio":
        mask = MASKS_OF_SOUND[MASKS_OF_SOUND[1] in takes]
        return functools.partial(sound, mask=mask)
    if "image_grid_thw" in takes:
        return grid_of_patches
    if "pixel_values_local" in takes:
        return picture_and_crops
    if "pixel_attention_mask" in takes:
        return tiles_with_mask
    if hasattr(model.config, "image_grid_pinpoints"):
        return picture_and_tiles
    if "image_sizes" in parameters and parameters["image_sizes"].default is inspect.Parameter.empty:
        return picture_of_any_size
    return square_picture


def _features_method(model: PreTrainedModel, medium: str) -> Callable[..., Any] | None:
    for owner in (getattr(model, "model", None), model):
        if hasattr(owner, f"get_{medium}_features"):
            return getattr(owner, f"get_{medium}_features")
    return None


def _prompts(
    model: PreTrainedModel,
    medium: str,
    media: list[Tensors],
    around: Sequence[tuple[int, int]] = TEXT_AROUND,
) -> Tensors:
    """All rows: text around the placeholders, left-padded, with masks, types and media."""
    config, kind = model.config, model.config.model_type
    name = "image" if medium == "video" and kind.startswith(IMAGES_AS_FRAMES) else medium
    (placeholder,) = _tokens(config, (f"{name}_token_id", f"{name}_token_index"))
    counts = []
    for tensors in media:
        frames = 1
        if medium == "video" and kind.startswith(FRAME_BY_FRAME):
            frames = int(tensors["video_grid_thw"][0, 0]) if "video_grid_thw" in tensors else 2
        counts.append([_count_embeddings(model, medium, tensors) // frames] * frames)
    inputs = prompts(config, medium, placeholder, counts, around)
    types = (inputs["input_ids"] == placeholder) * MEDIA_TYPES[medium]
    takes = inspect.signature(model.forward).parameters
    if "mm_token_type_ids" in takes:
        inputs["mm_token_type_ids"] = types
    if "token_type_ids" in takes:
        # there it marks the tokens to learn
        inputs["token_type_ids"] = types * (kind != "paligemma")
    return {**inputs, **(join(media) if len(media) > 1 else media[0])}


def prompts(
    config: PretrainedConfig,
    medium: str,
    placeholder: int,
    counts: list[list[int]],
    around: Sequence[tuple[int, int]] = TEXT_AROUND,
) -> Tensors:
    """Rows with groups of placeholders; a time stamp separates two groups."""
    start, end = (_tokens(config, names[medium]) for names in (STARTS, ENDS))
    rows = []
    for groups, (before, behind) in zip(counts, around, strict=True):
        stamped = [token for count in groups for token in (*_words(1), *[placeholder] * count)]
        rows.append([*_words(before), *start, *stamped[1:], *end, *_words(behind)])
    return left_padded(rows)


def join(media: list[Tensors]) -> Tensors:
    """Joins the inputs of rows or batches; patches in sequence stay so, indices continue."""
    return functools.reduce(_join_two, media)


def _join_two(first: Tensors, second: Tensors) -> Tensors:
    if "image_token_pooling" in first:
        patches = first["pixel_values"].shape[:2].numel()
        second = {**second, "image_token_pooling": second["image_token_pooling"] + patches}
    joined = {}
    strips = any(name.startswith("target_sizes") for name in first)
    for name, x in first.items():
        side = -1 if strips and name.startswith("pixel_values") else 0
        if isinstance(x, torch.Tensor):
            x = torch.cat([x, second[name]], side)
        elif isinstance(x, list):
            x = x + second[name]
        joined[name] = x
    return joined


def _words(count: int) -> list[int]:
    return torch.randint(5, 100, (count,)).tolist()


def _tokens(config: PretrainedConfig, names: tuple[str, ...]) -> list[int]:
    """The token that the config has under the first known of `names`, as a list; empty if there is
    none."""
    return [value for name in names if isinstance(value := getattr(config, name, None), int)][:1]


@torch.no_grad()
def _count_embeddings(model: PreTrainedModel, medium: str, tensors: Tensors) -> int:
    method = _features_method(model, medium)
    output = method(**{name: x for name, x in tensors.items() if name not in NOT_FOR_FEATURES})
    features = getattr(output, "pooler_output", None)
    if medium == "audio" and getattr(output, "attention_mask", None) is not None:
        features = features[output.attention_mask]
    if features is None:
        layers = getattr(output, "deepstack_features", None)
        features = layers[0][1] if layers else output.last_hidden_state
    features = [features] if isinstance(features, torch.Tensor) else features
    return sum(x.numel() for x in features) // model.get_input_embeddings().weight.shape[1]


# What a row of a medium is, by the config and the number of the row. Where a class takes any size,
# the second row's is half of the first one's.


def picture(config: PretrainedConfig, *rows: int) -> torch.Tensor:
    """Pictures `(*rows, 3, size, size)` of the size that a vision config names."""
    size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    return torch.randn(*rows, 3, size, size)


def first_half(length: int, row: int) -> torch.Tensor:
    """`(1, length)`: True up to the length of this row."""
    return torch.arange(length)[None] < length // (row + 1)


def square_picture(config: PretrainedConfig, row: int) -> Tensors:
    return {"pixel_values": picture(config.vision_config, 1)}


def picture_of_any_size(config: PretrainedConfig, row: int, side: int = 64) -> Tensors:
    """Pictures padded to the largest of the batch; the second is half as high."""
    height = side // (row + 1)
    pixels = torch.zeros(1, 3, side, side)
    pixels[:, :, :height] = torch.randn(1, 3, height, side)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, side]])}


def picture_and_tiles(config: PretrainedConfig, row: int) -> Tensors:
    """The whole picture and its two tiles, stacked in the first row, side by side in the second."""
    pixels = picture(config.vision_config, 1, 3)
    size = pixels.shape[-1]
    shape = (2 * size, size) if row == 0 else (size - 4, 2 * size)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([shape])}


def picture_and_crops(config: PretrainedConfig, row: int) -> Tensors:
    """The whole picture and two crops of the first, one of the second."""
    vision = getattr(config.vision_config, "sam_config", config.vision_config)
    pixels = {"pixel_values": picture(vision, 1), "pixel_values_local": picture(vision, 2 - row)}
    return {**pixels, "num_local_patches": torch.tensor([2 - row])}


def tiles_with_mask(config: PretrainedConfig, row: int) -> Tensors:
    """Two tiles of the first picture; one partly padded tile and an empty one of the second."""
    pixels = picture(config.vision_config, 1, 2)
    size = pixels.shape[-1]
    mask = torch.ones(1, 2, size, size, dtype=torch.long)
    if row:
        for x in (pixels.movedim(2, -1), mask):
            x[:, 1] = 0
            x[:, 0, size // 2 :] = 0
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


def grid_of_patches(config: PretrainedConfig, row: int, frames: int = 1) -> Tensors:
    grid = (frames, 4, 4 // (row + 1))
    return {"pixel_values": _patches(config, grid), "image_grid_thw": torch.tensor([grid])}


def _patches(config: PretrainedConfig, grid: tuple[int, ...]) -> torch.Tensor:
    """Pixels of a grid of patches, `(t * h * w, channels * frames * height * width)`."""
    vision = config.vision_config
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    frames = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", 1)
    return torch.randn(math.prod(grid), channels * frames * vision.patch_size**2)


def square_patches(config: PretrainedConfig, row: int) -> Tensors:
    """A grid of patches `(channels, height, width)`."""
    inputs, size = grid_of_patches(config, row), config.vision_config.patch_size
    return {**inputs, "pixel_values": inputs["pixel_values"].view(-1, 3, size, size)}


def strip_of_patches(config: PretrainedConfig, row: int) -> Tensors:
    """Patches in one sequence."""
    grid, size = (8, 8 // (row + 1)), config.vision_config.patch_size
    pixels = torch.randn(1, 3, size, math.prod(grid) * size)
    return {"pixel_values": pixels, "target_sizes": torch.tensor([grid])}


def as_video(build: Callable[..., Tensors], **more: int) -> Row:
    """Pictures under the names of clips."""
    names = {"image_grid_thw": "video_grid_thw"}
    return lambda config, row: {
        names.get(name, f"{name}_videos"): x for name, x in build(config, row, **more).items()
    }


grid_of_frames = as_video(grid_of_patches, frames=2)


def _padded_patches(row: int, size: int, draw: Any = torch.rand) -> tuple[Any, ...]:
    """Patches padded to the largest number in the batch: their grid, which are real, and pixels."""
    grid, real = (4, 4 // (row + 1)), first_half(16, row)
    pixels = torch.zeros(1, 16, 3 * size**2)
    pixels[real] = draw(1, math.prod(grid), 3 * size**2)
    return grid, real, pixels


def padded_patches(config: PretrainedConfig, row: int) -> Tensors:
    grid, real, pixels = _padded_patches(row, config.vision_config.patch_size, torch.randn)
    sizes = {"spatial_shapes": torch.tensor([grid]), "pixel_attention_mask": real.long()}
    return {"pixel_values": pixels, **sizes}


def patches_with_positions(config: PretrainedConfig, row: int) -> Tensors:
    """With the position of each."""
    vision = config.vision_config
    size = getattr(vision, "model_patch_size", vision.patch_size)
    grid, real, pixels = _padded_patches(row, size)
    places = torch.full((1, 16, 2), -1)
    places[real] = torch.cartesian_prod(*map(torch.arange, grid)).flip(-1)
    return {"pixel_values": pixels, "image_position_ids": places}


def frames_with_positions(config: PretrainedConfig, row: int) -> Tensors:
    frames = join([patches_with_positions(config, row) for _ in range(2)])
    inputs = {
        "pixel_values_videos": frames["pixel_values"],
        "video_position_ids": frames["image_position_ids"],
    }
    return {**inputs, "num_frames_per_video": torch.tensor([2])}


def picture_and_question(config: PretrainedConfig, row: int) -> Tensors:
    """A picture with the question for the Q-former."""
    pixels = square_picture(config, row)
    mask = torch.ones(1, 4, dtype=torch.long)
    mask[:, 4 - row :] = 0
    question = {"qformer_input_ids": torch.randint(5, 100, (1, 4)), "qformer_attention_mask": mask}
    return {**pixels, **question}


def crops_with_pooling(config: PretrainedConfig, row: int) -> Tensors:
    """The whole picture and a crop, `(crops, patches, pixels)`, with the patches that are averaged
    into each token."""
    vision = config.vision_config
    side = vision.image_size[0] // vision.patch_size
    places = torch.arange(2 * side**2).view(2, side // 2, 2, side // 2, 2).transpose(2, 3)
    places = places.reshape(2, side // 2, -1, 4)
    rows = side // 2 // (row + 1)  # of the crop
    return {
        "pixel_values": torch.randn(2, side**2, 3 * vision.patch_size**2),
        "image_token_pooling": torch.cat([places[0].flatten(0, 1), places[1, :rows].flatten(0, 1)]),
        "image_grids": torch.tensor([[side // 2, side // 2, rows, side // 2]]),
        "image_num_crops": torch.tensor([2]),
    }


def merged_patches(config: PretrainedConfig, row: int) -> Tensors:
    """Patches of the size that becomes one token, channels last."""
    grid = (1, 4, 4 // (row + 1))
    size = config.vision_config.patch_size * config.vision_config.spatial_merge_size
    pixels = torch.randn(math.prod(grid), size, size, 3)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}


def sound(
    config: PretrainedConfig, row: int, frames: int = 128, mask: str = MASKS_OF_SOUND[0]
) -> Tensors:
    """A spectrogram `(1, bins, frames)` with its mask."""
    audio = getattr(config.audio_config, "asr_config", config.audio_config)
    real = first_half(frames, row)
    return {"input_features": torch.randn(1, audio.num_mel_bins, frames) * real, mask: real.long()}


def sound_with_frames_first(config: PretrainedConfig, row: int) -> Tensors:
    inputs = sound(config, row)
    return {name: x.mT.contiguous() if x.ndim == 3 else x.bool() for name, x in inputs.items()}


def stacked_frames(config: PretrainedConfig, row: int) -> Tensors:
    """`(1, 12, features)`."""
    audio, real = config.audio_config, first_half(12, row)
    size = getattr(audio, "input_size", None) or audio.audio_embed_dim
    features = torch.randn(1, 12, size) * real[..., None]
    return {"input_features": features, "input_features_mask": real}


def samples(config: PretrainedConfig, row: int, mask: str = "padding_mask") -> Tensors:
    real = first_half(9600, row)
    return {"input_values": torch.randn(1, 9600) * real, mask: real}


def sound_of_dots(config: PretrainedConfig, row: int) -> Tensors:
    audio, real = config.audio_config, first_half(64, row)
    features = torch.randn(1, audio.feature_size, 64) * real
    lengths = torch.tensor([audio.hop_length * int(real.sum())])
    return {"input_features": features, "chunk_sample_lengths": lengths}


def _by_class(builders: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Builders by class and medium; names are without `ForConditionalGeneration` at their end."""
    whole = ("Model", "CausalLM", "Text2Text", "ForSpeechToText", "_V3")
    return {
        (name if name.endswith(whole) else f"{name}ForConditionalGeneration", medium): build
        for medium, rows in builders.items()
        for names, build in rows.items()
        for name in names.split()
    }


ROWS_BY_BUILDER: dict[str, dict[str, Row]] = {
    "image": {
        # two tiles of the first picture, one of the second
        "AyaVision Cohere2Vision GotOcr2 InternVL Ovis2 QianfanOCR": lambda c, row: {
            "pixel_values": picture(c.vision_config, 2 - row)
        },
        "Kimi_K25 PaddleOCRVL": square_patches,
        "MiniCPMOcr MiniCPMV4_6 MiniCPMV4_7": strip_of_patches,
        "Lfm2Vl": padded_patches,
        "Gemma4 Gemma4Unified": patches_with_positions,
        "InstructBlip": picture_and_question,
        "DeepseekVLHybrid": lambda c, row: {
            **square_picture(c, row),
            "high_res_pixel_values": picture(c.high_res_vision_config, 1),
        },
        "GraniteDocling": lambda c, row: {  # of the second picture, one tile is empty
            **tiles_with_mask(c, 0),
            "pixel_attention_mask": torch.tensor([[True, row == 0]]),
        },
        "Molmo2": crops_with_pooling,
        "VideoLlama3": lambda c, row: {
            **grid_of_patches(c, row),
            "image_merge_sizes": torch.tensor([2]),
        },
        "Inkling2 Inkling2Loop": merged_patches,
        "Chameleon": lambda c, row: {"pixel_values": torch.randn(1, 3, 16, 16)},
        "Emu3": lambda c, row: picture_of_any_size(c, row, side=8),
        "Florence2": lambda c, row: {"pixel_values": torch.randn(1, 3, 64, 64)},
        "UnlimitedOcr": lambda c, row: {
            **picture_and_crops(c, row),
            "num_local_patches": [2 - row],
            "patches_grid": [[1, 2 - row]],
        },
        "T5Gemma2": lambda c, row: square_picture(c.encoder, row),
        "FuyuForCausalLM": lambda c, row: {
            "pixel_values": torch.randn(4 - 2 * row, 3 * c.patch_size**2)
        },
        "NemotronH_Omni_Reasoning_V3": lambda c, row: {
            "pixel_values": grid_of_patches(c, row)["pixel_values"],
            "image_grid_hw": torch.tensor([[4, 4 // (row + 1)]]),
        },
    },
    "video": {
        "MiniCPMOcr MiniCPMV4_6 MiniCPMV4_7": as_video(strip_of_patches),
        "LlavaNextVideo LlavaOnevision VideoLlava": lambda c, row: {
            "pixel_values_videos": picture(c.vision_config, 1, 2)
        },
        "Kimi_K25": as_video(square_patches),
        "InstructBlipVideo": lambda c, row: {
            **picture_and_question(c, row),
            "pixel_values": picture(c.vision_config, 1, 2),
        },
        "VideoLlama3": lambda c, row: {
            **grid_of_frames(c, row),
            "video_merge_sizes": torch.tensor([2]),
        },
        "Qwen2_5OmniThinker Qwen3OmniMoeThinker": lambda c, row: {
            **grid_of_frames(c, row),
            "video_second_per_grid": torch.tensor([1.0]),
        },
        "Gemma4 Gemma4Unified": frames_with_positions,
    },
    "audio": {
        "FunAsrNano Gemma4Unified": stacked_frames,
        "Gemma4 Nemotron3_5Transcribe": sound_with_frames_first,
        "NemotronH_Omni_Reasoning_V3": sound_with_frames_first,
        "Voxtral": lambda c, row: {"input_features": sound(c, 0)["input_features"]},
        "MossTranscribeDiarize": lambda c, row: {
            **sound(c, row),
            "padding_mask": first_half(4000, row),
        },
        "Dots3Note": sound_of_dots,
        "VibeVoice VibeVoiceAsr": lambda c, row: {
            name: x[:, None] if name == "input_values" else x for name, x in samples(c, row).items()
        },
        "MuseSpark": lambda c, row: samples(c, row, mask="input_values_mask"),
        "Qwen3ASR": lambda c, row: sound(c, row, frames=200),
    },
}
ROWS = _by_class(ROWS_BY_BUILDER)


# Inputs of classes that take no text around placeholders: encoders, pictures in cross-attention.


def waveform(config: PretrainedConfig) -> Tensors:
    return {"input_values": torch.randn(2, 4000), "attention_mask": _lengths_mask(4000)}


def spectrogram(bins: int, frames: int, bins_first: bool = False) -> Tensors:
    features = torch.randn(2, bins, frames) if bins_first else torch.randn(2, frames, bins)
    return {"input_features": features, "attention_mask": _lengths_mask(frames)}


def _lengths_mask(length: int) -> torch.Tensor:
    """`(2, length)`: the second row ends after three quarters."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length * 3 // 4 :] = 0
    return mask


def pictures(size: int = 32) -> Tensors:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def words() -> Tensors:
    return left_padded([_words(length) for length in (11, 6)])


def _idefics(config: PretrainedConfig) -> Tensors:
    inputs = {**words(), "pixel_values": torch.randn(2, 1, 3, 32, 32)}
    return {**inputs, "image_attention_mask": torch.ones(2, 11, 1, dtype=torch.long)}


def _kosmos(media: Tensors) -> Tensors:
    """With four placeholders in each row."""
    mask = torch.arange(11).expand(2, -1).sub(5).clamp(0, 5).remainder(5).gt(0)
    return {**media, "image_embeds_position_mask": mask}


def _kosmos2_5(config: PretrainedConfig) -> Tensors:
    inputs = _kosmos({**words(), **_flat_patches(config)})
    return {**inputs, "image_embeds_position_mask": inputs["image_embeds_position_mask"].long()}


def _flat_patches(config: PretrainedConfig) -> Tensors:
    """`(2, 6, 2 + pixels)`: each patch after its row and column."""
    places = torch.cartesian_prod(torch.arange(1, 3), torch.arange(1, 4)).expand(2, -1, -1)
    pixels = torch.randn(2, 6, config.vision_config.patch_embed_hidden_size)
    return {"flattened_patches": torch.cat([places, pixels], -1)}


def _mllama(config: PretrainedConfig) -> Tensors:
    """The first picture has two tiles, the second one; tokens after the image token see the
    tiles."""
    tiles = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    inputs = prompts(config, "image", config.image_token_index, [[1], [1]])
    seen = (inputs["input_ids"] == config.image_token_index).cumsum(-1)
    pixels = picture(config.vision_config, 2, 1, 4)
    return {
        **inputs,
        "pixel_values": pixels * tiles[:, None, :, None, None, None],
        "aspect_ratio_ids": torch.tensor([[2], [1]]),
        "aspect_ratio_mask": tiles[:, None],
        "cross_attention_mask": seen[:, :, None, None] * tiles[:, None, None],
    }


def _phi4_image(config: PretrainedConfig) -> Tensors:
    """The whole picture and a crop, half of which is padding in the second row."""
    vision = config.vision_config
    size = vision.crop_size
    side = size // vision.patch_size
    mask = torch.ones(2, 2, side, side, dtype=torch.long)
    mask[1, 1, side // 2 :] = 0
    row = side // 2 * (side // 2 + 1)  # tokens of a whole picture, with its line ends
    counts = [[2 * row + 1], [row * 3 // 2 + 1]]
    return {
        **prompts(config, "image", vision.image_token_id, counts),
        "image_pixel_values": torch.randn(2, 2, 3, size, size),
        "image_sizes": torch.tensor([[size, size]] * 2),
        "image_attention_mask": mask,
    }


def _phi4_audio(config: PretrainedConfig) -> Tensors:
    """Eight frames become one token."""
    real = torch.arange(64).expand(2, -1) < torch.tensor([[64], [32]])
    inputs = prompts(config, "audio", config.audio_config.audio_token_id, [[8], [4]])
    features = torch.randn(2, 64, config.audio_config.input_size) * real[..., None]
    sizes = {"audio_embed_sizes": torch.tensor([8, 4]), "audio_attention_mask": real}
    return {**inputs, "audio_input_features": features, **sizes}


def _whisper_like(config: PretrainedConfig) -> Tensors:
    """Sound of which four frames become one placeholder."""
    mask = MASKS_OF_SOUND["qwen2" in config.model_type]
    media = join([sound(config, row, mask=mask) for row in range(2)])
    return {**prompts(config, "audio", config.audio_token_id, [[32], [16]]), **media}


def _granite_speech(config: PretrainedConfig) -> Tensors:
    """One placeholder per window of frames; the mask covers placeholders."""
    features = torch.randn(2, 6 * config.window_size, config.encoder_config.input_dim)
    mask = torch.arange(6).expand(2, -1) < torch.tensor([[6], [3]])
    inputs = prompts(config, "audio", config.audio_token_id, [[6], [3]])
    return {**inputs, "input_features": features, "input_features_mask": mask}


def _omniasr(config: PretrainedConfig) -> Tensors:
    """One placeholder for each frame that the convolutions make of the samples."""
    frames = 4000
    for kernel, stride in zip(config.audio_config.conv_kernel, config.audio_config.conv_stride):
        frames = (frames - kernel) // stride + 1
    inputs = prompts(config, "audio", config.audio_token_id, [[frames], [frames]])
    mask = torch.ones(2, 4000, dtype=torch.long)
    return {**inputs, "input_values": torch.randn(2, 1, 4000), "padding_mask": mask}


def _kyutai(config: PretrainedConfig) -> Tensors:
    shape = 2, 1, 24 * config.codec_config.frame_size
    return {"input_values": torch.randn(shape), "padding_mask": torch.ones(shape).long()}


CALLS_BY_BUILDER: dict[str, dict[str, Callable[[PretrainedConfig], Tensors]]] = {
    "image": {
        "Blip": lambda c: {**pictures(c.vision_config.image_size), **words()},
        "GitForCausalLM": lambda c: {**pictures(), **words()},
        "IdeficsForVisionText2Text": _idefics,
        "Kosmos2": lambda c: _kosmos({**words(), **pictures()}),
        "Kosmos2_5": _kosmos2_5,
        "Mllama": _mllama,
        "PPFormulaNet VisionEncoderDecoderModel": lambda c: pictures(),
        "Phi4MultimodalForCausalLM": _phi4_image,
        "Pix2Struct": _flat_patches,
        "Udop": lambda c: {**words(), "bbox": torch.rand(2, 11, 4), **pictures()},
    },
    "audio": {
        "Phi4MultimodalForCausalLM": _phi4_audio,
        "Canary CohereAsr": lambda c: spectrogram(c.encoder_config.num_mel_bins, 64),
        "GraniteSpeech GraniteSpeechPlus": _granite_speech,
        "Moonshine MoonshineStreaming SpeechEncoderDecoderModel": waveform,
        "SpeechT5ForSpeechToText": waveform,
        "MusicFlamingo Qwen2Audio": _whisper_like,
        "OmniASR": _omniasr,
        "Pop2Piano": lambda c: spectrogram(c.d_model, 20),
        "SeamlessM4TForSpeechToText SeamlessM4Tv2ForSpeechToText": lambda c: spectrogram(160, 40),
        "Speech2Text": lambda c: spectrogram(c.input_feat_per_channel, 40),
        "VoxtralRealtime": lambda c: {  # eight frames for each token, with those to come
            **words(),
            "input_features": torch.randn(2, c.audio_config.num_mel_bins, 8 * 40),
            "num_delay_tokens": 2,
        },
        "KyutaiSpeechToText": _kyutai,
        "Whisper": lambda c: spectrogram(
            c.num_mel_bins, 2 * c.max_source_positions, bins_first=True
        ),
    },
}
CALLS = _by_class(CALLS_BY_BUILDER)
