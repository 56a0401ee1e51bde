"""Domain randomisation (DR): train one student on levels drawn uniformly at random.

The baseline of unsupervised environment design (UED): no teacher, no buffer. Levels are
MiniGrid mazes (amaze.py), the student is a recurrent PPO agent (1707.06347), and the whole training
is one XLA program.

    initialise the student
    for each update:
        draw N levels, and for each the levels that follow it
        play T steps from zero recurrent state; when an episode ends, go on with the next level
        learn from the N * T transitions with PPO
        now and then: evaluate on test mazes that were never trained on

Run        python dr.py --seeds 8
From code  jax.jit(jax.vmap(make_train(Config())))(jax.random.split(jax.random.key(0), 8))
Sweep      jax.vmap(lambda rng, lr: make_train(replace(config, lr=lr))(rng))(rngs, lrs)

Shapes     T steps, N levels, E copies that play each level, B = N * E trajectories, H core units,
           M test mazes. Time comes first: [T, B, ...]. Everything below make_train is for one seed.
"""

import csv
import io
import json
import math
import os
import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from itertools import count, product
from typing import Literal, NamedTuple, get_args, get_origin

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import serialization, struct
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from tqdm import tqdm

import amaze
from s5 import S5


@dataclass(frozen=True)
class Config:
    """Flat. Every float may be a tracer: swept, vmapped. Ints, bools and strings are static."""

    # PPO
    lr: float = 1e-4  # Adam's learning rate
    anneal_lr: bool = False  # lower lr linearly, to 0 after num_updates
    num_updates: int = 30_000  # cycles of the outer loop
    num_envs: int = 32  # N, levels per cycle
    num_evals: int = 1  # E, copies that play each level at once
    num_steps: int = 256  # T, steps per trajectory and cycle
    update_epochs: int = 5  # passes over the batch
    num_minibatches: int = 1  # they split trajectories, never time
    gamma: float = 0.995  # discount
    gae_lambda: float = 0.98  # lambda of generalised advantage estimation
    clip_eps: float = 0.2  # clip range of the probability ratio and of the value
    ent_coef: float = 1e-3  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # the gradient's global norm is clipped to this
    # student
    rnn: Literal["lstm", "gru", "s5", "none"] = "lstm"  # recurrent core; none: feed-forward
    hidden_size: int = 256  # H, units of the core
    s5_layers: int = 2  # S5 layers
    s5_norm: Literal["after", "before", "none"] = "after"  # place of LayerNorm in an S5 layer
    # levels
    n_walls: int = 60  # wall cells drawn per level, with replacement
    height: int = 13  # of the interior, without the outer wall
    width: int = 13  # likewise
    max_steps: int = 250  # time limit of an episode
    see_through_walls: bool = True  # False: MiniGrid's occlusion
    # evaluation
    eval_interval: int = 50  # updates between evaluations; 0: never
    eval_suite: str = "minimax"  # a suite, or maze names with commas between
    eval_episodes: int = 10  # episodes per maze
    # run
    seed: int = 0  # the first seed
    seeds: int = 1  # trainings, with seeds from the first on
    seeds_at_once: int = 0  # trainings that share the devices' memory at once; 0: all
    sweep: tuple[str, ...] = ()  # float fields to sweep, as lr=1e-4,3e-4 or lr=log:1e-5:1e-3:8
    sweep_random: int = 0  # that many random points of the sweep; 0: the whole grid
    out: str = ""  # run folder; default: the next free runs/NAME-1, runs/NAME-2, ...
    resume: bool = False  # go on with the run in --out
    log_interval: int = 10  # updates between rows of logs.csv
    checkpoint_interval: int = 250  # updates between checkpoints
    archive_interval: int = 0  # updates between kept checkpoint_<update>.msgpack; 0: none
    plot_interval: int = 500  # updates between pictures; 0: only at the end
    devices: int = 0  # devices to use; 0: as many as deal evenly
    shard: Literal["seeds", "levels"] = "seeds"  # what is dealt over the devices
    distributed: bool = False  # one run in several processes, found as jax.distributed does
    coordinator: str = ""  # where it finds none: host:port of process 0, the same in all
    num_processes: int = 0  # likewise
    process_id: int = 0  # likewise; this one's number


FLOATS = [f.name for f in fields(Config) if f.type in (float, float | None)]
STATIC = [f.name for f in fields(Config) if f.name not in FLOATS]


def flatten(config):
    values = vars(config)
    return [values[name] for name in FLOATS], tuple(values[name] for name in STATIC)


def unflatten(static, floats):
    config = object.__new__(Config)  # without its __init__: JAX also puts placeholders into leaves
    vars(config).update(zip(FLOATS + STATIC, (*floats, *static)))
    return config


jax.tree_util.register_pytree_node(Config, flatten, unflatten)


class Transition(NamedTuple):
    obs: amaze.Observation  # o_t
    is_first: jax.Array  # o_t opens an episode, bool
    action: jax.Array  # a_t
    log_prob: jax.Array  # log pi(a_t | o_<=t)
    value: jax.Array  # V(o_<=t)
    reward: jax.Array  # r_t
    done: jax.Array  # a_t ended the episode, bool


class Agent(NamedTuple):
    params: dict
    opt_state: tuple


class RunnerState(struct.PyTreeNode):
    """What the next update needs."""

    rng: jax.Array  # the seed's key; update i uses fold_in(rng, i)
    step: jax.Array  # [] updates done
    student: Agent


# --- network

@jax.custom_vjp
def lstm(carry, x, is_first, w, b):
    """LSTM (Hochreiter 1997): x [T, B, I], w [4H, I + H], b [4H] -> carry, h [T, B, H]; or, of
    inputs that are projected already, x [T, B, 4H] and w [4H, H].

    On a CPU w @ [x; h] with units first, [I + H, B], is twice as fast as the transposed product.
    The gradient is written by hand: dw is one large product over all steps, not a sum of T."""
    return lstm_forward(carry, x, is_first, w, b)[0]


