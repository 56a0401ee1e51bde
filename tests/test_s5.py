"""s5.py against the S5 paper's formulas, written out in complex numbers, step by step."""

import os
import sys
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import s5

T, N, D_IN = 12, 4, 5
SIZES = dict(d_model=8, ssm_size=16)
LEVEL_3 = {"xla_backend_optimization_level": 3}  # for the precision of fused products and sums
LONG = dict(d_model=16, ssm_size=64, n_layers=1)
apply = {norm: jax.jit(s5.S5(**SIZES, norm=norm).apply) for norm in ("after", "before", "none")}


def is_first():
    """Sequences with resets at the first step, in the middle, at the last step, and without any."""
    first = np.zeros((T, N), bool)
    first[0, 0] = first[5, 1] = first[6, 1] = first[T - 1, 2] = True
    return first


@lru_cache
def example(norm="after"):
    """Parameters away from their initial values, a carry that is not zero, inputs."""
    random = np.random.default_rng(0)
    net = s5.S5(**SIZES, norm=norm)
    xs = random.normal(size=(T, N, D_IN)).astype(np.float32)
    params = jax.jit(net.init)(jax.random.key(0), net.initial_carry(N), xs[:1], is_first()[:1])
    move = lambda by: lambda x: np.asarray(x + by * random.normal(size=x.shape), np.float32)
    return jax.tree.map(move(0.1), params), jax.tree.map(move(1.0), net.initial_carry(N)), xs


def reference(params, carry, xs, first, norm):
    """The paper's equations, step by step, in complex numbers of float64."""

    def layer_norm(p, u):
        mean = u.mean(-1, keepdims=True)
        var = ((u - mean) ** 2).mean(-1, keepdims=True)
        return (u - mean) / np.sqrt(var + 1e-6) * p["scale"] + p["bias"]

    dense = lambda p, u: u @ p["kernel"] + p["bias"]
    u, last = dense(params["Dense_0"], xs), []
    for i, x in enumerate(carry):
        p = params[f"S5Layer_{i}"]
        Lambda = np.minimum(p["Lambda_re"], -1e-4) + 1j * p["Lambda_im"]
        B, C = p["B"][0] + 1j * p["B"][1], p["C"][0] + 1j * p["C"][1]
        Lambda_bar = np.exp(Lambda * np.exp(p["log_Delta"]))
        B_bar = ((Lambda_bar - 1) / Lambda)[:, None] * B
        skip = u
        u = layer_norm(p["LayerNorm_0"], u) if norm == "before" else u
        x, y = x[:, 0] + 1j * x[:, 1], []
        for k in range(len(u)):
            x = np.where(first[k][:, None], 0, x)
            x = x * Lambda_bar + u[k] @ B_bar.T
            y.append(2 * (x @ C.T).real + p["D"] * u[k])
        y = np.stack(y)
        g = 0.5 * y * (1 + np.tanh((2 / np.pi) ** 0.5 * (y + 0.044715 * y**3)))
        u = skip + g / (1 + np.exp(-dense(p["Dense_0"], g)))
        u = layer_norm(p["LayerNorm_0"], u) if norm == "after" else u
        last.append(np.stack([x.real, x.imag], 1))
    return tuple(last), u


def float64(*tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def assert_close(a, b, tol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tol, atol=tol), a, b)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["after", "before", "none"])
def test_learning_acting_and_float64_numpy_agree(norm):
    params, carry, xs = example(norm)
    last, ys = apply[norm](params, carry, xs, is_first())
    x, acted = carry, []
    for k in range(T):
        x, y = apply[norm](params, x, xs[k : k + 1], is_first()[k : k + 1])
        acted.append(y)
    expected = reference(*float64(params["params"], carry, xs), is_first(), norm)
    assert ys.dtype == jnp.float32
    assert_close((last, ys), expected)
    assert_close((x, jnp.concatenate(acted)), expected)


