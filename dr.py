"""Domain randomisation (DR): train one student on levels drawn uniformly at random.

The baseline of unsupervised environment design (UED): no teacher, no buffer. Levels are MiniGrid
mazes (amaze.py), the student is a recurrent PPO agent (1707.06347); a training is one XLA program.

    initialise the student
    for each cycle:
        draw N queues of random levels
        play T steps from zero recurrent state; when an episode ends, start the queue's next level
        learn from the transitions with PPO
        every eval_interval cycles: evaluate on test mazes that are never trained on

Run        python dr.py --fast        python dr.py --seeds 8
From code  run(replace(FAST, seeds=8))    jax.jit(jax.vmap(make_train(Config())))(rngs)
Sweep      jax.vmap(lambda rng, lr: make_train(replace(config, lr=lr))(rng))(rngs, lrs)

Shapes     T steps, N levels, E trajectories on each level, B = N * E trajectories, M test mazes,
           H units of the core. Time comes first: [T, B, ...]. make_train trains one seed.
"""

import csv
import hashlib
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import secrets
import shlex
import signal
import sys
import time
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import serialization, struct, traverse_util
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tqdm import tqdm

import amaze
from s5 import S5


@dataclass(frozen=True)
class Config:
    """All settings. Floats may be traced (swept, vmapped); ints, bools and strings are static."""

    # PPO
    lr: float = 1e-4  # Adam's learning rate
    anneal_lr: bool = False  # decay lr linearly, to 0 after num_updates
    num_updates: int = 30_000  # cycles: rollouts, each with one PPO update
    num_envs: int = 32  # N, levels per cycle
    num_evals: int = 1  # E, trajectories on each level
    num_steps: int = 256  # T, steps of each trajectory in a rollout
    update_epochs: int = 5  # PPO's epochs: passes over the batch
    num_minibatches: int = 1  # minibatches per epoch, of trajectories or their chunks (below)
    bptt_horizon: int = 0  # chunk of steps that gradients flow back through; 0: the rollout
    gamma: float = 0.995  # discount
    gae_lambda: float = 0.98  # lambda of generalised advantage estimation
    clip_eps: float = 0.2  # clip range of the probability ratio
    ent_coef: float = 1e-3  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    clip_vloss: bool = True  # clip the value's change in its loss, too, at clip_eps
    max_grad_norm: float = 0.5  # the global norm of a gradient is clipped to this
    polyak_averaging: bool = False  # evaluate an average of the parameters that favours late ones
    # student
    rnn: Literal["lstm", "gru", "s5", "none"] = "lstm"  # recurrent core; none: feed-forward
    hidden_size: int = 256  # H, units of the core
    s5_layers: int = 2  # S5 layers
    s5_norm: Literal["after", "before", "none"] = "after"  # place of LayerNorm in an S5 layer
    # levels
    n_walls: int = 60  # wall cells drawn per level, with replacement
    solvable_only: bool = False  # redraw a level until its goal can be reached
    height: int = 13  # cells of a level, without the outer wall
    width: int = 13  # cells of a level, without the outer wall
    max_steps: int = 250  # time limit; above num_steps only successes end: train_solve_rate is 1
    see_through_walls: bool = True  # False: MiniGrid's occlusion
    auto_replay: bool = False  # when an episode ends, restart the same level, not a new one
    # evaluation
    eval_interval: int = 50  # cycles between evaluations; 0: never
    eval_suite: str = next(iter(amaze.SUITES))  # name of a suite, or comma-separated mazes
    eval_episodes: int = 10  # episodes per maze
    # run
    seed: int = 0  # the first seed
    seeds: int = 1  # number of trainings, with seeds seed, seed + 1, ...
    seeds_at_once: int = 0  # trainings that a device runs at once; 0: all; a CPU runs one by one
    sweep: tuple[str, ...] = ()  # float fields to sweep, as lr=1e-4,3e-4 or lr=log:1e-5:1e-3:8
    sweep_random: int = 0  # number of random points of the sweep; 0: the whole grid
    out: str = ""  # run folder; default: the next free runs/NAME-1, runs/NAME-2, ...
    resume: bool = False  # continue the run in --out
    log_interval: int = 10  # cycles between rows of logs.csv
    checkpoint_interval: int = 250  # cycles between checkpoints
    archive_interval: int = 0  # cycles between archived checkpoint_<cycle>.msgpack; 0: none
    plot_interval: int = 500  # cycles between pictures; 0: only at the end
    devices: int = 0  # devices (on a CPU: cores) to use; 0: as many as can get equal parts
    shard: Literal["", "seeds", "levels"] = ""  # what devices share; "": whichever uses more
    distributed: str = ""  # several processes: auto (JAX finds them) or HOST:PORT,PROCESSES,NUMBER
    track: Literal["", "wandb", "trackio"] = ""  # log there, too; WANDB_PROJECT, WANDB_NAME: names


FAST = Config(  # ten minutes on one core of a CPU
    lr=2e-3, anneal_lr=True, num_updates=4_700, update_epochs=2, num_minibatches=2,
    bptt_horizon=64, gamma=0.999, vf_coef=2.0, clip_vloss=False, max_grad_norm=1.5,
    polyak_averaging=True, hidden_size=64)  # fmt: skip
PRESETS = {"--fast": FAST}  # flag: its preset; other flags then override single fields


class Transition(NamedTuple):
    obs: NamedTuple  # o_t, any tree of arrays
    is_first: jax.Array  # bool, whether o_t is an episode's first
    action: jax.Array  # a_t
    log_prob: jax.Array  # log pi(a_t | o_<=t)
    value: jax.Array  # V(o_<=t)
    reward: jax.Array  # r_t
    done: jax.Array  # bool, whether a_t ended the episode
    memory: tuple = ()  # the core's state before each chunk of bptt_horizon steps, [chunks, B, ...]


class Agent(NamedTuple):
    params: dict
    opt_state: tuple
    average_params: dict | None = None  # with polyak_averaging: the parameters to evaluate


class RunnerState(struct.PyTreeNode):
    """The state of a training between two cycles."""

    rng: jax.Array  # the seed's key; cycle i uses fold_in(rng, i)
    cycles: jax.Array  # [] cycles done
    student: Agent


# --- network


def on_gpu():
    """Whether a GPU runs this. Its time depends on the number of kernels, a CPU's on arithmetic
    and memory: scans, projections and sums over time have a form for each, with one result."""
    return jax.default_backend() != "cpu"


def scan(step, carry, xs, reverse=False, unroll=8):
    """jax.lax.scan, on a GPU unrolled: fewer CUDA graphs; an LSTM's short steps compile fast."""
    return jax.lax.scan(step, carry, xs, reverse=reverse, unroll=unroll if on_gpu() else 1)


@jax.custom_vjp
def lstm(carry, x, is_first, w, b):
    """LSTM (Hochreiter 1997): x [T, B, I], w [4H, I + H], b [4H] -> carry, h [T, B, H]. Inputs may
    also be projected already: x [T, B, 4H], w [4H, H]. Each step computes the same as flax's
        carry, h[t] = nn.LSTMCell(H)(carry, x[t])        with carry zero where is_first[t].
    On a CPU w @ [x; h] with units first, [I + H, B], is twice as fast as the transposed product.
    The gradient, also the same, is written by hand: dw is one large product, not a sum over T."""
    return lstm_forward(carry, x, is_first, w, b)[0]


def lstm_forward(carry, x, is_first, w, b):
    def step(carry, inputs):
        x, keep = inputs
        c, h = carry[0] * keep, carry[1]  # [H, B]; keep: 0 where o_t opens an episode, else 1
        z = w @ h * keep + x.T if projected else w @ jnp.concatenate([x.T, h * keep])
        i, f, g, o = jnp.split(z + b[:, None], 4)
        i, f, g, o = nn.sigmoid(i), nn.sigmoid(f), jnp.tanh(g), nn.sigmoid(o)
        c_next = f * c + i * g
        h_next = o * jnp.tanh(c_next)
        saved = i, f, g, o, c
        return (c_next, h_next), (h_next.T, jnp.stack(saved) if on_gpu() else saved)

    projected, keep = w.shape[1] == carry[1].shape[1], 1.0 - is_first[:, None]
    (c, h), (hs, saved) = scan(step, (carry[0].T, carry[1].T), (x, keep), unroll=16)
    return ((c.T, h.T), hs), (x, carry[1], hs, saved, keep, w)


