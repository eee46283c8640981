import json
import shutil
import time
from pathlib import Path

import pytest
import regex  # comes with tiktoken
import tokenizers as backend
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_zoo.checkpoints.files import CheckpointError
from kimi_zoo.tokenizers import KIMI_PIECES, bounded_pieces, load_tokenizer, read_special_ids

DATA = Path(__file__).parent / "data" / "tokenizers"
TIKTOKEN = DATA / "tiktoken_tiny"
EXPECTED = json.loads((TIKTOKEN / "expected.json").read_text())
CHAT_TEMPLATE = (DATA / "chat_kimi" / "chat_template.jinja").read_text()
SENTENCES = ["def keep(state):\n        return state  # 12345\n", "Ein Würfel, zwei Würfel: 中文 🎲🎲\n"] * 3
KINDS = ("tiktoken", "json")
unhurried = settings(deadline=None, max_examples=60)  # other work on the machine must not fail a test


def write_json_tokenizer(folder):
    """A byte-level BPE of 300 tokens: five control tokens, one of them not marked special, and one for two spaces."""
    pieces = backend.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = backend.Tokenizer(backend.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pieces, backend.decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"]
    trainer = backend.trainers.BpeTrainer(
        vocab_size=300, special_tokens=names, initial_alphabet=pieces.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([backend.AddedToken("<|im_end|>", special=False), backend.AddedToken("  ", special=False)])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    result = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    shutil.copytree(TIKTOKEN, result["tiktoken"], dirs_exist_ok=True)
    write_json_tokenizer(result["json"])
    for folder in result.values():
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return result


@pytest.fixture(scope="module")
def loaded(folders):
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}


@pytest.fixture(params=KINDS)
def tokenizer(loaded, request):
    return loaded[request.param]


def copy(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "copy"))


class TestTiktoken:
    def test_encodes_as_published(self, loaded):
        for text, ids in EXPECTED["encode"].items():
            assert loaded["tiktoken"].encode(text) == ids

    def test_han_runs_are_split_off_first(self):
        # `&&` in a character class means what it means in tiktoken in version 1 of `regex` only
        for text, pieces in EXPECTED["pre_tokenize"].items():
            assert regex.findall(KIMI_PIECES, text, flags=regex.V1) == pieces

    @pytest.mark.parametrize(
        ("text", "pieces"),
        [
            ("中文English混合", ["中文", "English", "混合"]),
            ("北京市 Pascal", ["北京市", " Pascal"]),
            ("HelloWorld it's WE'RE", ["Hello", "World", " it's", " WE'RE"]),
            ("1234567 (x)\n\n  y", ["123", "456", "7", " (", "x", ")\n\n", " ", " y"]),
            ("a   \n b  ", ["a", "   \n", " b", "  "]),
            ("_naïve🎲!", ["_naïve", "🎲!"]),
        ],
    )
    def test_splits(self, text, pieces):
        assert regex.findall(KIMI_PIECES, text, flags=regex.V1) == pieces

    def test_special_ids_are_named_or_reserved(self, loaded):
        tokenizer = loaded["tiktoken"]
        assert tokenizer.vocab_size == EXPECTED["base_ranks"] + EXPECTED["special_slots"]
        for token, name in EXPECTED["decode"].items():
            assert tokenizer.decode([int(token)]) == tokenizer.id_to_token(int(token)) == name
            assert tokenizer.token_to_id(name) == int(token)
            assert tokenizer.encode(name, allow_special=True) == [int(token)]

    def test_text_is_not_a_control_token_unless_allowed(self, loaded):
        plain, allowed = EXPECTED["plain_text_not_special"], EXPECTED["control_allowed"]
        assert loaded["tiktoken"].encode(plain["text"]) == plain["ids"]
        assert loaded["tiktoken"].encode(allowed["text"], allow_special=True) == allowed["ids"]

    def test_model_file_alone_is_enough(self, tmp_path):
        shutil.copy(TIKTOKEN / "tiktoken.model", tmp_path)
        tokenizer = load_tokenizer(str(tmp_path))
        assert tokenizer.encode("中文ab") == EXPECTED["encode"]["中文ab"]
        assert tokenizer.decode([268]) == "<|reserved_token_268|>"
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (None, (), None)

    def test_code_in_the_folder_is_not_run(self, tmp_path):
        folder = copy(TIKTOKEN, tmp_path)
        for name in ("tokenization_kimi.py", "tiktoken.py", "__init__.py"):
            (folder / name).write_text("raise RuntimeError('ran')\n")
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        assert load_tokenizer(folder).encode("hello") == EXPECTED["encode"]["hello"]

    def test_rows_of_the_model_above_the_vocabulary_decode(self, loaded):
        assert loaded["tiktoken"].decode([527]) == "<|reserved_token_527|>"  # config.json has 528 rows
        with pytest.raises(ValueError, match=r"0 to 527; got 528"):
            loaded["tiktoken"].decode([528])

    @pytest.mark.parametrize("character", ["a", " ", "中", "!", "\n"])
    def test_long_runs_take_bounded_time(self, loaded, character):
        start = time.process_time()
        ids = loaded["tiktoken"].encode(character * 60_000)
        assert loaded["tiktoken"].decode(ids) == character * 60_000
        assert time.process_time() - start < 10  # under 1 s, most of it the type checks of tests

    @unhurried
    @given(st.text("ab \n", max_size=60))
    def test_bounded_pieces_cut_runs_only(self, text):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kimi_zoo.tokenizers._LONGEST_RUN", 3)
            patch.setattr("kimi_zoo.tokenizers._LONGEST_TEXT", 20)
            pieces = list(bounded_pieces(text))
        assert "".join(pieces) == text
        assert all(len(piece) <= 20 and not regex.search(r"\s{4}|\S{4}", piece) for piece in pieces)

    def test_ordinary_text_is_one_piece(self):
        assert list(bounded_pieces("a b\n" * 90_000)) == ["a b\n" * 90_000]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("AA== 0\nAQ= 1\n", r"tiktoken\.model, line 2: .*'AQ= 1'"),
            ("AA== 0\nAQ== one\n", r"line 2: .*'AQ== one'"),
            ("AA== 0\nAQ== 2\n", r"2 byte strings are not 0 to 1"),
            ("AA== 0\nAQ== 1\n", r"254 of the 256 single bytes have no rank, the first is 2"),
            ("version https://git-lfs.github.com/spec/v1\n", r"tiktoken\.model is a large-file pointer"),
        ],
    )
    def test_unreadable_model_file(self, tmp_path, content, message):
        (tmp_path / "tiktoken.model").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        ("entries", "message"),
        [
            ({"265": {"content": "[BOS]"}}, "ids below 266.*: 265"),
            ({"266": {"content": "[A]"}, "267": {"content": "[A]"}}, r"two ids '\[A\]'"),
            ({"266": {"special": True}}, r"has '266': \{'special': True\}"),
        ],
    )
    def test_wrong_added_tokens(self, tmp_path, entries, message):
        folder = copy(TIKTOKEN, tmp_path)
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
        with pytest.raises(CheckpointError, match=message):
            load_tokenizer(folder)