def lstm_forward(carry, x, is_first, w, b):
    def step(carry, inputs):
        x, keep = inputs
        c, h = carry[0] * keep, carry[1] * keep  # [H, B], zero where o_t opens an episode
        xh = h if projected else jnp.concatenate([x.T, h])  # [I + H, B]
        z = w @ xh + b[:, None] + (x.T if projected else 0.0)
        i, f, g, o = jnp.split(z, 4)
        i, f, g, o = nn.sigmoid(i), nn.sigmoid(f), jnp.tanh(g), nn.sigmoid(o)
        c_next = f * c + i * g
        tanh_c = jnp.tanh(c_next)
        h_next = o * tanh_c
        return (c_next, h_next), (h_next.T, (xh.T, c, i, f, g, o, tanh_c))

    projected = w.shape[1] == carry[1].shape[1]
    keep = 1.0 - is_first[:, None]
    (c, h), (hs, saved) = jax.lax.scan(step, (carry[0].T, carry[1].T), (x, keep))
    return ((c.T, h.T), hs), (saved, keep, w)


def lstm_backward(residuals, gradients):
    def step(d_carry, inputs):
        d_h, (_, c, i, f, g, o, tanh_c), keep = inputs
        d_h = d_carry[1] + d_h.T
        d_c = d_carry[0] + d_h * o * (1 - tanh_c**2)
        d_z = [d_c * g * i * (1 - i), d_c * c * f * (1 - f), d_c * i * (1 - g**2)]
        d_z = jnp.concatenate([*d_z, d_h * tanh_c * o * (1 - o)])  # [4H, B]
        d_x, d_h = jnp.split(w.T @ d_z, [w.shape[1] - len(c)])
        d_x = d_x if len(d_x) else d_z  # projected
        return (d_c * f * keep, d_h * keep), (d_z.T, d_x.T)

    (saved, keep, w), ((d_c, d_h), d_hs) = residuals, gradients
    inputs = d_hs, saved, keep
    (d_c, d_h), (d_z, d_x) = jax.lax.scan(step, (d_c.T, d_h.T), inputs, reverse=True)
    flat = lambda x: x.reshape(-1, x.shape[-1])  # [T * B, ...]
    # the barrier keeps XLA from transposing the product, which would take longer
    d_w = jax.lax.optimization_barrier(flat(saved[0]).T @ flat(d_z)).T
    return (d_c.T, d_h.T), d_x, None, d_w, d_z.sum((0, 1))


lstm.defvjp(lstm_forward, lstm_backward)


def gru(carry, x, is_first, w, b):
    """GRU (1406.1078): projected x [T, B, 3H], w [3H, H], b [3H] -> carry, h [T, B, H]."""

    def step(h, inputs):
        z, keep = inputs
        h = h * keep
        (zr, zu, zn), (hr, hu, hn) = jnp.split(z, 3, axis=-1), jnp.split(h @ w.T, 3, axis=-1)
        r, u = nn.sigmoid(zr + hr), nn.sigmoid(zu + hu)
        h = (1 - u) * jnp.tanh(zn + r * hn) + u * h
        return h, h

    return jax.lax.scan(step, carry, (x + b, 1.0 - is_first[..., None]))


class GatedCore(nn.Module):
    """LSTM or GRU. Every core: carry, x [T, B, I], is_first [T, B] -> carry, y [T, B, H]."""

    rnn: str
    size: int

    def initial_carry(self, batch):
        h = jnp.zeros((batch, self.size))
        return (h, h) if self.rnn == "lstm" else h

    @nn.compact
    def __call__(self, carry, x, is_first):
        scan, gates = {"lstm": (lstm, 4), "gru": (gru, 3)}[self.rnn]
        project = self.rnn == "gru" or x.shape[-1] > gates * self.size  # a teacher's are wide
        if project:  # all steps in one product; the barrier as in lstm_backward
            x = nn.Dense(gates * self.size, use_bias=False)(x)
            x = jax.lax.optimization_barrier(x)

        def kernel(rng):  # [gates * H, I + H], for h orthogonal for each gate
            rng, *rngs = jax.random.split(rng, 1 + gates)
            orthogonal = nn.initializers.orthogonal()
            w_h = jnp.vstack([orthogonal(rng, (self.size, self.size)) for rng in rngs])
            lecun_normal = nn.initializers.lecun_normal(in_axis=1, out_axis=0)
            w_x = [] if project else [lecun_normal(rng, (gates * self.size, x.shape[-1]))]
            return jnp.hstack([*w_x, w_h])

        bias = self.param("bias", nn.initializers.zeros, gates * self.size)
        return scan(carry, x, is_first, self.param("kernel", kernel), bias)


class FeedForward(nn.Module):
    def initial_carry(self, batch):
        return ()

    def __call__(self, carry, x, is_first):
        return carry, x


def make_core(rnn, size, s5_layers, s5_norm):
    if rnn == "s5":
        return S5(d_model=size, ssm_size=size, n_layers=s5_layers, norm=s5_norm)
    return FeedForward() if rnn == "none" else GatedCore(rnn, size)


def convolution(image, filters):
    """3x3 and relu: image [..., h, w, 3] -> [..., (h - 2) * (w - 2) * filters].

    Written as a product, which stays one when it is vmapped over seeds."""
    *batch, height, width, _ = image.shape
    corners = [(i, j) for i in range(3) for j in range(3)]
    patches = [image[..., i : height - 2 + i, j : width - 2 + j, :] for i, j in corners]
    patches = jnp.concatenate(patches, axis=-1) / 10.0  # [..., h - 2, w - 2, 27]
    x = nn.Dense(filters, kernel_init=nn.initializers.orthogonal(2**0.5), name="conv")(patches)
    return nn.relu(x).reshape(*batch, -1)


