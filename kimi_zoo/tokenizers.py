"""Tokenizers behind one small interface: `tokenizer.json` (byte-level BPE) and Kimi's `tiktoken.model`.

No code of a checkpoint folder is ever run: both kinds are data, and chat templates are rendered in a sandbox.

Text is data too: however it is spelled, it never becomes a control token unless the caller allows it. In a chat, only
the template makes control tokens.
"""

import base64
import binascii
import codecs
import functools
import hashlib
import operator
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex, final

from kimi_zoo.bundled import find_weights
from kimi_zoo.chat_templates import TURN_BEGINS, TURN_ENDS, Mask, read_chat_template, render
from kimi_zoo.checkpoints.files import CheckpointError, list_some, read_json

_SPECIAL_SLOTS = 256  # ids above the ranks of a `tiktoken.model`, named or not
# tiktoken's split needs time and stack that grow faster than the text does, on text without any break.
_LONGEST_TEXT = 400_000
_LONGEST_RUN = 25_000

_WORD_START = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PIECES = "|".join(
    (
        r"[\p{Han}]+",
        f"{_WORD_START}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_WORD_START}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Kimi's tokenizer splits text before merging bytes: Han runs first, then words by case, digits in threes.

**Source:** the split pattern of the published `tokenization_kimi.py`.
"""


class ControlToken(NamedTuple):
    """A token that text becomes only where that is allowed."""

    id: int
    special: bool  # left out by `decode(..., skip_special=True)`
    lstrip: bool = False  # takes the white space before it along
    rstrip: bool = False  # takes the white space after it along


class SpecialIds(NamedTuple):
    """Ids with a role, from the configuration files of a folder."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


class Tokenizer(ABC):
    """Text to token ids and back.

    **Attributes:**

    - `vocab_size`: number of ids the tokenizer has; a model may have more rows, which decode as
      `<|reserved_token_ID|>`.
    - `control_tokens`: the control tokens by name.
    - `bos_id`, `pad_id`: an id or `None`; `eos_ids`: every id that ends a text, ascending.
    - `chat_template`: the Jinja source of the folder's chat template, or `None`.
    """

    vocab_size: int
    control_tokens: Mapping[str, ControlToken]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    chat_template: str | None

    def __init__(self, folder: Path, control_tokens: Mapping[str, ControlToken], vocab_size: int):
        self.vocab_size = vocab_size
        self.control_tokens = control_tokens
        self.bos_id, self.eos_ids, self.pad_id = read_special_ids(folder, self.token_to_id)
        self.chat_template = read_chat_template(folder)
        self._folder = folder
        self._control_names = {token.id: name for name, token in control_tokens.items()}
        self._control_pattern = _control_pattern(control_tokens)
        rows = _read_optional(folder / "config.json").get("vocab_size")
        self._id_limit = max(vocab_size, rows) if isinstance(rows, int) else vocab_size

    @property
    def fingerprint(self) -> str:
        """Changes whenever a file does that decides how text is encoded."""
        digest = hashlib.sha256()
        names = ("tokenizer.json", "tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "config.json")
        for name in (*names, "generation_config.json"):
            file = self._folder / name
            digest.update(f"{name}|".encode() + (file.read_bytes() if file.exists() else b""))
        return digest.hexdigest()

    @abstractmethod
    def _encode_plain(self, text: str) -> list[int]:
        """Ids of text in which no control token is recognised."""

    @abstractmethod
    def _ordinary_bytes(self, token: int) -> bytes | None:
        """Bytes that an ordinary token stands for; `None` if there is no such token."""

    @abstractmethod
    def _ordinary_id(self, token: str) -> int | None:
        """Id of the ordinary token that stands for exactly this text; `None` if there is none."""

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Returns the ids of `text`, nothing added before or after.

        **Arguments:**

        - `allow_special`: whether the name of a control token (`<|im_end|>`) becomes that token. If not, it is
          encoded as the characters that it is made of.
        """
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # halves of pairs are not text
        if not allow_special:
            return self._encode_plain(text)
        return self._encode_pieces(self._split_at_control(text))

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special: bool = False) -> str:
        """Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        **Arguments:**

        - `skip_special`: leave out special tokens (those that the folder's files call special, and reserved ones).

        **Raises:** `ValueError` if an id is outside the vocabulary.
        """
        return b"".join(self.token_bytes(token, skip_special=skip_special) for token in ids).decode("utf-8", "replace")

    def stream_decoder(self, *, skip_special: bool = False) -> "StreamDecoder":
        """Returns a decoder that takes one id at a time, for showing text while it is generated."""
        return StreamDecoder(self, skip_special=skip_special)

    def token_bytes(self, token: SupportsIndex, *, skip_special: bool = False) -> bytes:
        """Returns the bytes of one token, which may be a part of a character only.

        **Raises:** `ValueError` if the id is outside the vocabulary.
        """
        token = operator.index(token)
        if not 0 <= token < self._id_limit:
            raise ValueError(f"Token ids of this tokenizer are 0 to {self._id_limit - 1}; got {token}.")
        name = self._control_names.get(token)
        ordinary = self._ordinary_bytes(token) if name is None else None
        if ordinary is not None:
            return ordinary
        if skip_special and (name is None or self.control_tokens[name].special):
            return b""
        return (name or reserved_name(token)).encode()

    def id_to_token(self, token: SupportsIndex) -> str:
        """Returns the name of a control token or the text of another one, bytes of half a character as `\\xNN`.

        **Raises:** `ValueError` if the id is outside the vocabulary.
        """
        return self.token_bytes(token).decode("utf-8", "backslashreplace")

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of the control token of this name, or of the token that is exactly this text, or `None`."""
        if token in self.control_tokens:
            return self.control_tokens[token].id
        return self._ordinary_id(token)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> list[int]:
        """Returns the ids of a conversation in the folder's chat format.

        Control tokens come from the template alone: the text of a message that spells one stays text.

        **Arguments:**

        - `messages`: mappings with `role` and `content`, first to last.
        - `add_generation_prompt`: end with what opens the assistant's next turn.

        **Raises:** `ValueError` if the folder has no chat template, or if the template refuses the messages.
        """
        render, restore = self._renderer(messages)
        text = render(messages, add_generation_prompt).replace(TURN_BEGINS, "").replace(TURN_ENDS, "")
        return self._encode_rendered(text, restore)

    def encode_conversation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """Returns the ids of a conversation, and which of them the assistant wrote: what training learns.

        A turn of the assistant is what the template encloses in `{% generation %}`; without that, what follows the
        generation prompt, to the last control token of the turn, which ends it.

        **Raises:** `ValueError` as `apply_chat_template`, and if the template says nothing of turns and rewrites
        earlier ones as a conversation goes on.
        """
        render, restore = self._renderer(messages)
        text = render(messages, False)
        if TURN_BEGINS not in text:
            text = self._mark_turns(messages, text, render)
        ids: list[int] = []
        learned: list[bool] = []
        for part in re.split(f"(?={TURN_BEGINS}|{TURN_ENDS})", text):
            new = self._encode_rendered(part.lstrip(TURN_BEGINS + TURN_ENDS), restore)
            ids += new
            learned += [part.startswith(TURN_BEGINS)] * len(new)
        return ids, learned

    def _renderer(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Callable[..., str], Callable[[str], str]]:
        """What renders a beginning of these messages, with everything hidden that only the template may say, and what
        shows it again."""
        if self.chat_template is None:
            raise ValueError(
                f"{self._folder} has no chat template: neither chat_template.jinja nor `chat_template` in "
                "tokenizer_config.json. Put the chat_template.jinja of the model's publisher into the folder, or use "
                "plain prompts: a model without a chat format completes text."
            )
        template = self.chat_template
        pattern = re.compile(f"{TURN_BEGINS}|{TURN_ENDS}|{self._control_pattern.pattern}", self._control_pattern.flags)
        masked = Mask(pattern, avoid=(template, messages))
        names = {
            "bos_token": self._name_or_empty(self.bos_id),
            "eos_token": self._name_or_empty(self.eos_ids[0] if self.eos_ids else None),
            "pad_token": self._name_or_empty(self.pad_id),
        }

        def run(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
            hidden = {"messages": masked.hide(messages), "add_generation_prompt": add_generation_prompt}
            return render(template, names | hidden)

        return run, masked.restore

    def _mark_turns(self, messages: Sequence[Mapping[str, Any]], text: str, render: Callable[..., str]) -> str:
        """The rendered text with the assistant's turns between marks, found by rendering beginnings of it."""
        marked, start = "", 0
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before, after = render(messages[:index], True), render(messages[: index + 1], False)
            if not (after.startswith(before) and text.startswith(after) and len(before) >= start):
                raise ValueError(
                    f"{self._folder}: the chat template does not show which part of message {index} the assistant "
                    "wrote, since it renders a longer conversation otherwise than its beginning. Put "
                    "{% generation %} ... {% endgeneration %} around the assistant's turns in the template."
                )
            ends = [match.end() for match in self._control_pattern.finditer(after, len(before))]
            end = ends[-1] if ends else len(after)
            marked += text[start : len(before)] + TURN_BEGINS + text[len(before) : end] + TURN_ENDS
            start = end
        return marked + text[start:]

    def _encode_rendered(self, text: str, restore: Callable[[str], str]) -> list[int]:
        return self._encode_pieces((restore(plain), control) for plain, control in self._split_at_control(text))

    def _name_or_empty(self, token: int | None) -> str:
        return "" if token is None else self.id_to_token(token)

    def _encode_pieces(self, pieces: Iterable[tuple[str, ControlToken | None]]) -> list[int]:
        ids: list[int] = []
        for plain, control in pieces:
            ids += self._encode_plain(plain) if plain else []
            ids += [control.id] if control else []
        return ids

    def _split_at_control(self, text: str) -> Iterator[tuple[str, ControlToken | None]]:
        """Pieces of plain text, each with the control token after it; the last has none."""
        start = 0
        for match in self._control_pattern.finditer(text):
            name = match[0] if match[0] in self.control_tokens else match[0].strip()
            yield text[start : match.start()], self.control_tokens[name]
            start = match.end()
        yield text[start:], None


@final
class StreamDecoder:
    """Turns ids into text one at a time, never half a character; the parts join to the text of all ids at once."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False):
        """**Arguments:** as for `Tokenizer.decode`."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: SupportsIndex) -> str:
        """Takes the next id; returns the characters that are complete now, often none."""
        return self._utf8.decode(self._tokenizer.token_bytes(token, skip_special=self._skip_special))

    def flush(self) -> str:
        """Ends the text; returns U+FFFD for a character that never became complete. Ready for another text then."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


@final
class TiktokenTokenizer(Tokenizer):
    """Kimi's `tiktoken.model`: byte-pair ranks, with 256 special ids above them.

    Their names are in `added_tokens_decoder` of `tokenizer_config.json`; one without a name there is
    `<|reserved_token_ID|>`, with the id in the whole vocabulary.
    """

    def __init__(self, folder: Path):
        import tiktoken

        ranks = read_tiktoken_ranks(folder / "tiktoken.model")
        added = _read_added_tokens(folder)
        taken = sorted(token.id for token in added.values() if token.id < len(ranks))
        if taken:
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'} names ids below {len(ranks)}, which are ordinary tokens of "
                f"tiktoken.model: {list_some([str(token) for token in taken])}."
            )
        named = {token.id for token in added.values()}
        slots = range(len(ranks), len(ranks) + _SPECIAL_SLOTS)
        reserved = {reserved_name(slot): ControlToken(slot, special=True) for slot in slots if slot not in named}
        self._ranks = ranks
        self._bytes = {rank: piece for piece, rank in ranks.items()}
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=KIMI_PIECES, mergeable_ranks=ranks, special_tokens={}, explicit_n_vocab=len(ranks)
        )
        super().__init__(folder, added | reserved, max([slots.stop, *(token + 1 for token in named)]))

    def _encode_plain(self, text: str) -> list[int]:
        return [token for piece in bounded_pieces(text) for token in self._encoding.encode_ordinary(piece)]

    def _ordinary_bytes(self, token: int) -> bytes | None:
        return self._bytes.get(token)

    def _ordinary_id(self, token: str) -> int | None:
        return self._ranks.get(token.encode("utf-8", "replace"))


@final
class JsonTokenizer(Tokenizer):
    """A byte-level tokenizer in Hugging Face's `tokenizer.json`.

    Control tokens are its added tokens that are marked special or spelled `<|like_this|>`; other added tokens
    (a run of spaces, say) are ordinary ones.
    """

    def __init__(self, folder: Path):
        from tokenizers import AddedToken, decoders

        path = folder / "tokenizer.json"
        tokenizer = _read_tokenizer_json(path)
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise CheckpointError(
                f"{path} is not a byte-level tokenizer: its decoder is {tokenizer.decoder}. Only tokenizers with the "
                "decoder ByteLevel are supported."
            )
        tokenizer.no_padding()
        tokenizer.no_truncation()
        added = tokenizer.get_added_tokens_decoder()
        control = {
            entry.content: ControlToken(token, entry.special, entry.lstrip, entry.rstrip)
            for token, entry in added.items()
            if entry.special or re.fullmatch(r"<[|｜].*[|｜]>", entry.content)
        }
        # `encode_special_tokens` passes over tokens marked special only, so the other control tokens are marked here.
        unmarked = [name for name, token in control.items() if not token.special]
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in unmarked])
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._added = {entry.content: token for token, entry in added.items()}
        self._added_bytes = {token: entry.content.encode() for token, entry in added.items()}
        super().__init__(folder, control, max([tokenizer.get_vocab_size(False) - 1, *added]) + 1)

    def _encode_plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _ordinary_bytes(self, token: int) -> bytes | None:
        if token in self._added_bytes:
            return self._added_bytes[token]
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return None
        alphabet = byte_alphabet()
        return bytes(alphabet[c] for c in piece) if alphabet.keys() >= set(piece) else piece.encode()

    def _ordinary_id(self, token: str) -> int | None:
        if token in self._added:
            return self._added[token]
        return self._tokenizer.token_to_id(
            "".join(byte_characters()[byte] for byte in token.encode("utf-8", "replace"))
        )


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Reads the tokenizer of a checkpoint folder, or of bundled weights by name: its `tokenizer.json`, or else its
    `tiktoken.model`.

    `tokenizer_config.json`, `generation_config.json`, `config.json` and `chat_template.jinja` are read where present.
    Nothing else is, and no code of the folder is run.

    **Raises:** `CheckpointError` naming the file if one cannot be read, or what is there if there is no tokenizer.
    """
    folder = find_weights(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; a tokenizer is read from a checkpoint's folder.")
    _read_optional(folder / "tokenizer_config.json")  # a mistake in it explains more than what would follow from it
    if (folder / "tokenizer.json").exists():
        return JsonTokenizer(folder)
    if (folder / "tiktoken.model").exists():
        return TiktokenTokenizer(folder)
    found = list_some(sorted(entry.name for entry in folder.iterdir()))
    raise CheckpointError(
        f"{folder} has no tokenizer: neither tokenizer.json nor tiktoken.model. It holds {found}. "
        "Copy the tokenizer files of the checkpoint into it."
    )


def read_special_ids(folder: str | os.PathLike[str], token_to_id: Callable[[str], int | None]) -> SpecialIds:
    """Reads which ids begin, end and pad a text.

    The ids that end a text are all that any file names: `eos_token` of `tokenizer_config.json`, and `eos_token_id`,
    one or a list, of `generation_config.json` and `config.json`. For the others the first of these files decides.

    **Raises:** `CheckpointError` if a token is named that `token_to_id` does not know, or an id is not a whole number.
    """
    folder = Path(folder)
    named = _named_ids(folder / "tokenizer_config.json", token_to_id)
    generation, model = _given_ids(folder / "generation_config.json"), _given_ids(folder / "config.json")
    first = [next(iter((*named[role], *generation[role], *model[role])), None) for role in ("bos", "pad")]
    return SpecialIds(first[0], tuple(sorted({*named["eos"], *generation["eos"], *model["eos"]})), first[1])


def _named_ids(path: Path, token_to_id: Callable[[str], int | None]) -> dict[str, list[int]]:
    config = _read_optional(path)
    result: dict[str, list[int]] = {}
    for role in ("bos", "eos", "pad"):
        entry = config.get(f"{role}_token")
        name = entry.get("content") if isinstance(entry, dict) else entry
        found = token_to_id(name) if isinstance(name, str) else None
        if entry is not None and found is None:
            raise CheckpointError(f"{path}: `{role}_token` is {entry!r}, which is not a token of this tokenizer.")
        result[role] = [] if found is None else [found]
    return result


def _given_ids(path: Path) -> dict[str, list[int]]:
    config = _read_optional(path)
    result = {}
    for role in ("bos", "eos", "pad"):
        value = config.get(f"{role}_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise CheckpointError(f"{path}: `{role}_token_id` must be an id or a list of ids; it is {value!r}.")
        result[role] = ids
    return result


def reserved_name(token: int) -> str:
    """Name of an id that has none of its own."""
    return f"<|reserved_token_{token}|>"


def bounded_pieces(text: str) -> Iterator[str]:
    """Cuts text so that no piece is longer than 400,000 characters, nor a run of (non-)space longer than 25,000.

    Ordinary text is one piece, so that its tokens are not affected.

    **Source:** the limits of the published `tokenization_kimi.py`.
    """
    for offset in range(0, len(text), _LONGEST_TEXT):
        part, start = text[offset : offset + _LONGEST_TEXT], 0
        for run in re.finditer(r"\s+|\S+", part):
            for cut in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
                yield part[start:cut]
                start = cut
        yield part[start:]


def read_tiktoken_ranks(path: Path) -> dict[bytes, int]:
    """Reads lines of a base64 byte string and its rank.

    **Raises:** `CheckpointError` naming the line that cannot be read, or what is missing from the ranks.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read_bytes(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(
                f"{path}, line {number}: expected base64 text and a rank, got {line[:60].decode('utf-8', 'replace')!r}."
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path}: the ranks of its {len(ranks)} byte strings are not 0 to {len(ranks) - 1}.")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of the 256 single bytes have no rank, the first is {missing[0]}."
        )
    return ranks


def _read_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if content.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a large-file pointer, not the file itself. Download it again with git lfs pull."
        )
    return content


def _read_tokenizer_json(path: Path):
    from tokenizers import Tokenizer as Backend

    content = _read_bytes(path)
    try:
        return Backend.from_buffer(content)
    except Exception as error:  # the backend raises nothing narrower
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}.") from None


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _read_added_tokens(folder: Path) -> dict[str, ControlToken]:
    path = folder / "tokenizer_config.json"
    result: dict[str, ControlToken] = {}
    for token, entry in _read_optional(path).get("added_tokens_decoder", {}).items():
        if not (token.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)):
            raise CheckpointError(
                f"{path}: `added_tokens_decoder` has {token!r}: {entry!r}; expected an id and `content`."
            )
        if entry["content"] in result:
            raise CheckpointError(f"{path}: `added_tokens_decoder` names two ids {entry['content']!r}.")
        flags = (bool(entry.get(flag, default)) for flag, default in (("special", True), ("lstrip", 0), ("rstrip", 0)))
        result[entry["content"]] = ControlToken(int(token), *flags)
    return result


def _control_pattern(control_tokens: Mapping[str, ControlToken]) -> re.Pattern[str]:
    names = sorted(control_tokens, key=len, reverse=True)  # where two names begin alike, the longer one counts
    flags = [control_tokens[name] for name in names]
    spelled = (
        rf"{r'\s*' * token.lstrip}{re.escape(name)}{r'\s*' * token.rstrip}"
        for name, token in zip(names, flags, strict=True)
    )
    return re.compile("|".join(spelled) or r"(?!)")


@functools.cache
def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level `tokenizer.json`.

    Bytes that are printable in Latin-1 stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The byte that each character of `byte_characters` stands for."""
    return {character: byte for byte, character in byte_characters().items()}