class TestJson:
    def test_encodes_as_the_backend(self, folders, loaded):
        reference = backend.Tokenizer.from_file(str(folders["json"] / "tokenizer.json"))
        reference.no_truncation(), reference.no_padding()
        for text in (*SENTENCES, "if  x:\n    y"):
            assert loaded["json"].encode(text) == reference.encode(text, add_special_tokens=False).ids

    def test_control_tokens_not_marked_special_are_control_tokens(self, loaded):
        tokenizer = loaded["json"]
        end = tokenizer.token_to_id("<|im_end|>")
        assert end not in tokenizer.encode("a<|im_end|>")
        assert tokenizer.encode("a<|im_end|>b", allow_special=True)[1] == end
        assert tokenizer.decode([end], skip_special=True) == "<|im_end|>"  # what the file doesn't call special is shown
        assert tokenizer.decode([tokenizer.bos_id], skip_special=True) == ""

    def test_other_added_tokens_are_ordinary(self, loaded):
        spaces = loaded["json"].token_to_id("  ")
        assert spaces in loaded["json"].encode("if  x")
        assert loaded["json"].decode([spaces]) == "  "

    def test_special_ids(self, loaded):
        tokenizer = loaded["json"]
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, (300,), None)
        assert tokenizer.vocab_size == 302

    @unhurried
    @given(ids=st.lists(st.integers(4, 299), max_size=12))
    def test_decodes_as_the_backend(self, folders, loaded, ids):
        reference = backend.Tokenizer.from_file(str(folders["json"] / "tokenizer.json"))
        assert loaded["json"].decode(ids) == reference.decode(ids, skip_special_tokens=False)

    def test_white_space_that_a_control_token_takes_along(self, folders, tmp_path):
        folder = copy(folders["json"], tmp_path)
        content = json.loads((folder / "tokenizer.json").read_text())
        content["added_tokens"][1]["rstrip"] = content["added_tokens"][2]["lstrip"] = True
        (folder / "tokenizer.json").write_text(json.dumps(content))
        tokenizer, text = load_tokenizer(folder), "a <|im_user|> \nb \t<|im_assistant|> c"
        reference = backend.Tokenizer.from_file(str(folder / "tokenizer.json"))
        reference.no_truncation(), reference.no_padding()
        assert tokenizer.encode(text, allow_special=True) == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_other_decoders_are_refused(self, folders, tmp_path):
        tokenizer = backend.Tokenizer(backend.models.WordLevel({"a": 0}, unk_token="a"))
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(
            CheckpointError, match=r"tokenizer\.json is not a byte-level tokenizer: its decoder is None"
        ):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"model": 3}', r"tokenizer\.json cannot be read as a tokenizer"),
            ("version https://git-lfs.github.com/spec/v1\n", r"tokenizer\.json is a large-file pointer"),
        ],
    )
    def test_unreadable_file(self, tmp_path, content, message):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            load_tokenizer(tmp_path)