class ActorCritic(nn.Module):
    """The student: obs, is_first [T, B] -> carry, logits [T, B, 7], V [T, B]; acting is T = 1."""

    core: nn.Module

    @nn.compact
    def __call__(self, carry, obs, is_first):
        orthogonal = nn.initializers.orthogonal
        direction = nn.Embed(4, 5, embedding_init=orthogonal(1.0))(obs.direction)
        x = jnp.concatenate([convolution(obs.image, 16), direction], axis=-1)  # [T, B, 149]
        carry, x = self.core(carry, x, is_first)
        hidden = lambda: jnp.tanh(nn.Dense(32, kernel_init=orthogonal(2**0.5))(x))
        logits = nn.Dense(amaze.NUM_ACTIONS, kernel_init=orthogonal(0.01))(hidden())
        value = nn.Dense(1, kernel_init=orthogonal(1.0))(hidden())
        return carry, logits, value[..., 0]


# --- pure functions


def gae(reward, value, last_value, done, gamma, gae_lambda):
    """A_t = delta_t + gamma lambda (1 - d_t) A_{t+1} (1506.02438, eq. 16), advantages [T, B]."""

    def step(carry, x):
        advantage, next_value = carry
        reward, value, keep = x
        delta = reward + gamma * next_value * keep - value
        advantage = delta + gamma * gae_lambda * keep * advantage
        return (advantage, value), advantage

    carry = (jnp.zeros_like(last_value), last_value)
    return jax.lax.scan(step, carry, (reward, value, 1.0 - done), reverse=True)[1]


def episode_sums(x, done):
    """Sum of x over the episode so far, this step included [T, B]; whole where done."""

    def step(total, inputs):
        x, done = inputs
        total = total + x
        return jnp.where(done, 0.0, total), total

    return jax.lax.scan(step, jnp.zeros(x.shape[1:]), (x, done))[1]


def optimiser(config, lr):
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm), optax.adam(lr, eps=1e-5)
    )


