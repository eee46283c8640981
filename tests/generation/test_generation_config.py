"""Reading generation_config.json."""

import json
from types import SimpleNamespace

import pytest

from kimi_zoo.generation.config import GenerationConfig, model_generation_config, read_generation_config


def written(folder, values):
    (folder / "generation_config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return read_generation_config(folder)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, GenerationConfig()),
        ({"eos_token_id": [163585, 163586], "max_length": 1048576}, GenerationConfig(eos_token_ids=(163585, 163586))),
        ({"eos_token_id": 7, "bos_token_id": 1}, GenerationConfig(eos_token_ids=(7,))),
        ({"eos_token_id": None, "top_k": None}, GenerationConfig()),
        ({"do_sample": False, "temperature": 0.6}, GenerationConfig(temperature=0.0)),
        ({"do_sample": True}, GenerationConfig(temperature=1.0)),
        ({"temperature": 0.6}, GenerationConfig(temperature=0.6)),
        (
            {"do_sample": True, "temperature": 1, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1},
            GenerationConfig(temperature=1.0, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1),
        ),
        ({"max_new_tokens": 9, "transformers_version": "5.0", "num_beams": 1}, GenerationConfig(max_new_tokens=9)),
    ],
)
def test_read(tmp_path, values, expected):
    assert written(tmp_path, values) == expected


def test_folder_without_the_file(tmp_path):
    assert read_generation_config(tmp_path) == GenerationConfig()


def test_defaults_of_the_folder_a_model_came_from(tmp_path):
    written(tmp_path, {"temperature": 0.6, "eos_token_id": [5, 7]})
    loaded = SimpleNamespace(published=SimpleNamespace(source=str(tmp_path)))
    assert model_generation_config(loaded) == GenerationConfig(temperature=0.6, eos_token_ids=(5, 7))
    assert model_generation_config(SimpleNamespace()) == GenerationConfig()
    assert model_generation_config(SimpleNamespace(published=SimpleNamespace(source=None))) == GenerationConfig()


def test_what_is_not_supported_is_named(tmp_path):
    with pytest.warns(UserWarning, match=r"ignored: no_repeat_ngram_size=3, num_beams=4\."):
        written(tmp_path, {"num_beams": 4, "no_repeat_ngram_size": 3})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object; got a list"),
        ({"temperature": "hot"}, "`temperature` in .* must be a number; got 'hot'"),
        ({"top_k": 2.5}, "`top_k` in .* must be an integer; got 2.5"),
        ({"max_new_tokens": True}, "`max_new_tokens` in .* must be an integer; got True"),
        ({"eos_token_id": ["</s>"]}, r"`eos_token_id` in .* must be an integer or a list of integers; got \['</s>'\]"),
    ],
)
def test_bad_files_are_refused(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        written(tmp_path, values)
