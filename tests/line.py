"""Another environment, for test_environment.py: a walker on a line must come near the level's goal,
against the level's slope. Rewards are dense and negative; the optimal return is not known."""

from functools import partial
from typing import NamedTuple

import amaze
import jax
import jax.numpy as jnp
import numpy as np

NUM_ACTIONS = 3


class Level(NamedTuple):
    goal: jax.Array  # [] from -1 to 1
    slope: jax.Array  # [] what each step adds


class Observation(NamedTuple):
    place: jax.Array  # [2] goal less position, slope


class EnvState(NamedTuple):
    level: Level
    position: jax.Array
    t: jax.Array
    max_steps: jax.Array


def look(state):
    return Observation(jnp.stack([state.level.goal - state.position, state.level.slope])), state


def reset_one(level, max_steps):
    zero = jnp.zeros(())
    return look(EnvState(level, zero, zero.astype(int), jnp.asarray(max_steps)))


def step_one(state, action):
    position = state.position + 0.1 * (action - 1) + state.level.slope
    state = state._replace(position=position, t=state.t + 1)
    distance = abs(position - state.level.goal)
    near = distance < 0.1
    return *look(state), -distance, near | (state.t >= state.max_steps)


reset, step, step_and_reset = amaze.over_queues(reset_one, step_one, ndim=0)
solved = lambda total: total > -2.5
level_stats = lambda level, max_steps: {"distance": abs(level.goal), "slope": level.slope}
level_code = jnp.stack


def sample_level(rng, steepness):
    goal, slope = jax.random.uniform(rng, (2,), minval=-1)
    return Level(goal, steepness * slope)


def edit_level(rng, level, n_edits):
    change = n_edits * jax.random.normal(rng)
    return level._replace(goal=jnp.clip(level.goal + 0.05 * change, -1, 1))


def render(level_or_state):
    position = level_or_state.position if isinstance(level_or_state, EnvState) else 0.0
    level = getattr(level_or_state, "level", level_or_state)
    picture = np.full((8, 40, 3), 255, np.uint8)
    for x, colour in ((float(level.goal), (0, 255, 0)), (float(position), (255, 0, 0))):
        picture[2:6, int(np.clip(15 * x + 20, 0, 39))] = colour
    return picture


TEST_MAZES = {"Left": (lambda rng: Level(-0.6, 0.03), 20),
              "Right": (lambda rng: Level(0.55, 0.0), 30)}  # fmt: skip
TEST_MAZES["Any"] = (partial(sample_level, steepness=0.02), 20)
SUITES = {"two": ["Left", "Right"], "sampled": ["Any"]}
sample_mazes = partial(amaze.sample_mazes, mazes=TEST_MAZES, pad=list)
plot_levels = partial(amaze.plot_levels, render=render)