def make_train(config, shards=1):
    """train(rng) -> (RunnerState, metrics), one whole training; and its parts: train.init(rng),
    train.update(state, steps), train.show(state) -> the levels in training, train.act to play.

    shards: over how many devices (pmap's axis "shards") the levels of one training are split."""
    check(config)
    num_levels = config.num_envs // shards  # N on this device
    batch = num_levels * config.num_evals
    allowed = f"a divisor of {batch}, the trajectories on a device"
    demand(batch % config.num_minibatches == 0, config, "num_minibatches", allowed)
    core = make_core(config.rnn, config.hidden_size, config.s5_layers, config.s5_norm)
    network = ActorCritic(core)
    mazes = amaze.SUITES.get(config.eval_suite) or config.eval_suite.split(",")

    def new_student(rng):
        obs = amaze.Observation(jnp.zeros((1, 1, 5, 5, 3)), jnp.zeros((1, 1), int))
        params = network.init(rng, core.initial_carry(1), obs, jnp.zeros((1, 1), bool))
        return Agent(params, optimiser(config, 0.0).init(params))  # whatever the learning rate

    def init(rng):
        rng, rng_student = jax.random.split(rng)
        return RunnerState(rng, jnp.zeros((), int), new_student(rng_student))

    def shard_key(rng):
        return jax.random.fold_in(rng, jax.lax.axis_index("shards")) if shards > 1 else rng

    def mean(x, where=True):
        """Mean of x where `where`, over all shards; NaN if nowhere."""
        where = jnp.broadcast_to(where, x.shape)
        sums = jnp.where(where, x, 0).sum(), where.sum()
        total, count = jax.lax.psum(sums, "shards") if shards > 1 else sums
        return total / count

    def sample_levels(rng, number):
        size = dict(n_walls=config.n_walls, height=config.height, width=config.width)
        rngs = jax.random.split(shard_key(rng), number)
        return jax.vmap(partial(amaze.sample_level, **size))(rngs)

    def act(params, carry, obs, is_first, noise):
        """A step of B students -> carry, a_t, log pi(a_t), V; argmax(logits + noise) samples."""
        inputs = jax.tree.map(lambda x: x[None], (obs, is_first))
        carry, logits, value = network.apply(params, carry, *inputs)
        action = jnp.argmax(logits[0] + noise, axis=-1)
        log_prob = nn.log_softmax(logits[0])[jnp.arange(len(action)), action]
        return carry, action, log_prob, value[0]

    def rollout(rng, params, queue):
        """T steps on E copies of N levels -> batch [T, B], V(o_T); episode k of environment n
        plays queue[n, k % K] of the levels [N, K]."""
        rules = dict(max_steps=config.max_steps, see_through_walls=config.see_through_walls)
        queue = jax.tree.map(lambda x: jnp.repeat(x, config.num_evals, axis=0), queue)
        obs, env_state = jax.vmap(partial(amaze.reset, **rules))(queue)
        is_first = jnp.ones(len(queue.agent_dir), bool)
        # all noise at once: a few large operations are faster than many small ones
        shape = (config.num_steps + 1, len(is_first), amaze.NUM_ACTIONS)
        noise = jax.random.gumbel(shard_key(rng), shape)

        def step(carry, noise):
            memory, obs, env_state, is_first = carry
            memory, action, log_prob, value = act(params, memory, obs, is_first, noise)
            next_obs, env_state, reward, done = jax.vmap(amaze.step_and_reset)(env_state, action)
            transition = Transition(obs, is_first, action, log_prob, value, reward, done)
            return (memory, next_obs, env_state, done), transition

        carry = (core.initial_carry(len(is_first)), obs, env_state, is_first)
        (memory, obs, _, is_first), batch = jax.lax.scan(step, carry, noise[:-1])
        return batch, act(params, memory, obs, is_first, noise[-1])[3]

    def loss(params, config, batch, advantage, target):
        """PPO's clipped objective (1707.06347, eq. 7 and 9), the value's likewise clipped."""
        carry = core.initial_carry(advantage.shape[1])
        _, logits, value = network.apply(params, carry, batch.obs, batch.is_first)
        log_probs = nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(log_probs, batch.action[..., None], axis=-1)[..., 0]
        log_ratio = log_prob - batch.log_prob
        ratio = jnp.exp(log_ratio)
        clip = lambda x: jnp.clip(x, -config.clip_eps, config.clip_eps)
        advantage = advantage - mean(advantage)
        advantage = advantage / (jnp.sqrt(mean(advantage**2)) + 1e-5)
        gain = jnp.minimum(ratio * advantage, (1 + clip(ratio - 1)) * advantage)
        clipped_value = batch.value + clip(value - batch.value)
        error = jnp.maximum((value - target) ** 2, (clipped_value - target) ** 2)
        metrics = {
            "policy_loss": -gain.mean(),
            "value_loss": 0.5 * error.mean(),
            "entropy": -(jnp.exp(log_probs) * log_probs).sum(-1).mean(),
            "approx_kl": (ratio - 1 - log_ratio).mean(),
            "clip_fraction": (jnp.abs(ratio - 1) > config.clip_eps).mean(),
        }
        total = metrics["policy_loss"] + config.vf_coef * metrics["value_loss"]
        total -= config.ent_coef * metrics["entropy"]
        return total, metrics | {"total_loss": total}

    def learn(config, rng, student, lr, batch, last_value):
        """update_epochs passes of PPO over the batch [T, B] -> student, metrics."""
        rewards = batch.reward, batch.value, last_value, batch.done
        advantage = gae(*rewards, config.gamma, config.gae_lambda)
        target = advantage + batch.value

        def minibatch(student, columns):
            data = jax.tree.map(lambda x: x[:, columns], (batch, advantage, target))
            grads, metrics = jax.grad(loss, has_aux=True)(student.params, config, *data)
            if shards > 1:
                grads, metrics = jax.lax.pmean((grads, metrics), "shards")
            updates, opt_state = optimiser(config, lr).update(grads, student.opt_state)
            student = Agent(optax.apply_updates(student.params, updates), opt_state)
            return student, metrics | {"grad_norm": optax.global_norm(grads)}

        rngs = jax.random.split(rng, config.update_epochs)
        order = jax.vmap(lambda rng: jax.random.permutation(rng, advantage.shape[1]))(rngs)
        order = order.reshape(config.update_epochs * config.num_minibatches, -1)
        student, metrics = jax.lax.scan(minibatch, student, order)
        variance = lambda x: mean((x - mean(x)) ** 2)
        explained = 1 - variance(advantage) / variance(target)
        return student, jax.tree.map(jnp.mean, metrics) | {"explained_variance": explained}

    def evaluate(rng, params):
        """Solve rate and return on each test maze, and their means."""
        rng_mazes, rng_noise = jax.random.split(rng)
        obs, env_state = amaze.reset_mazes(rng_mazes, mazes, config.eval_episodes)
        batch = len(mazes) * config.eval_episodes

        def step(carry):
            t, memory, obs, env_state, playing, total = carry
            shape = (batch, amaze.NUM_ACTIONS)
            noise = jax.random.gumbel(jax.random.fold_in(rng_noise, t), shape)
            memory, action, _, _ = act(params, memory, obs, jnp.full(batch, t == 0), noise)
            obs, env_state, reward, done = jax.vmap(amaze.step)(env_state, action)
            return t + 1, memory, obs, env_state, playing & ~done, total + reward * playing

        memory, playing = core.initial_carry(batch), jnp.ones(batch, bool)
        carry = (0, memory, obs, env_state, playing, jnp.zeros(batch))
        total = jax.lax.while_loop(lambda carry: carry[4].any(), step, carry)[5]
        total = total.reshape(len(mazes), config.eval_episodes)
        scores = {"eval_solve_rate": (total > 0).mean(1), "eval_return": total.mean(1)}
        means = {name: score.mean() for name, score in scores.items()}
        return means | {f"{k}/{m}": x[i] for k, x in scores.items() for i, m in enumerate(mazes)}

    if jax.default_backend() == "cpu":
        # vmapped seeds take turns, there as fast or faster than at once; and a batched QR
        # decomposition, for orthogonal kernels, can block jaxlib's threads for ever
        in_turn = lambda f: jax.custom_batching.sequential_vmap(jax.jit(f))  # constants stay inside
        new_student, rollout = in_turn(new_student), in_turn(rollout)
        learn, evaluate = in_turn(learn), in_turn(evaluate)

    def nothing(function, *args):
        """NaN in the shape of function's metrics."""
        shapes = jax.eval_shape(function, *args)
        return jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan), shapes)

    def episode_stats(batch, where=True):
        """Return, solve rate and length of the episodes that ended in the columns `where` [B]."""
        total = episode_sums(batch.reward, batch.done)
        length = episode_sums(jnp.ones_like(batch.reward), batch.done)
        stats = {"return": total, "solve_rate": total > 0, "episode_length": length}
        return {name: mean(x, batch.done & where) for name, x in stats.items()}

    def level_stats(levels, solution, where=True):
        """Walls, shortest path (cells) and solvable share of the levels `where` [N]."""
        return {
            "walls": mean(levels.wall_map.sum((-2, -1)), where),
            "path_length": mean(solution.path_length, solution.solvable & where),
            "solvable": mean(solution.solvable, where),
        }

    def choose_levels(rng):
        """[N, K] random levels: those that open the cycle, and for each those that follow it."""
        shape = num_levels, max(config.num_steps // 4, 1)
        levels = sample_levels(rng, math.prod(shape))
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), levels)

    def cycle(state, _):
        rng = jax.random.fold_in(state.rng, state.step)
        rng_levels, rng_rollout, rng_learn, rng_eval = jax.random.split(rng, 4)
        step = state.step + 1

        # 1. CHOOSE LEVELS
        queue = choose_levels(rng_levels)

        # 2. ROLL OUT
        batch, last_value = rollout(rng_rollout, state.student.params, queue)

        # 3. LEARN
        lr = config.lr * (1 - state.step / config.num_updates if config.anneal_lr else 1.0)
        student, metrics = learn(config, rng_learn, state.student, lr, batch, last_value)

        # 4. EVALUATE
        metrics |= {"grad_updates": step, "rollouts": step, "lr": jnp.asarray(lr)}
        metrics |= {f"train_{name}": x for name, x in episode_stats(batch).items()}
        levels = jax.tree.map(lambda x: x[:, 0], queue)
        metrics |= level_stats(levels, jax.vmap(amaze.solve)(levels))
        if config.eval_interval:
            due = (step % config.eval_interval == 0) | (step == config.num_updates)
            skip = partial(nothing, evaluate)
            metrics |= jax.lax.cond(due, evaluate, skip, rng_eval, student.params)
        return state.replace(step=step, student=student), metrics

    def update(state, steps):
        """`steps` cycles -> RunnerState, metrics: name -> [steps]."""
        return jax.lax.scan(cycle, state, None, length=steps)

    def show(state):
        """The levels that the next update starts with: title -> (levels, captions)."""
        rng_levels = jax.random.split(jax.random.fold_in(state.rng, state.step), 4)[0]
        levels = jax.tree.map(lambda x: x[:, 0], choose_levels(rng_levels))
        return {"random levels": (levels, {"path": jax.vmap(amaze.solve)(levels).path_length})}

    def train(rng):
        return update(init(rng), config.num_updates)

    train.init, train.update, train.show = init, update, show
    train.act, train.initial_carry = act, core.initial_carry
    return train