class TestBothKinds:
    @pytest.mark.parametrize("kind", KINDS)
    @unhurried
    @given(text=st.text(max_size=40) | st.text("ab中🎲<|im_end|> \r\n'S1", max_size=40))
    def test_text_comes_back(self, loaded, kind, text):
        for allow_special in (False, True):
            assert loaded[kind].decode(loaded[kind].encode(text, allow_special=allow_special)) == text

    @pytest.mark.parametrize("kind", KINDS)
    @unhurried
    @given(data=st.data(), skip_special=st.booleans())
    def test_stream_joins_to_the_batch(self, loaded, kind, data, skip_special):
        tokenizer = loaded[kind]
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(128, 255), max_size=12))
        stream = tokenizer.stream_decoder(skip_special=skip_special)
        for _ in range(2):  # after `flush` the same decoder starts afresh
            parts = [stream.push(token) for token in ids] + [stream.flush()]
            assert "".join(parts) == tokenizer.decode(ids, skip_special=skip_special)

    def test_stream_never_shows_half_a_character(self, tokenizer):
        ids = tokenizer.encode("x🎲é")
        stream = tokenizer.stream_decoder()
        parts = [stream.push(token) for token in ids]
        assert "".join(parts) == "x🎲é" and "" in parts and stream.flush() == ""
        assert [stream.push(token) for token in ids[:-1]][-1] == "" and stream.flush() == "�"

    @pytest.mark.parametrize("kind", KINDS)
    @unhurried
    @given(text=st.text("<|im_end|>[EOS]ab", max_size=60))
    def test_plain_text_has_no_control_ids(self, loaded, kind, text):
        control = {token.id for token in loaded[kind].control_tokens.values()}
        assert not control & set(loaded[kind].encode(text + "<|im_end|>"))

    def test_halves_of_surrogate_pairs(self, tokenizer):
        assert tokenizer.decode(tokenizer.encode("a\ud83cb")) == "a�b"

    def test_ids_of_other_integer_types(self, tokenizer):
        import numpy

        ids = numpy.asarray(tokenizer.encode("hello"), numpy.int32)
        assert tokenizer.decode(ids) == "hello"
        assert "".join(map(tokenizer.stream_decoder().push, ids)) == "hello"

    def test_unknown_ids_and_names(self, tokenizer):
        with pytest.raises(ValueError, match="got -1"):
            tokenizer.decode([3, -1])
        assert tokenizer.token_to_id("<|no such token|>") is None

    def test_tokens_by_text(self, tokenizer):
        for token in tokenizer.encode("def hello 中 "):
            assert "�" in tokenizer.decode([token]) or tokenizer.token_to_id(tokenizer.id_to_token(token)) == token
        assert r"\xe4" in [tokenizer.id_to_token(token) for token in range(tokenizer.vocab_size)]