def lstm_backward(residuals, gradients):
    def step(d_carry, inputs):
        d_h, (i, f, g, o, c), keep = inputs
        d_h, tanh_c = d_carry[1] + d_h.T, jnp.tanh(f * c + i * g)
        d_c = d_carry[0] + d_h * o * (1 - tanh_c**2)
        d_gates = d_c * g, d_c * c, d_c * i, d_h * tanh_c
        slopes = i * (1 - i), f * (1 - f), 1 - g**2, o * (1 - o)
        d_z, d_c = jnp.concatenate([x * y for x, y in zip(d_gates, slopes)]), d_c * f
        d_x, d_h = jnp.split(w.T @ d_z, [w.shape[1] - len(c)])
        return (d_c * keep, d_h * keep), (d_z.T, d_z.T if projected else d_x.T)

    (x, h_0, hs, saved, keep, w), ((d_c, d_h), d_hs) = residuals, gradients
    projected, inputs = w.shape[1] == h_0.shape[1], (d_hs, saved, keep)
    (d_c, d_h), (d_z, d_x) = scan(step, (d_c.T, d_h.T), inputs, reverse=True, unroll=16)
    h = jnp.concatenate([h_0[None], hs[:-1]]) * keep.swapaxes(1, 2)  # h before each step
    xh = h if projected else jnp.concatenate([x, h], axis=-1)
    flat = lambda x: x.reshape(-1, x.shape[-1])  # [T * B, ...]
    # the barrier keeps XLA from transposing the product, which would take longer
    d_w = jax.lax.optimization_barrier(flat(xh).T @ flat(d_z)).T
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

    return scan(step, carry, (x + b, 1.0 - is_first[..., None]))


class GatedCore(nn.Module):
    """LSTM, GRU or none (y = x): carry, x [T, B, I], is_first [T, B] -> carry, y [T, B, H]."""

    rnn: str
    size: int

    def initial_carry(self, batch):
        h = jnp.zeros((batch, self.size))
        return {"lstm": (h, h), "gru": h, "none": ()}[self.rnn]

    @nn.compact
    def __call__(self, carry, x, is_first):
        if self.rnn == "none":
            return carry, x
        core, gates = {"lstm": (lstm, 4), "gru": (gru, 3)}[self.rnn]
        project = self.rnn == "gru" or x.shape[-1] > gates * self.size  # a teacher's are wide
        if project:  # project all steps in one product; for the barrier see lstm_backward
            x = nn.Dense(gates * self.size, use_bias=False)(x)
            x = jax.lax.optimization_barrier(x)

        def kernel(rng):  # [gates * H, I + H]; the columns for h are orthogonal, gate by gate
            rng, *rngs = jax.random.split(rng, 1 + gates)
            w_h = jnp.vstack([orthogonal(1.0)(rng, (self.size, self.size)) for rng in rngs])
            lecun_normal = nn.initializers.lecun_normal(in_axis=1, out_axis=0)
            w_x = [] if project else [lecun_normal(rng, (gates * self.size, x.shape[-1]))]
            return jnp.hstack([*w_x, w_h])

        bias = self.param("bias", nn.initializers.zeros, gates * self.size)
        w = self.param("kernel", kernel)
        if self.rnn == "lstm" and not project and len(x) > 1 and on_gpu():  # one product, too
            w_x, w = jnp.split(w, [x.shape[-1]], axis=1)
            x = x @ w_x.T
        return core(carry, x, is_first, w, bias)


def orthogonal(scale):
    """flax's initialiser, for one seed after the other: on a CPU, a QR decomposition that is
    batched over seeds can block jaxlib's threads for ever."""
    draw, in_turn = nn.initializers.orthogonal(scale), jax.custom_batching.sequential_vmap
    return lambda rng, shape, dtype=None: in_turn(partial(draw, shape=shape))(rng)


