import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from kimi_zoo.ops import kda_gate, kda_step, kimi_delta_attention, l2_norm

LOG2 = float(np.log(2.0))


@pytest.mark.parametrize(
    "a_log, x, lower_bound, expected",
    [
        (0.0, 0.0, -5.0, -2.5),  # the softplus form clipped at the bound would give -0.693
        (LOG2, 1.0, -5.0, -4.403985389889412),
        (4 * LOG2, -2.0, -5.0, -6.33208277454703e-14),
        (0.0, 100.0, -5.0, -5.0),
        (0.0, 0.0, None, -0.6931471805599453),
        (LOG2, 1.0, None, -2.6265233750364456),
        (0.0, 100.0, None, -100.0),  # softplus(x) is x here, not inf
    ],
)
@pytest.mark.parametrize("bias", [0.0, 0.75])
def test_values_of_both_forms(a_log, x, lower_bound, expected, bias):
    gate, a_log = jnp.full((1, 2, 3), x - bias), jnp.full(2, a_log)
    for dt_bias in (jnp.full((2, 3), bias), jnp.full(6, bias)):
        np.testing.assert_allclose(kda_gate(gate, a_log, dt_bias, lower_bound), expected, rtol=2e-6)


def test_bias_is_head_major():
    dt_bias = jnp.arange(6.0)
    log_decay = kda_gate(jnp.zeros((1, 2, 3)), jnp.zeros(2), dt_bias)
    np.testing.assert_allclose(log_decay[0], -jax.nn.softplus(dt_bias.reshape(2, 3)))


@pytest.mark.parametrize("lower_bound, slope", [(None, -1.0), (-5.0, 0.0)])
def test_gradient_at_large_input(lower_bound, slope):
    def total(gate):
        return jnp.sum(kda_gate(gate, jnp.zeros(1), None, lower_bound))

    assert jax.grad(total)(jnp.full((1, 1, 1), 100.0))[0, 0, 0] == slope


@pytest.mark.parametrize("a_log", [-10.0, 10.0])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_extreme_rates_have_finite_gradients(a_log, lower_bound):
    gate = jnp.array([-1e4, -30.0, 0.0, 30.0, 1e4])[None, None]
    gradients = jax.grad(lambda *args: kda_gate(*args, lower_bound).sum(), (0, 1, 2))(
        gate, jnp.full(1, a_log), jnp.zeros(5)
    )
    assert all(jnp.isfinite(x).all() for x in gradients)


def test_result_is_float32_for_bfloat16():
    assert kda_gate(jnp.zeros((1, 2, 3), jnp.bfloat16), jnp.zeros(2)).dtype == jnp.float32


@pytest.mark.parametrize("shape", [(8,), (1, 8), (8, 8, 1), (8, 4)])
def test_bias_never_broadcasts(shape):
    size = int(np.prod(shape))
    with pytest.raises(ValueError, match=rf"8 \* 8 = 64 values.* with {size} values"):
        kda_gate(jnp.zeros((1, 2, 8, 8)), jnp.zeros(8), jnp.zeros(shape))


@pytest.mark.parametrize("lower_bound", [0.0, 1.0, -5.1, float("nan"), -float("inf")])
def test_bound_out_of_range_is_refused(lower_bound):
    with pytest.raises(ValueError, match=rf"`lower_bound` must be in \[-5, 0\), got {lower_bound}"):
        kda_gate(jnp.zeros((1, 2, 3)), jnp.zeros(2), None, lower_bound)


def test_wrong_number_of_rates_is_refused():
    unchecked = kda_gate.__wrapped__  # without the annotations' own check, as users run it
    with pytest.raises(ValueError, match=r"shape \(2,\), got shape \(3,\)"):
        unchecked(jnp.zeros((1, 2, 3)), jnp.zeros(3))


def test_l2_norm():
    x = jnp.array([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0]])
    np.testing.assert_allclose(l2_norm(x)[0], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(l2_norm(x)[2], [0.5**0.5, 0.0], rtol=1e-6)  # 1e-6 under the root counts here
    gradient = jax.jacobian(l2_norm)(x)
    assert jnp.isfinite(gradient).all() and not l2_norm(x)[1].any()


def test_the_default_choice_takes_bfloat16_forward_and_backward(getkey):
    """Both forms that are compiled for the choice must agree in dtypes, whatever they compute in."""
    shape = (1, 5, 2, 4)
    query, key, value, gate = (jr.normal(getkey(), shape, jnp.bfloat16) for _ in range(4))
    beta = jnp.ones(shape[:3], jnp.bfloat16)
    run = lambda value: kimi_delta_attention(query, key, value, -jnp.abs(gate), beta)[0]
    assert run(value).dtype == jnp.bfloat16
    assert jax.grad(lambda value: run(value).astype(jnp.float32).sum())(value).dtype == jnp.bfloat16


def test_a_step_leaves_rows_that_are_not_real_alone(getkey):
    query, key, value, gate = (jr.normal(getkey(), (3, 2, 4)) for _ in range(4))
    beta, state = jr.uniform(getkey(), (3, 2)), jr.normal(getkey(), (3, 2, 4, 4))
    options = {"a_log": jnp.zeros(2), "dt_bias": jnp.zeros((2, 4)), "use_qk_l2norm": True}
    value = value.at[1].set(jnp.nan)  # whatever stands there
    output, new = kda_step(query, key, value, gate, beta, state, real=jnp.asarray([True, False, True]), **options)
    expected, after = kda_step(query, key, value, gate, beta, state, **options)
    assert jnp.array_equal(new[1], state[1]) and not output[1].any()
    for row in (0, 2):
        assert jnp.array_equal(new[row], after[row]) and jnp.array_equal(output[row], expected[row])
