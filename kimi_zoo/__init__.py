"""kimi-zoo: hybrid linear-attention language models in Equinox.

The public names are imported on first use, so that importing the package, and `kimi-zoo --help`, start at once.
"""

import importlib
import importlib.metadata

_MODULES = {
    "kimi_zoo.bundled": ("bundled_weights", "find_weights"),
    "kimi_zoo.checkpoints.configs": ("parse_config",),
    "kimi_zoo.checkpoints.convert": ("convert",),
    "kimi_zoo.checkpoints.files": ("CheckpointError",),
    "kimi_zoo.checkpoints.folder": ("from_pretrained", "save_pretrained", "to_tensors"),
    "kimi_zoo.checkpoints.megatron_layout": ("MegatronLayout",),
    "kimi_zoo.generation.config": ("GenerationConfig", "read_generation_config"),
    "kimi_zoo.generation.loop": ("generate", "stream_generate"),
    "kimi_zoo.layers.kda": ("KDACache", "KimiDeltaAttention", "ShortConvolution"),
    "kimi_zoo.layers.linear": ("Embedding", "Linear"),
    "kimi_zoo.layers.mla": ("MLACache", "MultiHeadLatentAttention", "Rope"),
    "kimi_zoo.layers.mlp": ("MLP",),
    "kimi_zoo.layers.moe": ("Experts", "MoE", "Router"),
    "kimi_zoo.layers.norm": ("RMSNorm",),
    "kimi_zoo.layers.stack": ("LayerStack", "stack_layers"),
    "kimi_zoo.models.kimi_linear": (
        "KIMI_LINEAR_48B_A3B",
        "KimiBlock",
        "KimiLinear",
        "KimiLinearCache",
        "KimiLinearConfig",
        "replace_layer",
    ),
    "kimi_zoo.parallel.axes": ("Parallelism", "make_mesh"),
    "kimi_zoo.tokenizers": ("load_tokenizer",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = ("checkpoints", "generation", "layers", "models", "ops", "parallel", "training")

__all__ = [*_HOME, *_SUBMODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name == "__version__":
        return importlib.metadata.version("kimi-zoo")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"kimi_zoo.{name}")
    raise AttributeError(f"module 'kimi_zoo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
