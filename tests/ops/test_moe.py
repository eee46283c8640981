"""Routing, and experts in every form against a plain loop."""

import json

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import DATA, assert_close

from kimi_zoo.ops import moe
from kimi_zoo.ops.activations import swiglu

CASES = json.loads((DATA / "field_cases" / "router_cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
@pytest.mark.parametrize("storage", [jnp.float32, jnp.bfloat16])
def test_router_cases(case, storage):
    """The bias picks, plain scores weigh, in float32 whatever the layer's storage: the router reads its logits so."""
    import equinox as eqx

    from kimi_zoo.layers.moe import Router

    experts = len(case["logits"])
    router = Router(
        experts,
        experts,
        top_k=case["top_k"],
        renormalize=case["renorm"],
        scale=case["scale"],
        num_groups=case["groups"],
        top_groups=case["topk_group"],
        key=jr.key(0),
    )
    weight = jnp.diag(jnp.asarray(case["logits"], storage))
    router = eqx.tree_at(lambda r: (r.weight, r.score_bias), router, (weight, jnp.asarray(case["bias"], jnp.float32)))
    expert_ids, weights = router(jnp.ones((1, experts), storage))
    got = dict(zip(expert_ids[0].tolist(), weights[0].tolist(), strict=True))
    want = dict(zip(case["expected"]["experts"], case["expected"]["weights"], strict=True))
    assert got == pytest.approx(want, rel=1e-5)


def test_groups_keep_the_best_two_scores():
    """Group 0 has the single best expert, group 1 the better pair: only group 1 may be chosen from."""
    logits = jnp.asarray([[3.0, -9.0, -9.0, 2.0, 2.0, -9.0]])
    expert_ids, weights = moe.route(logits, None, top_k=2, num_groups=2, top_groups=1)
    assert sorted(expert_ids[0].tolist()) == [3, 4]
    assert weights.sum() == pytest.approx(1.0)
    softmax, plain = moe.route(logits, None, top_k=1, activation="softmax", renormalize=False, scale=2.0)
    assert softmax.tolist() == [[0]] and plain[0, 0] == pytest.approx(2 * float(jax.nn.softmax(logits)[0, 0]), rel=1e-6)


def test_a_single_expert_keeps_its_score():
    """As in the published code: divided by itself, its weight would say nothing and the router would not learn."""
    _, weights = moe.route(jnp.asarray([[0.0, -1.0]]), None, top_k=1, renormalize=True, scale=3.0)
    assert weights.tolist() == [[1.5]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 4, "num_groups": 3, "top_groups": 1}, "Cannot choose 4 of 6 experts in 1 of 3 groups"),
        ({"top_k": 1, "num_groups": 4}, "6 experts cannot form 4 equal groups"),
        ({"top_k": 1, "activation": "tanh"}, "'tanh'"),
    ],
)
def test_bad_routing_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        moe.route(jnp.zeros((1, 6)), None, **options)


def naive(x, expert_ids, expert_weights, gate, up, down, limit):
    """Token by token, expert by expert, in float64."""
    y = np.zeros(x.shape)
    for token in range(x.shape[0]):
        for expert, weight in zip(expert_ids[token], expert_weights[token], strict=True):
            g, u = gate[expert] @ x[token], up[expert] @ x[token]
            g = g / (1 + np.exp(-g))
            if limit:
                g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
            y[token] += weight * (down[expert] @ (g * u))
    return y


def dense(x, expert_ids, expert_weights, gate, up, down, limit):
    """Every expert over every token, weighted: a form simple enough to take derivatives of."""
    weights = jnp.sum(jnp.where(expert_ids[..., None] == jnp.arange(gate.shape[0]), expert_weights[..., None], 0.0), 1)
    inner = swiglu(jnp.einsum("th,efh->tef", x, gate), jnp.einsum("th,efh->tef", x, up), limit)
    return jnp.einsum("tef,ehf,te->th", inner, down, weights)


