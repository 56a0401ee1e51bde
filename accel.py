"""ACCEL (2203.01302): level replay that also edits what it replays; parallel ACCEL (2311.12716).

Regret-based evolution: small edits of levels at the frontier of what the student can do make new
levels at the frontier, so that complexity grows from empty rooms.

    initialise the student and an empty buffer
    for each update:
        choose N levels: from the buffer with probability replay_prob, else fresh base levels
        play T steps from zero recurrent state; when an episode ends, restart the same level
        score each level; write the scores of replayed levels, let good fresh ones replace weak ones
        learn with PPO if the levels were replayed (plain: always)
        if replayed: edit each into a child, play and score these, let good ones into the buffer
        now and then: evaluate on test mazes that were never trained on

Parallel ACCEL plays [N fresh | N replayed | N children of the replayed] together in every cycle.
Differs from plr.py in the children: phase 6 of the cycle, or in parallel mode the third block.

Run        python accel.py --fast        python accel.py --parallel
From code  run(Config(**FAST | dict(seeds=8)))    jax.jit(jax.vmap(make_train(Config())))(rngs)

Shapes     T steps, N levels, E copies that play each level, B = N * E trajectories, K buffer slots,
           H core units, M test mazes. Time comes first: [T, B, ...]. make_train is for one seed.
"""

import csv
import importlib.util
import inspect
import itertools
import json
import math
import os
import platform
import re
import signal
import sys
import textwrap
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import serialization, struct
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from matplotlib.figure import Figure
from tqdm import tqdm

import amaze
from s5 import S5

# published defaults that differ by mode; num_updates for about 30,000 PPO updates in each
SERIAL = {"num_updates": 37_500, "lr": 3e-4, "ent_coef": 0.0}
PLAIN = SERIAL | {"num_updates": 30_000}  # not robust: every cycle learns
PARALLEL = {"num_updates": 30_000, "lr": 1e-4, "ent_coef": 1e-3}
FAST = SERIAL | {"num_updates": 4_800, "lr": 2e-3, "anneal_lr": True, "num_minibatches": 2,
        "update_epochs": 2, "bptt_horizon": 64, "hidden_size": 64, "ent_coef": 1e-2, "vf_coef": 2.0,
        "clip_vloss": False, "max_grad_norm": 1.5, "solvable_only": True,
        "temperature": 1.0, "polyak_averaging": True}  # fmt: skip
Score = Literal["max_mc", "positive_value_loss", "l1_value_loss", "learnability", "oracle_regret"]


@dataclass(frozen=True)
class Config:
    """Flat. Every float may be a tracer: swept, vmapped. Ints, bools and strings are static.
    What is None here gets its mode's default at once: Config(parallel=True), not `replace`."""

    # PPO
    lr: float | None = None  # Adam's learning rate; 3e-4, parallel 1e-4; fast 2e-3
    anneal_lr: bool = False  # lower lr linearly, to 0 after num_updates; fast True
    num_updates: int | None = None  # cycles; 37,500, parallel or not robust 30,000; fast 4,800
    num_envs: int = 32  # N, levels per cycle
    num_evals: int = 1  # E, trajectories on each level; more: a surer score
    num_steps: int = 256  # T, steps per trajectory and cycle
    update_epochs: int = 5  # passes over the batch; fast 2
    num_minibatches: int = 1  # they split trajectories, or their chunks of bptt_horizon; fast 2
    bptt_horizon: int = 0  # steps that gradients flow back through; 0: all of a rollout; fast 64
    gamma: float = 0.999  # discount
    gae_lambda: float = 0.98  # lambda of generalised advantage estimation
    clip_eps: float = 0.2  # clip range of the probability ratio
    ent_coef: float | None = None  # weight of the entropy bonus; 0, parallel 1e-3; fast 1e-2
    vf_coef: float = 0.5  # weight of the value loss; fast 2.0
    clip_vloss: bool = True  # clip the value as the ratio is; fast False
    max_grad_norm: float = 0.5  # the gradient's global norm is clipped to this; fast 1.5
    polyak_averaging: bool = False  # the mean of late parameters is evaluated; fast True
    # student
    rnn: Literal["lstm", "gru", "s5", "none"] = "lstm"  # recurrent core; none: feed-forward
    hidden_size: int = 256  # H, units of the core; fast 64
    s5_layers: int = 2  # S5 layers
    s5_norm: Literal["after", "before", "none"] = "after"  # place of LayerNorm in an S5 layer
    # levels
    n_walls: int = 0  # wall cells drawn per level, with replacement
    solvable_only: bool = False  # draw and edit until the goal can be reached; fast True
    height: int = 13  # cells of a level, without the outer wall
    width: int = 13  # cells of a level, without the outer wall
    max_steps: int = 250  # time limit; above num_steps no failure ends: train_solve_rate is 1
    see_through_walls: bool = True  # False: MiniGrid's occlusion
    num_edits: int = 20  # edits that make a child of a replayed level; 0: no children, as plr.py
    # level replay
    robust: bool = True  # learn only in cycles that replay; parallel: from what these replay
    parallel: bool = False  # all three blocks of levels together, other defaults where said
    replay_prob: float = 0.8  # share of cycles that replay, the same for all seeds; parallel: all
    score: Score = "max_mc"  # what makes a level worth replaying
    temperature: float = 0.3  # beta: a level's score counts by rank^(-1/beta); fast 1.0
    staleness_coef: float = 0.5  # rho: share of age against score
    buffer_size: int = 4000  # K, slots
    min_fill: float = 0.5  # share of the slots; before as many levels are played none is replayed
    # evaluation
    eval_interval: int = 50  # updates between evaluations; 0: never
    eval_suite: str = next(iter(amaze.SUITES))  # a suite, or maze names with commas between
    eval_episodes: int = 10  # episodes per maze
    # run
    fast: bool = False  # defaults for ten minutes on one core, serial; in code Config(**FAST)
    seed: int = 0  # the first seed
    seeds: int = 1  # trainings, with seeds from the first on
    seeds_at_once: int = 0  # trainings that share a device's memory at once; 0: all; on a CPU one
    sweep: tuple[str, ...] = ()  # float fields to sweep, as lr=1e-4,3e-4 or lr=log:1e-5:1e-3:8
    sweep_random: int = 0  # that many random points of the sweep; 0: the whole grid
    out: str = ""  # run folder; default: the next free runs/NAME-1, runs/NAME-2, ...
    resume: bool = False  # go on with the run in --out
    log_interval: int = 10  # updates between rows of logs.csv
    checkpoint_interval: int = 250  # updates between checkpoints
    archive_interval: int = 0  # updates between kept checkpoint_<update>.msgpack; 0: none
    plot_interval: int = 500  # updates between pictures; 0: only at the end
    devices: int = 0  # devices to use, on a CPU cores; 0: as many as deal evenly
    shard: Literal["", "seeds", "levels"] = ""  # what is dealt over them; "": seeds, if all deal
    distributed: str = ""  # one run in several processes: auto, as JAX finds them, or HOST:PORT,P,I
    track: Literal["", "wandb", "trackio"] = ""  # gets logs.csv too; WANDB_PROJECT, WANDB_NAME win

    def __post_init__(self):
        mode = PARALLEL if self.parallel else SERIAL if self.robust else PLAIN
        for name, value in mode.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


class Transition(NamedTuple):
    obs: NamedTuple  # o_t, or another tree of arrays
    is_first: jax.Array  # o_t opens an episode, bool
    action: jax.Array  # a_t
    log_prob: jax.Array  # log pi(a_t | o_<=t)
    value: jax.Array  # V(o_<=t)
    reward: jax.Array  # r_t
    done: jax.Array  # a_t ended the episode, bool
    memory: tuple | None = None  # of the core before o_t, with bptt_horizon


class Agent(NamedTuple):
    params: dict
    opt_state: tuple
    mean: dict | None = None  # of params, with polyak_averaging: what is evaluated