# --- command line
# The same in each file. A run is a list of rows: a seed and its swept values. Rows form groups:
# what fits at once. A group is one program, mapped over devices, vmapped over rows: [D, R, ...].
# Several processes (--distributed) all do the same; only the first, 0, writes.

ALLOWED = {
    "at least 0": (lambda v: v >= 0, """lr ent_coef vf_coef n_walls num_edits eval_interval seed
        archive_interval plot_interval devices seeds_at_once sweep_random teacher_lr
        teacher_ent_coef num_processes process_id"""),
    "at least 1": (lambda v: v >= 1, """num_updates num_envs num_evals num_steps update_epochs seeds
        num_minibatches hidden_size s5_layers max_steps eval_episodes log_interval num_students
        checkpoint_interval buffer_size teacher_hidden_size teacher_filters"""),
    "at least 2": (lambda v: v >= 2, "height width"),
    "above 0": (lambda v: v > 0, "clip_eps max_grad_norm temperature"),
    "from 0 to 1": (lambda v: 0 <= v <= 1, """gamma gae_lambda replay_prob staleness_coef min_fill
        teacher_gamma teacher_gae_lambda"""),
}  # fmt: skip
# what may differ when a run is resumed; the processes are always as given anew
FREE = "resume out checkpoint_interval archive_interval plot_interval devices seeds_at_once".split()
PROCESSES = "distributed coordinator num_processes process_id".split()


class BadConfig(ValueError):
    """One line: the field, its value, what is allowed."""


def demand(fine, config, name, allowed):
    if not fine:
        raise BadConfig(f"{name} = {getattr(config, name)!r}: allowed is {allowed}")


def check(config):
    """Refuse the first value that is not allowed; traced floats pass."""
    for f in fields(config):
        value = getattr(config, f.name)
        if get_origin(f.type) is Literal:
            demand(value in get_args(f.type), config, f.name, " | ".join(get_args(f.type)))
        if f.type is int:
            demand(isinstance(value, int), config, f.name, "a whole number")
        for allowed, (test, names) in ALLOWED.items():
            if f.name in names.split() and not isinstance(value, jax.Array):
                demand(test(value), config, f.name, allowed)
    known = f"a suite ({', '.join(amaze.SUITES)}) or mazes ({', '.join(amaze.TEST_MAZES)})"
    mazes = amaze.SUITES.get(config.eval_suite) or config.eval_suite.split(",")
    demand(set(mazes) <= set(amaze.TEST_MAZES), config, "eval_suite", known)
    room = config.height * config.width - 2
    demand(config.n_walls <= room, config, "n_walls", f"at most {room}: two cells stay free")
    batch = config.num_envs * config.num_evals
    allowed = f"a divisor of {batch}, the trajectories"
    demand(batch % config.num_minibatches == 0, config, "num_minibatches", allowed)


def sweep_values(config, sweep, rng):
    """`lr=1e-4,3e-4` or `lr=log:1e-5:1e-3:8` -> name, values: the grid's, or sweep_random drawn."""
    name, _, values = sweep.partition("=")
    if name not in FLOATS:
        why = f"a float: {', '.join(FLOATS)}; for other fields, a run for each value"
        raise BadConfig(f"sweep = {sweep!r}: allowed is {why}")
    try:
        if not values.startswith("log:"):
            values = [float(value) for value in values.split(",")]
            random = rng.choice(values, config.sweep_random)
        else:
            low, high, number = values[4:].split(":")
            if int(number) < 1:
                raise ValueError
            values = np.geomspace(float(low), float(high), int(number)).tolist()
            random = np.exp(rng.uniform(*np.log([values[0], values[-1]]), config.sweep_random))
    except ValueError:
        allowed = f"{name}=0.1,0.2 or {name}=log:0.01:0.1:8"
        raise BadConfig(f"sweep = {sweep!r}: allowed is {allowed}") from None
    return name, random.tolist() if config.sweep_random else values


def make_rows(config):
    """The rows: a dict of seed and swept floats for each; every point of a sweep has all seeds."""
    names = [sweep.partition("=")[0] for sweep in config.sweep]
    demand(len({*names}) == len(names), config, "sweep", "each field once")
    demand(names or not config.sweep_random, config, "sweep_random", "0 without --sweep")
    rng = np.random.default_rng(config.seed)
    swept = dict(sweep_values(config, sweep, rng) for sweep in config.sweep)
    points = zip(*swept.values()) if config.sweep_random else product(*swept.values())
    points = [dict(zip(swept, point)) for point in points]
    for point in points:
        check(replace(config, **point))
    seeds = range(config.seed, config.seed + config.seeds)
    return [{"seed": seed} | point for point in points for seed in seeds]