FORMS = [moe._chosen, moe._blocks, moe._ragged]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 5, 2), (7, 3, 3), (37, 6, 2), (300, 4, 1)])
def test_every_form_equals_the_loop(form, tokens, experts, top_k):
    random = np.random.default_rng(tokens)
    x, gate, up, down = (
        random.standard_normal(shape) for shape in ((tokens, 8), (experts, 5, 8), (experts, 5, 8), (experts, 8, 5))
    )
    expert_ids = np.stack([random.permutation(experts)[:top_k] for _ in range(tokens)])
    if tokens == 37:
        expert_ids[:, 0], expert_ids[:, 1] = 2, 5  # all tokens to two experts, the others empty
    weights = random.random((tokens, top_k))
    limit = 1.5 if tokens == 7 else None
    low = [jnp.asarray(a, jnp.float32) for a in (x, weights, gate, up, down)]

    @jax.jit
    def run(x, weights, *rest):
        call = lambda x, weights, *rest: form(x, jnp.asarray(expert_ids), weights, *rest, limit)
        y, vjp = jax.vjp(call, x, weights, *rest)
        return call(x, weights, *rest), y, vjp(jnp.cos(y))

    alone, y, grads = run(*low)  # forward alone may take another way
    assert_close(alone, y, rtol=1e-5, name="forward alone")
    assert_close(y, naive(x, expert_ids, weights, gate, up, down, limit), rtol=1e-5, name="output")
    reference = jax.vjp(lambda x, w, *rest: dense(x, jnp.asarray(expert_ids), w, *rest, limit), *low)[1]
    assert_close(grads, reference(jnp.cos(y)), rtol=1e-4, name="gradients")


@pytest.mark.parametrize("form", [*FORMS, moe.expert_mlps], ids=lambda form: form.__name__)
@pytest.mark.parametrize("ensemble", [False, True])
def test_batches_by_vmap(getkey, form, ensemble):
    """Outputs and gradients of each example, or of each model of an ensemble, are those it has alone."""
    stack = (3,) if ensemble else ()
    experts = [jr.normal(getkey(), (*stack, *shape)) for shape in ((4, 5, 8), (4, 5, 8), (4, 8, 5))]
    x, weights = jr.normal(getkey(), (3, 6, 8)), jr.uniform(getkey(), (3, 6, 2))
    ids = jax.vmap(jax.vmap(lambda key: jr.permutation(key, 4)[:2]))(jr.split(getkey(), (3, 6)))

    def gradients(x, ids, weights, *experts):
        def loss(x, weights, *experts):
            y = form(x, ids, weights, *experts, limit=None)
            return jnp.sin(y).sum(), y

        return jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)(x, weights, *experts)

    together = jax.jit(jax.vmap(gradients, in_axes=(0, 0, 0, *[0 if ensemble else None] * 3)))(
        x, ids, weights, *experts
    )
    alone = jax.jit(gradients)
    for i in range(3):
        expected = alone(x[i], ids[i], weights[i], *(leaf[i] if ensemble else leaf for leaf in experts))
        assert_close(jax.tree.map(lambda leaf: leaf[i], together), expected, rtol=1e-5, name=f"example {i}")


def test_form_by_size_and_no_tokens():
    ids, weights = jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2))
    experts = [jnp.ones(shape) for shape in ((3, 5, 8), (3, 5, 8), (3, 8, 5))]
    assert moe.expert_mlps(jnp.ones((0, 8)), ids, weights, *experts).shape == (0, 8)


def test_rows_do_not_influence_one_another(getkey):
    experts = [jr.normal(getkey(), shape) for shape in ((3, 5, 8), (3, 5, 8), (3, 8, 5))]
    x, weights = jr.normal(getkey(), (40, 8)), jnp.ones((40, 1))
    ids = jr.randint(getkey(), (40, 1), 0, 3)
    plain = moe.expert_mlps(x, ids, weights, *experts)
    other = moe.expert_mlps(x.at[3].set(jnp.nan), ids, weights, *experts)
    keep = jnp.arange(40) != 3
    assert np.array_equal(plain[keep], other[keep])


def test_limits():
    """Fixtures ling_clamp and clamp_zero_means_off."""
    expected = json.loads((DATA / "field_cases" / "ling_clamp" / "expected.json").read_text())
    for row in expected["rows"]:
        got = swiglu(jnp.asarray([row["gate"]]), jnp.asarray([row["up"]]), row["limit"])
        assert float(got[0]) == pytest.approx(row["out"], rel=1e-6)
    folder = DATA / "field_cases" / "clamp_zero_means_off"
    config, expected = (json.loads((folder / name).read_text()) for name in ("config.json", "expected.json"))
    gate, up = jnp.asarray([expected["gate"]]), jnp.asarray([expected["up"]])
    for kind, limits in (("routed", "expert_swiglu_limit_list"), ("shared", "share_expert_swiglu_limit_list")):
        got = [float(swiglu(gate, up, limit)[0]) for limit in config[limits]]
        assert got == pytest.approx(expected[f"{kind}_by_layer"], rel=1e-6)