class Buffer(NamedTuple):
    """K level slots; entries to be written to it have the same fields, one for each level [N]."""

    level: NamedTuple  # [K, ...]
    code: jax.Array  # [K, words] the level as bits
    scored: jax.Array  # [K] bool; False: a free slot, an entry of which no episode ended
    score: jax.Array  # [K]
    max_return: jax.Array  # [K] the best ever seen
    mean_return: jax.Array  # [K] of first episodes, when last played
    stats: dict  # name -> [K], what the environment says of the level
    mutations: jax.Array  # [K] generations of edits since the base level
    origin: jax.Array  # [K] number of the base level that it descends from
    touched: jax.Array  # [K] cycle in which it was last sampled or inserted


class RunnerState(struct.PyTreeNode):
    """What the next update needs."""

    rng: jax.Array  # the seed's key; update i uses fold_in(rng, i)
    step: jax.Array  # [] updates done
    grad_updates: jax.Array  # [] updates that learned
    rollouts: jax.Array  # [] rollouts of N levels
    student: Agent
    buffer: Buffer


# --- network


@jax.custom_vjp
def lstm(carry, x, is_first, w, b):
    """LSTM (Hochreiter 1997): x [T, B, I], w [4H, I + H], b [4H] -> carry, h [T, B, H]; or, of
    inputs that are projected already, x [T, B, 4H] and w [4H, H]. At each step it is flax's
        carry, h[t] = nn.LSTMCell(H)(carry, x[t])        with carry zero where is_first[t].
    On a CPU w @ [x; h] with units first, [I + H, B], is twice as fast as the transposed product.
    The gradient, equal too, is by hand: dw is one large product over all steps, not a sum of T."""
    return lstm_forward(carry, x, is_first, w, b)[0]


def lstm_forward(carry, x, is_first, w, b):
    def step(carry, inputs):
        x, keep = inputs
        c, h = carry[0] * keep, carry[1] * keep  # [H, B], zero where o_t opens an episode
        z = w @ h + x.T if projected else w @ jnp.concatenate([x.T, h])
        i, f, g, o = jnp.split(z + b[:, None], 4)
        gates = i, f, g, o = nn.sigmoid(i), nn.sigmoid(f), jnp.tanh(g), nn.sigmoid(o)
        c_next = f * c + i * g
        h_next = o * jnp.tanh(c_next)
        return (c_next, h_next), (h_next.T, (gates, c))

    projected, keep = w.shape[1] == carry[1].shape[1], 1.0 - is_first[:, None]
    (c, h), (hs, saved) = jax.lax.scan(step, (carry[0].T, carry[1].T), (x, keep))
    return ((c.T, h.T), hs), (x, carry[1], hs, saved, keep, w)


def lstm_backward(residuals, gradients):
    def step(d_carry, inputs):
        d_h, ((i, f, g, o), c), keep = inputs
        d_h, tanh_c = d_carry[1] + d_h.T, jnp.tanh(f * c + i * g)
        d_c = d_carry[0] + d_h * o * (1 - tanh_c**2)
        d_gates = d_c * g, d_c * c, d_c * i, d_h * tanh_c
        slopes = i * (1 - i), f * (1 - f), 1 - g**2, o * (1 - o)
        d_z, d_c = jnp.concatenate([x * y for x, y in zip(d_gates, slopes)]), d_c * f
        d_x, d_h = jnp.split(w.T @ d_z, [w.shape[1] - len(c)])
        return (d_c * keep, d_h * keep), (d_z.T, d_z.T if projected else d_x.T)

    (x, h_0, hs, saved, keep, w), ((d_c, d_h), d_hs) = residuals, gradients
    projected, inputs = w.shape[1] == h_0.shape[1], (d_hs, saved, keep)
    (d_c, d_h), (d_z, d_x) = jax.lax.scan(step, (d_c.T, d_h.T), inputs, reverse=True)
    h = jnp.concatenate([h_0[None], hs[:-1]]) * keep.swapaxes(1, 2)  # before each step
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

    return jax.lax.scan(step, carry, (x + b, 1.0 - is_first[..., None]))


class GatedCore(nn.Module):
    """LSTM, GRU, none (y is x). All: carry, x [T, B, I], is_first [T, B] -> carry, y [T, B, H]."""

    rnn: str
    size: int

    def initial_carry(self, batch):
        h = jnp.zeros((batch, self.size))
        return {"lstm": (h, h), "gru": h, "none": ()}[self.rnn]

    @nn.compact
    def __call__(self, carry, x, is_first):
        if self.rnn == "none":
            return carry, x
        scan, gates = {"lstm": (lstm, 4), "gru": (gru, 3)}[self.rnn]
        project = self.rnn == "gru" or x.shape[-1] > gates * self.size  # wide inputs, a teacher's
        if project:  # all steps in one product; the barrier as in lstm_backward
            x = nn.Dense(gates * self.size, use_bias=False)(x)
            x = jax.lax.optimization_barrier(x)

        def kernel(rng):  # [gates * H, I + H], for h orthogonal for each gate
            rng, *rngs = jax.random.split(rng, 1 + gates)
            w_h = jnp.vstack([orthogonal(1.0)(rng, (self.size, self.size)) for rng in rngs])
            lecun_normal = nn.initializers.lecun_normal(in_axis=1, out_axis=0)
            w_x = [] if project else [lecun_normal(rng, (gates * self.size, x.shape[-1]))]
            return jnp.hstack([*w_x, w_h])

        bias = self.param("bias", nn.initializers.zeros, gates * self.size)
        return scan(carry, x, is_first, self.param("kernel", kernel), bias)


def orthogonal(scale):
    """flax's initialiser, one seed after the other: on a CPU a QR decomposition that is batched
    over seeds can block jaxlib's threads for ever."""
    draw, in_turn = nn.initializers.orthogonal(scale), jax.custom_batching.sequential_vmap
    return lambda rng, shape, dtype=None: in_turn(partial(draw, shape=shape))(rng)


