"""What a general compressor and counting n-grams reach on the held-out text, in bits per byte.

Every figure is the code length of all held-out documents, with the marks between them, over the bytes of their text:

- `xz -9` (and `-9e`) of the held-out text alone, and what it adds to the training text when it follows it;
- interpolated n-gram models of the training text, over the bundled model's tokens and over bytes.

Run as `python weights/train/baselines.py CORPUS FOLDER`, after `corpus.py` and `tokenizer.py` wrote these two;
writes `baselines.json` into FOLDER.
"""

import argparse
import json
import lzma
from pathlib import Path
from typing import NamedTuple

import corpus
import numpy as np

DOCUMENT_MARK = b"\0"  # between documents where the unit is a byte; the texts hold none


class Order(NamedTuple):
    """Counts of one n-gram length, and what its contexts keep and give away.

    `grams` and `contexts` are sorted; an n-gram is its units' numbers in one integer, the last unit in the lowest bits.
    """

    grams: np.ndarray
    discounted: np.ndarray  # of each n-gram: its count less the discount
    contexts: np.ndarray
    totals: np.ndarray  # of each context: the sum of its counts
    backoff: np.ndarray  # of each context: the share of the shorter context's model


class NGrams:
    """Interpolated Kneser-Ney model with three discounts an order, over units of `bits` bits each.

    The longest n-grams are counted as they occur, shorter ones by how many different units stand before them; the
    distribution under the single unit's is uniform over `units`.

    **Source:** Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1998), section 3.
    """

    def __init__(self, ids: np.ndarray, *, length: int, bits: int, units: int):
        """**Arguments:**

        - `ids`: the training text.
        - `length`: units in the longest n-gram.
        - `bits`, `units`: how wide a unit is (`length * bits` at most 63) and how many there are.
        """
        self.bits, self.units = bits, units
        grams, counts = np.unique(packed(ids, length, bits), return_counts=True)
        self.orders = [order_counts(grams, counts, bits)]
        for shorter in range(length - 1, 0, -1):
            grams, counts = np.unique(grams & ((1 << bits * shorter) - 1), return_counts=True)
            self.orders.insert(0, order_counts(grams, counts, bits))

    def probabilities(self, ids: np.ndarray) -> np.ndarray:
        """Probability of every unit of `ids` but the first, given the ones before it (fewer at the start)."""
        result = np.full(len(ids) - 1, 1 / self.units)
        for length, order in enumerate(self.orders, start=1):
            start = max(length, 2) - 1  # the first unit that has a context of this length
            grams = packed(ids, length, self.bits)[start - length + 1 :]
            own, _ = looked_up(order.grams, order.discounted, grams)
            totals, seen = looked_up(order.contexts, order.totals, grams >> self.bits)
            backoff, _ = looked_up(order.contexts, order.backoff, grams >> self.bits)
            shorter = result[start - 1 :]
            result[start - 1 :] = np.where(seen, own / np.where(seen, totals, 1) + backoff * shorter, shorter)
        return result

    def bits_of(self, ids: np.ndarray) -> float:
        """Code length of all of `ids` but the first, in bits."""
        return float(-np.log2(self.probabilities(ids)).sum())


def packed(ids: np.ndarray, length: int, bits: int) -> np.ndarray:
    """The n-grams of `ids` in order, each as one integer."""
    ids = ids.astype(np.int64)
    grams = np.zeros(len(ids) - length + 1, np.int64)
    for offset in range(length):
        grams = (grams << bits) | ids[offset : offset + len(grams)]
    return grams


def order_counts(grams: np.ndarray, counts: np.ndarray, bits: int) -> Order:
    """Discounts the counts of one order and sums them by context. `grams` must be sorted."""
    table = np.array([0, *estimated_discounts(counts)])
    discounts = table[np.minimum(counts, 3)]
    contexts, starts = np.unique(grams >> bits, return_index=True)
    totals = np.add.reduceat(counts, starts)
    return Order(grams, counts - discounts, contexts, totals, np.add.reduceat(discounts, starts) / totals)


def estimated_discounts(counts: np.ndarray) -> tuple[float, float, float]:
    """What to take off counts of 1, 2, and 3 or more, from how many n-grams were seen 1 to 4 times."""
    ones, twos, threes, fours = (np.count_nonzero(counts == n) for n in (1, 2, 3, 4))
    if not (ones and twos and threes):
        return 0.5, 1.0, 1.5  # nothing to estimate from
    common = ones / (ones + 2 * twos)
    seen = ((1, ones, twos), (2, twos, threes), (3, threes, fours))
    first, second, third = (max(0.0, n - (n + 1) * common * more / same) for n, same, more in seen)
    return first, second, third


def looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values of the `wanted` keys among sorted `keys` (0 where there is none), and which were found."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found = keys[places] == wanted
    return np.where(found, values[places], 0), found


def byte_stream(documents: list[corpus.Document]) -> np.ndarray:
    """All texts as bytes, a mark before each and after the last."""
    texts = (document.text.encode() for document in documents)
    return np.frombuffer(b"".join([DOCUMENT_MARK, *(text + DOCUMENT_MARK for text in texts)]), np.uint8)


def compressed_bits(data: bytes, preset: int) -> int:
    """Length of `data` compressed by xz, in bits."""
    return 8 * len(lzma.compress(data, preset=preset))


def compare(corpus_folder: Path, folder: Path) -> dict:
    """Bits per byte of the held-out text, by method; also written to `folder / "baselines.json"`."""
    train, held_out = (corpus.read(corpus_folder / f"{part}.jsonl") for part in ("train", "held_out"))
    size = sum(len(document.text.encode()) for document in held_out)
    train_bytes, held_out_bytes = byte_stream(train), byte_stream(held_out)
    train_ids, held_out_ids = (np.load(folder / f"{part}.npy") for part in ("train", "held_out"))
    units = json.loads((folder / "tokens.json").read_text())["vocab_size"]
    bits = (units - 1).bit_length()
    alone, before = held_out_bytes.tobytes(), train_bytes.tobytes()
    code_lengths = {
        "xz -9": compressed_bits(alone, 9),
        "xz -9e": compressed_bits(alone, 9 | lzma.PRESET_EXTREME),
        "xz -9e after the training text": compressed_bits(before + alone, 9 | lzma.PRESET_EXTREME)
        - compressed_bits(before, 9 | lzma.PRESET_EXTREME),
        "5-gram of bytes": NGrams(train_bytes, length=5, bits=8, units=256).bits_of(held_out_bytes),
        "7-gram of bytes": NGrams(train_bytes, length=7, bits=8, units=256).bits_of(held_out_bytes),
        "3-gram of tokens": NGrams(train_ids, length=3, bits=bits, units=units).bits_of(held_out_ids),
        "5-gram of tokens": NGrams(train_ids, length=5, bits=bits, units=units).bits_of(held_out_ids),
    }
    report = {"held_out_bytes": size, "bits_per_byte": {name: round(v / size, 4) for name, v in code_lengths.items()}}
    (folder / "baselines.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="folder that corpus.py wrote")
    parser.add_argument("folder", type=Path, help="folder that tokenizer.py wrote")
    options = parser.parse_args()
    print(json.dumps(compare(options.corpus, options.folder), indent=2))
