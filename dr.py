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
import importlib
import itertools
import json
import math
import os
import platform
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
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
from tqdm import tqdm

import amaze
from s5 import make_core, on_gpu, orthogonal, scan


@dataclass(frozen=True)
class Config:
    """All settings. Floats may be traced, so none meets an `if`. Others are static."""

    # PPO
    lr: float = 1e-4  # Adam's learning rate
    anneal_lr: bool = False  # decay lr linearly to 0 over num_updates, which is then fixed
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
    max_steps: int = 250  # time limit; above num_steps failures never end: train_solve_rate is 1
    see_through_walls: bool = True  # False: MiniGrid's occlusion; test mazes have their own rule
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
    out: str = ""  # run folder; default: the next free runs/NAME-1, runs/NAME-2, ...
    resume: bool = False  # continue the run in --out, or begin it there
    log_interval: int = 10  # cycles between rows of logs.csv
    checkpoint_interval: int = 250  # cycles between checkpoints
    archive_interval: int = 0  # cycles between archived checkpoint_<cycle>.msgpack; 0: none
    plot_interval: int = 500  # cycles between pictures; 0: only at the end
    devices: int = 0  # devices (on a CPU: cores) to use; 0: as many as can get equal parts
    shard: Literal["", "seeds", "levels"] = ""  # what devices share; "": whichever uses more
    distributed: bool = False  # one of several processes, as JAX or its variables tell it
    track: Literal["", "wandb", "trackio"] = ""  # log there, too; WANDB_PROJECT: its name