def make_core(rnn, size, s5_layers, s5_norm):
    if rnn == "s5":
        return S5(d_model=size, ssm_size=max(size // 4 * 4, 4), n_layers=s5_layers, norm=s5_norm)
    return GatedCore(rnn, size)


def convolution(image, filters):
    """3x3 and relu: image [..., h, w, 3] -> [..., (h - 2) * (w - 2) * filters].
    Written as a product, which stays one when it is vmapped over seeds."""
    *batch, height, width, _ = image.shape
    patches = [image[..., i : height - 2 + i, j : width - 2 + j, :] for i, j in np.ndindex(3, 3)]
    # 10: MiniGrid's highest index, an agent's; minimax and JaxUED divide by it too
    patches = jnp.concatenate(patches, axis=-1) / 10.0  # [..., h - 2, w - 2, 27]
    x = nn.Dense(filters, kernel_init=orthogonal(2**0.5), name="conv")(patches)
    return nn.relu(x).reshape(*batch, -1)


class ActorCritic(nn.Module):
    """The student: obs, is_first [T, B] -> carry, policy, V [T, B]; acting is T = 1."""

    core: nn.Module

    @nn.compact
    def __call__(self, carry, obs, is_first):
        direction = nn.Embed(4, 5, embedding_init=orthogonal(1.0))(obs.direction)
        x = jnp.concatenate([convolution(obs.image, 16), direction], axis=-1)  # [T, B, 149]
        carry, x = self.core(carry, x, is_first)
        hidden = lambda: jnp.tanh(nn.Dense(32, kernel_init=orthogonal(2**0.5))(x))
        logits = nn.Dense(amaze.NUM_ACTIONS, kernel_init=orthogonal(0.01))(hidden())
        value = nn.Dense(1, kernel_init=orthogonal(1.0))(hidden())
        return carry, distrax.Categorical(logits), value[..., 0]


# --- pure functions


def gae(batch, last_value, gamma, gae_lambda):
    """A_t = delta_t + gamma lambda (1 - d_t) A_{t+1} (1506.02438, eq. 16), advantages [T, B]."""

    def step(carry, x):
        advantage, next_value = carry
        reward, value, keep = x
        delta = reward + gamma * next_value * keep - value
        advantage = delta + gamma * gae_lambda * keep * advantage
        return (advantage, value), advantage

    inputs = batch.reward, batch.value, 1.0 - batch.done
    return jax.lax.scan(step, (jnp.zeros_like(last_value), last_value), inputs, reverse=True)[1]


def first_episodes(reward, done):
    """Return and length of the first episodes in a batch [T, B], and whether they ended; [B].
    Statistics are of these: of later ones mostly short, solved ones end within T steps."""
    playing = jnp.cumsum(done, axis=0) - done == 0  # [T, B]
    return (reward * playing).sum(0), playing.sum(0), done.any(0)


def episode_stats(total, length, ended, where=True):
    """Means over first episodes that ended, of the trajectories `where` [B]; NaN if none."""
    stats = {"return": total, "solve_rate": amaze.solved(total), "episode_length": length}
    return {name: jnp.mean(x, where=ended & where) for name, x in stats.items()}


def means(stats, weight=1.0):
    """Weighted means of what is known of levels {name: [N]}, NaN where it is of none."""
    known = {name: jnp.where(jnp.isnan(x), 0.0, weight) for name, x in stats.items()}
    return {name: jnp.nansum(known[name] * x) / known[name].sum() for name, x in stats.items()}


def episode_sums(x, done):
    """Sum of x over the episode so far, this step included [T, B]; whole where done."""

    def step(total, inputs):
        x, done = inputs
        total = total + x
        return jnp.where(done, 0.0, total), total

    return jax.lax.scan(step, jnp.zeros(x.shape[1:]), (x, done))[1]


def replay_probabilities(buffer, now, temperature, staleness_coef):
    """P = (1 - rho) P_S + rho P_C over taken slots (2010.03934, eq. 1 to 4) -> [K]."""
    best_first = jnp.argsort(jnp.where(buffer.scored, -buffer.score, jnp.inf))
    rank = 1.0 + jnp.argsort(best_first)
    by_score = jnp.where(buffer.scored, rank ** (-1 / temperature), 0.0)
    age = jnp.where(buffer.scored, now - buffer.touched, 0).astype(float)  # int32 would overflow
    by_age = jnp.where(age.any(), age, buffer.scored)
    share = lambda x: x / jnp.maximum(x.sum(), 1e-30)
    return (1 - staleness_coef) * share(by_score) + staleness_coef * share(by_age)


def find(buffer, code):
    """The slot that holds each level [N] already; K where there is none."""
    same = (code[:, None] == buffer.code).all(-1) & buffer.scored  # [N, K]
    return jnp.where(same.any(1), same.argmax(1), len(buffer.score))


def write_buffer(buffer, entries, slot, now, temperature, staleness_coef):
    """Update the slots of levels that have one; let the others contest the weakest slots.

    Copies of a level agree on the mean of their scores and the best of their returns. The i-th
    best new level contests the i-th weakest slot (empty ones first, then by P) and wins if its
    score is no lower."""
    known, finished = slot < len(buffer.score), entries.scored
    copies = (slot[:, None] == slot) & finished  # [N, N]
    over_copies = lambda x: jnp.mean(jnp.broadcast_to(x, copies.shape), axis=1, where=copies)
    target = jnp.where(known & finished, slot, len(buffer.score))
    score, mean_return = over_copies(entries.score), over_copies(entries.mean_return)
    buffer = buffer._replace(
        score=buffer.score.at[target].set(score, mode="drop"),
        mean_return=buffer.mean_return.at[target].set(mean_return, mode="drop"),
        max_return=buffer.max_return.at[slot].max(entries.max_return, mode="drop"),
        touched=buffer.touched.at[slot].set(now, mode="drop"),
    )

    same = (entries.code[:, None] == entries.code).all(-1)
    is_copy = (jnp.tril(same, -1) & finished).any(1)
    new = ~known & finished & ~is_copy
    best_first = jnp.argsort(jnp.where(new, -entries.score, jnp.inf))
    p = replay_probabilities(buffer, now, temperature, staleness_coef)  # in float32 with ties
    weakest_first = jnp.lexsort((buffer.score, jnp.where(buffer.scored, p, -1.0)))[: len(new)]
    new, entries = jax.tree.map(lambda x: x[best_first], (new, entries))
    floor = jnp.where(buffer.scored, buffer.score, -jnp.inf)[weakest_first]
    target = jnp.where(new & (entries.score >= floor), weakest_first, len(buffer.score))
    return jax.tree.map(lambda x, y: x.at[target].set(y, mode="drop"), buffer, entries)


def level_outcomes(batch, advantage, max_return, copies, optimal_return):
    """What N levels scored in the episodes that ended in the batch [T, N * E]. copies [N, N]: which
    levels are the same; they have one R_max, the best of all of them and of what was seen before.

    -> number of episodes, mean return of first episodes, R_max, every score; [N]."""
    by_level = lambda x: x.reshape(len(x), len(max_return), -1)  # [T, N, E]
    done = by_level(batch.done)
    total = episode_sums(batch.reward, batch.done)
    length = episode_sums(jnp.ones_like(batch.reward), batch.done)
    best = jnp.where(done, by_level(total), -jnp.inf).max((0, 2))  # if none has ended, -inf
    max_return = jnp.where(copies, jnp.maximum(best, max_return), -jnp.inf).max(1)
    by_episode = lambda x: by_level(episode_sums(x, batch.done) / length)  # time means, where done
    time_mean = lambda x: jnp.mean(by_episode(x), axis=(0, 2), where=done)
    first, _, ended = (x.reshape(done.shape[1:]) for x in first_episodes(batch.reward, batch.done))
    mean_return, solved = (jnp.mean(x, axis=1, where=ended) for x in (first, amaze.solved(first)))
    scores = {
        "max_mc": time_mean(jnp.repeat(max_return, done.shape[2]) - batch.value),
        "positive_value_loss": time_mean(jnp.maximum(advantage, 0)),
        "l1_value_loss": time_mean(jnp.abs(advantage)),
        "learnability": solved * (1 - solved),
        "oracle_regret": optimal_return - mean_return,
    }
    return done.sum((0, 2)), mean_return, max_return, scores


def make_train(config, devices=1):
    """train(rng) -> (RunnerState, metrics), one whole training; its parts: train.init(rng),
    train.update(state, steps), train.show(state) -> the levels in training; and what evaluate.py
    plays with: train.act, train.initial_carry, train.reset, train.step.
    devices: over how many, the mesh's axis "devices", the work of this training is split."""
    check(config)
    room = config.height * config.width - 2  # agent and goal need a cell each
    demand(config.n_walls <= room, config, "n_walls height width", f"at most {room} walls")
    trajectories = config.num_envs * config.num_evals  # B
    fine = trajectories % config.num_minibatches == 0
    demand(fine, config, "num_minibatches num_envs num_evals", f"a divisor of {trajectories}")
    if config.score == "learnability":  # a variance over trajectories, in which failures end too
        for name, low in {"num_evals": 2, "num_steps": config.max_steps}.items():
            demand(getattr(config, name) >= low, config, f"{name} score", f"at least {low}")
    parallel_blocks = 3 if config.num_edits else 2
    blocks = parallel_blocks if config.parallel else 1  # of N levels in a rollout
    replay_block = 1 if config.parallel else 0  # the block that is replayed and learned from
    offered = config.num_envs * blocks  # levels of a cycle
    demand(config.buffer_size >= offered, config, "buffer_size num_envs", f"at least {offered}")
    fine = config.num_steps % (config.bptt_horizon or 1) == 0
    demand(fine, config, "bptt_horizon num_steps", "a divisor of num_steps")
    core = make_core(config.rnn, config.hidden_size, config.s5_layers, config.s5_norm)
    network = ActorCritic(core)
    mazes = maze_names(config.eval_suite)
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    optimiser = lambda lr: optax.chain(clip, optax.adam(lr, eps=1e-5))
    level_stats = jax.vmap(lambda level: amaze.level_stats(level, config.max_steps))

    def init(rng):
        rng, rng_student = jax.random.split(rng)
        level = sample_levels(rng)
        stats = amaze.level_stats(level, config.max_steps)
        fine = config.score != "oracle_regret" or "optimal_return" in stats
        demand(fine, config, "score", "another: the environment knows no optimal return")
        obs = jax.tree.map(lambda x: x[None, None], reset(level)[0])
        params = network.init(rng_student, core.initial_carry(1), obs, jnp.zeros((1, 1), bool))
        student = Agent(params, optimiser(0.0).init(params))  # whatever the learning rate
        student = student._replace(mean=params if config.polyak_averaging else None)
        slot = Buffer(level, amaze.level_code(level), False, 0.0, 0.0, 0.0, stats, 0, 0, 0)
        free = lambda x: jnp.zeros((config.buffer_size, *jnp.shape(x)), jnp.result_type(x))
        buffer, zero = jax.tree.map(free, slot), jnp.zeros((), int)
        return RunnerState(rng, zero, zero, zero, student, buffer)

    # On several devices each plays its part of the trajectories, and learns from its part of a
    # minibatch; all else (levels, keys, scores, statistics) they all hold and compute alike.

    def my_part(x):
        """This device's part of an array [B, ...]."""
        parts = x.reshape(devices, -1, *x.shape[1:])
        return parts[jax.lax.axis_index("devices") if devices > 1 else 0]

    def whole(tree, axis):
        """The whole arrays, of which the devices have their parts."""
        return jax.lax.all_gather(tree, "devices", axis=axis, tiled=True) if devices > 1 else tree

    average = lambda tree: jax.lax.pmean(tree, "devices") if devices > 1 else tree

    def reset(level, max_steps=config.max_steps, see_through_walls=config.see_through_walls):
        """o_0, state, of a level or a queue of levels [Q, ...]."""
        return amaze.reset(level, max_steps, see_through_walls)

    def step(state, action, restart=False):
        """o_{t+1}, state, r_t, d_t; restart: on done, o and state open the queue's next episode."""
        return (amaze.step_and_reset if restart else amaze.step)(state, action)

    def sample_levels(rng, *shape):
        """Random levels [*shape]."""
        draw = lambda rng: amaze.sample_level(rng, config.n_walls, config.height, config.width)
        if config.solvable_only:
            draw = partial(amaze.sample_solvable, sample=draw)
        levels = jax.vmap(draw)(jax.random.split(rng, math.prod(shape)))
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), levels)

    def act(params, carry, obs, is_first, noise):
        """A step of B students -> carry, a_t, log pi(a_t), V. Gumbel noise makes argmax sample."""
        inputs = jax.tree.map(lambda x: x[None], (obs, is_first))
        carry, policy, value = network.apply(params, carry, *inputs)
        action = jnp.argmax(policy.logits + noise, axis=-1)
        return carry, action[0], policy.log_prob(action)[0], value[0]

    def rollout(rng, params, queue):
        """T steps on E copies of N levels -> batch [T, B], V(o_T) [B]; episode k of trajectory b
        plays queue[b // E, k % Q] of the levels [N, Q]."""
        queue = jax.tree.map(lambda x: jnp.repeat(x, config.num_evals, axis=0), queue)
        shape = config.num_steps + 1, len(jax.tree.leaves(queue)[0]), amaze.NUM_ACTIONS
        noise = jax.vmap(my_part)(jax.random.gumbel(rng, shape))  # faster than step by step
        obs, state = jax.vmap(reset)(jax.tree.map(my_part, queue))

        def play_step(carry, noise):
            memory, obs, state, is_first = carry
            before = memory if config.bptt_horizon else None
            memory, action, log_prob, value = act(params, memory, obs, is_first, noise)
            next_obs, state, reward, done = jax.vmap(partial(step, restart=True))(state, action)
            transition = Transition(obs, is_first, action, log_prob, value, reward, done, before)
            return (memory, next_obs, state, done), transition

        number = noise.shape[1]  # of trajectories on this device
        carry = core.initial_carry(number), obs, state, jnp.ones(number, bool)
        (memory, obs, _, is_first), batch = jax.lax.scan(play_step, carry, noise[:-1])
        last_value = act(params, memory, obs, is_first, noise[-1])[3]
        return whole(batch, axis=1), whole(last_value, axis=0)

    def loss(params, batch, advantage, target):
        """PPO's clipped objective (1707.06347, eq. 7 and 9); the value's likewise: clip_vloss."""
        carry = core.initial_carry(advantage.shape[1])
        if batch.memory is not None:
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
        total = metrics["policy_loss"] + config.vf_coef * metrics["value_loss"]
        total -= config.ent_coef * metrics["entropy"]
        return total, metrics | {"total_loss": total}

    def learn(rng, student, lr, batch, last_value):
        """update_epochs passes of PPO over the batch [T, B] -> student, metrics."""
        advantage = gae(batch, last_value, config.gamma, config.gae_lambda)
        target = advantage + batch.value
        if batch.memory is not None:  # chunks of time are trajectories: [horizon, chunks * B, ...]
            horizon = config.bptt_horizon
            chunks = lambda x: x.reshape(-1, horizon, *x.shape[1:]).swapaxes(0, 1)
            chop = lambda x: chunks(x).reshape(horizon, -1, *x.shape[2:])
            batch, advantage, target = jax.tree.map(chop, (batch, advantage, target))

        def minibatch(student, columns):
            mean, std = advantage[:, columns].mean(), advantage[:, columns].std()
            data = batch, (advantage - mean) / (std + 1e-5), target
            data = jax.tree.map(lambda x: x[:, my_part(columns)], data)
            grads, metrics = average(jax.grad(loss, has_aux=True)(student.params, *data))
            updates, opt_state = optimiser(lr).update(grads, student.opt_state, student.params)
            student = Agent(optax.apply_updates(student.params, updates), opt_state, student.mean)
            norms = {"grad_norm": grads, "param_norm": student.params}
            return student, metrics | {k: optax.global_norm(x) for k, x in norms.items()}

        rngs = jax.random.split(rng, config.update_epochs)
        order = jax.vmap(lambda rng: jax.random.permutation(rng, advantage.shape[1]))(rngs)
        order = order.reshape(config.update_epochs * config.num_minibatches, -1)
        student, metrics = jax.lax.scan(minibatch, student, order)
        if student.mean is not None:  # of about the last quarter of updates: 1212.1824, section 4
            updates = optax.tree_utils.tree_get(student.opt_state, "count") / len(order)
            mean = optax.incremental_update(student.params, student.mean, 4 / (updates + 3))
            student = student._replace(mean=mean)
        metrics["explained_variance"] = 1 - advantage.var() / jnp.maximum(target.var(), 1e-8)
        # in metrics NaN means that nothing was measured; what is not finite is inf
        finite = lambda x: jnp.where(jnp.isfinite(x), x, jnp.inf)
        return student, {name: finite(x.mean()) for name, x in metrics.items()}

    def play(rng, params, levels, *rules):
        """One episode on each level [B] -> returns and lengths [B]."""
        obs, state = jax.vmap(reset)(levels, *rules)
        number = len(jax.tree.leaves(levels)[0])

        def play_step(carry):
            t, memory, obs, state, playing, total, length = carry
            noise = jax.random.gumbel(jax.random.fold_in(rng, t), (number, amaze.NUM_ACTIONS))
            is_first = jnp.full(number, t == 0)
            memory, action, _, _ = act(params, memory, obs, is_first, noise)
            obs, state, reward, done = jax.vmap(step)(state, action)
            total, length = total + reward * playing, length + playing
            return t + 1, memory, obs, state, playing & ~done, total, length

        memory, playing = core.initial_carry(number), jnp.ones(number, bool)
        carry = (0, memory, obs, state, playing, jnp.zeros(number), jnp.zeros(number, int))
        return jax.lax.while_loop(lambda carry: carry[4].any(), play_step, carry)[5:]

    def evaluate(rng, student):
        """The student, and its solve rate and return on each test maze, and their means."""
        rng_mazes, rng_play = jax.random.split(rng)
        levels = amaze.sample_mazes(rng_mazes, mazes, config.eval_episodes)
        params = student.params if student.mean is None else student.mean
        total = play(rng_play, params, *levels)[0].reshape(len(mazes), -1)
        scores = {"eval_solve_rate": amaze.solved(total).mean(1), "eval_return": total.mean(1)}
        each = {f"{k}/{m}": x[i] for k, x in scores.items() for i, m in enumerate(mazes)}
        return student, each | {name: score.mean() for name, score in scores.items()}

    def skip(function, rng, state, *args):
        """In place of function(rng, state, ...) -> state, metrics: not measured is NaN."""
        shapes = jax.eval_shape(function, rng, state, *args)[1]
        return state, jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan), shapes)

    strength = config.temperature, config.staleness_coef

    def sample_fresh(rng, state, block=0):
        """N random levels, without mutations, each an origin of its own."""
        origin = (blocks * state.step + block) * config.num_envs + jnp.arange(config.num_envs)
        return sample_levels(rng, config.num_envs), jnp.zeros(config.num_envs, int), origin

    def sample_replay(rng, state):
        """N levels drawn from the buffer with replacement, with their mutations and origins; fresh
        ones for free slots: from a buffer that is still empty, because no episode has ended."""
        probability = replay_probabilities(state.buffer, state.step, *strength)
        slot = jax.random.choice(rng, config.buffer_size, (config.num_envs,), p=probability)
        drawn = state.buffer.level, state.buffer.mutations, state.buffer.origin
        drawn = jax.tree.map(lambda x: x[slot], drawn)
        choose = partial(jax.vmap(jnp.where), state.buffer.scored[slot])
        return jax.tree.map(choose, drawn, sample_fresh(rng, state))

    def edit(rng, levels, mutations, origin):
        """A child of each level, by num_edits edits."""

        def child(rng, level):
            draw = lambda rng: amaze.edit_level(rng, level, config.num_edits)
            return amaze.sample_solvable(rng, draw) if config.solvable_only else draw(rng)

        rngs = jax.random.split(rng, config.num_envs)
        return jax.vmap(child)(rngs, levels), mutations + 1, origin

    def score(state, levels, mutations, origin, batch, last_value):
        """What the batch says of the levels [N]: entries for the buffer, their slots."""
        stats = level_stats(levels)
        code = jax.vmap(amaze.level_code)(levels)
        slot = find(state.buffer, code)
        advantage = gae(batch, last_value, config.gamma, config.gae_lambda)
        seen = state.buffer.max_return.at[slot].get(mode="fill", fill_value=-jnp.inf)
        copies = (code[:, None] == code).all(-1)
        best = stats.get("optimal_return", jnp.nan)  # which has no oracle regret
        outcomes = level_outcomes(batch, advantage, seen, copies, best)
        episodes, mean_return, max_return, scores = outcomes
        entries = episodes > 0, scores[config.score], max_return, mean_return, stats
        touched = jnp.full(len(code), state.step)
        return Buffer(levels, code, *entries, mutations, origin, touched), slot

    def child_stats(buffer, entries, slot, where=1.0):
        """Of children; inserted: of these the new ones that the buffer holds after writing."""
        inserted = (slot == config.buffer_size) & (find(buffer, entries.code) < config.buffer_size)
        stats = means(entries.stats | {"inserted": inserted}, where)
        return {f"child_{name}": x for name, x in stats.items()}

    def breed(rng, state, *parents):
        """Children of N levels, played without learning and written -> state, statistics."""
        rng_edit, rng_rollout = jax.random.split(rng)
        children = edit(rng_edit, *parents)
        queue = jax.tree.map(lambda x: x[:, None], children[0])
        played = rollout(rng_rollout, state.student.params, queue)
        entries, slot = score(state, *children, *played)
        buffer = write_buffer(state.buffer, entries, slot, state.step, *strength)
        return state.replace(buffer=buffer), child_stats(buffer, entries, slot)

    def buffer_stats(buffer, now):
        """Means over the taken slots, and means weighted by P."""
        probability = replay_probabilities(buffer, now, *strength)
        stats = buffer.stats | {"score": buffer.score, "age": now - buffer.touched}
        if "optimal_return" in stats:
            stats["regret"] = stats["optimal_return"] - buffer.mean_return
        of_level = buffer.stats | {"score": buffer.score, "mutations": buffer.mutations}
        weighted = means(of_level, probability)
        metrics = means(stats, buffer.scored) | {f"{k}_weighted": x for k, x in weighted.items()}
        metrics["fill"] = buffer.scored.mean()
        return {f"buffer_{name}": x for name, x in metrics.items()}

    def replays(now):
        """Whether cycle `now` replays; the same for all seeds, so that it stays a branch."""
        warm = (1.0 * now * offered >= config.min_fill * config.buffer_size) & (now > 0)
        draw = jax.random.uniform(jax.random.fold_in(jax.random.key(0), now))
        return warm if config.parallel else warm & (draw < config.replay_prob)

    def cycle_rngs(state):
        """The keys of a cycle: fresh and replayed levels, rollout, learning, evaluation, edits."""
        return jax.random.split(jax.random.fold_in(state.rng, state.step), 6)

    def cycle(state, _):
        rng_fresh, rng_choice, rng_rollout, rng_learn, rng_eval, rng_edit = cycle_rngs(state)
        cycles = state.step + 1  # with this one
        lr = config.lr * (1 - state.step / config.num_updates if config.anneal_lr else 1.0)

        # 1. CHOOSE LEVELS
        replay = replays(state.step)
        choice = jax.lax.cond(replay, sample_replay, sample_fresh, rng_choice, state)
        if config.parallel:  # [N fresh | N replayed | N children], all fresh while it is cold
            no_edit = lambda rng, *_: sample_fresh(rng, state, 2)
            children = jax.lax.cond(replay, edit, no_edit, rng_edit, *choice)
            children = (children,) if config.num_edits else ()
            choice = sample_fresh(rng_fresh, state, 1), choice, *children
            choice = jax.tree.map(lambda *x: jnp.concatenate(x), *choice)
        levels, mutations, origin = choice
        block = jnp.arange(len(mutations)) // config.num_envs
        replayed = replay & state.buffer.scored.any() & (block == replay_block)
        is_child = replay & (block == 2)

        # 2. ROLL OUT
        queue = jax.tree.map(lambda x: x[:, None], levels)  # of one level: on done, restart it
        batch, last_value = rollout(rng_rollout, state.student.params, queue)

        # 3. SCORE
        entries, slot = score(state, levels, mutations, origin, batch, last_value)

        # 4. WRITE THE BUFFER
        buffer = write_buffer(state.buffer, entries, slot, state.step, *strength)

        # 5. LEARN
        learns = replay | (not config.robust)
        columns = slice(replay_block * trajectories, (replay_block + 1) * trajectories)
        data = jax.tree.map(lambda x: x[:, columns], batch), last_value[columns]
        inputs = rng_learn, state.student, lr, *data
        student, metrics = jax.lax.cond(learns, learn, partial(skip, learn), *inputs)

        # 6. MUTATE
        state, rollouts = state.replace(student=student, buffer=buffer), state.rollouts + blocks
        if config.num_edits and config.parallel:
            metrics |= child_stats(buffer, entries, slot, is_child)
        elif config.num_edits:
            inputs = rng_edit, state, *choice
            state, stats = jax.lax.cond(replay, breed, partial(skip, breed), *inputs)
            metrics, rollouts = metrics | stats, rollouts + replay

        # 7. LOG AND EVALUATE
        grad_updates = state.grad_updates + learns
        # the command line needs these two: PPO updates so far, rollouts of N * E * T steps so far
        metrics |= {"grad_updates": grad_updates, "rollouts": rollouts, "current_lr": lr}
        episode = first_episodes(batch.reward, batch.done)
        metrics |= {f"train_{name}": x for name, x in episode_stats(*episode).items()}
        for name, where in {"fresh": ~(replayed | is_child), "replay": replayed}.items():
            stats = means(entries.stats, where)
            stats |= episode_stats(*episode, jnp.repeat(where, config.num_evals))
            metrics |= {f"{name}_{key}": x for key, x in stats.items()}
        learned = learns & (block == replay_block)
        if "solvable" in entries.stats:
            metrics["unsolvable_share"] = jnp.mean(~entries.stats["solvable"], where=learned)
        metrics |= buffer_stats(state.buffer, cycles)
        if config.eval_interval:
            due = (cycles % config.eval_interval == 0) | (cycles == config.num_updates)
            metrics |= jax.lax.cond(due, evaluate, partial(skip, evaluate), rng_eval, student)[1]
        return state.replace(step=cycles, grad_updates=grad_updates, rollouts=rollouts), metrics

    def update(state, steps):
        """-> RunnerState after that many cycles, metrics: name -> [steps]."""
        return jax.lax.scan(cycle, state, None, length=steps)

    def lineage(buffer, slot):
        """Levels that descend from the same base level as the slot's, by generation."""
        family = buffer.scored & (buffer.origin == buffer.origin[slot])
        order = jnp.argsort(jnp.where(family, buffer.mutations, 2**30))
        last = jnp.maximum(family.sum() - 1, 0)
        members = order[jnp.linspace(0, last, config.num_envs).astype(int)]
        levels, mutations = jax.tree.map(lambda x: x[members], (buffer.level, buffer.mutations))
        return levels, {"generation": mutations, "score": buffer.score[members]}

    def show(state):
        """Random levels, those of the buffer that are replayed most, the family of the first."""
        probability = replay_probabilities(state.buffer, state.step, *strength)
        top = jnp.argsort(-probability)[: config.num_envs]
        best = jax.tree.map(lambda x: x[top], state.buffer)
        captions = {"score": best.score, "age": state.step - best.touched, "P": probability[top]}
        fresh = sample_fresh(cycle_rngs(state)[0 if config.parallel else 1], state)[0]
        return {
            "fresh": (fresh, level_stats(fresh)),
            "most probable of the buffer": (best.level, captions),
            "lineage of the most probable": lineage(state.buffer, top[0]),
        }

    def train(rng):
        return update(init(rng), config.num_updates)

    train.init, train.update, train.show = init, update, show
    train.act, train.initial_carry = act, core.initial_carry
    train.reset, train.step = reset, step
    return train


