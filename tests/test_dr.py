"""dr.py compared with plain loops and formulas in NumPy: network, PPO, rollouts, whole updates."""

import importlib
import os
import subprocess
import sys
from collections import deque
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from parts import cycle_rngs, hacked, part

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import amaze  # noqa: E402
import dr  # noqa: E402
import paired  # noqa: E402
import s5  # noqa: E402

SMALL = dr.Config(
    rnn="none", hidden_size=16, height=5, width=5, n_walls=6, max_steps=5, num_envs=4, num_evals=2,
    num_steps=16, update_epochs=2, num_minibatches=2, num_updates=5, lr=1e-2, gamma=0.9,
    eval_interval=0, eval_suite="TrivialMaze", eval_episodes=2)  # fmt: skip
SEED = jax.random.key(0)


def close(x, y, tolerance=1e-4):
    fits = lambda x, y: np.allclose(np.asarray(x), np.asarray(y), tolerance, tolerance, True)
    return jax.tree.all(jax.tree.map(fits, x, y))


def numbers(tree):
    """The tree with random keys converted to arrays of numbers."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


@cache
def program(function, config=SMALL):
    """Compiled `init`, or compiled `update` for a number of cycles."""
    train = dr.make_train(config)
    update = lambda state: train.update(state, function)
    return jax.jit(train.init if function == "init" else update)


def start(config=SMALL):
    return program("init", config)(SEED)


# --- network


def random_inputs(T, B, seed=0):
    """Random observations and flags [T, B]; an episode starts in the middle of odd columns."""
    random = np.random.default_rng(seed)
    image = random.integers(0, 9, (T, B, 5, 5, 3)).astype(np.uint8)
    is_first = random.random((T, B)) < 0.2
    is_first[0], is_first[T // 2] = True, np.arange(B) % 2
    return amaze.Observation(image, random.integers(0, 4, (T, B))), is_first


def make_network(rnn, size=16):
    """A network and its parameters, with noise so that no output is close to 0."""
    network = dr.ActorCritic(s5.make_core(rnn, size, 2, "after"))
    inputs = random_inputs(1, 1)
    params = jax.jit(network.init)(SEED, network.core.initial_carry(1), *inputs)
    flat, unravel = ravel_pytree(params)
    return network, unravel(flat + 0.2 * jax.random.normal(SEED, flat.shape))


def run_network(network):
    """Compiled: params, carry, obs, is_first -> carry, log pi [T, B, 7], V [T, B]."""

    def apply(*inputs):
        carry, policy, value = network.apply(*inputs)
        return carry, jax.nn.log_softmax(policy.logits), value

    return jax.jit(apply)


@pytest.mark.slow
@pytest.mark.parametrize("rnn", ["lstm", "gru", "s5", "none"])
def test_acting_step_by_step_equals_learning_over_the_sequence(rnn):
    T, B = 13, 4
    network, params = make_network(rnn)
    obs, is_first = random_inputs(T, B)
    apply, carry = run_network(network), network.core.initial_carry(B)
    last, logits, value = apply(params, carry, obs, is_first)
    for t in range(T):
        step = jax.tree.map(lambda x: x[t : t + 1], (obs, is_first))
        carry, step_logits, step_value = apply(params, carry, *step)
        assert close((logits[t], value[t]), (step_logits[0], step_value[0]))
    assert close(last, carry)


@pytest.mark.slow
@pytest.mark.parametrize("rnn", ["lstm", "gru", "s5"])
def test_an_episode_starts_from_a_zero_state(rnn):
    T, B, cut = 13, 4, 6
    network, params = make_network(rnn)
    obs, is_first = random_inputs(T, B)
    is_first[:], is_first[cut] = False, True
    carry = jax.tree.map(lambda x: x + 1.0, network.core.initial_carry(B))
    apply = run_network(network)
    _, *whole = apply(params, carry, obs, is_first)
    second = jax.tree.map(lambda x: x[cut:], (obs, is_first))
    _, *fresh = apply(params, network.core.initial_carry(B), *second)
    _, *without = apply(params, carry, obs, is_first & False)
    assert close(jax.tree.map(lambda x: x[cut:], whole), fresh)
    assert not close(whole, without, 1e-2)
    assert close(*jax.tree.map(lambda x: x[:cut], (whole, without)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def flax_lstm(carry, x, is_first, w, b):
    """flax's LSTM cell with our weights, step by step; for projected inputs its weight is 1."""
    H = len(b) // 4
    w_x = w[:, :-H] if w.shape[1] > H else jnp.eye(4 * H)
    parts = (jnp.split(x, 4) for x in (w_x, w[:, -H:], b))
    params = {}
    for gate, w_x, w_h, bias in zip("ifgo", *parts):
        params |= {f"i{gate}": {"kernel": w_x.T}, f"h{gate}": {"kernel": w_h.T, "bias": bias}}
    hs = []
    for x_t, first in zip(x, is_first):
        carry = jax.tree.map(lambda x: jnp.where(first[:, None], 0.0, x), carry)
        carry, h = nn.LSTMCell(H).apply({"params": params}, carry, x_t)
        hs.append(h)
    return carry, jnp.stack(hs)


def plain_gru(h, x, is_first, w, bias):
    hs, H = [], len(bias) // 3
    for t in range(len(x)):
        h = h * np.where(is_first[t], 0.0, 1.0)[:, None]
        a, b = x[t] + bias, h @ w.T
        r, u = sigmoid(a[:, :H] + b[:, :H]), sigmoid(a[:, H : 2 * H] + b[:, H : 2 * H])
        h = (1 - u) * np.tanh(a[:, 2 * H :] + r * b[:, 2 * H :]) + u * h
        hs.append(h)
    return h, np.stack(hs)


def core_inputs(gates, seed=0, T=7, B=3, H=5, I=4):
    """Random inputs of a core; with I = 0 they are projected already."""
    random = np.random.default_rng(seed)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)
    is_first = np.zeros((T, B), bool)
    is_first[3, 0] = is_first[5, 0] = is_first[4, 2] = True
    w, b = draw(gates * H, I + H), draw(gates * H)
    return (draw(B, H), draw(B, H)), draw(T, B, I or gates * H), is_first, w, b


