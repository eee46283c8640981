"""The defaults a checkpoint folder gives for generation: `generation_config.json`."""

import json
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FILE_NAME = "generation_config.json"

# Keys that would change the text and that we do not follow, with the values at which they do nothing.
UNSUPPORTED = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "bad_words_ids": (None, []),
    "force_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1.0),
    "min_new_tokens": (None, 0),
    "min_length": (None, 0),
}


@dataclass(frozen=True)
class GenerationConfig:
    """Defaults for `generate` and `stream_generate`; an argument given there wins.

    - `max_new_tokens`: tokens to add to each prompt at most.
    - `temperature`: 0 is the greedy choice.
    - `top_k`, `top_p`, `min_p`, `repetition_penalty`: off at 0, 1, 0 and 1.
    - `eos_token_ids`: tokens that end a row; `None`: those of the model's config.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] | None = None


def read_generation_config(folder: str | os.PathLike[str]) -> GenerationConfig:
    """Reads `generation_config.json` of a checkpoint folder; without the file, the defaults of `GenerationConfig`.

    `eos_token_id` may be one id or a list. `do_sample: false` is temperature 0, whatever temperature stands beside it;
    `do_sample: true` without a temperature is temperature 1; where `do_sample` is absent a temperature that is given
    counts. `null` is the default. Keys that say nothing about the choice of tokens are ignored; a warning names those
    that would change it and are not supported (beam search, for example).

    **Raises:** `ValueError` if the file is not a JSON object or a value has the wrong type.
    """
    path = Path(folder) / FILE_NAME
    if not path.exists():
        return GenerationConfig()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object; got a {type(values).__name__}.")
    _warn_unsupported(values, path)
    integers = {key: _number(values, key, int, path) for key in ("max_new_tokens", "top_k")}
    numbers = {
        key: _number(values, key, float, path) for key in ("temperature", "top_p", "min_p", "repetition_penalty")
    }
    given = {key: value for key, value in (integers | numbers).items() if value is not None}
    do_sample = values.get("do_sample")
    if do_sample is False:
        given["temperature"] = 0.0
    elif do_sample:
        given.setdefault("temperature", 1.0)
    eos = token_ids(values.get("eos_token_id"), f"`eos_token_id` in {path}")
    return replace(GenerationConfig(eos_token_ids=eos), **given)


def model_generation_config(model: Any) -> GenerationConfig:
    """The defaults of the folder that a model was loaded from; those of `GenerationConfig` for a model from scratch."""
    source = getattr(getattr(model, "published", None), "source", None)
    return GenerationConfig() if source is None else read_generation_config(source)


def _number[T: (int, float)](values: dict[str, Any], key: str, kind: type[T], path: Path) -> T | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise ValueError(f"`{key}` in {path} must be {'an integer' if kind is int else 'a number'}; got {value!r}.")
    return kind(value)


def token_ids(value: object, name: str) -> tuple[int, ...] | None:
    """One id or a list of ids, as configs write them, as a tuple; `None` stays `None`.

    **Raises:** `ValueError` beginning with `name` for anything else.
    """
    if value is None:
        return None
    listed = list(value) if isinstance(value, list | tuple | set | frozenset) else [value]
    ids = tuple(i for i in listed if isinstance(i, int) and not isinstance(i, bool))
    if len(ids) != len(listed):
        raise ValueError(f"{name} must be an integer or a list of integers; got {value!r}.")
    return ids


def _warn_unsupported(values: dict[str, Any], path: Path) -> None:
    ignored = sorted(key for key, neutral in UNSUPPORTED.items() if key in values and values[key] not in neutral)
    if ignored:
        found = ", ".join(f"{key}={values[key]!r}" for key in ignored)
        warnings.warn(f"{path} asks for what generation here does not do; ignored: {found}.", stacklevel=3)
