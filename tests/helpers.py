"""What several test modules share: data, a tiny configuration, comparisons."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import kimi_zoo as kz

DATA = Path(__file__).parent / "data"

# sizes differ from one another, so that a swapped axis fails
TINY = kz.KimiLinearConfig(
    vocab_size=61,
    hidden_size=16,
    layer_kinds=("kda", "kda", "kda", "mla"),
    mlp_kinds=("dense", "moe", "moe", "moe"),
    intermediate_size=20,
    initializer_range=0.2,
    linear_num_heads=2,
    linear_head_dim=8,
    num_attention_heads=3,
    kv_lora_rank=10,
    qk_nope_head_dim=7,
    qk_rope_head_dim=4,
    v_head_dim=6,
    num_experts=5,
    num_experts_per_token=2,
    moe_intermediate_size=9,
    num_shared_experts=1,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def tiny(**changes: object) -> kz.KimiLinearConfig:
    """`TINY` with other fields."""
    return dataclasses.replace(TINY, **changes)


def assert_close(actual, expected, *, rtol: float = 0.0, atol: float = 0.0, name: str = "") -> None:
    """Every array of a pytree within `atol + rtol * max|expected|` of the expected one."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected), name
    for got, want in zip(actual, expected, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert got.shape == want.shape, (name, got.shape, want.shape)
        limit = atol + rtol * np.max(np.abs(want), initial=0.0)
        worst = np.max(np.abs(got - want), initial=0.0)
        assert worst <= limit, f"{name}: largest difference {worst:.3g}, allowed {limit:.3g}"


def next_token_loss(model: kz.KimiLinear, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of every token but the first of each row."""
    log_probs = jax.nn.log_softmax(model(tokens)[:, :-1].astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean()