def choose_devices(config, sizes):
    """The devices to use: --devices, or as many as deal evenly; sizes: the rows of each group."""
    parts = sizes if config.shard == "seeds" else [config.num_envs]
    here = jax.devices()
    number = config.devices or math.gcd(len(here), *parts)
    demand(number <= len(here), config, "devices", f"at most {len(here)}, the devices here")
    if jax.process_count() > 1:
        number = config.devices or len(here)
        allowed = f"0 or {len(here)}, the devices of all processes"
        demand(number == len(here), config, "devices", allowed)
    for part in parts:
        what = "the trainings at once" if config.shard == "seeds" else "num_envs"
        demand(part % number == 0, config, "devices", f"a divisor of {part}, {what}")
    return here[:number]


def over_devices(function, devices, donate=()):
    """jax.pmap, which is jit(shard_map), in a form that is compiled ahead and spans processes."""
    sharding = on(devices)
    take, put_back = partial(jax.tree.map, lambda x: x[0]), partial(jax.tree.map, lambda x: x[None])
    part = lambda *args: put_back(function(*take(args)))
    specs = dict(in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False)
    mapped = jax.shard_map(part, mesh=sharding.mesh, **specs)
    options = dict(in_shardings=sharding, out_shardings=sharding, donate_argnums=donate)
    return jax.jit(mapped, **options)


def make_programs(config, devices):
    """init(rows), update(steps)(rows, state) and show(rows, state), over devices and rows."""
    shards = len(devices) if config.shard == "levels" else 1
    swept = lambda row: {name: value for name, value in row.items() if name != "seed"}
    train = lambda row: make_train(replace(config, **swept(row)), shards)
    init = lambda row: train(row).init(jax.random.key(row["seed"]))
    axes = jax.tree.map(lambda _: 0, jax.eval_shape(init, make_rows(config)[0]))
    axes = axes.replace(step=None)  # not batched, so that lax.cond stays a branch

    def update(steps):
        program = lambda row, state: train(row).update(state, steps)
        return over_devices(jax.vmap(program, (0, axes), (axes, 0)), devices, donate=1)

    show = jax.vmap(lambda row, state: train(row).show(state), (0, axes))
    init = jax.vmap(init, out_axes=axes)
    return over_devices(init, devices), update, over_devices(show, devices)


def deal(config, rows, num_devices):
    """A group's rows as arrays [D, R]; where levels are split, each device has all of them."""
    arrays = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    if config.shard == "levels":
        return {name: np.tile(x, (num_devices, 1)) for name, x in arrays.items()}
    return {name: x.reshape(num_devices, -1) for name, x in arrays.items()}


def on(devices):
    """The sharding of arrays [D, ...]: x[i] on device i."""
    return NamedSharding(Mesh(devices, ("shards",)), PartitionSpec("shards"))


def place(tree, devices):
    """NumPy arrays [D, ...], the same in all processes, on the devices."""
    put = lambda x: jax.make_array_from_callback(x.shape, on(devices), lambda i: x[i])
    return jax.tree.map(put, tree)


def gather(tree):
    """NumPy arrays [D, ...] in each process; of a process's own array [...], all: [P, ...]."""
    several = jax.process_count() > 1
    return multihost_utils.process_allgather(tree, tiled=True) if several else jax.device_get(tree)


def to_host(config, state):
    """A group's state as NumPy arrays [shards, rows, ...], as checkpoints hold it."""
    key_data = jax.random.key_data(state.rng)
    state = gather(state.replace(rng=key_data, step=state.step[:, None]))
    if config.shard == "seeds":
        state = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), state)
    return state.replace(step=state.step[0, 0])


def to_devices(state, devices):
    """The inverse: [shards, rows, ...] -> [D, R, ...]."""
    state = state.replace(step=np.full((len(devices), 1), state.step))
    state = jax.tree.map(lambda x: x.reshape(len(devices), -1, *x.shape[2:]), state)
    state = place(state.replace(step=state.step[:, 0]), devices)
    return state.replace(rng=jax.random.wrap_key_data(state.rng))


def write(path, data):
    """Replace a file as a whole: after a crash or on a full disk the old one is still there."""
    if jax.process_index():
        return
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def log_rows(config, rows, chunk, step, seconds):
    """A dict for each row of logs.csv: means over a chunk [R, steps], counters as they stand."""
    for i, row in enumerate(rows):
        finite = {name: x[i][~np.isnan(x[i])] for name, x in chunk.items()}
        means = {name: f"{x.mean():.7g}" if x.size else "" for name, x in finite.items()}
        counters = {name: int(chunk[name][i, -1]) for name in ("grad_updates", "rollouts")}
        for name in counters:
            del means[name]
        env_steps = config.num_envs * config.num_evals * config.num_steps
        counters["env_steps"] = counters.pop("rollouts") * env_steps
        yield {"update": step} | counters | row | {"seconds": f"{seconds:.1f}"} | means | row