@pytest.mark.slow
def test_gradients_equal_those_of_the_sequential_form():
    """Along random directions of parameters, carry and inputs, by central differences."""
    params, carry, xs = example()
    random = np.random.default_rng(0)
    weight = random.normal(size=(T, N, SIZES["d_model"]))

    def loss(run, p, carry, xs):
        last, ys = run(p, carry, xs)
        return (ys * weight).sum() + sum((x**2).sum() for x in last)

    parallel = lambda p, c, xs: apply["after"]({"params": p}, c, xs, is_first())
    sequential = lambda p, c, xs: reference(p, c, xs, is_first(), "after")
    gradient = jax.jit(jax.grad(lambda args: loss(parallel, *args)), compiler_options=LEVEL_3)
    gradient = gradient((params["params"], carry, xs))
    leaves, tree = jax.tree.flatten(float64(params["params"], carry, xs))
    for i, (g, leaf) in enumerate(zip(jax.tree.leaves(gradient), leaves)):
        for _ in range(8):
            v = random.normal(size=leaf.shape)
            at = lambda h: tree.unflatten([*leaves[:i], leaf + h * v, *leaves[i + 1 :]])
            up, down = loss(sequential, *at(1e-5)), loss(sequential, *at(-1e-5))
            tol = 1e-5 * abs(np.asarray(g) * v).sum()
            np.testing.assert_allclose((g * v).sum(), (up - down) / 2e-5, atol=1e-6 + tol)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("steps", [7, 16, 65])  # a prime; 4 chunks of 4; more than 64 steps back
