"""Byte-level BPE tokenizer of the bundled model, trained on the training text alone, and the texts as token ids.

Run as `python weights/train/tokenizer.py CORPUS FOLDER [--vocab-size 4096]`, where CORPUS is what `corpus.py` wrote.
Writes `tokenizer/tokenizer.json`, `tokenizer/tokenizer_config.json`, `train.npy`, `held_out.npy` (uint16 ids, each
document after an `<|endoftext|>`, and one more at the end) and `tokens.json` (bytes and tokens) into FOLDER.
"""

import argparse
import hashlib
import json
from pathlib import Path

import corpus
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
# The marks of Kimi's chat format are set aside, untrained, so that a chat model can be fine-tuned from this one.
CHAT_MARKS = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
VOCAB_SIZE = 4096

# Line breaks go with the indentation after them; a word takes one space before it, and the punctuation of an
# attribute or a call (`.name`, `(name`); digits come in threes.
PIECES = "|".join(
    (
        r"\r?\n[\n ]*",
        r"[^\r\n\p{L}\p{N}]?[\p{L}_]+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",
        r" +(?! )",
        r"\s",
    )
)


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE over `texts`: all 256 bytes are in the alphabet, so any text comes back whole."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *CHAT_MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config(context_length: int) -> dict:
    """`tokenizer_config.json`: the one control token that the model has seen begins, ends and pads a text."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }


def token_ids(tokenizer: Tokenizer, documents: list[corpus.Document]) -> np.ndarray:
    """All documents as one row of ids, an `<|endoftext|>` before each and after the last."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = [end]
    for encoding in tokenizer.encode_batch([document.text for document in documents]):
        ids += [*encoding.ids, end]
    return np.asarray(ids, np.uint16)


def build(corpus_folder: Path, folder: Path, vocab_size: int = VOCAB_SIZE, context_length: int = 2048) -> dict:
    """Trains and writes everything the module docstring names; returns what `tokens.json` says."""
    parts = {part: corpus.read(corpus_folder / f"{part}.jsonl") for part in ("train", "held_out")}
    tokenizer = train_tokenizer([document.text for document in parts["train"]], vocab_size)
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer" / "tokenizer.json"
    tokenizer.save(str(path))
    config = json.dumps(tokenizer_config(context_length), indent=2) + "\n"
    (folder / "tokenizer" / "tokenizer_config.json").write_text(config)
    report: dict = {
        "vocab_size": tokenizer.get_vocab_size(),
        "end_of_text_id": tokenizer.token_to_id(END_OF_TEXT),
        "tokenizer_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    for part, documents in parts.items():
        ids = token_ids(tokenizer, documents)
        np.save(folder / f"{part}.npy", ids)
        size = sum(len(document.text.encode()) for document in documents)
        report[part] = {
            "documents": len(documents),
            "bytes": size,
            "tokens": len(ids),
            "bytes_per_token": round(size / (len(ids) - len(documents) - 1), 4),
            "sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        }
    (folder / "tokens.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="folder that corpus.py wrote")
    parser.add_argument("folder", type=Path, help="where to write the tokenizer and the ids")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--context-length", type=int, default=2048, help="model_max_length of tokenizer_config.json")
    options = parser.parse_args()
    report = build(options.corpus, options.folder, options.vocab_size, options.context_length)
    print(json.dumps(report, indent=2))