# --- command line
# The same in each file. One program trains all rows (a seed, swept values); states are [R, ...].

SCRIPT = Path(__file__).name
FLOATS = [f.name for f in fields(Config) if f.type in (float, float | None)]
maze_names = lambda suite: amaze.SUITES.get(suite) or [*dict.fromkeys(suite.split(","))]
CACHE = "\n--FIELD: True, --no-FIELD: False. Compiled programs are in ~/.cache/amaze: delete freely"
CURVES = "train_solve_rate", "eval_solve_rate"  # what curves.png and the progress bar show
CLEANRL = {"learning_rate": "lr", "total_timesteps": "num_updates", "clip_coef": "clip_eps"}
gather = partial(multihost_utils.process_allgather, tiled=True)  # whole, in each process
ALLOWED = {  # of a field or a teacher_field
    "at least 0": (lambda v: v >= 0, """lr ent_coef vf_coef n_walls num_edits eval_interval seed
        archive_interval plot_interval devices seeds_at_once sweep_random candidate_steps
        bptt_horizon"""),
    "at least 1": (lambda v: v >= 1, """num_updates num_envs num_evals num_steps update_epochs seeds
        num_minibatches hidden_size s5_layers max_steps eval_episodes log_interval num_students
        checkpoint_interval buffer_size filters score_interval candidates_at_once"""),
    "from 2 to 128": (lambda v: 2 <= v <= 128, "height width candidate_evals"),
    "above 0": (lambda v: v > 0, "clip_eps max_grad_norm temperature"),
    "from 0 to 1": (lambda v: 0 <= v <= 1, "gamma gae_lambda replay_prob staleness_coef min_fill"),
    "what is installed: pip install wandb, pip install trackio":
        (lambda v: not v or importlib.util.find_spec(v), "track"),
    f"a suite ({', '.join(amaze.SUITES)}) or mazes ({', '.join(amaze.TEST_MAZES)})":
        (lambda v: {*maze_names(v)} <= {*amaze.TEST_MAZES}, "eval_suite"),
}  # fmt: skip
FREE = """resume out devices shard seeds_at_once distributed track checkpoint_interval
    archive_interval plot_interval""".split()  # may differ when a run is resumed