def make_core(rnn, size, s5_layers, s5_norm):
    if rnn == "s5":
        return S5(d_model=size, ssm_size=max(size // 4 * 4, 4), n_layers=s5_layers, norm=s5_norm)
    return GatedCore(rnn, size)


class Embed(nn.Embed):
    """nn.Embed by one-hot vectors: its usual gradient, a scatter, may vary between GPU runs."""

    def __call__(self, x):
        return (nn.one_hot(x, self.num_embeddings)[..., None] * self.embedding).sum(-2)


def convolution(image, filters):
    """3 x 3 convolution and ReLU: image [..., h, w, 3] -> [..., (h - 2) * (w - 2) * filters].
    It is written as a matrix product, which stays one when it is vmapped over seeds."""
    *batch, height, width, _ = image.shape
    patches = [image[..., i : height - 2 + i, j : width - 2 + j, :] for i, j in np.ndindex(3, 3)]
    # 10 is MiniGrid's highest index, the agent's; minimax and JaxUED divide by it, too
    patches = jnp.concatenate(patches, axis=-1) / 10.0  # [..., h - 2, w - 2, 27]
    x = nn.Dense(filters, kernel_init=orthogonal(2**0.5), name="conv")(patches)
    return nn.relu(x).reshape(*batch, -1)


class ActorCritic(nn.Module):
    """The student: carry, obs, is_first [T, B] -> carry, policy, V [T, B]; to act, T = 1."""

    core: nn.Module

    @nn.compact
    def __call__(self, carry, obs, is_first):
        direction = Embed(4, 5, embedding_init=orthogonal(1.0))(obs.direction)
        x = jnp.concatenate([convolution(obs.image, 16), direction], axis=-1)  # [T, B, 149]
        carry, x = self.core(carry, x, is_first)
        hidden = lambda: jnp.tanh(nn.Dense(32, kernel_init=orthogonal(2**0.5))(x))
        logits = nn.Dense(amaze.NUM_ACTIONS, kernel_init=orthogonal(0.01))(hidden())
        value = nn.Dense(1, kernel_init=orthogonal(1.0))(hidden())
        return carry, distrax.Categorical(logits), value[..., 0]


# --- pure functions


def discounted_sums(x, discount):
    """y_t = x_t + discount_t y_{t+1}, [T, B]; on a GPU by doubling, in log2(T) passes."""
    if not on_gpu():
        back = lambda y, inputs: (inputs[0] + inputs[1] * y,) * 2
        return jax.lax.scan(back, jnp.zeros_like(x[0]), (x, discount), reverse=True)[1]
    later = lambda x, n: jnp.pad(x[n:], [(0, n), (0, 0)])
    for n in [2**i for i in range((len(x) - 1).bit_length())]:  # y_t sums 1, 2, 4, ... terms
        x, discount = x + discount * later(x, n), discount * later(discount, n)
    return x


def gae(batch, last_value, gamma, gae_lambda):
    """Advantages [T, B]: A_t = delta_t + gamma lambda (1 - d_t) A_{t+1} (1506.02438, eq. 16)."""
    keep, next_value = 1.0 - batch.done, jnp.concatenate([batch.value[1:], last_value[None]])
    delta = batch.reward + gamma * next_value * keep - batch.value
    return discounted_sums(delta, gamma * gae_lambda * keep)


def first_episodes(reward, done):
    """Return and length of each trajectory's first episode in a batch [T, B], and whether it ended,
    [B]. Statistics leave out later episodes: mostly the short, solved ones end within T steps."""
    playing = jnp.cumsum(done, axis=0) - done == 0  # [T, B]
    return (reward * playing).sum(0), playing.sum(0), done.any(0)


def episode_stats(returns, lengths, ended, where=True):
    """Means over the first episodes that ended, of the trajectories `where` [B]; NaN if none."""
    stats = {"return": returns, "solve_rate": amaze.solved(returns), "episode_length": lengths}
    return {name: jnp.mean(x, where=ended & where) for name, x in stats.items()}


def make_train(config, devices=1):
    """Return train(rng) -> (RunnerState, metrics), a whole training. Its parts: train.init(rng),
    train.update(state, cycles) and train.show(state) -> the present levels. evaluate.py plays
    with train.act, train.initial_carry, train.reset and train.step.
    devices: number of devices, on the mesh axis "devices", that share this training."""
    check(config)
    room = config.height * config.width - 2  # agent and goal need a cell each
    demand(config.n_walls <= room, config, "n_walls height width", f"at most {room} walls")
    trajectories = config.num_envs * config.num_evals  # B
    deals = trajectories % config.num_minibatches == 0
    demand(deals, config, "num_minibatches num_envs num_evals", f"a divisor of {trajectories}")
    horizon = config.bptt_horizon or config.num_steps
    deals = config.num_steps % horizon == 0
    demand(deals, config, "bptt_horizon num_steps", "a divisor of num_steps")
    core = make_core(config.rnn, config.hidden_size, config.s5_layers, config.s5_norm)
    network = ActorCritic(core)
    mazes = maze_names(config.eval_suite)
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    optimiser = lambda lr: optax.chain(clip, optax.adam(lr, eps=1e-5))
    level_stats = jax.vmap(lambda level: amaze.level_stats(level, config.max_steps))

    def init(rng):
        rng, rng_student = jax.random.split(rng)
        obs = jax.tree.map(lambda x: x[None, None], reset(sample_levels(rng))[0])
        params = network.init(rng_student, core.initial_carry(1), obs, jnp.zeros((1, 1), bool))
        student = Agent(params, optimiser(0.0).init(params))  # the same for any lr
        student = student._replace(average_params=params if config.polyak_averaging else None)
        return RunnerState(rng, jnp.zeros((), int), student)

    # Each of several devices plays its part of the trajectories and learns from its part of a
    # minibatch. All else (levels, keys, scores, statistics) every device computes for itself.

    def my_part(x):
        """This device's part of an array [B, ...]."""
        parts = x.reshape(devices, -1, *x.shape[1:])
        return parts[jax.lax.axis_index("devices") if devices > 1 else 0]

    def whole(tree, axis):
        """The whole arrays, put together from the parts on the devices."""
        return jax.lax.all_gather(tree, "devices", axis=axis, tiled=True) if devices > 1 else tree

    average = lambda tree: jax.lax.pmean(tree, "devices") if devices > 1 else tree

    def reset(level, max_steps=config.max_steps, see_through_walls=config.see_through_walls):
        """o_0 and state at the start of a level or of a queue of levels [Q, ...]."""
        return amaze.reset(level, max_steps, see_through_walls)

    def step(state, action, restart=False):
        """-> o_{t+1}, state, r_t, d_t; restart: on done, o and state are the next episode's."""
        return (amaze.step_and_reset if restart else amaze.step)(state, action)

    def sample_levels(rng, *shape):
        """Random levels [*shape]."""
        draw = lambda rng: amaze.sample_level(rng, config.n_walls, config.height, config.width)
        if config.solvable_only:
            draw = partial(amaze.sample_solvable, sample=draw)
        levels = jax.vmap(draw)(jax.random.split(rng, math.prod(shape)))
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), levels)

    def act(params, carry, obs, is_first, noise):
        """B students act -> carry, a_t, log pi(a_t), V. Gumbel noise makes the argmax a sample."""
        inputs = jax.tree.map(lambda x: x[None], (obs, is_first))
        carry, policy, value = network.apply(params, carry, *inputs)
        action = jnp.argmax(policy.logits + noise, axis=-1)
        log_prob = jnp.take_along_axis(policy.logits, action[..., None], axis=-1)  # one kernel less
        return carry, action[0], log_prob[0, :, 0], value[0]

    def rollout(rng, params, queue):
        """T steps of E trajectories on each of N queues of levels [N, Q] -> batch [T, B], V(o_T)
        [B]. Episode k of trajectory b plays the level queue[b // E, k % Q]."""
        queue = jax.tree.map(lambda x: jnp.repeat(x, config.num_evals, axis=0), queue)
        shape = config.num_steps + 1, len(jax.tree.leaves(queue)[0]), amaze.NUM_ACTIONS
        noise = jax.vmap(my_part)(jax.random.gumbel(rng, shape))  # all at once is faster
        obs, state = jax.vmap(reset)(jax.tree.map(my_part, queue))

        def play_step(carry, noise):
            memory, obs, state, is_first = carry
            memory, action, log_prob, value = act(params, memory, obs, is_first, noise)
            next_obs, state, reward, done = jax.vmap(partial(step, restart=True))(state, action)
            transition = Transition(obs, is_first, action, log_prob, value, reward, done)
            return (memory, next_obs, state, done), transition

        def play_chunk(carry, noise):
            memory = jax.tree.map(lambda x: x[None], carry[0])
            carry, batch = scan(play_step, carry, noise)
            return carry, batch._replace(memory=memory)

        number = noise.shape[1]  # trajectories on this device
        carry = core.initial_carry(number), obs, state, jnp.ones(number, bool)
        chunks = noise[:-1].reshape(-1, horizon, *noise.shape[1:])
        (memory, obs, _, is_first), batch = jax.lax.scan(play_chunk, carry, chunks)
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)  # [T, B, ...]
        last_value = act(params, memory, obs, is_first, noise[-1])[3]
        return whole(batch, axis=1), whole(last_value, axis=0)

    def loss(params, batch, advantage, target):
        """PPO's clipped objective (1707.06347, eq. 7 and 9), with clip_vloss also for the value."""
        carry = jax.tree.map(lambda x: x[0], batch.memory)
        _, policy, value = network.apply(params, carry, batch.obs, batch.is_first)
        log_ratio = policy.log_prob(batch.action) - batch.log_prob
        ratio = jnp.exp(log_ratio)
        near = lambda x, center: center + jnp.clip(x - center, -config.clip_eps, config.clip_eps)
        gain = jnp.minimum(ratio * advantage, near(ratio, 1) * advantage)
        error = (value - target) ** 2
        if config.clip_vloss:
            error = jnp.maximum(error, (near(value, batch.value) - target) ** 2)
        metrics = {
            "policy_loss": -gain.mean(),
            "value_loss": 0.5 * error.mean(),
            "entropy": policy.entropy().mean(),
            "approx_kl": (ratio - 1 - log_ratio).mean(),
            "clip_fraction": (jnp.abs(ratio - 1) > config.clip_eps).mean(),
        }
        total_loss = metrics["policy_loss"] + config.vf_coef * metrics["value_loss"]
        total_loss -= config.ent_coef * metrics["entropy"]
        return total_loss, metrics | {"total_loss": total_loss}

    def learn(rng, student, lr, batch, last_value):
        """update_epochs passes of PPO over the batch [T, B] -> student, metrics."""
        advantage = gae(batch, last_value, config.gamma, config.gae_lambda)
        target = advantage + batch.value
        # chunks become trajectories: [horizon, chunks * B, ...]; memory [1, chunks * B, ...]
        chunks = len(advantage) // horizon
        split = lambda x: x.reshape(chunks, -1, *x.shape[1:]).swapaxes(0, 1)
        chop = lambda x: split(x).reshape(len(x) // chunks, -1, *x.shape[2:])
        batch, advantage, target = jax.tree.map(chop, (batch, advantage, target))

        def minibatch(student, columns):
            mean, std = advantage[:, columns].mean(), advantage[:, columns].std()
            data = batch, (advantage - mean) / (std + 1e-5), target
            data = jax.tree.map(lambda x: x[:, my_part(columns)], data)
            grads, metrics = average(jax.grad(loss, has_aux=True)(student.params, *data))
            changes, opt_state = optimiser(lr).update(grads, student.opt_state, student.params)
            params = optax.apply_updates(student.params, changes)
            student = student._replace(params=params, opt_state=opt_state)
            return student, metrics | {"grad_norm": optax.global_norm(grads)}

        rngs = jax.random.split(rng, config.update_epochs)
        order = jax.vmap(lambda rng: jax.random.permutation(rng, advantage.shape[1]))(rngs)
        order = order.reshape(config.update_epochs * config.num_minibatches, -1)
        student, metrics = jax.lax.scan(minibatch, student, order)
        if student.average_params is not None:  # favours late ones: 1212.1824, section 4
            ppo_updates = optax.tree_utils.tree_get(student.opt_state, "count") / len(order)
            new, old = student.params, student.average_params
            average_params = optax.incremental_update(new, old, 4 / (ppo_updates + 3))
            student = student._replace(average_params=average_params)
        metrics["param_norm"] = optax.global_norm(student.params)
        metrics["explained_variance"] = 1 - advantage.var() / jnp.maximum(target.var(), 1e-8)
        # in metrics NaN means "not measured", so any value that is not finite becomes inf
        finite = lambda x: jnp.where(jnp.isfinite(x), x, jnp.inf)
        return student, {name: finite(x.mean()) for name, x in metrics.items()}

    def play(rng, params, levels, *rules):
        """One episode on each level [B] -> returns and lengths [B]."""
        obs, state = jax.vmap(reset)(levels, *rules)
        number = len(jax.tree.leaves(levels)[0])

        def play_step(t, memory, obs, state, playing, returns, lengths):
            noise = jax.random.gumbel(jax.random.fold_in(rng, t), (number, amaze.NUM_ACTIONS))
            is_first = jnp.full(number, t == 0)
            memory, action, _, _ = act(params, memory, obs, is_first, noise)
            obs, state, reward, done = jax.vmap(step)(state, action)
            returns, lengths = returns + reward * playing, lengths + playing
            episodes = dict(playing=playing & ~done, returns=returns, lengths=lengths)
            return dict(t=t + 1, memory=memory, obs=obs, state=state) | episodes

        carry = dict(t=0, memory=core.initial_carry(number), obs=obs, state=state)
        zeros = dict(returns=jnp.zeros(number), lengths=jnp.zeros(number, int))
        carry |= zeros | dict(playing=jnp.ones(number, bool))
        unfinished = lambda carry: carry["playing"].any()
        carry = jax.lax.while_loop(unfinished, lambda carry: play_step(**carry), carry)
        return carry["returns"], carry["lengths"]

    def evaluate(rng, student):
        """-> the same student, its solve rate and return on each test maze, and their means."""
        rng_mazes, rng_play = jax.random.split(rng)
        levels = amaze.sample_mazes(rng_mazes, mazes, config.eval_episodes)
        params = student.average_params or student.params
        returns = play(rng_play, params, *levels)[0].reshape(len(mazes), -1)
        solve_rate = amaze.solved(returns).mean(1)
        scores = {"eval_solve_rate": solve_rate, "eval_return": returns.mean(1)}
        each = {f"{k}/{m}": x[i] for k, x in scores.items() for i, m in enumerate(mazes)}
        return student, each | {name: score.mean() for name, score in scores.items()}

    def skip(function, rng, state, *args):
        """Replace function(rng, state, ...) -> state, metrics: the same state, metrics NaN."""
        shapes = jax.eval_shape(function, rng, state, *args)[1]
        return state, jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan), shapes)

    def cycle_rngs(state):
        """The random keys of a cycle: for levels, rollout, learning and evaluation."""
        return jax.random.split(jax.random.fold_in(state.rng, state.cycles), 4)

    def choose_levels(rng):
        """N queues [N, Q] of random levels; trajectories start with the first level of a queue."""
        following = 1 if config.auto_replay else max(config.num_steps // 4, 1)
        return sample_levels(rng, config.num_envs, following)

    def cycle(state, _):
        rng_levels, rng_rollout, rng_learn, rng_eval = cycle_rngs(state)
        cycles = state.cycles + 1  # including this one
        lr = config.lr * (1 - state.cycles / config.num_updates if config.anneal_lr else 1.0)

        # 1. CHOOSE LEVELS
        queue = choose_levels(rng_levels)

        # 2. ROLL OUT
        batch, last_value = rollout(rng_rollout, state.student.params, queue)

        # 3. LEARN
        student, metrics = learn(rng_learn, state.student, lr, batch, last_value)

        # 4. LOG AND EVALUATE
        # the command line needs the first two: PPO updates and rollouts (N * E * T steps) so far
        metrics |= {"grad_updates": cycles, "rollouts": cycles, "current_lr": lr}
        episode = first_episodes(batch.reward, batch.done)
        metrics |= {f"train_{name}": x for name, x in episode_stats(*episode).items()}
        levels = jax.tree.map(lambda x: x[:, 0], queue)
        metrics |= {k: jnp.nanmean(x) for k, x in level_stats(levels).items()}
        if config.eval_interval:
            due = (cycles % config.eval_interval == 0) | (cycles == config.num_updates)
            metrics |= jax.lax.cond(due, evaluate, partial(skip, evaluate), rng_eval, student)[1]
        return state.replace(cycles=cycles, student=student), metrics

    def update(state, cycles):
        """Train for so many cycles -> RunnerState, metrics {name: [cycles]}."""
        return jax.lax.scan(cycle, state, None, length=cycles)

    def show(state):
        """The levels that the next cycle starts with: {title: (levels, captions)}."""
        levels = jax.tree.map(lambda x: x[:, 0], choose_levels(cycle_rngs(state)[0]))
        return {"random levels": (levels, level_stats(levels))}

    def train(rng):
        return update(init(rng), config.num_updates)

    train.init, train.update, train.show = init, update, show
    train.act, train.initial_carry = act, core.initial_carry
    train.reset, train.step = reset, step
    train.parts = locals()  # for tests
    return train


# --- command line
# The same in all five files. A row is one training: a seed and swept values. States are [R, ...].

SCRIPT = Path(__file__).name
TYPES = get_type_hints(Config)  # field -> type
FLOATS = [name for name, kind in TYPES.items() if kind is float]
MAY_CHANGE = """resume out devices shard seeds_at_once distributed track checkpoint_interval
    archive_interval plot_interval""".split()  # when a run is resumed
OTHER_NAMES = {  # field: what minimax, JaxUED, dcd, PureJaxRL and CleanRL call it
    "lr": "learning_rate",
    "num_updates": "n_total_updates total_timesteps num_env_steps",
    "num_envs": "n_parallel num_train_envs num_processes",
    "num_evals": "n_eval",
    "num_steps": "n_rollout_steps",
    "update_epochs": "ppo_n_epochs ppo_epoch epoch_ppo",
    "num_minibatches": "ppo_n_minibatches num_mini_batch",
    "gamma": "discount discount_factor",
    "clip_eps": "clip_coef ppo_clip_eps",
    "ent_coef": "entropy_coef entropy_coeff student_entropy_coef",
    "vf_coef": "value_loss_coef student_value_loss_coef critic_coeff",
    "rnn": "student_recurrent_arch recurrent_arch",
    "hidden_size": "student_recurrent_hidden_dim recurrent_hidden_dim",
    "max_steps": "max_episode_steps",
    "num_edits": "n_edits",
    "score": "ued_score score_function level_replay_strategy",
    "buffer_size": "level_buffer_capacity plr_buffer_size level_replay_seed_buffer_size",
    "min_fill": "minimum_fill_ratio plr_minimum_fill_ratio level_replay_rho",
    "replay_prob": "plr_replay_prob level_replay_prob",
    "temperature": "temp plr_temp level_replay_temperature",
    "staleness_coef": "staleness_coeff plr_staleness_coef",
    "eval_suite": "eval_levels test_env_names",
    "eval_interval": "eval_freq test_interval",
    "eval_episodes": "eval_num_attempts test_n_episodes",
    "checkpoint_interval": "checkpoint_save_interval",
    "seeds": "num_seeds n_seeds",
    "devices": "n_devices",
    "out": "log_dir",
}
COUNTERS = ("grad_updates", "rollouts")  # metrics that logs.csv needs
PROGRESS = ("cycles", "seconds", "log_bytes", "log_checksum", "where")  # these change in a run
CURVES = ("train_solve_rate", "eval_solve_rate")  # what curves.png and the progress bar show
HELP = f"""{", ".join(PRESETS)}: preset values, listed in {SCRIPT}; other flags override them.
Compiled programs are kept in ~/.cache/amaze, which may be deleted. On a GPU matrix products are
TF32; JAX_DEFAULT_MATMUL_PRECISION=highest makes them float32."""
FORMAT = b"amaze checkpoint 1 "  # a checkpoint's first bytes; next is the checksum of its body
BEGUN = {"config.json", "levels", "lock", "logs.csv", "wandb"}  # made before training
MOST = 2**16  # trainings in one run
gather = partial(multihost_utils.process_allgather, tiled=True)  # whole arrays, in every process
NUMBER = (int, float, np.integer, np.floating, jax.Array)


def maze_names(suite):
    """The mazes of a suite, or those of a comma-separated list."""
    return amaze.SUITES.get(suite, list(dict.fromkeys(suite.split(","))))


def is_installed(package):
    """Whether a package can be imported; a folder of its name beside the script does not count."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


TYPE_RULES = {  # to Python a bool is an int, too
    bool: ("True or False", lambda x: isinstance(x, bool | np.bool_)),
    int: ("an int", lambda x: isinstance(x, int | np.integer) and type(x) is not bool),
    float: ("a number", lambda x: isinstance(x, NUMBER) and type(x) is not bool and not np.ndim(x)),
    str: ("a string", lambda x: isinstance(x, str)),
    tuple[str, ...]: ("a tuple of str", lambda x: type(x) is tuple and set(map(type, x)) <= {str}),
}
RULES = (  # what is allowed, its test, the fields that it is for, teacher_ fields included
    ("at least 0", lambda x: x >= 0, """lr ent_coef vf_coef bptt_horizon n_walls num_edits seed
        eval_interval seeds_at_once sweep_random devices archive_interval plot_interval
        candidate_steps"""),
    ("finite", np.isfinite, "lr ent_coef vf_coef"),
    ("at least 1", lambda x: x >= 1, """num_updates num_envs num_evals num_steps update_epochs
        num_minibatches s5_layers max_steps num_students filters buffer_size score_interval
        candidates_at_once eval_episodes log_interval checkpoint_interval"""),
    ("from 1 to 2,048", lambda x: 1 <= x <= 2048, "hidden_size"),
    (f"from 1 to {MOST:,}", lambda x: 1 <= x <= MOST, "seeds"),
    ("from 2 to 128", lambda x: 2 <= x <= 128, "height width candidate_evals"),
    ("above 0", lambda x: x > 0, "clip_eps max_grad_norm temperature"),
    ("from 0 to 1", lambda x: 0 <= x <= 1, "gamma gae_lambda replay_prob staleness_coef min_fill"),
    ("False: amaze has no sample_solvable",
        lambda x: not x or hasattr(amaze, "sample_solvable"), "solvable_only"),
    ("an installed tracker: pip install wandb, pip install trackio",
        lambda x: x == "" or is_installed(x), "track"),
    (f"a suite ({', '.join(amaze.SUITES)}) or mazes ({', '.join(amaze.TEST_MAZES)})",
        lambda x: set(maze_names(x)) <= set(amaze.TEST_MAZES), "eval_suite"),
)  # fmt: skip


class BadConfig(ValueError):
    """In one line: the fields that are wrong, their values and what is allowed."""


def demand(condition, config, names, allowed):
    """Raise BadConfig about these fields, unless the condition holds."""
    if not condition:
        values = ", ".join(f"{name} = {getattr(config, name)!r}" for name in names.split())
        raise BadConfig(f"{values}: allowed is {allowed}")


def check(config):
    """Raise BadConfig at the first value of a wrong type or size. NumPy's scalars are allowed as
    numbers; a float may be traced."""
    for name, why in {"jax_enable_x64": "programs use 32-bit numbers",
                      "jax_debug_nans": "a metric of NaN means not measured"}.items():  # fmt: skip
        if getattr(jax.config, name):
            raise BadConfig(f"{name.upper()} = True: allowed is False; {why}")
    for name, kind in TYPES.items():
        value = getattr(config, name)
        if isinstance(value, jax.core.Tracer):
            is_static = kind in (bool, int, str) or get_origin(kind) is Literal
            demand(not is_static, config, name, "a static value: each needs its own program")
            continue
        if get_origin(kind) is Literal:
            allowed = " | ".join(get_args(kind))
            demand(type(value) is str and value in get_args(kind), config, name, allowed)
        elif kind in TYPE_RULES:
            allowed, test = TYPE_RULES[kind]
            demand(test(value), config, name, allowed)
        if isinstance(value, jax.Array):
            value = np.asarray(value)  # inside jit a comparison of it would be traced
        demand(kind is not int or abs(value) < 2**31, config, name, "a 32-bit int")
        for allowed, test, names in RULES:
            if name.removeprefix("teacher_") in names.split():
                demand(test(value), config, name, allowed)


def read_sweep(text):
    """Read log:0.01:0.1:8 as (values, ends of their range), and 0.1,0.2 as (values, None)."""
    if not text.startswith("log:"):
        return [float(x) for x in text.split(",")], None
    low, high, number = text.removeprefix("log:").split(":")
    ends = float(low), float(high)
    if not (0 < min(ends) and max(ends) < np.inf and int(number) > 0):
        raise ValueError(text)
    values = np.geomspace(*ends, min(int(number), MOST + 1)).tolist()
    return values, (min(ends), max(ends))


def random_points(config, grid, ranges):
    """sweep_random random points: log-uniform in the ranges, or distinct points of the grid."""
    rng, number = np.random.default_rng(config.seed), config.sweep_random
    if set(ranges.values()) == {None}:
        points = list(dict.fromkeys(itertools.product(*grid.values())))
        return [points[i] for i in rng.permutation(len(points))[:number]]
    columns = []
    for name, values in grid.items():
        if ranges[name] is None:
            columns.append(rng.choice(values, number))
        else:
            columns.append(np.exp(rng.uniform(*np.log(ranges[name]), number)))
    return [tuple(point) for point in np.transpose(columns).tolist()]


def make_rows(config):
    """The rows, one for each training: a dict of its seed and swept floats. Every point of a sweep
    is trained with every seed; points are the whole grid, or sweep_random random ones."""
    check(config)
    grid, ranges = {}, {}
    for sweep in config.sweep:
        name, _, text = sweep.partition("=")
        allowed = f"NAME=..., NAME a float: {', '.join(FLOATS)}, each once; not {name!r} (else"
        is_new = name in FLOATS and name not in grid
        demand(is_new, config, "sweep", f"{allowed} a run for each value)")
        try:
            grid[name], ranges[name] = read_sweep(text)
        except ValueError:
            allowed = f"{name}=0.1,0.2 or {name}=log:0.01:0.1:8, not {text!r}"
            demand(False, config, "sweep", allowed)
    has_points = len(grid) > 0 or config.sweep_random == 0
    demand(has_points, config, "sweep_random", "0 without --sweep")
    trainings = config.seeds * math.prod(map(len, grid.values()))
    demand(trainings <= MOST, config, "sweep seeds", f"at most {MOST:,} trainings")
    if config.sweep_random > 0:
        points = random_points(config, grid, ranges)
    else:
        points = itertools.product(*grid.values())
    points = [dict(zip(grid, point)) for point in dict.fromkeys(points)]
    for point in points:
        check(replace(config, **point))
    seeds = [int(config.seed) + i for i in range(config.seeds)]
    return [{"seed": seed} | point for point in points for seed in seeds]


def choose_devices(config, num_rows):
    """The devices to use, as many as can get equal parts, and what they share: seeds or levels."""
    here = jax.devices()
    levels = config.num_envs // config.num_minibatches
    trajectories = config.num_envs * config.num_evals // config.num_minibatches
    parts = {"seeds": num_rows, "levels": math.gcd(trajectories, levels)}
    numbers = range(1, len(here) + 1) if jax.process_count() == 1 else [len(here)]
    numbers = [n for n in numbers if config.devices in (0, n)]
    most = lambda shard: max((n for n in numbers if parts[shard] % n == 0), default=0)
    shard = max(parts, key=most) if config.shard == "" else config.shard
    allowed = "a divisor of {seeds} (seeds) or {levels} (levels), at most {}; --distributed: all"
    demand(most(shard) > 0, config, "devices", allowed.format(len(here), **parts))
    return here[: most(shard)], shard


def make_programs(config, num_rows, devices, shard):
    """init, update(n) and show for all rows: cycles, rows [R], states [R, ...] -> states, shown."""
    split = shard == "levels"  # each device has all rows, and a part of their levels
    spec = P() if split else P("devices")
    sharding = NamedSharding(Mesh(devices, ("devices",)), spec)
    here = num_rows if split else num_rows // len(devices)  # rows on a device
    at_once = here if config.seeds_at_once == 0 else min(config.seeds_at_once, here)
    demand(here % at_once == 0, config, "seeds_at_once", f"a divisor of {here}")
    if devices[0].platform == "cpu":
        at_once = None  # one row after the other is faster there

    def program(function, **options):
        def of_row(cycles, row, state):
            swept = {name: value for name, value in row.items() if name != "seed"}
            train = make_train(replace(config, **swept), len(devices) if split else 1)
            if state is not None:  # cycles are the same for all rows: lax.cond stays a branch
                state = state.replace(cycles=cycles, rng=jax.random.wrap_key_data(state.rng))
            state, shown = function(train, row["seed"], state)
            if state is not None:
                state = state.replace(cycles=None, rng=jax.random.key_data(state.rng))
            return state, shown

        def of_rows(cycles, *inputs):
            return jax.lax.map(lambda x: of_row(cycles, *x), inputs, batch_size=at_once)

        specs = dict(in_specs=(P(), spec, spec), out_specs=spec, check_vma=False)
        sharded = jax.shard_map(of_rows, mesh=sharding.mesh, **specs)
        return jax.jit(sharded, out_shardings=sharding, **options)

    init = program(lambda train, seed, _: (train.init(jax.random.key(seed)), ()))
    show = program(lambda train, _, state: (None, train.show(state)))
    update = cache(lambda n: program(lambda train, _, x: train.update(x, n), donate_argnums=2))
    return init, update, show, sharding


class Speech:
    """stdout or stderr (None if closed), whose failing writes do not stop a training."""

    def __init__(self, stream):
        self.stream = open(os.devnull, "w") if stream is None else stream
        if hasattr(self.stream, "reconfigure"):  # not in a notebook
            self.stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # a closed pipe, a full disk
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def printable(text):
    """The text with ? for all characters that could control a terminal."""
    return "".join(x if x.isprintable() else "?" for x in text)


def say(line):
    """Print above the progress bar, in the first process only."""
    if jax.process_index() == 0:
        tqdm.write(printable(line))


# --- files: checked when they are read, replaced as a whole when they are written


def write(path, save):
    """Replace a file as a whole: save(file) writes a temporary one, which then takes its place."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:  # a new file, not a link
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def to_json(config):
    stored = {"script": SCRIPT} | asdict(replace(config, resume=False))
    return json.dumps(stored, indent=2, default=lambda number: number.item())


def fixed_fields(config):
    """The fields that must be the same on --resume."""
    stored = json.loads(to_json(config))
    return {name: x for name, x in stored.items() if name not in [*MAY_CHANGE, "num_updates"]}


def write_config(folder, config):
    write(folder / "config.json", lambda file: file.write(to_json(config).encode()))


def read_config(folder):
    """Read what write_config wrote: a dict of the script's name and its Config's fields."""
    path = folder / "config.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8-sig")) if path.is_file() else {}
        lists = {name: tuple(x) for name, x in stored.items() if isinstance(x, list)}
        return stored | lists | {"script": str(stored["script"])}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadConfig(f"{path} is missing or damaged: allowed is what a run wrote") from None