def plot_curves(folder, swept):
    """curves.png from logs.csv: return and solve rate against env steps, mean and spread."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    with open(folder / "logs.csv", newline="") as file:
        table = list(csv.DictReader(file))
    panels = {"train_return": "return in training", "eval_solve_rate": "solve rate on test mazes"}
    for axis, (column, title) in zip(figure.subplots(1, 2), panels.items()):
        curves = {}
        for row in table:
            if row.get(column):
                label = ", ".join(f"{name} {float(row[name]):.3g}" for name in swept)
                values = curves.setdefault(label, {}).setdefault(int(row["env_steps"]), [])
                values.append(float(row[column]))
        for label, curve in curves.items():
            mean, std = (np.array([f(x) for x in curve.values()]) for f in (np.mean, np.std))
            axis.plot(list(curve), mean, label=label)
            axis.fill_between(list(curve), mean - std, mean + std, alpha=0.2)
        axis.set(xlabel="env steps", title=title, ylim=(0, 1))
        if swept and len(curves) <= 12:
            axis.legend(fontsize="small")
    save_figure(folder / "curves.png", figure)


def rank_sweep(folder, swept, table):
    """Print the points of a sweep by their last solve rate, and plot it: sweep.png."""
    points = {}
    for row in table:
        score = float(row.get("eval_solve_rate") or row["train_solve_rate"] or 0)
        points.setdefault(tuple(row[name] for name in swept), []).append(score)
    print(*swept, "solve rate, mean and 95% interval over seeds", sep="\t")
    for point, scores in sorted(points.items(), key=lambda item: -np.mean(item[1])):
        interval = 1.96 * np.std(scores, ddof=1) / len(scores) ** 0.5 if len(scores) > 1 else np.nan
        print(*(f"{value:.4g}" for value in point), sep="\t", end="\t")
        print(f"{np.mean(scores):.3f} +- {interval:.3f}")
    figure = Figure(figsize=(4 * len(swept), 4), layout="constrained")
    for i, (axis, name) in enumerate(zip(figure.subplots(1, len(swept), squeeze=False)[0], swept)):
        for point, scores in points.items():
            axis.plot([point[i]] * len(scores), scores, "o", alpha=0.5, color="C0")
        values = [point[i] for point in points]
        wide = min(values) > 0 and max(values) / min(values) > 10
        scale = "log" if wide else "linear"
        axis.set(xlabel=name, ylabel="solve rate", ylim=(-0.02, 1.02), xscale=scale)
    save_figure(folder / "sweep.png", figure)


def plot_levels(path, shown):
    """levels/update_<n>.png: the levels in training, of the run's first row."""
    first, sections = jax.tree.map(lambda x: x[0, 0], shown), {}
    for title, (levels, captions) in first.items():
        lines = zip(*([f"{name} {x:.3g}" for x in values] for name, values in captions.items()))
        sections[title] = levels, ["\n".join(line) for line in lines] or None
    save_figure(path, amaze.plot_levels(sections))


def save_figure(path, figure):
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write(path, image.getvalue())


def open_run(config):
    """The run folder, made if it is new, and its last checkpoint."""
    script = Path(__file__)
    names = (Path(f"runs/{script.stem}-{i}") for i in count(1))
    folder = Path(config.out or next(name for name in names if not name.exists()))
    checkpoint = {"step": 0, "seconds": 0.0, "log_bytes": 0}
    if config.resume and (folder / "checkpoint.msgpack").exists():
        data = (folder / "checkpoint.msgpack").read_bytes()
        checkpoint = serialization.msgpack_restore(data)
    if jax.process_index():
        return folder, checkpoint
    if not config.resume:
        fresh = not folder.exists() or folder.is_dir() and not any(folder.iterdir())
        demand(fresh, config, "out", "a new or empty folder; --resume goes on with a run")
        try:
            (folder / "levels").mkdir(parents=True)
        except OSError as error:
            demand(False, config, "out", f"a folder that can be made ({error.strerror})")
        stored = {"script": script.name} | asdict(config)
        write(folder / "config.json", json.dumps(stored, indent=2).encode())
    return folder, checkpoint


def say(line):
    """Print above the progress bar; process 0 speaks for all."""
    if not jax.process_index():
        tqdm.write(line)
        sys.stdout.flush()


class Trainings:
    """All rows of a run: their groups, what trains them, and the state of each group."""

    def __init__(self, config):
        rows = make_rows(config)
        at_once = config.seeds_at_once or len(rows)
        self.config, self.rows, self.programs = config, rows, {}
        self.groups = [slice(i, i + at_once) for i in range(0, len(rows), at_once)]
        parts = [rows[group] for group in self.groups]
        self.devices = choose_devices(config, [len(part) for part in parts])
        self.init, self.train, self.show = make_programs(config, self.devices)
        self.dealt = [deal(config, part, len(self.devices)) for part in parts]

    def start(self, saved):
        """From the beginning, or from a checkpoint's state."""
        self.dealt = [place(group, self.devices) for group in self.dealt]
        if saved is None:
            self.states = [self.park(self.init(group)) for group in self.dealt]
            return
        shards = len(saved["rng"])
        same = self.config.shard == "seeds" or shards == len(self.devices)
        demand(same, self.config, "devices", f"{shards}, as in the run to resume")
        saved = serialization.from_state_dict(jax.eval_shape(self.init, self.dealt[0]), saved)
        part = lambda group: jax.tree.map(lambda x: x[:, group] if np.ndim(x) else x, saved)
        self.states = [self.park(to_devices(part(g), self.devices)) for g in self.groups]

    def park(self, state):
        """Groups take turns on the devices; those that wait are in host memory."""
        return to_host(self.config, state) if len(self.groups) > 1 else state

    def fetch(self, i):
        state = self.states[i]
        return to_devices(state, self.devices) if len(self.groups) > 1 else state

    def program(self, steps, i):
        """`steps` updates of group i, compiled once for all groups of its size."""
        key = steps, self.dealt[i]["seed"].shape
        if key not in self.programs:
            say(f"compiling {steps} updates ...")
            started = time.time()
            lowered = self.train(steps).lower(self.dealt[i], self.fetch(i))
            self.programs[key] = lowered.compile()
            say(f"compiled in {time.time() - started:.1f} s")
        return self.programs[key]

    def update(self, steps):
        """Train all rows -> metrics: name -> [rows, steps]; seconds."""
        chunks, seconds = [], 0.0
        by_row = (lambda x: x[0]) if self.config.shard == "levels" else np.concatenate
        for i, group in enumerate(self.dealt):
            program = self.program(steps, i)
            started = time.time()
            state, chunk = jax.block_until_ready(program(group, self.fetch(i)))
            seconds += time.time() - started
            self.states[i] = self.park(state)
            chunks.append({name: by_row(x) for name, x in gather(chunk).items()})
        return {k: np.concatenate([chunk[k] for chunk in chunks]) for k in chunks[0]}, seconds

    def state(self):
        """The state of all rows, as NumPy arrays [shards, rows, ...]."""
        parts = [to_host(self.config, self.fetch(i)) for i in range(len(self.groups))]
        return jax.tree.map(lambda *x: np.concatenate(x, 1) if x[0].ndim else x[0], *parts)

    def levels(self):
        return gather(self.show(self.dealt[0], self.fetch(0)))