BadConfig = type("BadConfig", (ValueError,), {})  # one line: fields, values, what is allowed


def demand(fine, config, names, allowed):
    if not fine:
        values = ", ".join(f"{name} = {getattr(config, name)!r}" for name in names.split())
        raise BadConfig(f"{values}: allowed is {allowed}")


def check(config):
    """Refuse the first value that is not allowed; traced floats pass."""
    for f in fields(config):
        value = getattr(config, f.name)
        if get_origin(f.type) is Literal:
            demand(value in get_args(f.type), config, f.name, " | ".join(get_args(f.type)))
        if f.type in (int, int | None):
            demand(isinstance(value, int) and abs(value) < 2**31, config, f.name, "a 32-bit int")
        for allowed, (test, names) in ALLOWED.items():
            if f.name.removeprefix("teacher_") in names.split():
                demand(isinstance(value, jax.Array) or test(value), config, f.name, allowed)


def make_rows(config):
    """The rows: a dict of seed and swept floats for each; every point of a sweep has all seeds."""
    rng, swept, number = np.random.default_rng(abs(config.seed)), {}, config.sweep_random
    demand(config.sweep or not number, config, "sweep_random", "0 without --sweep")
    for sweep in config.sweep:
        name, _, text = sweep.partition("=")
        allowed = f"NAME=..., NAME a float: {', '.join(FLOATS)}, each once; not {name!r} (else"
        demand(name in {*FLOATS} - {*swept}, config, "sweep", f"{allowed} a run for each value)")
        try:
            if text.startswith("log:"):
                low, high, steps = text[4:].split(":")
                values = np.geomspace(float(low), float(high), int(steps))
                drawn = np.exp(rng.uniform(*sorted(np.log([values[0], float(high)])), number))
            else:
                values = np.array(text.split(","), float)
                drawn = rng.choice(values, number)
        except (ValueError, ArithmeticError, IndexError):
            demand(False, config, "sweep", f"{name}=0.1,0.2 or {name}=log:0.01:0.1:8, not {text!r}")
        swept[name] = (drawn if number else values).tolist()
    combine = zip if number else itertools.product
    points = [dict(zip(swept, x)) for x in dict.fromkeys(combine(*swept.values()))]
    for point in points:
        check(replace(config, **point))
    return [{"seed": config.seed + i} | point for point in points for i in range(config.seeds)]