@pytest.mark.slow
def test_the_forms_for_a_gpu_equal_those_for_a_cpu(monkeypatch):
    """A whole update, with chunks whose length is no multiple of four."""
    sizes = dict(num_steps=36, bptt_horizon=9, max_steps=7)
    config = replace(SMALL, rnn="lstm", **sizes)
    state, out = start(config), []
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert dr.on_gpu() == (platform == "gpu")
        train = dr.make_train(config)
        out.append(numbers(jax.jit(partial(train.update, cycles=1))(state)))
    assert close(*out)
    assert not close(out[0][0].student.params, state.student.params)


def test_embedding_is_flax_s_without_a_scatter():
    index = np.arange(12).reshape(3, 4) % 5
    ours, flax_s = (x(5, 6, embedding_init=s5.orthogonal(1.0)) for x in (dr.Embed, nn.Embed))
    params = flax_s.init(SEED, index)
    assert close(ours.init(SEED, index), params, 0)
    assert close(ours.apply(params, index), flax_s.apply(params, index), 0)
    gradient = lambda embed: jax.grad(lambda p: (embed.apply(p, index) ** 3).sum())
    assert close(gradient(ours)(params), gradient(flax_s)(params))
    text = {x: str(jax.make_jaxpr(gradient(x))(params)) for x in (ours, flax_s)}
    assert "scatter" in text[flax_s]
    assert "scatter" not in text[ours]


def test_gru_equals_a_plain_loop():
    (_, h), *inputs = core_inputs(3, I=0)
    assert close(s5.gru(h, *inputs), plain_gru(h, *inputs))


@pytest.mark.slow
@pytest.mark.parametrize("I", [4, 0])
def test_lstm_and_its_gradient_equal_flax_and_autodiff(I):
    """Alone and vmapped, for plain and for projected inputs."""
    weigh = core_inputs(4, seed=9, I=5)

    def with_gradient(lstm):
        def function(carry, x, w, b, is_first):
            (c, h), hs = lstm(carry, x, is_first, w, b)
            d_c, d_h = weigh[0]
            return (c * d_c).sum() + (h * d_h).sum() + (hs**2 * weigh[1]).sum(), ((c, h), hs)

        return jax.grad(function, (0, 1, 2, 3), has_aux=True)

    by_hand, autodiff = jax.jit(with_gradient(s5.lstm)), jax.jit(with_gradient(flax_lstm))
    rows = [core_inputs(4, seed, I=I) for seed in range(3)]
    rows = [(carry, x, w, b, is_first) for carry, x, is_first, w, b in rows]
    stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
    together = jax.jit(jax.vmap(with_gradient(s5.lstm)))(*stacked)
    for i, row in enumerate(rows):
        expected = autodiff(*row)
        assert close(by_hand(*row), expected)
        assert close(jax.tree.map(lambda x: x[i], together), expected)


@pytest.mark.parametrize("rnn, size", [("lstm", 432_924), ("s5", 451_612)])
def test_number_of_parameters(rnn, size):
    config = replace(dr.Config(), rnn=rnn)
    params = jax.eval_shape(dr.make_train(config).init, SEED).student.params
    assert sum(x.size for x in jax.tree.leaves(params)) == size


def equations(jaxpr):
    """All equations of a program, including those inside other equations."""
    for equation in jaxpr.eqns:
        yield equation
        for x in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inside = getattr(x, "jaxpr", x)
            yield from equations(inside) if hasattr(inside, "eqns") else ()


@pytest.mark.parametrize("script, rnn", [
    *(("dr", rnn) for rnn in ("lstm", "gru", "s5", "none")),
    *((script, "lstm") for script in ("plr", "accel", "paired"))])  # fmt: skip
def test_seeds_are_vmapped_but_their_qr_decompositions(script, rnn):
    """These run one seed after the other: a batch of them can block jaxlib's threads for ever."""
    module = importlib.import_module(script)
    known = {name: x for name, x in vars(SMALL).items() if hasattr(module.Config, name)}
    known |= {"rnn": rnn, "num_updates": 1000}  # PLR refuses fewer than it takes to learn
    init = module.make_train(module.Config(**known)).init
    program = jax.make_jaxpr(jax.vmap(init))(jax.random.split(SEED, 3)).jaxpr
    shapes = [x.invars[0].aval.shape for x in equations(program) if x.primitive.name == "qr"]
    assert len(shapes) >= 6
    assert all(len(shape) == 2 for shape in shapes)


@pytest.mark.slow
def test_the_patch_product_is_a_convolution():
    network, params = make_network("none")
    obs, is_first = random_inputs(3, 4)
    _, found = network.apply(params, (), obs, is_first, capture_intermediates=True)
    found = found["intermediates"]["conv"]["__call__"][0]  # [3, 4, 9, 16]
    layer = params["params"]["conv"]
    images, kernel = obs.image.reshape(12, 5, 5, 3) / 10.0, layer["kernel"].reshape(3, 3, 3, 16)
    dims = ("NHWC", "HWIO", "NHWC")
    expected = jax.lax.conv_general_dilated(
        images.astype(np.float32), kernel, (1, 1), "VALID", dimension_numbers=dims)  # fmt: skip
    assert close(found.reshape(12, 3, 3, 16), expected + layer["bias"])


@pytest.mark.slow
@pytest.mark.parametrize("rnn, gates", [("lstm", 4), ("gru", 3)])
def test_initialisation(rnn, gates):
    H = 64
    network = dr.ActorCritic(s5.make_core(rnn, H, 2, "after"))
    inputs = network.core.initial_carry(1), *random_inputs(1, 1)
    params = jax.jit(network.init)(SEED, *inputs)["params"]
    square = lambda x: x.T @ x if len(x) >= x.shape[1] else x @ x.T
    scaled = lambda x, scale: close(square(x), scale**2 * np.eye(min(x.shape)), 1e-5)
    assert scaled(params["conv"]["kernel"], 2**0.5)
    assert scaled(params["Embed_0"]["embedding"], 1.0)
    kernels = {name: layer["kernel"] for name, layer in params.items() if "Dense" in name}
    heads = [kernel for kernel in kernels.values() if kernel.shape == (H, 32)]
    assert len(heads) == 2
    assert all(scaled(kernel, 2**0.5) for kernel in heads)
    (policy,) = (kernel for kernel in kernels.values() if kernel.shape == (32, 7))
    (value,) = (kernel for kernel in kernels.values() if kernel.shape == (32, 1))
    assert scaled(policy * 100, 1.0)
    assert scaled(value, 1.0)
    kernel = params["core"]["kernel"]
    recurrent = jnp.split(kernel[:, -H:], gates)
    assert all(scaled(gate, 1.0) for gate in recurrent)
    assert not close(recurrent[0], recurrent[1], 1e-2)
    w_x = params["core"]["Dense_0"]["kernel"].T if rnn == "gru" else kernel[:, :-H]
    assert w_x.shape == (gates * H, 149)
    assert abs(w_x.std() * 149**0.5 - 1) < 0.03
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    assert all((x == 0).all() for path, x in flat if path[-1].key == "bias")