def write_checkpoint(path, data):
    """Write data, a tree of dicts, arrays and numbers; keep the previous checkpoint.msgpack."""
    if path.name == "checkpoint.msgpack":
        with suppress(OSError):  # there is none yet, or a file system without links
            path.with_stem("checkpoint_previous").unlink(missing_ok=True)
            os.link(path, path.with_stem("checkpoint_previous"))
    body = serialization.msgpack_serialize(data)
    checksum = hashlib.sha256(body).hexdigest().encode()
    write(path, lambda file: file.writelines([FORMAT, checksum, b"\n", body]))


def read_checkpoint(path):
    """Read what write_checkpoint wrote."""
    if not path.is_file():
        raise BadConfig(f"{path} is missing, or no file")
    head, _, body = path.read_bytes().partition(b"\n")
    if not head.startswith(FORMAT):
        raise BadConfig(f"{path} does not begin with {FORMAT.decode()!r}: another format, or none")
    if head != FORMAT + hashlib.sha256(body).hexdigest().encode():
        raise BadConfig(f"{path} is damaged: truncated or changed")
    try:
        return dict(serialization.msgpack_restore(body))
    except Exception:  # the parser may raise anything here
        raise BadConfig(f"{path} holds no checkpoint") from None


def outline(data):
    """A checkpoint as {place: value}, to compare two; for arrays the data type and shape."""

    def about(place, x):
        if place in PROGRESS:
            return type(x).__name__
        return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else repr(x)

    flat = traverse_util.flatten_dict(data, keep_empty_nodes=True)
    flat = {"/".join(map(str, place)): x for place, x in flat.items()}
    return {place: about(place, x) for place, x in flat.items()}


