"""How well a model predicts data: loss, perplexity, bits per byte."""

import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from kimi_zoo.bundled import find_weights
from kimi_zoo.checkpoints.folder import from_pretrained
from kimi_zoo.models.kimi_linear_partition import RULES
from kimi_zoo.parallel.axes import Parallelism, as_parallelism
from kimi_zoo.parallel.partition import place
from kimi_zoo.tokenizers import Tokenizer, load_tokenizer
from kimi_zoo.training.dataset import Dataset, Overlong, prepare
from kimi_zoo.training.lora import load_adapter
from kimi_zoo.training.packing import in_order
from kimi_zoo.training.quantization import Kind, quantize_frozen
from kimi_zoo.training.run import mean_loss


def evaluate(
    model: str | Path,
    data: Iterable[str | Path],
    *,
    adapter: str | Path | None = None,
    frozen_weights: Kind | None = None,
    seq_length: int = 512,
    overlong: Overlong = "split",
    rows: int = 8,
    packed: bool = True,
    dtype: str = "float32",
    mesh: Parallelism | Mesh | str | None = None,
    progress: bool = False,
    warn: Callable[[str], None] = lambda _message: None,
) -> dict[str, Any]:
    """Measures a checkpoint on data files. Every example is read by itself, however rows are packed.

    **Arguments:** as of `finetune`; `mesh`: the devices to compute on, such as `"fsdp=4"`; `frozen_weights`: measure
    with weights so rounded, as of `quantize_frozen`.

    **Returns:** `loss` (nats per learned token), `perplexity`, `bits_per_byte`, `tokens` (learned), `bytes` (of the
    learned text; control tokens have none), `examples`.

    **Raises:** `DataError` and `CheckpointError` as `finetune`.
    """
    parallelism = as_parallelism(mesh)
    if parallelism is not None:
        parallelism.check_tokens(rows, seq_length)
    folder = find_weights(model)
    tokenizer = load_tokenizer(folder)
    with tempfile.TemporaryDirectory() as temporary:
        dataset = prepare(
            data, tokenizer, Path(temporary) / "data", seq_length=seq_length, overlong=overlong, warn=warn
        )
        loaded = from_pretrained(folder, dtype=dtype, mesh=parallelism)
        if frozen_weights is not None:
            loaded = quantize_frozen(loaded, frozen_weights)
        if adapter is not None:
            loaded = load_adapter(loaded, adapter)
            loaded = loaded if parallelism is None else place(loaded, parallelism, RULES)
        batches = in_order(dataset, range(len(dataset)), seq_length, rows, packed=packed)
        shown = iter(tqdm(batches, disable=not progress, leave=False, unit=" batches"))
        loss, tokens = mean_loss(loaded, shown, dtype, mesh=parallelism)
        size = learned_bytes(dataset, tokenizer)
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss * tokens / math.log(2) / size if size else math.nan,
        "tokens": tokens,
        "bytes": size,
        "examples": len(dataset),
    }


def learned_bytes(dataset: Dataset, tokenizer: Tokenizer) -> int:
    """Bytes of the text that is learned: of every learned token but the control tokens."""
    learned = np.array(dataset.learned)
    learned[dataset.offsets[:-1]] = False  # nothing predicts the first token of an example
    ids, counts = np.unique(dataset.tokens[learned], return_counts=True)
    sizes = (len(tokenizer.token_bytes(int(token), skip_special=True)) for token in ids)
    return int(sum(size * int(count) for size, count in zip(sizes, counts, strict=True)))