@pytest.mark.parametrize("script", ["dr", "plr", "accel", "paired", "sfl"])
def test_seeds_begin_with_networks_and_keys_of_their_own(script):
    """And levels have the height and the width that were asked for."""
    module = importlib.import_module(script)
    known = {name: x for name, x in vars(SMALL).items() if hasattr(module.Config, name)}
    known |= dict(height=4, num_updates=1000)
    train = module.make_train(module.Config(**known))
    init = jax.jit(train.init)
    one, other = (init(jax.random.key(seed)) for seed in (0, 1))
    learners = "students teacher" if script == "paired" else "student"
    for name in learners.split():
        flat = [ravel_pytree(getattr(state, name).params)[0] for state in (one, other)]
        assert (flat[0] != flat[1]).mean() > 0.8  # but for biases
    assert (jax.random.key_data(one.rng) != jax.random.key_data(other.rng)).any()
    for levels, _ in jax.eval_shape(train.show, one).values():
        assert levels.wall_map.shape[1:] == (4, 5)


# --- pure functions


def random_rewards(T=40, B=5, share=0.2):
    random = np.random.default_rng(1)
    done = random.random((T, B)) < share
    done[-1, 0], done[:, 1] = True, False
    reward, value = random.normal(size=(2, T, B)).astype(np.float32)
    return reward, value, random.normal(size=B).astype(np.float32), done


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_gae_is_the_discounted_sum_of_td_errors(platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    gamma, gae_lambda = 0.9, 0.7
    reward, value, last_value, done = random_rewards()
    T, B = reward.shape
    expected = np.zeros((T, B))
    for b in range(B):
        next_value = [*value[1:, b], last_value[b]]
        for start in range(T):
            for t in range(start, T):
                bootstrap = 0.0 if done[t, b] else gamma * next_value[t]
                delta = reward[t, b] + bootstrap - value[t, b]
                expected[start, b] += (gamma * gae_lambda) ** (t - start) * delta
                if done[t, b]:
                    break
    batch = dr.Transition(None, None, None, None, value, reward, done)
    assert close(dr.gae(batch, last_value, gamma, gae_lambda), expected)


def first_episodes(reward, done):
    """Yield the first episode of each column if it ends: (column, its rewards)."""
    for b in range(reward.shape[1]):
        for t in range(len(reward)):
            if done[t, b]:
                yield b, reward[: t + 1, b]
                break


def plain_stats(reward, done, where=True):
    where = np.broadcast_to(where, reward.shape[1])
    played = [rewards for b, rewards in first_episodes(reward, done) if where[b]]
    mean = lambda x: np.mean(x) if x else np.nan
    return {
        "return": mean([rewards.sum() for rewards in played]),
        "solve_rate": mean([rewards.sum() > 0 for rewards in played]),
        "episode_length": mean([len(rewards) for rewards in played]),
    }


def test_statistics_are_of_first_episodes():
    reward, _, _, done = random_rewards(B=40, share=0.1)
    reward = np.maximum(reward - 1, 0)
    done[:, 30:], done[-1, 38] = False, True  # no end; at the last step
    played = list(first_episodes(reward, done))
    total, length, ended = map(np.asarray, dr.first_episodes(reward, done))
    assert np.flatnonzero(ended).tolist() == [b for b, _ in played]
    assert close(total[ended], [rewards.sum() for _, rewards in played])
    assert length[ended].tolist() == [len(rewards) for _, rewards in played]
    assert 2 * len(played) < done.sum()
    assert not ended.all()
    for where in (True, np.arange(40) % 2 == 0, np.arange(40) < 5):
        expected = plain_stats(reward, done, where)
        assert 0 < expected["solve_rate"] < 1
        assert close(dr.episode_stats(total, length, ended, where), expected)
    unended = dr.episode_stats(total, length, ended, np.arange(40) == 35)
    assert all(np.isnan(x) for x in unended.values())


def pooled_solve_rate(reward, done):
    """The solve rate over all episodes that end in the window, by a plain loop."""
    solved, total = [], np.zeros(reward.shape[1])
    for r, d in zip(reward, done):
        total += r
        solved.extend(total[d] > 0)
        total[d] = 0
    return np.mean(solved)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("truth", [0.5, 0.875])
def test_the_solve_rate_of_training_is_the_true_one(truth, restarts):
    """Students of known solve rate solve a level in 10 to 60 steps, or fail in 250. With restarts a
    student plays the same level again and again, otherwise a new one after each episode."""
    T, B, max_steps, random = 256, 4000, 250, np.random.default_rng(0)
    reward, done = np.zeros((T, B), np.float32), np.zeros((T, B), bool)
    for b in range(B):
        t, solves = 0, random.random() < truth
        while (t := t + (random.integers(10, 61) if solves else max_steps)) <= T:
            reward[t - 1, b], done[t - 1, b] = 0.5 * solves, True
            solves = solves if restarts else random.random() < truth
    stats = dr.episode_stats(*dr.first_episodes(reward, done))
    assert abs(stats["solve_rate"] - truth) < 4 * (truth * (1 - truth) / B) ** 0.5
    assert abs(stats["return"] - truth / 2) < 0.02
    assert abs(stats["episode_length"] - (truth * 35 + (1 - truth) * 250)) < 8
    assert pooled_solve_rate(reward, done) > truth + 0.06


# --- learning


@pytest.mark.slow
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_loss_is_the_formula_of_ppo(clip_vloss):
    config = replace(SMALL, ent_coef=0.03, vf_coef=0.7, clip_vloss=clip_vloss)
    loss, network = part(dr.make_train(config), "loss", "network")
    params = make_network("none")[1]
    random, shape = np.random.default_rng(0), (16, 8)
    obs, is_first = random_inputs(*shape)
    _, logits, new_value = run_network(network)(params, (), obs, is_first)
    logits, new_value = np.asarray(logits, np.float64), np.asarray(new_value, np.float64)
    action = random.integers(0, 7, shape)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    new = np.log([[p[t, b, action[t, b]] for b in range(8)] for t in range(16)])
    old, value = new + random.normal(size=shape) * 0.3, new_value + random.normal(size=shape) * 0.3
    advantage, target = random.normal(size=shape) + 0.5, value + random.normal(size=shape)

    policy, error, clipped = 0, 0, 0
    for t, b in np.ndindex(shape):
        ratio = np.exp(new[t, b] - old[t, b])
        inside = min(max(ratio, 0.8), 1.2)
        clipped += ratio != inside
        policy -= min(ratio * advantage[t, b], inside * advantage[t, b])
        reach = 0.2 if clip_vloss else np.inf
        near = value[t, b] + min(max(new_value[t, b] - value[t, b], -reach), reach)
        error += max((new_value[t, b] - target[t, b]) ** 2, (near - target[t, b]) ** 2)
    log_ratio, size = new - old, 16 * 8
    expected = {
        "policy_loss": policy / size,
        "value_loss": 0.5 * error / size,
        "entropy": -(p * np.log(p)).sum() / size,
        "approx_kl": (np.exp(log_ratio) - 1 - log_ratio).mean(),
        "clip_fraction": clipped / size,
    }
    assert 0.2 < expected["clip_fraction"] < 0.8
    total = expected["policy_loss"] + 0.7 * expected["value_loss"] - 0.03 * expected["entropy"]
    batch = dr.Transition(obs, is_first, action, old, value, None, None)
    found, metrics = loss(params, batch, advantage, target)
    assert close(found, total)
    assert close(metrics, expected | {"total_loss": total})


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 4])
def test_minibatches(k):
    """Every epoch has each trajectory once, whole, in a new order. Each minibatch gives one
    optimiser step, with advantages of mean 0 and deviation 1."""
    config = replace(SMALL, num_minibatches=k, update_epochs=3)
    seen = []

    def recorded(params, batch, advantage, target):
        jax.debug.callback(lambda *x: seen.append(x), batch.action, advantage, target, ordered=True)
        return sum(x.sum() for x in jax.tree.leaves(params)), {}

    copy = hacked(dr, {"jax.grad(loss, ": "jax.grad(recorded, "}, recorded=recorded)
    learn = part(copy.make_train(config), "learn")
    reward, value, last_value, done = random_rewards(T=16, B=8)
    number = np.arange(16 * 8).reshape(16, 8)
    batch = dr.Transition(number, number, number, reward, value, reward, done)
    data = jax.tree.map(jnp.asarray, (batch, last_value))
    student, metrics = learn(SEED, start().student, 1e-3, *data)
    jax.effects_barrier()
    assert optax.tree_utils.tree_get(student.opt_state, "count") == 3 * k == len(seen)
    advantage = dr.gae(batch, last_value, config.gamma, config.gae_lambda)
    advantage, orders = np.asarray(advantage), []
    target = advantage + value
    for epoch in range(3):
        orders.append([])
        for action, normed, targets in seen[epoch * k : (epoch + 1) * k]:
            columns = action[0]
            assert (action == number[:, columns]).all()
            assert len(columns) == 8 // k
            chosen = advantage[:, columns]
            assert close(normed, (chosen - chosen.mean()) / chosen.std())
            assert close(targets, target[:, columns])
            orders[-1].extend(columns.tolist())
        assert sorted(orders[-1]) == list(range(8))
    assert orders[0] != orders[1] != orders[2]
    assert close(metrics["explained_variance"], 1 - advantage.var() / target.var())