def new_checkpoint(config, rows, metrics, state, where):
    """The checkpoint of a new run: what never changes, the state's shapes, and PROGRESS."""
    for name in set(COUNTERS) - set(metrics):
        raise BadConfig(f"make_train's metrics: {name} is missing, which logs.csv needs")
    metrics = dict.fromkeys(metrics, "logged")
    new = {"config": fixed_fields(config), "rows": rows, "metrics": metrics, "state": state}
    progress = {"cycles": 0, "seconds": 0.0, "log_bytes": 0, "log_checksum": "", "where": where}
    return serialization.to_state_dict(new) | progress


def load_checkpoint(config, folder, new):
    """The last checkpoint, a dict, of a run to resume, or `new` if there is none. Raise BadConfig
    if it is of another run than `new`, or if logs.csv lacks the rows that it counts on."""
    path = folder / "checkpoint.msgpack"
    others = sorted(folder.glob("checkpoint_*.msgpack"), key=os.path.getmtime, reverse=True)
    if not config.resume or not (path.exists() or len(others) > 0):
        return new
    try:
        last = {name: new[name] for name in (*PROGRESS, "metrics")} | read_checkpoint(path)
        expected, found = outline(new), outline(last)
        for place in expected | found:
            there, wanted = found.get(place, "nothing"), expected.get(place, "nothing")
            if there != wanted:
                raise BadConfig(f"{path}: {place:.99} is {there:.99}, in this run {wanted:.99}")
        if not (0 <= last["cycles"] <= config.num_updates and last["log_bytes"] >= 0):
            raise BadConfig(f"{path}: {last['cycles']} cycles, {last['log_bytes']} bytes of rows")
        check_log(folder / "logs.csv", last)
    except BadConfig as error:
        names = " or ".join(other.name for other in others[:2])
        helps = f"; what helps: {names} in place of {path.name}" if len(others) > 0 else ""
        raise BadConfig(f"{error}{helps}") from None
    return last