FAST = Config(  # ten to fifteen minutes on one core of a CPU
    lr=2e-3, anneal_lr=True, num_updates=4_700, update_epochs=2, num_minibatches=2,
    bptt_horizon=64, ent_coef=1e-2, vf_coef=2.0, clip_vloss=False, max_grad_norm=1.5,
    polyak_averaging=True, hidden_size=64, n_walls=90, solvable_only=True,
    gamma=0.999)  # fmt: skip
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
    # On one device these three change nothing.

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
        rngs = jax.random.split(rng, math.prod(shape))
        in_blocks = config.solvable_only and not on_gpu()  # a block redraws until all are solvable
        levels = jax.lax.map(draw, rngs, batch_size=8) if in_blocks else jax.vmap(draw)(rngs)
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
        noise = jax.vmap(my_part)(jax.random.gumbel(rng, shape))  # [T + 1, B / devices, actions]
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
        carry = jax.tree.map(lambda x: x[0], batch.memory)  # before the chunk, [chunks * B, ...]
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
            # lr may be traced, hence an optimiser made here; its state does not depend on lr
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
        # NaN means "not measured", so any value that is not finite becomes inf
        finite = lambda x: jnp.where(jnp.isfinite(x), x, jnp.inf)
        return student, {name: finite(x.mean()) for name, x in metrics.items()}

    def play(rng, params, levels, *rules):
        """One episode on each level [B] -> returns [B]."""
        obs, state = jax.vmap(reset)(levels, *rules)
        number = len(jax.tree.leaves(levels)[0])

        def play_step(carry):
            playing, t, memory, obs, state, returns = carry
            noise = jax.random.gumbel(jax.random.fold_in(rng, t), (number, amaze.NUM_ACTIONS))
            is_first = jnp.full(number, t == 0)
            memory, action, _, _ = act(params, memory, obs, is_first, noise)
            obs, state, reward, done = jax.vmap(step)(state, action)
            return playing & ~done, t + 1, memory, obs, state, returns + reward * playing

        carry = jnp.ones(number, bool), 0, core.initial_carry(number), obs, state, jnp.zeros(number)
        return jax.lax.while_loop(lambda carry: carry[0].any(), play_step, carry)[-1]

    def evaluate(rng, student):
        """The student's solve rate and return on each test maze, and their means."""
        rng_mazes, rng_play = jax.random.split(rng)
        levels = amaze.sample_mazes(rng_mazes, mazes, config.eval_episodes)
        params = student.average_params or student.params
        returns = play(rng_play, params, *levels).reshape(len(mazes), -1)
        solve_rate = amaze.solved(returns).mean(1)
        scores = {"eval_solve_rate": solve_rate, "eval_return": returns.mean(1)}
        each = {f"{k}/{m}": x[i] for k, x in scores.items() for i, m in enumerate(mazes)}
        return each | {name: score.mean() for name, score in scores.items()}

    def nothing(function, *args):
        """In place of the metrics function(*args): the same names, and NaN for "not measured"."""
        shapes = jax.eval_shape(function, *args)
        return jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan), shapes)

    def choose_levels(rng):
        """N queues [N, Q] of random levels; trajectories start with the first level of a queue."""
        if config.auto_replay:
            return sample_levels(rng, config.num_envs, 1)
        levels = sample_levels(rng, config.num_envs, max(config.num_steps // 8, 1))
        # episodes are rarely that short: a queue ends with the levels of another one
        return jax.tree.map(lambda x: jnp.concatenate([x, jnp.roll(x, 1, axis=0)], 1), levels)

    def cycle(state, _):
        rngs = jax.random.split(jax.random.fold_in(state.rng, state.cycles), 4)
        rng_levels, rng_rollout, rng_learn, rng_eval = rngs
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
            metrics |= jax.lax.cond(due, evaluate, partial(nothing, evaluate), rng_eval, student)
        return state.replace(cycles=cycles, student=student), metrics

    def update(state, cycles):
        """Train for so many cycles -> RunnerState, metrics {name: [cycles]}."""
        return jax.lax.scan(cycle, state, None, length=cycles)

    def show(state):
        """16 levels for the picture: {title: (levels, captions)}."""
        levels = sample_levels(jax.random.fold_in(state.rng, state.cycles), 16)
        return {"drawn at random": (levels, level_stats(levels))}

    def train(rng):
        return update(init(rng), config.num_updates)

    train.init, train.update, train.show = init, update, show
    train.act, train.initial_carry = act, core.initial_carry
    train.reset, train.step = reset, step
    return train


# --- command line
# The same in all five files. A row is one training: a seed and swept values. States are [R, ...].

SCRIPT = Path(__file__).name
FLOATS = [field.name for field in fields(Config) if field.type is float]
MAY_CHANGE = """num_updates out resume log_interval checkpoint_interval archive_interval
    plot_interval seeds_at_once devices shard distributed track""".split()  # when a run is resumed
CURVES = "train_solve_rate", "eval_solve_rate"  # in curves.png and the progress bar
GROUPS = re.compile("^(train|fresh|replay|buffer|child|eval)_")  # in trackers
RANGES = {  # of fields, teacher_ fields included
    (0, 1e9): """lr ent_coef vf_coef bptt_horizon n_walls num_edits candidate_steps eval_interval
        seed seeds_at_once archive_interval plot_interval devices""",
    (1, 1e9): """num_updates num_envs num_evals num_steps update_epochs num_minibatches hidden_size
        s5_layers filters num_students max_steps buffer_size score_interval num_candidates
        candidates_at_once eval_episodes seeds log_interval checkpoint_interval""",
    (2, 128): "height width candidate_evals",
    (1e-6, 1e9): "clip_eps max_grad_norm temperature",
    (0, 1): "gamma gae_lambda replay_prob staleness_coef min_fill",
}
gather = partial(multihost_utils.process_allgather, tiled=True)  # whole arrays
maze_names = lambda suite: amaze.SUITES.get(suite, suite.split(","))  # or a list of mazes


class BadConfig(ValueError):
    """What is wrong, and what it must be."""


def demand(condition, config, names, allowed):
    """Raise BadConfig about these fields, unless the condition holds."""
    if not condition:
        values = ", ".join(f"{name} = {getattr(config, name)!r}" for name in names.split())
        raise BadConfig(f"{values}: must be {allowed}")


def check(config):
    """Raise BadConfig at the first value out of range; a traced one has none."""
    for field in fields(config):
        name, x = field.name, getattr(config, field.name)
        for (low, high), names in RANGES.items():
            has_range = name.removeprefix("teacher_") in names.split()
            fine = not has_range or isinstance(x, jax.Array) or low <= x <= high
            demand(fine, config, name, f"from {low:g} to {high:g}")
        is_word, words = get_origin(field.type) is Literal, get_args(field.type)
        demand(not is_word or x in words, config, name, f"one of {', '.join(map(repr, words))}")
    unknown = set(maze_names(config.eval_suite)) - set(amaze.TEST_MAZES)
    allowed = f"a suite ({', '.join(amaze.SUITES)}) or mazes ({', '.join(amaze.TEST_MAZES)})"
    demand(len(unknown) == 0, config, "eval_suite", allowed)
    if jax.config.jax_enable_x64:
        raise BadConfig("JAX_ENABLE_X64 = True: must be False")


def read_values(text):
    """Values from 0.1,0.2 or log:0.01:0.1:8, eight in equal ratios."""
    if not text.startswith("log:"):
        return [float(x) for x in text.split(",")]
    low, high, number = text.removeprefix("log:").split(":")
    return np.geomspace(float(low), float(high), int(number)).tolist()


def make_rows(config):
    """The rows, one for each training: every point of the sweep's grid with every seed."""
    grid = {}
    for sweep in config.sweep:
        name, _, text = sweep.partition("=")
        is_new = name in FLOATS and name not in grid
        demand(is_new, config, "sweep", f"NAME=VALUES, each NAME once: {', '.join(FLOATS)}")
        with suppress(ValueError):
            grid[name] = read_values(text)
        demand(grid.get(name), config, "sweep", f"{name}=0.1,0.2 or {name}=log:0.01:0.1:8")
        distinct = len({f"{x:.6g}" for x in grid[name]}) == len(grid[name])
        demand(distinct, config, "sweep", f"values of {name} that differ in their first six digits")
    points = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    for point in points:
        make_train(replace(config, **point))
    seeds = range(config.seed, config.seed + config.seeds)
    return [{"seed": seed} | point for point in points for seed in seeds]


def choose_devices(config, num_rows):
    """As many devices as get equal parts, and of what: seeds or levels."""
    here = jax.devices()
    trajectories = config.num_envs * config.num_evals // config.num_minibatches
    levels = math.gcd(config.num_envs // config.num_minibatches, trajectories)
    parts = {"seeds": num_rows, "levels": levels}
    numbers = range(len(here), 0, -1) if jax.process_count() == 1 else [len(here)]
    for number, shard in itertools.product(numbers, parts):
        asked = config.devices in (0, number) and config.shard in ("", shard)
        if asked and parts[shard] % number == 0:
            return here[:number], shard
    demand(False, config, "devices shard", f"a divisor of {parts}, at most {len(here)}")


def make_programs(config, num_rows, devices, shard):
    """init, update(n), show: cycles, rows [R], states [R, ...] -> states, shown."""
    split = shard == "levels"  # each device has all rows
    spec = P() if split else P("devices")
    sharding = NamedSharding(Mesh(devices, ("devices",)), spec)
    here = num_rows if split else num_rows // len(devices)  # rows on a device
    at_once = min(config.seeds_at_once or here, here)
    demand(here % at_once == 0, config, "seeds_at_once", f"a divisor of {here}")
    compiler = {}
    if devices[0].platform == "cpu":
        at_once = None  # faster in turn there
        if "optimization_level" not in os.environ.get("XLA_FLAGS", ""):
            compiler = {"xla_backend_optimization_level": 1}  # compiles faster

    def program(function, **options):
        def of_row(cycles, row, state):
            swept = {name: value for name, value in row.items() if name != "seed"}
            train = make_train(replace(config, **swept), len(devices) if split else 1)
            if state is not None:  # the same for all rows: lax.cond stays a branch
                state = state.replace(cycles=cycles)
            return function(train, row["seed"], state)

        def of_rows(cycles, *inputs):
            return jax.lax.map(lambda x: of_row(cycles, *x), inputs, batch_size=at_once)

        specs = dict(in_specs=(P(), spec, spec), out_specs=spec, check_vma=False)
        sharded = jax.shard_map(of_rows, mesh=sharding.mesh, **specs)
        return jax.jit(sharded, out_shardings=sharding, compiler_options=compiler, **options)

    init = program(lambda train, seed, _: (train.init(jax.random.key(seed)), ()))
    show = program(lambda train, _, state: (None, train.show(state)))
    update = cache(lambda n: program(lambda train, _, x: train.update(x, n), donate_argnums=2))
    return init, update, show, sharding


# --- a run's folder


def write(path, save):
    """Replace a file: save(file) writes a new one, which takes its place."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(new, "xb") as file:  # never an old file or a link
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def to_json(config):
    """A run's config.json: script, JAX's settings of numbers, Config."""
    names = "jax_default_prng_impl", "jax_threefry_partitionable", "jax_enable_x64"
    stored = {"script": SCRIPT} | {x: getattr(jax.config, x) for x in names} | asdict(config)
    return json.dumps(stored, indent=2, default=float)


def read_config(folder):
    """A run's config.json, a dict."""
    path = Path(folder, "config.json")
    try:
        stored = json.loads(path.read_text())
        return stored | {"sweep": tuple(stored["sweep"])}
    except (ValueError, KeyError, TypeError):
        raise BadConfig(f"{path} is damaged") from None


def save_checkpoint(path, log, config, rows, state, cycle, seconds):
    """Write a checkpoint that knows the size of logs.csv, after its checksum."""
    os.fsync(log.fileno())
    state = gather(state.replace(rng=jax.random.key_data(state.rng)))
    data = {"config": to_json(config), "rows": rows, "cycles": cycle, "seconds": seconds}
    data |= {"log_bytes": os.path.getsize(log.name), "state": serialization.to_state_dict(state)}
    body = serialization.msgpack_serialize(data)
    write(path, lambda file: file.writelines([hashlib.sha256(body).digest(), body]))


def read_checkpoint(path):
    """Read what save_checkpoint wrote: a dict."""
    data = Path(path).read_bytes()
    checksum, body = data[:32], data[32:]
    if checksum != hashlib.sha256(body).digest():
        raise BadConfig(f"{path} is damaged, or no checkpoint")
    return serialization.msgpack_restore(body)


def load_checkpoint(config, state):
    """The checkpoint to go on from, its state like this, or {}; BadConfig: another run's."""
    path, log = (Path(config.out, name) for name in ("checkpoint.msgpack", "logs.csv"))
    begun = config.out != "" and (path.exists() or log.exists() and log.stat().st_size > 0)
    demand(config.resume or not begun, config, "out", "a new folder, or --resume")
    if not begun or not path.exists():
        return {}
    last = read_checkpoint(path)
    stored, given = json.loads(last["config"]), json.loads(to_json(config))
    fixed, annealed = stored.keys() - MAY_CHANGE, ""
    if stored["anneal_lr"]:
        fixed, annealed = fixed | {"num_updates"}, ", whose lr is annealed"
    for name in sorted(fixed):
        if stored[name] != given.get(name):
            allowed = f"{stored[name]!r}, as in the run to resume{annealed}"
            raise BadConfig(f"{name} = {given.get(name)!r}: must be {allowed}")
    state = state.replace(rng=jax.eval_shape(jax.random.key_data, state.rng))
    with suppress(ValueError):  # other fields
        last["state"] = serialization.from_state_dict(state, last["state"])
    fits = jax.tree.map(jnp.shape, last["state"]) == jax.tree.map(jnp.shape, state)
    demand(fits, config, "out", "a run by this code: the state there has other fields or shapes")
    demand(config.num_updates >= last["cycles"], config, "num_updates", f"{last['cycles']} or more")
    return last


def open_folder(config):
    """Make --out, or the next free runs/NAME-1, runs/NAME-2, ..., and open and lock its logs.csv:
    one process trains in a folder. -> the folder, the file"""
    folder, number = config.out and Path(config.out), itertools.count(1)
    if jax.process_index() > 0:
        folder = Path(tempfile.mkdtemp())  # not kept
    while not folder:
        Path("runs").mkdir(exist_ok=True)
        free = Path(f"runs/{Path(SCRIPT).stem}-{next(number)}")
        with suppress(FileExistsError):  # an earlier run's, or one's that begins now
            free.mkdir()
            folder = free
    (folder / "levels").mkdir(parents=True, exist_ok=True)
    path = folder / "logs.csv"
    demand(not path.is_symlink(), config, "out", "a folder whose logs.csv is no link")
    log = open(path, "a+", newline="")
    try:
        import fcntl

        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        demand(False, config, "out", "a folder in which no other process trains")
    except (ImportError, OSError):
        pass  # no locks here
    return folder, log


def write_log(log, config, rows, metrics, cycle, seconds):
    """Append a line for each row: means over a chunk of metrics {name: [R, cycles]}.
    Blank: nothing was measured; inf: a value was not finite. -> the lines"""
    learned, rollouts = (metrics.pop(name)[:, -1] for name in ("grad_updates", "rollouts"))
    steps = rollouts.astype(int) * config.num_envs * config.num_evals * config.num_steps
    lines = []
    for i, row in enumerate(rows):
        line = {"update": cycle, "grad_updates": int(learned[i]), "env_steps": int(steps[i])}
        line |= row | {"seconds": f"{seconds:.1f}"}
        for name, values in metrics.items():
            measured = values[i][~np.isnan(values[i])]
            line[name] = f"{measured.mean(dtype=float):.7g}" if measured.size > 0 else ""
        lines.append(line)
    log.seek(0)
    columns = next(csv.reader(log), None)  # those of a resumed run
    known = columns is None or lines[0].keys() <= {*columns}
    demand(known, config, "out", "a run by this code: logs.csv there lacks a metric's column")
    writer = csv.DictWriter(log, columns or lines[0])
    if columns is None:
        writer.writeheader()
    writer.writerows(lines)
    log.flush()
    return lines


def draw(folder, levels, cycle, rows):
    """Draw the first row's levels, out of levels [R, ...], and curves.png, from logs.csv."""
    import matplotlib.style  # slow
    from matplotlib.figure import Figure

    with matplotlib.style.context("default"):  # not by a matplotlibrc
        figure = amaze.plot_levels(jax.tree.map(lambda x: x[0], levels))
        write(folder / f"levels/update_{cycle}.png", partial(figure.savefig, format="png"))
        with open(folder / "logs.csv", newline="") as log:
            needed = "env_steps", *CURVES
            table = [{x: line.get(x) for x in needed} for line in csv.DictReader(log)]
        figure = Figure(figsize=(11, 4), layout="constrained")
        for axis, name in zip(figure.subplots(1, 2), CURVES):
            for i, row in enumerate(rows):
                lines = [line for line in table[i :: len(rows)] if line[name]]
                x, y = ([float(line[k]) for line in lines] for k in ("env_steps", name))
                axis.plot(x, y, label=str(row)[1:-1].replace("'", "") if i < 12 else None)
            axis.set(xlabel="env steps", title=name, ylim=(0, 1))
            axis.legend(fontsize="small")
        write(folder / "curves.png", partial(figure.savefig, format="png"))


def start_trackers(config, rows, folder):
    """Start a run of wandb or trackio for each row, in one group."""
    about = {"project": os.environ.get("WANDB_PROJECT", SCRIPT), "group": folder.name}
    if config.track == "wandb":
        about |= {"reinit": "create_new", "dir": folder}
    configs = {f"{folder.name}-{i}": asdict(config) | row for i, row in enumerate(rows)}
    try:
        start = importlib.import_module(config.track).init
        return [start(name=name, config=x, **about) for name, x in configs.items()]
    except Exception as error:  # not installed, or no key, or no network
        demand(False, config, "track", f"able to start: {error!r:.200}")


@contextmanager
def spare(what):
    """Turn an error into a line: no picture is worth a training."""
    try:
        yield
    except Exception as error:
        tqdm.write(f"no {what}: {error!r:.200}")


@contextmanager
def catch_signals():
    """Yield a list for the first SIGINT or SIGTERM; a second one acts as before."""
    caught, before = [], {}

    def note(number, _):
        caught.append(number)
        signal.signal(number, before[number])
        os.write(2, b"\nstops after these cycles; at once if asked again\n")

    with suppress(ValueError):  # only the main thread can
        before = {x: signal.signal(x, note) for x in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(config):
    """Train all rows in chunks of log_interval cycles; after each: log, checkpoint, pictures.
    -> states [R, ...]. Ctrl-C or SIGTERM ends it after a chunk: KeyboardInterrupt(exit status)."""
    rows = make_rows(config)
    devices, shard = choose_devices(config, len(rows))
    init, update, show, sharding = make_programs(config, len(rows), devices, shard)
    table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    table = jax.device_put(table, sharding)
    state = jax.eval_shape(init, 0, table, None)[0]
    jax.eval_shape(update(config.log_interval), 0, table, state)  # raises what make_train demands
    folder, log = open_folder(config)
    quiet = jax.process_index() > 0
    with log, catch_signals() as caught, ExitStack() as stack:
        if quiet:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        last = load_checkpoint(config, state)  # under the lock
        trackers = start_trackers(config, rows, folder) if config.track and not quiet else []
        for tracker in trackers:
            stack.callback(spare("track")(tracker.finish))
        cycle, seconds, stopped, shown = last.get("cycles", 0), last.get("seconds", 0.0), 0, {}
        log.truncate(min(last.get("log_bytes", 0), os.path.getsize(log.name)))
        write(folder / "config.json", lambda file: file.write(to_json(config).encode()))
        if not quiet:
            where = f"{len(devices)} x {devices[0].device_kind}, dealt by {shard}"
            print(f"{folder}: {len(rows)} training(s) on {where}; compiling ...", flush=True)
        if last:
            state = jax.device_put(last["state"], sharding)
            state = state.replace(rng=jax.random.wrap_key_data(state.rng))
        else:
            state = init(0, table, None)[0]
        compiled = cache(lambda n: update(n).lower(cycle, table, state).compile())
        bar = tqdm(initial=cycle, total=config.num_updates, unit="cycle", disable=quiet)
        stack.enter_context(bar)
        while cycle < config.num_updates and not stopped:
            to_next_line = config.log_interval - cycle % config.log_interval
            cycles = min(to_next_line, config.num_updates - cycle)
            program, started = compiled(cycles), time.monotonic()
            state, metrics = jax.block_until_ready(program(cycle, table, state))
            seconds += time.monotonic() - started
            cycle += cycles
            stopped = int(gather(np.array([*caught, 0])[:1]).max())  # by a signal
            lines = write_log(log, config, rows, gather(metrics), cycle, seconds)
            if all("inf" in line.values() for line in lines):
                raise FloatingPointError(f"all trainings have diverged by cycle {cycle}")
            shown |= {name: lines[0][name] for name in CURVES if lines[0].get(name)}
            bar.set_postfix(shown, refresh=False)
            bar.update(cycles)
            ends = stopped or cycle == config.num_updates
            due = lambda interval: interval and cycle // interval > (cycle - cycles) // interval
            reached = log, config, rows, state, cycle, seconds
            if due(config.archive_interval):
                save_checkpoint(folder / f"checkpoint_{cycle}.msgpack", *reached)
            if ends or due(config.checkpoint_interval):
                save_checkpoint(folder / "checkpoint.msgpack", *reached)
            with spare("track"):
                for tracker, line in zip(trackers, lines):
                    known = {GROUPS.sub(r"\1/", k): float(x) for k, x in line.items() if x != ""}
                    tracker.log(known, step=cycle)
            if ends or due(config.plot_interval):
                with spare("picture"):
                    draw(folder, gather(show(cycle, table, state)[1]), cycle, rows)
                    for tracker in trackers[:1]:
                        image = importlib.import_module(config.track).Image
                        levels = image(f"{folder}/levels/update_{cycle}.png")
                        tracker.log({"levels": levels}, step=cycle)
    if not quiet:
        again = f"python {SCRIPT} --resume --out" if stopped else "python evaluate.py"
        print(f"cycle {cycle}, {seconds:.0f} s; next: {again} {folder}", flush=True)
    if stopped:
        raise KeyboardInterrupt(128 + stopped)
    return state


def parse(arguments):
    """The Config of a command line: its flags change a preset, or the run to resume."""
    flags = [x.replace("_", "-") for x in arguments]  # to tyro they are the same
    presets = [preset for flag, preset in PRESETS.items() if flag in flags]
    alone = {*PRESETS} - {"--parallel", "--no-robust"}  # these two are fields, too
    arguments = [x for x, flag in zip(arguments, flags) if flag not in alone]
    append = (tyro.conf.UseAppendAction,)
    read = partial(tyro.cli, Config, args=arguments, description=__doc__, config=append)
    config = read(default=presets[0] if presets else Config())
    demand(config.out or not config.resume, config, "out", "the folder of the run to --resume")
    if not (config.resume and Path(config.out, "config.json").exists()):
        return config
    stored = read_config(config.out)
    demand(stored.get("script") == SCRIPT, config, "out", f"the folder of a run of {SCRIPT}")
    if config.sweep:
        stored["sweep"] = ()  # tyro appends to it
    known = {field.name: stored[field.name] for field in fields(Config) if field.name in stored}
    for preset in presets[:1]:  # so many flags
        known |= dict(vars(preset).items() - vars(Config()).items())
    return read(default=Config(**known))


def start_jax(config):
    """Make CPU cores devices, keep compiled programs, join other processes."""
    if jax.config.jax_compilation_cache_dir is None:
        kept = f"~/.cache/amaze/{platform.node()}"  # another machine's CPU may crash
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(kept))
    by_flags = "device_count" in os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices == -1 and not by_flags and config.devices != 1:
        get_cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))  # on macOS
        with suppress(RuntimeError):  # an import has started JAX
            jax.config.update("jax_num_cpu_devices", len(get_cores(0)))
    if config.distributed:
        with suppress(ValueError):
            jax.distributed.initialize()
        demand(jax.distributed.is_initialized(), config, "distributed", "False without a cluster")


def main():
    """Exit status: 0 done, 1 training failed, 2 bad input, 128 + n stopped by signal n."""
    os.environ.pop("MPLBACKEND", None)  # a notebook's need not be installed
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it at once, but in `run`
    try:
        config = parse(sys.argv[1:])
        start_jax(config)
        run(config)
    except KeyboardInterrupt as stop:
        sys.exit(stop.args[0])
    except (BadConfig, FloatingPointError, OSError) as error:
        print(f"{SCRIPT}: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BadConfig) else 1)


if __name__ == "__main__":
    main()
