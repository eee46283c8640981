import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from kimi_zoo.checkpoints.files import CheckpointError, atomic_file, atomic_folder, parse_size, read_json, write_json
from kimi_zoo.checkpoints.safetensors import open_checkpoint, save_tensors

CASES = Path(__file__).parent.parent / "data" / "field_cases"


class TestJson:
    def test_trailing_comma_is_located(self):
        path = CASES / "tokenizer_config_trailing_comma" / "tokenizer_config.json"
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON: line 4, column 1.*comma"):
            read_json(path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"a": [1, 2,\n ]}', "line 2, column 2: there is a comma before this closing ']'"),
            ('{"a": 1,}', "line 1, column 9: there is a comma before this closing '}'"),
            ('{"a": 1\n"b": 2}', r"line 2, column 1: Expecting ',' delimiter \(the line reads '\"b\": 2}'\)"),
            ("", "line 1, column 1: Expecting value"),
            ("{'a': 1}", "line 1, column 2"),
            ('{"a": 1, "b": {"c": 2, "c": 3}}', "the key 'c' appears twice"),
            ("[1]", "must hold a JSON object.*it holds a list"),
            ("[" * 100_000, "is not usable JSON"),
        ],
    )
    def test_errors(self, tmp_path, text, message):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"config\.json .*{message}"):
            read_json(tmp_path / "config.json")

    def test_not_text_or_not_there(self, tmp_path):
        (tmp_path / "config.json").write_bytes(b'{"a": "\xe9"}')
        with pytest.raises(CheckpointError, match=r"config\.json is not UTF-8 text: byte 7 is 0xe9"):
            read_json(tmp_path / "config.json")
        with pytest.raises(CheckpointError, match=r"none\.json cannot be read: No such file"):
            read_json(tmp_path / "none.json")

    def test_byte_order_mark_is_skipped(self, tmp_path):
        (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"a": "\xe4\xb8\xad"}')
        assert read_json(tmp_path / "config.json") == {"a": "中"}

    def test_write_keeps_order_and_text(self, tmp_path):
        value = {"b": 1, "a": ["中", None], "c": {"x": 0.5}}
        write_json(tmp_path / "config.json", value)
        assert (tmp_path / "config.json").read_text().startswith('{\n  "b": 1,\n  "a": [\n    "中"')
        assert list(read_json(tmp_path / "config.json")) == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(7, 7), ("7B", 7), ("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("2KiB", 2048), ("3TB", 3 * 10**12)],
)
def test_parse_size(size, expected):
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["5", "GB", "5 gigabytes", "-5GB", "5iB5"])
def test_parse_size_refuses_text(size):
    with pytest.raises(ValueError, match=f"A size is a number of bytes or text such as .* got '{size}'"):
        parse_size(size)


@pytest.mark.parametrize(("size", "shown"), [(0, 0), (-3, -3), ("0GB", 0)])
def test_parse_size_refuses_nothing(size, shown):
    with pytest.raises(ValueError, match=f"must be more than 0 bytes; got {shown}"):
        parse_size(size)


class TestAtomicFile:
    def test_failure_keeps_the_old_file(self, tmp_path):
        path = tmp_path / "w.bin"
        path.write_bytes(b"old")
        with pytest.raises(RuntimeError, match="stop"), atomic_file(path) as file:
            file.write(b"half")
            raise RuntimeError("stop")
        assert path.read_bytes() == b"old"
        assert [entry.name for entry in tmp_path.iterdir()] == ["w.bin"]


def fill(folder, value):
    save_tensors({"w": np.full(3, value, np.float32)}, folder)
    (folder / "config.json").write_text(json.dumps({"value": value}))


def value_in(folder):
    return float(open_checkpoint(folder).read("w")[0]), read_json(folder / "config.json")["value"]