def checksum_of(path, size):
    """The SHA-256 checksum of the first `size` bytes of a file."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(size)).hexdigest()


def check_log(path, last):
    """Raise BadConfig if logs.csv lacks rows of the checkpoint `last`, unless it is empty."""
    size, checksum = last["log_bytes"], last["log_checksum"]
    there = path.stat().st_size if path.is_file() else -1
    has_rows = size == 0 or (there >= size and checksum_of(path, size) == checksum)
    if there != 0 and not has_rows:
        allowed = f"all {size} bytes of them, or an empty file to go on without"
        raise BadConfig(f"{path} lacks the rows of this checkpoint: allowed are {allowed}")


def open_log(folder, log_bytes):
    """Open logs.csv, cut to the rows that the checkpoint counts on; only process 0 writes."""
    if jax.process_index() > 0:
        return open(os.devnull, "a")
    path = folder / "logs.csv"
    if path.is_file() and path.stat().st_size > log_bytes:
        os.truncate(path, log_bytes)
    return open(path, "a", buffering=1, newline="", encoding="utf-8")


def save_checkpoint(path, log, reached, state):
    """Write a checkpoint that records the size of logs.csv, so that both agree after a crash."""
    data = reached | serialization.to_state_dict({"state": gather(state)})
    if jax.process_index() == 0:
        os.fsync(log.fileno())  # before the checkpoint that counts on it
        checksum = checksum_of(log.name, log.tell())
        write_checkpoint(path, data | {"log_bytes": log.tell(), "log_checksum": checksum})


def make_folder(config):
    """Make --out, or the next of runs/NAME-1, runs/NAME-2, ... that is free. A new run's folder
    must be empty, or hold only what is left of a run that has trained nothing."""
    folder = Path(config.out)
    if jax.process_index() > 0:
        return folder
    if config.out == "":
        for folder in (Path(f"runs/{Path(SCRIPT).stem}-{i}") for i in itertools.count(1)):
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        demand(False, config, "out", f"a folder that can be made ({error.strerror})")
    for name in ("lock", "logs.csv", "levels"):
        demand(not (folder / name).is_symlink(), config, "out", f"a folder whose {name} is no link")
    log = folder / "logs.csv"
    has_rows = log.is_file() and log.read_bytes().count(b"\n") > 1
    is_new = {x.name for x in folder.iterdir() if x.suffix != ".tmp"} <= BEGUN and not has_rows
    demand(config.resume or is_new, config, "out", "a new one, or --resume")
    return folder


@contextmanager
def hold_folder(config, folder):
    """Keep other processes out of a run's folder; the lock ends with this process."""
    if jax.process_index() > 0:
        yield
        return
    with open(folder / "lock", "a") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            demand(False, config, "out", "a folder whose `lock` no other process holds")
        except (OSError, ImportError):  # a file system without locks, Windows
            pass
        for left in folder.glob(".*.tmp"):
            left.unlink()
        (folder / "levels").mkdir(exist_ok=True)
        yield