def choose_devices(config, num_rows):
    """The devices to use, as many as deal evenly, and what is dealt over them: seeds or levels."""
    here, (n, m) = jax.devices(), (config.num_envs, config.num_minibatches)
    parts = {"seeds": num_rows, "levels": math.gcd(n * config.num_evals // m, n // m)}
    counts = range(1, len(here) + 1) if jax.process_count() == 1 else [len(here)]
    counts = [i for i in counts if config.devices in (0, i)]
    deal = lambda shard: max((i for i in counts if parts[shard] % i == 0), default=0)
    shard = config.shard or max(parts, key=deal)
    allowed = "a divisor of {seeds} (seeds) or {levels} (levels), at most {}; --distributed: all"
    demand(deal(shard) > 0, config, "devices", allowed.format(len(here), **parts))
    return here[: deal(shard)], shard


def make_programs(config, num_rows, devices, shard):
    """Of all rows init, update(steps), show: step, rows [R], states [R, ...] -> states, shown."""
    shares, spec = (len(devices), P()) if shard == "levels" else (1, P("devices"))
    sharding = NamedSharding(Mesh(devices, ("devices",)), spec)
    here = num_rows * shares // len(devices)  # rows on a device
    at_once = min(config.seeds_at_once or here, here)
    demand(here % at_once == 0, config, "seeds_at_once", f"a divisor of {here}")
    at_once = None if devices[0].platform == "cpu" else at_once  # there rows are faster in turn

    def program(function, **options):
        def of_row(step, row, state):
            train = make_train(replace(config, **{k: row[k] for k in row if k != "seed"}), shares)
            if state is not None:  # step is the same for all rows, so that lax.cond stays a branch
                state = state.replace(step=step, rng=jax.random.wrap_key_data(state.rng))
            state, shown = function(train, row["seed"], state)
            return state and state.replace(step=None, rng=jax.random.key_data(state.rng)), shown

        of_rows = lambda step, *x: jax.lax.map(lambda x: of_row(step, *x), x, batch_size=at_once)
        specs = dict(in_specs=(P(), spec, spec), out_specs=spec, check_vma=False)
        sharded = jax.shard_map(of_rows, mesh=sharding.mesh, **specs)
        return jax.jit(sharded, out_shardings=sharding, **options)

    init = program(lambda train, seed, _: (train.init(jax.random.key(seed)), ()))
    show = program(lambda train, _, state: (None, train.show(state)))
    update = cache(lambda n: program(lambda train, _, x: train.update(x, n), donate_argnums=2))
    return init, update, show, sharding


def write(path, save):
    """Replace a file as a whole: save(file) makes another one, which then takes its place."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def plot_curves(folder, swept):
    """curves.png from logs.csv: mean and spread over the seeds of each point of a sweep."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    table = list(csv.DictReader((folder / "logs.csv").read_text().splitlines()))
    for axis, column in zip(figure.subplots(1, 2), CURVES):
        curves = {}
        for row in (row for row in table if row.get(column)):
            curve = curves.setdefault(", ".join(f"{k} {float(row[k]):.6g}" for k in swept), {})
            curve.setdefault(row["update"], []).append((int(row["env_steps"]), float(row[column])))
        for point, curve in curves.items():
            mean, std = (np.array([f(x, 0) for x in curve.values()]).T for f in (np.mean, np.std))
            axis.plot(*mean, label=point)  # steps differ between seeds where episodes are counted
            axis.fill_between(mean[0], mean[1] - std[1], mean[1] + std[1], alpha=0.2)
        axis.set(xlabel="env steps", title=column, ylim=(0, 1))
        swept and len(curves) <= 12 and axis.legend(fontsize="small")
    write(folder / "curves.png", partial(figure.savefig, format="png"))


def run(config, status=False):
    """Train all rows, until a signal, in chunks of log_interval updates; between them logs,
    checkpoints, pictures -> states [R, ...], metrics {name: [R, updates]}; or an exit status."""
    rows, first = make_rows(config), jax.process_index() == 0
    say = tqdm.write if first else lambda line: None  # above the progress bar
    if config.fast and (getattr(config, "parallel", False) or not getattr(config, "robust", True)):
        say("--fast was tuned for the serial, robust mode, not for this one")
    devices, shard = choose_devices(config, len(rows))
    init, update, show, sharding = make_programs(config, len(rows), devices, shard)
    table = jax.device_put({k: np.array([row[k] for row in rows]) for k in rows[0]}, sharding)
    state = jax.eval_shape(init, 0, table, None)[0]
    metrics = jax.eval_shape(update(config.log_interval), 0, table, state)[1]
    for name in {"grad_updates", "rollouts"} - metrics.keys():
        raise BadConfig(f"make_train's metrics: {name} is missing, which logs.csv needs")
    names = (Path(f"runs/{Path(SCRIPT).stem}-{i}") for i in itertools.count(1))
    folder = Path(config.out or next(name for name in names if not name.exists()))
    last = {"step": 0, "seconds": 0.0, "log_bytes": 0, "state": None, "metrics": list(metrics)}
    if config.resume and (folder / "checkpoint.msgpack").exists():
        last |= serialization.msgpack_restore((folder / "checkpoint.msgpack").read_bytes())
    other = ", ".join(sorted({*metrics} ^ {*last["metrics"]}))
    demand(not other, config, "out", f"with --resume, a run with the same metrics; not so: {other}")
    if first:
        demand(config.resume or not any(folder.glob("*")), config, "out", "a new one, or --resume")
        try:
            (folder / "levels").mkdir(parents=True, exist_ok=config.resume)
        except OSError as error:
            demand(False, config, "out", f"a folder that can be made ({error.strerror})")
        stored = json.dumps({"script": SCRIPT} | asdict(replace(config, resume=False)), indent=2)
        write(folder / "config.json", lambda file: file.write(stored.encode()))
    step, seconds, saved, chunks = last["step"], last["seconds"], last["state"], []
    saved = saved and serialization.from_state_dict(state, saved)
    state = jax.device_put(saved or init(0, table, None)[0], sharding)
    stop, ended, undo, trackers, diverged, programs, shown = [], 0, ExitStack(), [], set(), {}, {}
    for i, row in enumerate(rows if config.track and first else []):
        about = dict(reinit="create_new", dir=folder) if config.track == "wandb" else {}
        about |= dict(group=folder.name, name=f"{os.environ.get('WANDB_NAME', folder.name)}-{i}")
        about |= dict(project=os.environ.get("WANDB_PROJECT", SCRIPT), config=asdict(config) | row)
        trackers.append(importlib.import_module(config.track).init(**about))
    if first and (folder / "logs.csv").exists():  # nothing can be refused any more
        os.truncate(folder / "logs.csv", last["log_bytes"])
    for number in (signal.SIGINT, signal.SIGTERM):  # a second one does what it did before
        handler = signal.signal(number, lambda n, _: stop.append(n) or undo.close())
        undo.callback(signal.signal, number, handler)
    devices = f"{len(devices)} x {devices[0].device_kind}"
    say(f"{folder}: {len(rows)} training(s) on {devices}, dealt by {shard}")

    def save(path):
        """A checkpoint; it notes how long logs.csv is, so that both agree after a crash."""
        data = {"step": step, "seconds": seconds, "log_bytes": log.tell(), "metrics": list(metrics)}
        data |= serialization.to_state_dict({"rows": rows, "state": gather(state)})
        if first:
            os.fsync(log.fileno())  # before the checkpoint that counts on it
            write(path, lambda file: file.write(serialization.msgpack_serialize(data)))

    bar = tqdm(initial=step, total=config.num_updates, unit="update", disable=not first)
    with open(folder / "logs.csv" if first else os.devnull, "a", 1, newline="") as log, bar, undo:
        while step < config.num_updates and not ended:
            before, steps = step, min(config.log_interval, config.num_updates - step)
            if steps not in programs:
                started = time.time()
                programs[steps] = update(steps).lower(step, table, state).compile()
                say(f"compiled {steps} updates in {time.time() - started:.1f} s")
            started = time.time()
            state, chunk = jax.block_until_ready(programs[steps](step, table, state))
            step, seconds, chunk = step + steps, seconds + time.time() - started, gather(chunk)
            ended = int(gather(np.array([stop[0] if stop else 0])).max())  # by a signal to anyone
            lines, chunks = [], [] if status else [*chunks, chunk]
            for i, row in enumerate(rows):  # means over the chunk; blank: NaN, nan: not finite
                values = {name: x[i][~np.isnan(x[i])] for name, x in chunk.items()}
                learned, played = (int(values.pop(x)[-1]) for x in ("grad_updates", "rollouts"))
                played *= config.num_envs * config.num_evals * config.num_steps
                mean = lambda x: f"{x.mean(dtype=float):.7g}" if np.isfinite(x).all() else "nan"
                means = {name: mean(x) if x.size else "" for name, x in values.items()}
                counters = {"update": step, "grad_updates": learned, "env_steps": played}
                lines.append(counters | row | {"seconds": f"{seconds:.1f}"} | means | row)
            writer = csv.DictWriter(log, lines[0])
            log.tell() or writer.writeheader()
            writer.writerows(lines)
            for tracker, line in zip(trackers, lines):
                tracker.log({name: float(x) for name, x in line.items() if x != ""}, step=step)
            shown |= {name: lines[0][name] for name in CURVES if lines[0].get(name)}
            bar.set_postfix(shown, refresh=False)
            bar.update(steps)
            infinite = np.any([np.isinf(x) for x in chunk.values()], axis=0)  # [R, steps]
            for i in {*np.flatnonzero(infinite.any(1))} - diverged:
                say(f"diverged at update {before + infinite[i].argmax() + 1}: {rows[i]}")
                diverged.add(i)
            if len(diverged) == len(rows):
                raise FloatingPointError(f"all trainings have diverged by update {step}")
            ends = ended or step == config.num_updates
            due = lambda interval: interval and step // interval > before // interval
            if ends or due(config.plot_interval):
                levels = jax.tree.map(lambda x: x[0], gather(show(step, table, state)[1]))
                if first:
                    drawn = partial(amaze.plot_levels(levels).savefig, format="png")
                    write(folder / f"levels/update_{step}.png", drawn)
                    plot_curves(folder, list(rows[0])[1:])
            if due(config.archive_interval):
                save(folder / f"checkpoint_{step}.msgpack")
            if ends or due(config.checkpoint_interval):  # last: what comes before is made again
                save(folder / "checkpoint.msgpack")
    script, stopped = sys.argv[0] if status else SCRIPT, step < config.num_updates
    go_on = f"stopped at update {step}; to go on: python {script} --resume --out {folder}"
    look = f"done: {seconds:.0f} s; next: python evaluate.py {folder} --script {script}"
    say(go_on if stopped else look)
    state = state.replace(step=jnp.full(len(rows), step), rng=jax.random.wrap_key_data(state.rng))
    metrics = {name: np.concatenate([x[name] for x in chunks], 1) for name in chunks and metrics}
    return (128 + ended) * stopped if status else (state, metrics)


def parse(arguments):
    """The command line; on --resume, what is not given there comes from the run's config.json."""
    for name in {x[2:].split("=")[0].replace("-", "_") for x in arguments} & CLEANRL.keys():
        raise BadConfig(f"--{name}: did you mean --{CLEANRL[name]}?".replace("_", "-"))
    given = [x for x in arguments if x not in ("-h", "--help")]
    read = partial(tyro.cli, Config, args=given, config=(tyro.conf.UseAppendAction,))
    config = read()  # what is not given has Config's defaults; or else, of another one, default=
    config = read(default=Config(**FAST)) if config.fast and not config.resume else config
    if given != arguments:  # help: Config's text, with the values that the fields have now
        flag = lambda x: f"  --{x[1].replace('_', '-')} {getattr(config, x[1])!r}".ljust(31)
        kind = lambda x: str(Config.__annotations__[x[1]]).partition("Literal")[2]  # its choices
        row = lambda x: textwrap.fill(f"{flag(x)} {x[2]} {kind(x)}", 80, subsequent_indent=32 * " ")
        text = re.sub(r"(?m)^ +(\w+): .*  # (.*)", row, inspect.getsource(Config).split("\n\n")[1])
        sys.exit(print(__doc__, text.replace("    # ", "\n"), CACHE, sep="\n"))
    if not config.resume:
        return config
    path = Path(config.out) / "config.json"
    demand(config.out and path.exists(), config, "out", "the folder of a run, to --resume it")
    stored = json.loads(path.read_text())
    ours = stored.pop("script") == SCRIPT and {*stored} <= {f.name for f in fields(Config)}
    demand(ours, config, "out", f"a run of {SCRIPT} as it stands, to --resume it")
    stored = Config(**stored | {"sweep": tuple(stored["sweep"]), "distributed": config.distributed})
    config = read(default=replace(stored, sweep=() if config.sweep else stored.sweep))
    for name, old in asdict(stored).items():
        new, more = getattr(config, name), " (without anneal_lr more)" * (name == "num_updates")
        fine = name in FREE or new == old or more and new > old and not config.anneal_lr
        demand(fine, config, name, f"{old!r}{more}, as in the run to resume")
    return config


def start_jax(config):
    """Every core of a CPU is a device, programs are kept; --distributed: join other processes."""
    info, root = Path("/proc/cpuinfo"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    text = info.read_text() if info.exists() else f"flags {platform.platform()}"
    cpu = str(re.findall("(?m)^(?:model name|flags|Features).*", text)[:2]).encode()
    kept = Path(root, f"amaze/jax-{jax.__version__}-{hash(int.from_bytes(cpu)):x}").expanduser()
    try:  # for each kind of CPU apart: code for another may crash
        if jax.config.jax_compilation_cache_dir is None:  # else it is the user's
            kept.mkdir(parents=True, exist_ok=True)
            (kept / "writable").touch()
            jax.config.update("jax_compilation_cache_dir", str(kept))
    except OSError as error:
        print(f"warning: compiled programs are not kept: {error}", file=sys.stderr)
    by_user = jax.config.jax_num_cpu_devices, "device_count" in os.environ.get("XLA_FLAGS", "")
    address, *numbers = config.distributed.split(",")
    try:
        if by_user == (-1, False) and config.devices != 1:
            cores = getattr(os, "sched_getaffinity", lambda pid: range(os.cpu_count()))(0)
            jax.config.update("jax_num_cpu_devices", len(cores))
        numbers = () if address == "auto" else (address, *map(int, numbers))
        address and jax.distributed.initialize(*numbers, heartbeat_timeout_seconds=30)
    except (ValueError, RuntimeError) as error:
        allowed = f"auto, or HOST:PORT,PROCESSES,NUMBER ({str(error).splitlines()[0]})"
        demand(not config.distributed, config, "distributed", allowed)
        print("an import has started JAX: its devices are used; of a CPU, JAX_NUM_CPU_DEVICES")


def main():
    sys.stdout.reconfigure(line_buffering=True)  # into a file too
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what `run` does not catch ends it at once
    try:
        config = parse(sys.argv[1:])
        check(config)
        start_jax(config)
        sys.exit(run(config, status=True))
    except (BadConfig, FloatingPointError) as error:
        message, status = error, 2 if isinstance(error, BadConfig) else 1
    except (OSError, jax.errors.JaxRuntimeError) as error:  # `write` names its file
        if not (isinstance(error, OSError) or jax.distributed.is_initialized()):
            raise
        of_log = error.args[1:] and not getattr(error, "filename", None)
        why = str(OSError(*error.args, "logs.csv") if of_log else error).splitlines()[0]
        message, status = f"{why}; the last checkpoint is intact, if any; --resume goes on", 1
    print(f"{SCRIPT}: error: {message}", file=sys.stderr, flush=True)
    (os._exit if jax.distributed.is_initialized() else sys.exit)(status)  # others wait for this one


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10", "flax>=0.12", "optax>=0.2.5", "distrax>=0.1.8", "numpy>=2.0",
#                 "matplotlib>=3.9", "tyro>=0.9", "tqdm>=4.66"]
# ///