class TestAtomicFolder:
    @pytest.fixture
    def saved(self, tmp_path):
        with atomic_folder(tmp_path / "model") as folder:
            fill(folder, 1)
        return tmp_path / "model"

    def test_new(self, tmp_path):
        with atomic_folder(tmp_path / "a" / "model") as folder:
            assert folder.parent.parent == tmp_path / "a"  # the same file system, so that the rename is atomic
            fill(folder, 1)
            assert not (tmp_path / "a" / "model").exists()
        assert value_in(tmp_path / "a" / "model") == (1, 1)
        assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["model"]

    def test_existing_empty_folder(self, tmp_path):
        with atomic_folder(tmp_path) as folder:
            fill(folder, 1)
        assert value_in(tmp_path) == (1, 1)

    def test_failure_leaves_nothing(self, tmp_path):
        with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "model") as folder:
            fill(folder, 1)
            raise KeyboardInterrupt
        assert list(tmp_path.iterdir()) == []

    def test_existing_is_refused_before_any_work(self, saved):
        with (
            pytest.raises(CheckpointError, match=r"it holds config\.json, model\.safetensors.*overwrite=True"),
            atomic_folder(saved),
        ):
            pytest.fail("must not get here")
        assert value_in(saved) == (1, 1)

    def test_overwrite(self, saved):
        (saved / "stale.txt").touch()
        with open_checkpoint(saved) as old, atomic_folder(saved, overwrite=True) as folder:
            fill(folder, 2)
            assert value_in(saved) == (1, 1)
        assert value_in(saved) == (2, 2)
        assert not (saved / "stale.txt").exists()
        assert [entry.name for entry in saved.parent.iterdir()] == ["model"]
        with pytest.raises(ValueError, match="closed"):
            old.read("w")

    def test_saving_over_the_folder_that_is_mapped(self, saved):
        old = open_checkpoint(saved)
        with atomic_folder(saved, overwrite=True) as folder:
            save_tensors({"w": old.read("w") + 5, "old": old.read("w")}, folder)
        np.testing.assert_array_equal(open_checkpoint(saved).read("w"), [6, 6, 6])
        np.testing.assert_array_equal(old.read("w"), [1, 1, 1])

    def test_failure_keeps_the_old_folder(self, saved):
        with pytest.raises(RuntimeError, match="disk full"), atomic_folder(saved, overwrite=True) as folder:
            fill(folder, 2)
            raise RuntimeError("disk full")
        assert value_in(saved) == (1, 1)
        assert [entry.name for entry in saved.parent.iterdir()] == ["model"]

    def test_failure_while_renaming_keeps_the_old_folder(self, saved, monkeypatch):
        rename = os.rename

        def failing_rename(source, destination):
            if Path(source).name == "new":
                raise OSError("no space")
            rename(source, destination)

        monkeypatch.setattr(os, "rename", failing_rename)
        with pytest.raises(OSError, match="no space"), atomic_folder(saved, overwrite=True) as folder:
            fill(folder, 2)
        assert value_in(saved) == (1, 1)
        assert [entry.name for entry in saved.parent.iterdir()] == ["model"]

    def test_filled_by_someone_else_meanwhile(self, tmp_path):
        with pytest.raises(CheckpointError, match="exists and is not empty"), atomic_folder(tmp_path / "m") as folder:
            fill(folder, 1)
            (tmp_path / "m").mkdir()
            (tmp_path / "m" / "notes.txt").touch()
        assert [entry.name for entry in (tmp_path / "m").iterdir()] == ["notes.txt"]

    def test_never_replaces_what_is_not_a_checkpoint(self, tmp_path, saved):
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.tex").touch()
        (saved / ".git").mkdir()
        for folder, held in ((tmp_path / "home", "thesis.tex"), (saved, r"\.git")):
            with (
                pytest.raises(CheckpointError, match=f"not replaced even with overwrite=True.*It holds {held}"),
                atomic_folder(folder, overwrite=True),
            ):
                pytest.fail("must not get here")

    def test_file_in_the_way(self, tmp_path):
        (tmp_path / "model").touch()
        with pytest.raises(CheckpointError, match="model is a file"), atomic_folder(tmp_path / "model", overwrite=True):
            pytest.fail("must not get here")

    def test_symlink_to_a_folder(self, tmp_path, saved):
        (tmp_path / "link").symlink_to(saved)
        with atomic_folder(tmp_path / "link", overwrite=True) as folder:
            fill(folder, 2)
        assert (tmp_path / "link").is_symlink()
        assert value_in(saved) == (2, 2)

    def test_folders_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").touch()
        for folder, message in (
            ("", "has an empty name"),
            (tmp_path / "file" / "x", r"x cannot be made in .*file: \w+"),
        ):
            with pytest.raises(CheckpointError, match=message), atomic_folder(folder):
                pytest.fail("must not get here")


def test_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: '.*some\.json'"), atomic_file(tmp_path / "some.json"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match=r"^text alone$"), atomic_file(tmp_path / "some.json"):
        raise OSError("text alone")
    assert not list(tmp_path.iterdir())