def log_row(config, row, metrics, cycle, seconds):
    """A training's line of logs.csv: the means of metrics {name: [cycles]} over a chunk of cycles.
    Blank: nothing was measured; nan: a value was not finite."""
    learned, rollouts = (int(metrics[name][-1]) for name in COUNTERS)
    steps = rollouts * config.num_envs * config.num_evals * config.num_steps
    counters = {"update": cycle, "grad_updates": learned, "env_steps": steps}
    line = counters | row | {"seconds": f"{seconds:.1f}"}
    for name in [name for name in metrics if name not in COUNTERS]:
        measured = metrics[name][~np.isnan(metrics[name])]
        line[name] = f"{measured.mean(dtype=float):.7g}" if measured.size > 0 else ""
        if not np.isfinite(measured).all():
            line[name] = "nan"
    return line | row


def write_log(log, trackers, lines):
    """Write the lines, one for each row, to logs.csv and to the trackers."""
    writer = csv.DictWriter(log, lines[0])
    if log.tell() == 0:
        writer.writeheader()
    writer.writerows(lines)
    for tracker, line in zip(trackers, lines):
        numbers = {name: float(x) for name, x in line.items() if x != ""}
        tracker.log(numbers, step=line["update"])


def start_trackers(config, rows, folder):
    """Start a run of wandb or trackio for each row, in one group."""
    if config.track == "" or jax.process_index() > 0:
        return []
    about = {"project": os.environ.get("WANDB_PROJECT", SCRIPT), "group": folder.name}
    if config.track == "wandb":
        about |= {"reinit": "create_new", "dir": folder}
    name, trackers = os.environ.get("WANDB_NAME", folder.name), []
    for i, row in enumerate(rows):
        about |= {"name": f"{name}-{i}", "config": asdict(config) | row}
        try:
            trackers.append(importlib.import_module(config.track).init(**about))
        except Exception as error:  # of any type, for example without a key
            why = str(error).partition("\n")[0]
            demand(False, config, "track", f"a tracker that starts ({why})")
    return trackers


def plot_curves(folder, swept):
    """Draw curves.png from logs.csv: mean and standard deviation over seeds, by sweep point."""
    from matplotlib.figure import Figure  # imported here, as it is slow

    figure = Figure(figsize=(11, 4), layout="constrained")
    text = (folder / "logs.csv").read_text(encoding="utf-8")
    table = list(csv.DictReader(text.splitlines()))
    for axis, column in zip(figure.subplots(1, 2), CURVES):
        curves = {}  # point -> update -> [steps, value] of each seed
        for row in table:
            if row.get(column, "") != "":
                point = ", ".join(f"{name} {float(row[name]):.6g}" for name in swept)
                seeds = curves.setdefault(point, {}).setdefault(row["update"], [])
                seeds.append([int(row["env_steps"]), float(row[column])])
        for point, curve in curves.items():
            # in SFL seeds differ in steps: they count episodes
            steps, mean = np.transpose([np.mean(seeds, axis=0) for seeds in curve.values()])
            std = np.array([np.std(seeds, axis=0)[1] for seeds in curve.values()])
            axis.plot(steps, mean, label=point)
            axis.fill_between(steps, mean - std, mean + std, alpha=0.2)
        axis.set(xlabel="env steps", title=column, ylim=(0, 1))
        if len(swept) > 0 and 0 < len(curves) <= 12:
            axis.legend(fontsize="small")
    write(folder / "curves.png", partial(figure.savefig, format="png"))


def draw(folder, levels, cycle, swept):
    """Draw the first row's levels, out of levels [R, ...], and the learning curves."""
    levels = jax.tree.map(lambda x: x[0], gather(levels))
    if jax.process_index() == 0:
        figure = amaze.plot_levels(levels)
        write(folder / f"levels/update_{cycle}.png", partial(figure.savefig, format="png"))
        plot_curves(folder, swept)


@contextmanager
def catch_signals():
    """Yield a list that gets the first SIGINT or SIGTERM; a second one acts as it did before."""
    caught, restore = [], ExitStack()

    def note(number, _):
        caught.append(number)
        restore.close()
        with suppress(OSError):  # print might be in use
            os.write(2, b"\nstops after these cycles; at once if asked again\n")

    with restore:
        for number in (signal.SIGINT, signal.SIGTERM):
            restore.callback(signal.signal, number, signal.signal(number, note))
        yield caught


def compile_update(update, cycles, *inputs):
    started = time.monotonic()
    program = update(cycles).lower(*inputs).compile()
    say(f"compiled {cycles} cycles in {time.monotonic() - started:.1f} s")
    return program


def say_diverged(rows, metrics, cycle, diverged):
    """Print each training whose metrics {name: [R, cycles]} are not finite, once."""
    infinite = np.any([np.isinf(x) for x in metrics.values()], axis=0)  # [R, cycles]
    for i in set(np.flatnonzero(infinite.any(axis=1))) - diverged:
        say(f"diverged at cycle {cycle + infinite[i].argmax() + 1}: {rows[i]}")
        diverged.add(i)
    if len(diverged) == len(rows):
        last = cycle + infinite.shape[1]
        raise FloatingPointError(f"all trainings have diverged by cycle {last}")


def progress_bar(cycle, cycles):
    quiet = jax.process_index() > 0
    return tqdm(initial=cycle, total=cycles, unit="cycle", disable=quiet)


def say_begin(folder, rows, where, before):
    say(f"{folder}: {len(rows)} training(s) on {where}")
    if before != where:
        say(f"before on {before}: results are equal up to rounding, not bit for bit")


def say_end(config, folder, cycle, seconds):
    """Print the command that comes next, with paths from the present folder."""
    here = Path(min(os.path.abspath(__file__), os.path.relpath(__file__), key=len))
    script = Path(sys.argv[0]) if __name__ == "__main__" else here
    if cycle < config.num_updates:
        command = ["python", script, "--resume", "--out", folder]
        said = f"stopped at cycle {cycle}; to go on"
    else:
        command = ["python", here.with_name("evaluate.py"), folder]
        said = f"done: {seconds:.0f} s; next"
        if not command[1].exists():
            command[1:] = ["evaluate.py", folder, "--script", script]
    say(f"{said}: {shlex.join(map(str, command))}")


def run(config, keep_metrics=True, stopped_by=None):
    """Train all rows in chunks of log_interval cycles; after each: log, checkpoints, pictures.

    -> states [R, ...], metrics {name: [R, cycles]} of this call's cycles, {} if they are not kept.
    A signal ends the run after a chunk; its number is appended to the list stopped_by, if given."""
    rows = make_rows(config)
    devices, shard = choose_devices(config, len(rows))
    init, update, show, sharding = make_programs(config, len(rows), devices, shard)
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    table = jax.device_put(columns, sharding)
    state = jax.eval_shape(init, 0, table, None)[0]
    metrics = list(jax.eval_shape(update(1), 0, table, state)[1])
    where = f"{len(devices)} x {devices[0].device_kind}, dealt by {shard}"
    new = new_checkpoint(config, rows, metrics, state, where)
    folder = make_folder(config)
    with ExitStack() as stack:
        stack.enter_context(hold_folder(config, folder))
        last = load_checkpoint(config, folder, new)
        if jax.process_index() == 0:
            write_config(folder, config)
        if last is not new:
            state = serialization.from_state_dict(state, last["state"])
        state = jax.device_put(init(0, table, None)[0] if last is new else state, sharding)
        trackers = start_trackers(config, rows, folder)
        say_begin(folder, rows, where, last["where"])
        cycle, seconds, stopped = last["cycles"], last["seconds"], 0
        programs, diverged = {}, set()
        shown, kept = {}, []
        bar = stack.enter_context(progress_bar(cycle, config.num_updates))
        log = stack.enter_context(open_log(folder, last["log_bytes"]))
        caught = stack.enter_context(catch_signals())
        while cycle < config.num_updates and stopped == 0:
            before = cycle
            to_next_row = config.log_interval - cycle % config.log_interval
            cycles = min(to_next_row, config.num_updates - cycle)
            if cycles not in programs:
                programs[cycles] = compile_update(update, cycles, cycle, table, state)
                bar.unpause()  # compiling is no part of its rate
            started = time.monotonic()
            state, chunk = jax.block_until_ready(programs[cycles](cycle, table, state))
            seconds += time.monotonic() - started
            cycle += cycles
            chunk = gather(chunk)
            stopped = int(gather(np.array([*caught, 0])[:1]).max())  # from any process

            of_row = [{name: x[i] for name, x in chunk.items()} for i in range(len(rows))]
            lines = [log_row(config, *x, cycle, seconds) for x in zip(rows, of_row)]
            write_log(log, trackers, lines)
            shown |= {name: lines[0][name] for name in CURVES if lines[0].get(name, "") != ""}
            bar.set_postfix(shown, refresh=False)
            bar.update(cycles)
            if keep_metrics:
                kept.append(chunk)
            say_diverged(rows, chunk, before, diverged)
            due = lambda interval: interval > 0 and cycle // interval > before // interval
            ends = stopped > 0 or cycle == config.num_updates
            if ends or due(config.plot_interval):
                draw(folder, show(cycle, table, state)[1], cycle, list(rows[0])[1:])
            reached = new | {"cycles": cycle, "seconds": seconds}
            if due(config.archive_interval):
                save_checkpoint(folder / f"checkpoint_{cycle}.msgpack", log, reached, state)
            if ends or due(config.checkpoint_interval):  # last: a crash repeats all above
                save_checkpoint(folder / "checkpoint.msgpack", log, reached, state)
    say_end(config, folder, cycle, seconds)
    if stopped > 0 and stopped_by is not None:
        stopped_by.append(stopped)
    rng = jax.random.wrap_key_data(state.rng)
    state = state.replace(cycles=jnp.full(len(rows), cycle), rng=rng)
    names = metrics if len(kept) > 0 else []
    return state, {name: np.concatenate([x[name] for x in kept], axis=1) for name in names}