def test_recurrence_and_its_gradient_at_any_length(steps, platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    keys = jax.random.split(jax.random.key(steps), 4)
    Lambda_bar = jax.random.uniform(keys[0], (2, 6), minval=-0.7, maxval=0.7)
    keep = jax.random.bernoulli(keys[1], 0.9, (steps, 3, 1, 1)).astype(jnp.float32)
    x_0 = jax.random.normal(keys[2], (3, 2, 6))
    Bu = jax.random.normal(keys[3], (steps, 3, 2, 6))

    def sequential(Lambda_bar, keep, x_0, Bu):
        def step(x, inputs):
            (re, im), (xr, xi), (keep, b) = Lambda_bar, (x[:, 0], x[:, 1]), inputs
            x = keep * jnp.stack([re * xr - im * xi, re * xi + im * xr], 1) + b
            return x, x

        return jax.lax.scan(step, x_0, (keep, Bu))[1]

    out = []
    for form in (s5.recurrence, sequential):

        @jax.jit
        def run(*args):
            x, vjp = jax.vjp(lambda a, x_0, Bu: form(a, keep, x_0, Bu), *args)
            return x, vjp(jnp.cos(jnp.arange(x.size).reshape(x.shape)))

        out.append(run(Lambda_bar, x_0, Bu))
    assert_close(*out)


def test_initial_eigenvalues_are_those_of_hippo_legs_normal_part():
    n = 128
    A = np.zeros((n, n))  # HiPPO-LegS (2008.07669, theorem 2)
    for i in range(n):
        for k in range(i + 1):
            A[i, k] = -((2 * i + 1) ** 0.5) * (2 * k + 1) ** 0.5 if i > k else -(i + 1)
    p = (np.arange(n) + 0.5) ** 0.5
    normal = A + np.outer(p, p)
    expected = np.linalg.eigvals(normal)
    Lambda, V = s5.hippo_legs(n)
    by_im = lambda z: np.sort_complex(1j * z.conj())  # by imaginary part
    np.testing.assert_allclose(by_im(np.r_[Lambda, Lambda.conj()]), by_im(expected), rtol=1e-9)
    np.testing.assert_allclose(2 * (V * Lambda @ V.conj().T).real, normal, atol=1e-9)
    layer = published()["S5Layer_1"]  # two blocks
    np.testing.assert_allclose(layer["Lambda_re"], np.tile(Lambda.real, 2), rtol=1e-6)
    np.testing.assert_allclose(layer["Lambda_im"], np.tile(Lambda.imag, 2), rtol=1e-6)


@lru_cache
def published():
    net = s5.S5()
    args = net.initial_carry(1), jnp.zeros((1, 1, 149)), jnp.zeros((1, 1), bool)
    return jax.jit(net.init)(jax.random.key(0), *args)["params"]


@pytest.mark.parametrize("size", [1, 2, 50, 67])
def test_any_hidden_size(size):
    """Complex states come in blocks of two halves; the scripts round the number of states."""
    core, x = s5.make_core("s5", size, 1, "none"), jnp.zeros((3, 2, 5))
    inputs = core.initial_carry(2), x, jnp.zeros((3, 2), bool)
    y = jax.eval_shape(lambda: core.init_with_output(jax.random.key(0), *inputs)[0][1])
    assert y.shape == (3, 2, size)


def test_published_number_of_parameters():
    count = sum(x.size for x in jax.tree.leaves(published()))
    conv, direction, policy, value = 448, 20, 8455, 8257
    assert count == 434_432
    assert count + conv + direction + policy + value == 451_612


def test_initial_values():
    """B, C are lecun-normal and real in the basis of HiPPO-LegS; D ~ N(0, 1); Delta log-uniform."""
    layers = [published()[f"S5Layer_{i}"] for i in range(2)]
    V = np.kron(np.eye(2), s5.hippo_legs(128)[1])
    complex_ = lambda x: np.asarray(x[0]) + 1j * np.asarray(x[1])
    for p in layers:
        for M in (2 * (V @ complex_(p["B"])).real, 2 * (complex_(p["C"]) @ V.conj().T).real):
            assert M.shape == (256, 256)
            assert abs(M.mean()) < 1e-3
            np.testing.assert_allclose(M.std() * 16, 1, rtol=0.02)
    D = np.concatenate([p["D"] for p in layers])
    assert abs(D.mean()) < 0.15
    assert abs(D.std() - 1) < 0.1
    log_Delta = np.sort(np.concatenate([p["log_Delta"] for p in layers]))
    quantile = (log_Delta - np.log(0.001)) / np.log(100)
    assert 0 <= quantile[0]
    assert quantile[-1] <= 1
    assert abs(quantile - (np.arange(256) + 0.5) / 256).max() < 0.1  # Kolmogorov-Smirnov, p ~ 0.01


@pytest.mark.slow
def test_long_sequences_stay_finite():
    """Values and gradients over 4,096 steps, even if eigenvalues learned positive real parts."""
    net = s5.S5(**LONG)
    xs = jax.random.normal(jax.random.key(0), (4096, 2, D_IN))
    first = jnp.zeros((4096, 2), bool)
    params = jax.jit(net.init)(jax.random.key(1), net.initial_carry(2), xs[:1], first[:1])
    grow = lambda path, x: x + 1.0 if "Lambda_re" in jax.tree_util.keystr(path) else x

    @jax.jit
    def run(params):
        def loss(params):
            last, ys = net.apply(params, net.initial_carry(2), xs, first)
            return (ys**3).mean(), (last, ys)

        return jax.value_and_grad(loss, has_aux=True)(params)

    for p in (params, jax.tree_util.tree_map_with_path(grow, params)):
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(run(p)))


@pytest.mark.slow
def test_state_carried_over_chunks_equals_one_long_pass():
    params, carry, xs = example()
    last, ys = apply["after"](params, carry, xs, is_first())
    x, parts = carry, []
    for part in (slice(0, 4), slice(4, T)):
        x, y = apply["after"](params, x, xs[part], is_first()[part])
        parts.append(y)
    assert_close((x, jnp.concatenate(parts)), (last, ys))


@pytest.mark.slow
def test_a_batch_of_seeds_equals_each_seed_alone():
    """Initialisation, values and gradients, with everything vmapped, including parameters."""
    net = s5.S5(**SIZES, n_layers=1)
    carry, xs = net.initial_carry(N), example()[2]

    def run(rng):
        params = net.init(rng, carry, xs, is_first())
        loss = lambda p: (net.apply(p, carry, xs, is_first())[1] ** 3).mean()
        return params, jax.value_and_grad(loss)(params)

    rngs = jax.random.split(jax.random.key(7), 2)
    rows = jax.jit(jax.vmap(run))(rngs)
    alone = jax.jit(run)(rngs[1])
    assert_close(jax.tree.map(lambda x: x[1], rows), alone)