def test_advantages_that_are_nearly_equal_stay_small():
    """They are divided by their deviation plus 1e-5."""
    seen = []

    def recorded(params, batch, advantage, target):
        jax.debug.callback(lambda x: seen.append(x), advantage)
        return sum(x.sum() for x in jax.tree.leaves(params)), {}

    copy = hacked(dr, {"jax.grad(loss, ": "jax.grad(recorded, "}, recorded=recorded)
    config = replace(SMALL, num_minibatches=1, update_epochs=1)
    reward, value, last_value, done = random_rewards(T=16, B=8)
    reward, value, last_value = (np.float32(1e-5) * x for x in (reward, value, last_value))
    batch = dr.Transition(reward, reward, reward, reward, value, reward, done)
    data = jax.tree.map(jnp.asarray, (batch, last_value))
    part(copy.make_train(config), "learn")(SEED, start().student, 1e-3, *data)
    jax.effects_barrier()
    advantage = np.asarray(dr.gae(batch, last_value, config.gamma, config.gae_lambda))
    expected = advantage.std() / (advantage.std() + 1e-5)
    assert 0.3 < expected < 0.8
    assert seen[0].std() == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_gradients_go_back_bptt_horizon_steps():
    """A step of learning equals PPO's formula on chunks of four steps, each of which starts from
    the memory that the rollout had there."""
    one_step = dict(update_epochs=1, num_minibatches=1, ent_coef=0.03, clip_vloss=False)
    config = replace(SMALL, rnn="lstm", bptt_horizon=4, **one_step)
    train = dr.make_train(config)
    learn, network = part(train, "learn", "network")
    student, random, (T, B) = jax.jit(train.init)(SEED).student, np.random.default_rng(0), (16, 8)
    (obs, is_first), (reward, value, last_value, done) = random_inputs(T, B), random_rewards(T, B)
    action, log_prob = random.integers(0, 7, (T, B)), np.log(random.uniform(0.1, 0.2, (T, B)))
    memory = tuple(random.normal(size=(2, T // 4, B, 16)).astype(np.float32))
    batch = dr.Transition(obs, is_first, action, log_prob, value, reward, done, memory)
    advantage = dr.gae(batch, last_value, config.gamma, config.gae_lambda)
    normed = (advantage - advantage.mean()) / (advantage.std() + 1e-5)

    def plain(params):
        total = 0.0
        for t in range(0, T, 4):
            now = lambda tree: jax.tree.map(lambda x: x[t : t + 4], tree)
            carry = jax.tree.map(lambda x: x[t // 4], memory)
            _, policy, v = network.apply(params, carry, now(obs), now(is_first))
            ratio = jnp.exp(policy.log_prob(now(action)) - now(log_prob))
            gain = jnp.minimum(ratio * now(normed), jnp.clip(ratio, 0.8, 1.2) * now(normed))
            error = (v - now(advantage + value)) ** 2
            total += (-gain + 0.25 * error - 0.03 * policy.entropy()).mean() / 4
        return total

    total, grads = jax.jit(jax.value_and_grad(plain))(student.params)
    data = jax.tree.map(jnp.asarray, (batch, last_value))
    metrics = jax.jit(learn)(SEED, student, 1e-3, *data)[1]
    assert close(metrics["total_loss"], total)
    assert close(metrics["grad_norm"], optax.global_norm(grads))


@pytest.mark.parametrize("rnn", ["lstm", "gru", "s5", "none"])
@pytest.mark.parametrize("horizon, chunks", [(0, 1), (4, 4)])
def test_a_rollout_keeps_memories_of_the_starts_of_chunks_only(rnn, horizon, chunks):
    """They are the core's carry, [chunks, B, ...]; without a core there is nothing."""
    train = dr.make_train(replace(SMALL, rnn=rnn, bptt_horizon=horizon))
    choose_levels, rollout = part(train, "choose_levels", "rollout")

    def play(rng):
        return rollout(rng, train.init(rng).student.params, choose_levels(rng))[0]

    batch, carry = jax.eval_shape(play, SEED), train.initial_carry(8)
    assert batch.action.shape == (16, 8)
    assert jax.tree.structure(batch.memory) == jax.tree.structure(carry)
    for found, expected in zip(jax.tree.leaves(batch.memory), jax.tree.leaves(carry)):
        assert found.shape == (chunks, *expected.shape)
        assert found.dtype == expected.dtype


@pytest.mark.slow
@pytest.mark.parametrize("horizon", [0, 4])
def test_memories_of_a_rollout_are_those_before_the_chunks(horizon):
    """They equal those of an LSTM run step by step, which is reset at the start of an episode."""
    train = dr.make_train(replace(SMALL, rnn="lstm", bptt_horizon=horizon, max_steps=3))
    choose_levels, rollout = part(train, "choose_levels", "rollout")
    network, params = make_network("lstm")
    batch = jax.jit(lambda rng: rollout(rng, params, choose_levels(rng))[0])(SEED)
    apply, carry, before = run_network(network), network.core.initial_carry(8), []
    for t in range(16):
        if t % (horizon or 16) == 0:
            before.append(carry)
        opens = batch.is_first[t][:, None]
        carry = jax.tree.map(lambda x: jnp.where(opens, 0.0, x), carry)
        obs, is_first = jax.tree.map(lambda x: x[t : t + 1], (batch.obs, batch.is_first))
        carry = apply(params, carry, obs, is_first & False)[0]
    before = jax.tree.map(lambda *x: np.stack(x), *before)
    assert close(batch.memory, before)
    assert batch.is_first[1:].any()
    h = before[1]
    assert (h[0] == 0).all()
    assert all((abs(x) > 0.01).any(axis=1).all() for x in h[1:])


@pytest.mark.slow
def test_memories_of_a_rollout_are_those_that_it_was_played_with():
    """Before the first optimiser step, chunks reproduce the policy and the values of the batch."""
    one_step = dict(rnn="gru", update_epochs=1, num_minibatches=1)
    config = replace(SMALL, **one_step)
    update = lambda **fields: program(2, replace(config, **fields))(start(config))[1]
    whole, chunks = update(), update(bptt_horizon=4)
    same = "approx_kl value_loss train_return entropy".split()
    assert close([whole[x][0] for x in same], [chunks[x][0] for x in same], 1e-5)
    assert abs(whole["grad_norm"][0] / chunks["grad_norm"][0] - 1) > 1e-4
    whole, longest = numbers((whole, update(bptt_horizon=16)))
    assert close(whole, longest)


@pytest.mark.slow
def test_annealed_lr_and_adam_by_hand():
    """Four updates of one step each: clipping by global norm, Adam, a learning rate that falls to a
    quarter; and their metrics."""
    one_step = dict(update_epochs=1, num_minibatches=1, max_grad_norm=0.1)
    config = replace(SMALL, anneal_lr=True, num_updates=4, **one_step)
    train = dr.make_train(config)
    choose_levels, rollout, loss = part(train, "choose_levels", "rollout", "loss")

    @jax.jit
    def gradient(state):
        rngs = cycle_rngs(state, 4)
        queue = choose_levels(rngs[0])
        batch, last_value = rollout(rngs[1], state.student.params, queue)
        advantage = dr.gae(batch, last_value, config.gamma, config.gae_lambda)
        normed = (advantage - advantage.mean()) / (advantage.std() + 1e-5)
        data = batch, normed, advantage + batch.value
        return jax.grad(loss, has_aux=True)(state.student.params, *data)[0], batch

    flat = lambda tree: np.asarray(ravel_pytree(tree)[0], np.float64)
    state, mu, nu, clipped = start(config), 0, 0, 0
    for i in range(4):
        gradients, batch = gradient(state)
        before, g = flat(state.student.params), flat(gradients)
        norm = np.sqrt((g**2).sum())
        clipped += norm > 0.1
        g *= min(1, 0.1 / norm)
        mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g**2
        step = mu / (1 - 0.9 ** (i + 1)) / (np.sqrt(nu / (1 - 0.999 ** (i + 1))) + 1e-5)
        state, metrics = program(1, config)(state)
        lr = config.lr * (1 - i / 4)
        assert close(metrics["current_lr"], [lr], 1e-7)
        assert close(metrics["grad_norm"], [norm], 1e-3)
        assert close(metrics["param_norm"], [np.linalg.norm(flat(state.student.params))])
        stats = plain_stats(*map(np.asarray, (batch.reward, batch.done)))
        assert close([metrics[f"train_{name}"][0] for name in stats], [*stats.values()])
        change = flat(state.student.params) - before
        assert np.abs(change + lr * step).max() < 0.02 * lr
        assert np.abs(change).max() > 0.5 * lr
    assert clipped


@pytest.mark.slow
def test_polyak_averaging_by_hand():
    """Update t has the weight t (t + 1) (t + 2), as in 1212.1824's recursion with eta = 3.
    Everything else is the same as without averaging."""
    flat = lambda tree: np.asarray(ravel_pytree(tree)[0], np.float64)
    config, plain, past = replace(SMALL, polyak_averaging=True), start(), []
    state = start(config)
    for t in range(1, 6):
        state, plain = program(1, config)(state)[0], program(1)(plain)[0]
        past.append(flat(state.student.params))
        weights = [t * (t + 1) * (t + 2) for t in range(1, t + 1)]
        average = flat(state.student.average_params)
        assert np.allclose(average, np.average(past, 0, weights), atol=1e-6)
    assert np.abs(past[-1] - average).max() > 1e-2
    assert close(state.student.params, plain.student.params)
    assert plain.student.average_params is None


# --- rollouts and evaluation


def test_rollout():
    """Copies play the same levels; on done the next level starts; the batch is what was seen."""
    config = replace(SMALL, rnn="lstm", num_evals=3, max_steps=3, see_through_walls=False)
    train, params = dr.make_train(config), start(config).student.params
    choose_levels, rollout, network = part(train, "choose_levels", "rollout", "network")
    queue = jax.jit(choose_levels)(SEED)
    batch, last_value = jax.jit(rollout)(jax.random.key(1), params, queue)
    T, B, K = 16, 12, len(queue.agent_dir[0])
    batch = jax.tree.map(np.asarray, batch)
    assert batch.action.shape == (T, B)
    assert K == 4
    reset = jax.jit(lambda level: amaze.reset(level, 3, see_through_walls=False))
    step = jax.jit(amaze.step)
    last = []
    for b in range(B):
        number, opens = -1, True
        for t in range(T):
            if opens:  # the next level, as a plain environment
                number += 1
                n, k = b // 3, number % K
                obs, env_state = reset(jax.tree.map(lambda x: x[n, k], queue))
            assert batch.is_first[t, b] == opens
            assert jax.tree.all(jax.tree.map(lambda x, y: (x[t, b] == y).all(), batch.obs, obs))
            obs, env_state, reward, opens = step(env_state, batch.action[t, b])
            assert batch.reward[t, b] == reward
            assert batch.done[t, b] == opens
        if opens:
            obs, _ = reset(jax.tree.map(lambda x: x[n, (number + 1) % K], queue))
        assert number > K  # the queue starts over
        last.append((obs, opens))
    copies = batch.action.reshape(T, 4, 3)
    assert (copies[..., 0] != copies[..., 1]).any()
    assert (copies[:, 0] != copies[:, 1]).any()
    last = jax.tree.map(lambda *x: np.stack(x)[None], *last)
    inputs = jax.tree.map(lambda x, y: np.concatenate([x, y]), (batch.obs, batch.is_first), last)
    carry = network.core.initial_carry(B)
    _, log_pi, value = run_network(network)(params, carry, *inputs)
    assert close(value[:-1], batch.value)
    assert close(value[-1], last_value)
    chosen = np.take_along_axis(np.asarray(log_pi)[:-1], batch.action[..., None], -1)[..., 0]
    assert close(chosen, batch.log_prob)


@pytest.mark.slow
def test_actions_are_sampled_from_the_policy():
    act, params = dr.make_train(SMALL).act, make_network("none")[1]
    obs, is_first = jax.tree.map(lambda x: np.repeat(x[0], 20_000, 0), random_inputs(1, 1))
    noise = jax.random.gumbel(SEED, (20_000, 7))
    _, action, log_prob, _ = act(params, (), obs, is_first, noise)
    share = np.bincount(action, minlength=7) / 20_000
    assert sum(share > 0.02) > 2
    for a in range(7):
        chance = np.exp(np.asarray(log_prob)[action == a])
        assert len(chance) == 0 or share[a] == pytest.approx(chance[0], abs=0.015)


@pytest.mark.slow
def test_evaluation_equals_a_plain_loop():
    """A scripted policy goes forward, and turns left at a wall; it reaches some of the goals. It is
    called with the student's parameters, or with the averaged ones if there are any."""
    mazes, count = ["TrivialMaze", "FourRooms"], 16
    config = replace(SMALL, eval_suite=",".join(mazes), eval_episodes=count, eval_interval=1)

    def choose(obs):
        wall = obs.image[..., 2, 3, 0] == 2  # the cell ahead
        return jnp.where(wall, 0, 2)

    still = amaze.NUM_ACTIONS - 1
    act = lambda good, obs: jnp.where(good, choose(obs), still)
    scripted = lambda good, memory, obs, *_: (memory, act(good, obs), None, None)
    copy = hacked(dr, {"action, _, _ = act(": "action, _, _ = scripted("}, scripted=scripted)
    evaluate = part(copy.make_train(config), "evaluate")
    students = dr.Agent(True, ()), dr.Agent(False, (), average_params=True)
    found, of_average = jax.jit(lambda rng: [evaluate(rng, x) for x in students])(SEED)
    levels = amaze.sample_mazes(jax.random.split(SEED)[0], mazes, count)
    first = jax.jit(jax.vmap(amaze.reset))(*levels)
    step = jax.jit(lambda obs, state: amaze.step(state, choose(obs)))
    total = np.zeros((2, count))
    for i in range(2 * count):
        (obs, state), done = jax.tree.map(lambda x: x[i], first), False
        while not done:
            obs, state, reward, done = step(obs, state)
            total[i // count, i % count] += reward
    assert 0 < (total > 0).sum() < total.size
    assert len(set((total > 0).mean(1))) > 1
    expected = {"eval_solve_rate": (total > 0).mean(), "eval_return": total.mean()}
    for i, maze in enumerate(mazes):
        expected[f"eval_solve_rate/{maze}"] = (total[i] > 0).mean()
        expected[f"eval_return/{maze}"] = total[i].mean()
    assert close(found, expected)
    assert close(of_average, expected)


def test_an_evaluation_draws_new_noise_for_each_episode_and_step():
    seen = []

    def still(params, memory, obs, is_first, noise):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), noise)
        return memory, jnp.full(len(noise), amaze.NUM_ACTIONS - 1), None, None

    for module in (dr, paired):
        seen.clear()
        who = "" if module is dr else "network, "
        acts = f"memory, action, _, _ = {{}}({who}params, memory, obs, is_first, noise)\n"
        acts += "            obs, st"
        copy = hacked(module, {acts.format("act"): acts.format("still").replace("network, ", "")},
                      still=still)  # fmt: skip
        small = dict(rnn="none", height=5, width=5, n_walls=6)
        play = part(copy.make_train(copy.Config(**small)), "play")
        levels = amaze.sample_mazes(SEED, ["MiniMaze"], 20)
        returns = jax.jit(lambda rng: play(rng, None, *levels))(SEED)
        jax.effects_barrier()
        noise = np.stack(seen)  # [steps, episodes, actions]
        assert noise.shape == (72, 20, 7)
        assert not returns.any()
        assert len(np.unique(noise)) > 0.99 * noise.size
        assert abs(noise.mean() - np.euler_gamma) < 0.05
        assert abs(noise.std() - np.pi / 6**0.5) < 0.05


def path_length(walls, agent, goal):
    """Moves on the shortest path, by breadth-first search; None if there is none."""
    queue, seen = deque([(agent, 0)]), {agent}
    while queue:
        (x, y), length = queue.popleft()
        if (x, y) == goal:
            return length
        for cell in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
            if 0 <= min(cell) and max(cell) < 5 and cell not in seen and not walls[cell[::-1]]:
                seen.add(cell)
                queue.append((cell, length + 1))


@pytest.mark.slow
def test_levels_are_shown_and_logged_with_their_paths():
    """16 random levels, others in each cycle; of those played the first of each queue counts."""
    state = start()
    config = replace(SMALL, n_walls=12)
    train = dr.make_train(config)
    show, choose_levels = jax.jit(train.show), part(train, "choose_levels")
    first = jax.jit(lambda state: jax.tree.map(
        lambda x: x[:, 0], choose_levels(cycle_rngs(state, 4)[0])))  # fmt: skip
    shares, shown = [], []

    def find_paths(levels):
        pairs = zip(*(np.asarray(x).tolist() for x in (levels.agent_pos, levels.goal_pos)))
        walls = np.asarray(levels.wall_map)
        return walls, [path_length(w, tuple(a), tuple(g)) for w, (a, g) in zip(walls, pairs)]

    for _ in range(3):
        levels, captions = show(state)["drawn at random"]
        walls, paths = find_paths(levels)
        shown += [x.tobytes() for x in walls]
        expected = [np.nan if path is None else path for path in paths]
        assert np.array_equal(captions["path_length"], expected, equal_nan=True)
        walls, paths = find_paths(first(state))
        state, metrics = program(1, config)(state)
        solvable = [path for path in paths if path is not None]
        assert close(metrics["walls"], [walls.sum((1, 2)).mean()])
        assert close(metrics["path_length"], [np.mean(solvable) if solvable else np.nan])
        assert close(metrics["solvable"], [len(solvable) / 4])
        shares.append(len(solvable) / 4)
    assert min(shares) < 1
    assert len(shown) == 48
    assert len({*shown}) > 46


@pytest.mark.parametrize("seed", range(3))
def test_solvable_only_draws_by_rejection_and_auto_replay_one_level(seed):
    config, rng = replace(SMALL, n_walls=12), jax.random.key(seed)
    train = lambda **changes: dr.make_train(replace(config, **changes))
    choose_levels = lambda **changes: part(train(**changes), "choose_levels")(rng)
    solvable = lambda level: [path_length(w, tuple(a), tuple(g)) is not None for w, a, g in zip(
        *(np.asarray(x).reshape(-1, *x.shape[2:])
          for x in (level.wall_map, level.agent_pos, level.goal_pos)))]  # fmt: skip
    random, chosen = choose_levels(), choose_levels(solvable_only=True, auto_replay=True)
    assert random.agent_dir.shape == (4, 4)
    assert not all(solvable(random))
    assert chosen.agent_dir.shape == (4, 1)
    assert all(solvable(chosen))
    walls = choose_levels(solvable_only=True).wall_map.sum((2, 3))
    assert walls.max() > walls.min()  # a draw, not what is left of one


# --- whole updates


@pytest.mark.parametrize("changes, words", [
    (dict(n_walls=24), "n_walls = 24, height = 5, width = 5: must be at most 23 walls"),
    (dict(num_minibatches=3),
     "num_minibatches = 3, num_envs = 4, num_evals = 2: must be a divisor of 8"),
    (dict(bptt_horizon=5), "bptt_horizon = 5, num_steps = 16: must be a divisor of num_steps"),
])  # fmt: skip
def test_bad_combinations(changes, words):
    with pytest.raises(dr.BadConfig) as error:
        dr.make_train(replace(SMALL, **changes))
    assert str(error.value) == words


NUMBERS = dict(lr=np.float32(1e-3), gamma=jnp.float32(0.9), vf_coef=1, clip_eps=np.int64(1),
               num_envs=np.int64(8), anneal_lr=np.bool_(True))  # fmt: skip


def test_a_training_with_numbers_of_numpy_and_jax():
    config = replace(SMALL, **NUMBERS)
    metrics = jax.eval_shape(dr.make_train(config), SEED)[1]
    plain = replace(SMALL, num_envs=8, anneal_lr=True)
    expected = jax.eval_shape(dr.make_train(plain), SEED)[1]
    assert metrics == expected


def test_a_float_may_be_made_in_jit_or_traced():
    jax.jit(lambda: dr.check(replace(SMALL, lr=jnp.float32(1e-3))))()
    given = jax.jit(lambda lr: dr.check(replace(SMALL, lr=lr)))
    given(1e-3)
    given(-1.0)  # its value is not known
    jax.vmap(given)(jnp.ones(3))


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("name", ["lr", "ent_coef", "vf_coef", "gamma", "max_grad_norm"])
def test_numbers_are_finite(name, value):
    with pytest.raises(dr.BadConfig) as error:
        dr.check(replace(SMALL, **{name: value}))
    assert str(error.value).startswith(f"{name} = {value}: must be from ")


TESTED = replace(SMALL, eval_interval=2)


@pytest.mark.slow
def test_chunks_equal_one_go_whatever_the_evaluations():
    state, metrics = program(5, TESTED)(start())
    rows, chunk = [], start()
    for _ in range(5):
        chunk, row = program(1)(chunk)
        rows.append(row)
    assert close(numbers(state), numbers(chunk), 1e-6)
    rows = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    metrics = dict(metrics)
    assert close(rows, {name: metrics.pop(name) for name in rows}, 1e-6)
    names = {f"eval_{x}{maze}" for x in ("solve_rate", "return") for maze in ("", "/TrivialMaze")}
    assert metrics.keys() == names
    for x in metrics.values():  # every two cycles, and at the end
        assert np.isnan(x).tolist() == [True, False, True, False, False]
    for name in ("grad_updates", "rollouts"):
        assert rows[name].tolist() == [1, 2, 3, 4, 5]
    assert state.cycles == 5


CHANGES = dict(
    lr=3e-3, gamma=0.5, gae_lambda=0.3, clip_eps=0.01, ent_coef=0.3, vf_coef=5.0,
    max_grad_norm=1e-4)  # fmt: skip


@cache
def sweep():
    """Trainings vmapped over (seed, floats): rows, states, metrics. Two rows differ in the seed, a
    row for each float changes only this float, and one row diverges."""
    assert set(CHANGES) == set(dr.FLOATS)
    base = {name: getattr(SMALL, name) for name in CHANGES}
    rows = {("seed", i): (jax.random.key(i), base) for i in range(2)}
    rows |= {pair: (SEED, base | dict([pair])) for pair in CHANGES.items()}
    rows |= {"diverged": (SEED, base | {"lr": 1e38})}
    rngs = jnp.stack([rng for rng, _ in rows.values()])
    floats = jax.tree.map(lambda *x: jnp.array(x), *(floats for _, floats in rows.values()))
    train = lambda rng, floats: dr.make_train(replace(TESTED, **floats))(rng)
    state, metrics = jax.jit(jax.vmap(train))(rngs, floats)
    together = numbers((state, metrics))
    return rows, {name: jax.tree.map(lambda x: x[i], together) for i, name in enumerate(rows)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_vmapped_row_equals_the_solo_run(seed):
    """In the solo run the floats are constants."""
    _, found = sweep()
    alone = numbers(program(5, TESTED)(program("init")(jax.random.key(seed))))
    assert close(found["seed", seed], alone, 1e-3)
    assert not close(found["seed", 1 - seed], alone, 1e-3)


@cache
def traced():
    return jax.jit(lambda rng, floats: dr.make_train(replace(TESTED, **floats))(rng))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_swept_float_equals_the_solo_run(name):
    rows, found = sweep()
    pair = name, CHANGES[name]
    assert close(found[pair], numbers(traced()(*rows[pair])), 1e-3)
    params = [state.student.params for state, _ in (found[pair], found["seed", 0])]
    assert not close(*params, 3e-3)


@pytest.mark.slow
def test_what_is_not_finite_is_told_from_what_is_not_measured():
    """A row that diverges shows inf; NaN marks an evaluation that was not due, as in other rows."""
    _, found = sweep()
    (_, metrics), (_, fine) = found["diverged"], found["seed", 0]
    for name in ("param_norm", "total_loss", "value_loss", "entropy", "grad_norm"):
        assert np.isinf(metrics[name]).all()
        assert np.isfinite(fine[name]).all()
    for name, x in fine.items():
        assert (np.isnan(metrics[name]) == np.isnan(x)).all()
        assert np.isnan(x).any() == name.startswith("eval_")
        assert not np.isinf(x).any()


@pytest.mark.slow
def test_a_new_float_can_be_swept():
    """A copy of dr.py charges a price per step of a rollout, swept in turn and at once. At price 0
    it equals dr.py; otherwise all returns are lower by the price."""
    field = "    gamma: float = 0.995"
    moved = "next_obs, state, reward, done = jax.vmap(partial(step, restart=True))(state, action)\n"
    copy = hacked(dr, {field: f"    price: float = 0.0\n{field}",
                       moved: f"{moved}            reward -= config.price\n"})  # fmt: skip
    config, before = copy.Config(**vars(SMALL)), start()
    before = copy.RunnerState(before.rng, before.cycles, copy.Agent(*before.student))
    update = lambda price: copy.make_train(replace(config, price=price)).update(before, 1)
    prices = jnp.array([0.0, 0.01])
    in_turn = jax.jit(lambda prices: jax.lax.map(update, prices))(prices)
    at_once = jax.jit(jax.vmap(update))(prices)
    assert close(numbers(in_turn), numbers(at_once))
    state, metrics = program(1)(start())
    params = lambda state: ravel_pytree(state.student.params)[0]
    free, dear = jax.vmap(params)(in_turn[0])
    assert close(free, params(state))
    assert not close(dear, params(state), 1e-3)
    free, dear = in_turn[1]["train_return"]
    assert close(free, metrics["train_return"])
    assert close(dear, free - 0.01 * metrics["train_episode_length"])


# --- levels split over devices

SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec
import dr
from test_dr import SEED, SMALL, close, numbers

before, after = ([*np.load(name).values()] for name in ("before.npz", "after.npz"))
train = dr.make_train(SMALL, 2)
tree = jax.tree.structure(jax.eval_shape(train.init, SEED))

def update(leaves):
    state = jax.tree.unflatten(tree, leaves)
    state = state.replace(rng=jax.random.wrap_key_data(state.rng))
    return [x[None] for x in jax.tree.leaves(numbers(train.update(state, 1)))]

mesh, each = Mesh(jax.devices(), ("devices",)), PartitionSpec("devices")
specs = dict(in_specs=PartitionSpec(), out_specs=each, check_vma=False)
found = jax.jit(jax.shard_map(update, mesh=mesh, **specs))(before)
for one, two in zip(found, after, strict=True):
    assert one.shape == (2, *two.shape)
    assert close(one[0], two, 1e-5)
    assert np.array_equal(*one, equal_nan=True), "the devices differ"
print("passed")
"""


@pytest.mark.slow
def test_an_update_on_two_devices_is_that_of_one(tmp_path):
    """Up to rounding, with copies and minibatches; the two devices agree bit for bit."""
    for name, tree in {"before": start(), "after": program(1)(start())}.items():
        np.savez(tmp_path / name, *jax.tree.leaves(numbers(tree)))
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    options = dict(env=env, cwd=tmp_path, capture_output=True, text=True)
    result = subprocess.run([sys.executable, "-c", SHARDED], **options)
    assert result.stdout == "passed\n", result.stderr