def refuse_words(arguments):
    """Refuse names of fields in other libraries, and a value after a flag that takes none."""
    for word, following in itertools.pairwise([*arguments, ""]):
        flag, _, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        ours = [field for field in TYPES if name in OTHER_NAMES.get(field, "").split()]
        if name.lower() in TYPES and name not in TYPES:
            ours = [name.lower()]
        if flag.startswith("--") and len(ours) > 0:
            raise BadConfig(f"--{name}: did you mean --{ours[0]}?".replace("_", "-"))
        value = following if value == "" else value
        if TYPES.get(name) is bool and value.lower() in ("true", "false"):
            raise BadConfig(f"{flag} {value}: allowed is {flag} or --no-{flag[2:]}")


def whole_numbers(arguments):
    """The arguments, with 1e6 written as 1000000 where an int is expected."""
    words = list(arguments)
    for i, (flag, value) in enumerate(itertools.pairwise(arguments), start=1):
        name = flag.removeprefix("--").replace("-", "_")
        is_short = TYPES.get(name) is int and re.fullmatch(r"\d+(\.\d+)?e\d", value)
        if is_short and float(value).is_integer():
            words[i] = f"{float(value):.0f}"
    return words


def resume(config, read):
    """The Config of the run in --out, changed by the flags given now where that is allowed."""
    there = config.out != "" and Path(config.out, "config.json").exists()
    demand(there, config, "out", "the folder of a run, to --resume it")
    stored = read_config(Path(config.out))
    name, unknown = stored.pop("script"), set(stored) - set(TYPES)
    demand(name == SCRIPT, config, "out", f"a run of {SCRIPT}, to --resume it; not of {name}")
    if len(unknown) > 0:
        raise BadConfig(f"{config.out}/config.json: {SCRIPT} does not know {min(unknown)}")
    stored = Config(**stored)
    make_rows(stored)
    sweep = stored.sweep if config.sweep == () else ()  # tyro appends to it
    config = read(default=replace(stored, sweep=sweep, distributed=""))
    for name in [name for name in TYPES if name not in MAY_CHANGE]:
        old, new = getattr(stored, name), getattr(config, name)
        longer = name == "num_updates" and new > old and not config.anneal_lr
        more = " (without anneal_lr more)" if name == "num_updates" else ""
        demand(new == old or longer, config, name, f"{old!r}{more}, as in the run to resume")
    return config


def parse(arguments):
    """The Config of a command line. Other fields are those of a preset, or of the run to resume."""
    refuse_words(arguments)
    if "-h" in arguments or "--help" in arguments:
        print(f"{__doc__}\n{HELP}\n")  # unchanged; tyro would reflow it
    presets = [flag for flag in PRESETS if flag in arguments]
    if len(presets) > 1:
        print(f"{presets[0]} was not tuned for {presets[1]}")
    given = [word for word in whole_numbers(arguments) if word != "--fast"]
    append = (tyro.conf.UseAppendAction,)
    read = partial(tyro.cli, Config, args=given, prog=SCRIPT, description="", config=append)
    config = read(default=PRESETS[presets[0]] if len(presets) > 0 else Config())
    config = replace(config, out=os.path.expanduser(config.out))
    return resume(config, read) if config.resume else config


def keep_programs():
    """Keep compiled programs, in a folder for each kind of CPU: code for another may crash."""
    info, root = Path("/proc/cpuinfo"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    text = info.read_text() if info.exists() else f"flags {platform.platform()}"
    cpu = str(re.findall("(?m)^(?:model name|flags|Features).*", text)[:2]).encode()
    kept = Path(root, f"amaze/jax-{jax.__version__}-{hash(int.from_bytes(cpu)):x}")
    try:
        kept = kept.expanduser()
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "writable").touch()
        jax.config.update("jax_compilation_cache_dir", str(kept))
    except (OSError, RuntimeError) as error:  # no place to write, no home
        print(f"warning: compiled programs are not kept: {error}", file=sys.stderr)


def start_jax(config):
    """Make every core of a CPU a device and keep compiled programs, unless the user has set these;
    with --distributed join the other processes."""
    if jax.config.jax_compilation_cache_dir is None:
        keep_programs()
    by_flags = "device_count" in os.environ.get("XLA_FLAGS", "")
    try:
        if not by_flags and jax.config.jax_num_cpu_devices == -1 and config.devices != 1:
            cores = getattr(os, "sched_getaffinity", lambda pid: range(os.cpu_count()))(0)
            jax.config.update("jax_num_cpu_devices", len(cores))
        if config.distributed != "":
            address, *numbers = config.distributed.split(",")
            where = [] if address == "auto" else [address, *map(int, numbers)]
            jax.distributed.initialize(*where, heartbeat_timeout_seconds=30)
    except (ValueError, RuntimeError) as error:
        allowed = f"auto, or HOST:PORT,PROCESSES,NUMBER ({str(error).splitlines()[0]})"
        demand(config.distributed == "", config, "distributed", allowed)
        print("an import has started JAX: its devices are used (CPU: set JAX_NUM_CPU_DEVICES)")
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # such as a plugin that is not installed
        why = str(error).partition("\n")[0] or "it is not installed"
        raise BadConfig(f"JAX_PLATFORMS = {jax.config.jax_platforms}: {why}") from None


def main():
    """Exit status: 0 done, 1 training failed, 2 bad input, 128 + n stopped by signal n."""
    os.environ.pop("MPLBACKEND", None)  # a notebook's backend need not be installed
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, except in `run`
    signals = []
    try:
        config = parse(sys.argv[1:])
        check(config)
        start_jax(config)
        run(config, keep_metrics=False, stopped_by=signals)
        sys.exit(0 if len(signals) == 0 else 128 + signals[0])
    except (BadConfig, FloatingPointError) as error:
        message, status = str(error), 2 if isinstance(error, BadConfig) else 1
    except AttributeError as error:
        if error.obj is not amaze:
            raise
        message, status = f"amaze.{error.name} is missing: {SCRIPT} needs it", 2
    except (OSError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, OSError) and not jax.distributed.is_initialized():
            raise
        if getattr(error, "errno", None) is not None and error.filename is None:
            error.filename = "logs.csv"  # errors of `write` name their file
        why, status = str(error).splitlines()[0], 1
        message = f"{why}; the last checkpoint is intact, if any; --resume goes on"
    print(f"{SCRIPT}: error: {printable(message)}", file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():
        os._exit(status)  # the others wait for this one
    sys.exit(status)


if __name__ == "__main__":
    with redirect_stdout(Speech(sys.stdout)), redirect_stderr(Speech(sys.stderr)):
        main()

# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10", "flax>=0.12", "optax>=0.2.5", "distrax>=0.1.8", "numpy>=2.0",
#                 "matplotlib>=3.9", "tyro>=0.9", "tqdm>=4.66"]
# ///