class TestChat:
    MESSAGES = (
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "4."},
        {"role": "user", "content": "Add 3."},
        {"role": "assistant", "content": "7."},
    )

    def test_renders_as_expected(self, tokenizer):
        expected = json.loads((DATA / "chat_kimi" / "expected.json").read_text())["rendered"]
        ids = tokenizer.apply_chat_template(self.MESSAGES)
        assert tokenizer.decode(ids) == expected
        opened = tokenizer.apply_chat_template(self.MESSAGES, add_generation_prompt=True)
        assert opened[: len(ids)] == ids
        assert tokenizer.decode(opened[len(ids) :]) == "<|im_assistant|>assistant<|im_middle|>"

    def test_only_the_template_makes_control_ids(self, tokenizer):
        text = "<|im_end|><|im_user|>system<|im_<|im_end|>end|> \U000f0000"
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        end, user = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|im_user|>")
        assert ids.count(end) == 1 and ids[-1] == end
        assert ids.count(user) == 1 and ids[0] == user
        content = tokenizer.encode(text)
        assert ids[-1 - len(content) : -1] == content
        assert tokenizer.decode(ids).endswith(text + "<|im_end|>")

    @pytest.mark.parametrize("kind", KINDS)
    @unhurried
    @given(text=st.text("<|im_end|>\U000f0000\U000f0001", max_size=30))
    def test_any_content_stays_text(self, loaded, kind, text):
        tokenizer = loaded[kind]
        around = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text + "ab"}])
        control = {token.id for token in tokenizer.control_tokens.values()}
        assert [token for token in ids if token in control] == [token for token in around if token in control]
        assert tokenizer.decode(ids) == tokenizer.decode(around).replace("ab", text + "ab")

    def test_no_template(self, folders, tmp_path):
        folder = copy(folders["json"], tmp_path)
        (folder / "chat_template.jinja").unlink()
        tokenizer = load_tokenizer(folder)
        assert tokenizer.decode(tokenizer.encode("plain prompts work")) == "plain prompts work"
        assert tokenizer.chat_template is None
        with pytest.raises(ValueError, match=r"has no chat template: .*Put the chat_template\.jinja"):
            tokenizer.apply_chat_template(self.MESSAGES)

    @pytest.mark.parametrize(
        "template",
        ["{{ bos_token }}{{ messages[0].content }}", [{"name": "default", "template": "{{ messages[0]['content'] }}"}]],
    )
    def test_template_in_the_configuration(self, folders, tmp_path, template):
        folder = copy(folders["json"], tmp_path)
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        text = load_tokenizer(folder).decode(load_tokenizer(folder).apply_chat_template(self.MESSAGES))
        assert text in ("<|endoftext|>What is 2+2?", "What is 2+2?")

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{{ raise_exception('roles must alternate') }}", "cannot take these messages: roles must alternate"),
            ("{{ messages[0].missing.more }}", "cannot take these messages: .*missing"),
            ("{{ messages.__class__.__mro__ }}", "cannot take these messages: .*unsafe"),
            ("{% set x = messages.append(1) %}", "cannot take these messages: .*append"),
            ("a\n{% for %}", "not valid Jinja, line 2"),
        ],
    )
    def test_templates_that_fail(self, folders, tmp_path, template, message):
        folder = copy(folders["json"], tmp_path)
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(ValueError, match=message):
            load_tokenizer(folder).apply_chat_template(self.MESSAGES)

    def test_helpers_of_templates(self, folders, tmp_path):
        folder = copy(folders["json"], tmp_path)
        template = "{% for m in messages %}{{ m | tojson }}{{ strftime_now('%Y') | length }}{% break %}{% endfor %}"
        (folder / "chat_template.jinja").write_text(template)
        tokenizer = load_tokenizer(folder)
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "中<|im_end|>", "parts": [None, 1.5, "a"]}])
        shown = '{"role": "user", "content": "中<|im_end|>", "parts": [null, 1.5, "a"]}4'
        assert tokenizer.decode(ids) == shown


class TestFolders:
    def test_every_file_names_ends_of_text(self):
        names = {"[BOS]": 163584, "[EOS]": 163585}
        ids = read_special_ids(DATA / "gen_eos_list", names.get)
        assert (ids.bos, ids.eos, ids.pad) == (163584, (163585, 163586), 163839)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("generation_config.json", {"eos_token_id": [1, "2"]}, r"generation_config\.json: `eos_token_id` .*'2'"),
            ("config.json", {"pad_token_id": True}, r"config\.json: `pad_token_id` .*True"),
            ("tokenizer_config.json", {"eos_token": "<end>"}, r"tokenizer_config\.json: `eos_token` is '<end>'"),
        ],
    )
    def test_wrong_special_ids(self, folders, tmp_path, name, content, message):
        folder = copy(folders["json"], tmp_path)
        (folder / name).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            load_tokenizer(folder)

    def test_mistake_in_the_configuration_is_located(self):
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON: line 4, column 1"):
            load_tokenizer(DATA / "tokenizer_config_trailing_comma")

    def test_no_tokenizer(self, tmp_path):
        (tmp_path / "model.safetensors").touch()
        (tmp_path / "vocab.txt").touch()
        with pytest.raises(
            CheckpointError, match=r"neither tokenizer\.json nor .* It holds model\.safetensors, vocab\.txt\."
        ):
            load_tokenizer(tmp_path)

    def test_not_a_folder(self, tmp_path):
        with pytest.raises(CheckpointError, match="absent' is no file or folder here, nor the name of bundled weights"):
            load_tokenizer(tmp_path / "absent")
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match="file is not a folder"):
            load_tokenizer(tmp_path / "file")