def save(path, trainings, log, step, seconds):
    """A checkpoint of all rows; it notes how long logs.csv is, so that both agree after a crash."""
    state = trainings.state()
    if jax.process_index():
        return
    log.flush()
    os.fsync(log.fileno())
    data = {"step": step, "seconds": seconds, "log_bytes": log.tell()}
    data["rows"] = {str(i): row for i, row in enumerate(trainings.rows)}
    data["state"] = serialization.to_state_dict(state)
    write(path, serialization.msgpack_serialize(data))


def append(log, table):
    writer = csv.DictWriter(log, table[0])
    if log.tell() == 0:
        writer.writeheader()
    writer.writerows(table)
    log.flush()


def progress(table, seconds):
    """What the progress bar shows."""
    shown = {"steps/s": f"{sum(row['env_steps'] for row in table) / seconds:,.0f}"}
    for name in ("train_solve_rate", "eval_solve_rate"):
        values = [float(row[name]) for row in table if row.get(name)]
        shown |= {name: f"{np.mean(values):.2f}"} if values else {}
    return shown


def catch_signals():
    """The list that Ctrl-C and SIGTERM will be in; a second one ends at once."""

    def request_stop(number, _):
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)

    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)
    return stop


def run(config):
    """Train all rows: chunks of log_interval updates; between them logs, checkpoints, pictures."""
    trainings = Trainings(config)
    rows, devices, first = trainings.rows, trainings.devices, jax.process_index() == 0
    swept = list(rows[0])[1:]
    folder, checkpoint = open_run(config)
    trainings.start(checkpoint.pop("state", None))
    step, seconds = checkpoint["step"], checkpoint["seconds"]
    if first and (folder / "logs.csv").exists():  # nothing can be refused any more
        os.truncate(folder / "logs.csv", checkpoint["log_bytes"])
    stop, ended, shown = catch_signals(), 0, {}
    bar = tqdm(initial=step, total=config.num_updates, unit="update", dynamic_ncols=True,
               disable=not first)
    say(f"{folder}: {len(rows)} training(s) on {len(devices)} x {devices[0].device_kind}")
    with open(folder / "logs.csv" if first else os.devnull, "a", newline="") as log, bar:
        while step < config.num_updates and not ended:
            before, steps = step, min(config.log_interval, config.num_updates - step)
            chunk, took = trainings.update(steps)
            step, seconds = step + steps, seconds + took
            ended = int(gather(np.array([stop[0] if stop else 0])).max())  # by a signal to anyone
            table = list(log_rows(config, rows, chunk, step, seconds))
            append(log, table)
            shown |= progress(table, seconds)
            bar.set_postfix(shown, refresh=False)
            bar.update(steps)

            last = ended or step == config.num_updates
            due = lambda interval: interval and step // interval > before // interval
            if last or due(config.checkpoint_interval):
                save(folder / "checkpoint.msgpack", trainings, log, step, seconds)
            if due(config.archive_interval):
                save(folder / f"checkpoint_{step}.msgpack", trainings, log, step, seconds)
            if last or due(config.plot_interval):
                levels = trainings.levels()
                if first:
                    plot_curves(folder, swept)
                    plot_levels(folder / "levels" / f"update_{step}.png", levels)
    if ended:
        say(f"stopped at update {step}; to go on: python {sys.argv[0]} --resume --out {folder}")
        sys.exit(128 + ended)
    if first and swept and step > checkpoint["step"]:
        rank_sweep(folder, swept, table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    say(f"done: {seconds:.0f} s of training, peak memory {peak:.1f} GiB on the host")


def parse(arguments):
    """The command line; on --resume, what is not given there comes from the run's config.json."""
    options = dict(args=arguments, description=__doc__, config=(tyro.conf.UseAppendAction,))
    config = tyro.cli(Config, **options)
    if not config.resume:
        return config
    path = Path(config.out) / "config.json"
    demand(config.out and path.exists(), config, "out", "with --resume, the folder of a run")
    stored = json.loads(path.read_text())
    name = Path(__file__).name
    demand(stored.pop("script") == name, config, "out", f"with --resume, a run of {name}")
    given = {name: getattr(config, name) for name in ("out", *PROCESSES)}
    stored = replace(Config(**stored), sweep=tuple(stored["sweep"]), **given)
    append = () if config.sweep else stored.sweep  # given again, --sweep must be the same
    config = tyro.cli(Config, default=replace(stored, sweep=append), **options)
    for f in fields(Config):
        value = getattr(stored, f.name)
        same = f.name in FREE or getattr(config, f.name) == value
        demand(same, config, f.name, f"{value!r}, as in the run to resume")
    return config


def connect(config):
    """With --distributed, join the other processes of the run."""
    if not config.distributed:
        demand(not config.coordinator, config, "coordinator", "empty without --distributed")
        return
    given = config.coordinator, config.num_processes, config.process_id
    try:
        given = given if config.coordinator else ()
        jax.distributed.initialize(*given, heartbeat_timeout_seconds=30)
    except (ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        demand(False, config, "distributed", f"a cluster that JAX knows, or --coordinator "
               f"host:port --num-processes P --process-id 0 to P - 1 ({why})")


def main():
    try:
        config = parse(sys.argv[1:])
        check(config)
        connect(config)
        return run(config)
    except BadConfig as error:
        message, status = error, 2
    except OSError as error:
        error.filename = error.filename or "logs.csv"  # all other files are named by `write`
        hint = "the last checkpoint is intact, --resume goes on from it"
        message, status = f"{error}; {hint}", 1
    except jax.errors.JaxRuntimeError as error:
        if not jax.distributed.is_initialized():
            raise
        why = str(error).splitlines()[0]
        message, status = f"{why}; if another process ended, --resume all", 1
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():
        os._exit(status)  # without waiting for the others, who wait for this one
    sys.exit(status)


if __name__ == "__main__":
    main()
