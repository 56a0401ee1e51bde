"""Craftax-Classic (2402.16801), symbolic, in place of amaze.py: a level is a world.

A level is a world's map and the seed of all randomness in it, such as where zombies appear. An
achievement gives 1 and a point of health 0.1, so a return is the number of achievements to within
0.9. An episode is solved if its return is at least 6, of 22. Only episodes that end within
num_steps (256) count in a level's score, so max_steps is 250, and not 10,000 as in Craftax.

    pip install "craftax>=1.6"    # its gymnax asks for jax<0.12
    cp examples/craftax.py craftax_levels.py    # craftax is the package's name
    patch -o craftax_accel.py accel.py examples/craftax.diff    # also dr.py, plr.py, sfl.py
    python craftax_accel.py --rnn gru --hidden-size 64 --lr 1e-3 --gamma 0.99 --ent-coef 0.01 \\
        --num-minibatches 4 --num-updates 1000 --buffer-size 500 --out runs/craftax
    python evaluate.py runs/craftax --gif World1

The test suite has the worlds of seeds 1 to 4. Craftax starts JAX when it is imported: on a CPU,
set the environment variable JAX_NUM_CPU_DEVICES=4 to use four cores as devices. The first picture
takes a minute, to load Craftax's textures. Config still has n_walls, height, width and
see_through_walls, but nothing uses them.
"""

from functools import cache, partial
from typing import NamedTuple

import amaze
import jax
import jax.numpy as jnp
import numpy as np
from craftax.craftax_classic.constants import OBS_DIM, BlockType, load_all_textures
from craftax.craftax_classic.envs.craftax_symbolic_env import CraftaxClassicSymbolicEnvNoAutoReset
from craftax.craftax_classic.renderer import make_craftax_pixel_renderer

ENV = CraftaxClassicSymbolicEnvNoAutoReset()
NUM_ACTIONS = ENV.num_actions
NEAR = 8  # edits and counts concern cells this near to the player, in the middle of the map
KINDS = "GRASS WATER STONE TREE COAL IRON DIAMOND LAVA RIPE_PLANT".split()  # edits move these
COUNTED = {"water": "WATER", "trees": "TREE", "stone": "STONE", "coal": "COAL", "iron": "IRON",
           "diamonds": "DIAMOND", "lava": "LAVA"}  # fmt: skip


class Level(NamedTuple):
    map: jax.Array  # [64, 64] uint8 BlockType
    seed: jax.Array  # [] uint32


class EnvState(NamedTuple):
    world: NamedTuple  # Craftax's own state, without its key, which is only used for pictures
    seed: jax.Array  # [] uint32
    max_steps: jax.Array  # [] int32


# --- dynamics


@cache
def opening(seed):
    """The world that Craftax draws from a seed, without its key."""
    with jax.ensure_compile_time_eval():
        world = jax.jit(ENV.reset_env)(jax.random.key(seed), ENV.default_params)[1]
        return jax.tree.map(np.asarray, world.replace(state_rng=None))


def reset_one(level, max_steps, *_):  # scripts pass see_through_walls, too
    world = opening(0).replace(map=level.map.astype(jnp.int32))  # worlds differ in the map only
    state = EnvState(world, level.seed, jnp.asarray(max_steps))
    return ENV.get_obs(world), jax.tree.map(jnp.asarray, state)


def step_one(state, action):
    rng = jax.random.fold_in(jax.random.key(state.seed), state.world.timestep)
    params = ENV.default_params.replace(max_timesteps=state.max_steps)
    obs, world, reward, done, _ = ENV.step_env(rng, state.world, action, params)
    return obs, state._replace(world=world.replace(state_rng=None)), reward, done


reset, step, step_and_reset = amaze.over_queues(reset_one, step_one, ndim=2)
solved = lambda total: total >= 6 - 0.01  # sums of 0.1 are rounded


# --- levels


def sample_level(rng):
    """A random world, as Craftax draws it."""
    rng_map, rng_seed = jax.random.split(rng)
    world = ENV.reset_env(rng_map, ENV.default_params)[1]
    return Level(world.map.astype(jnp.uint8), jax.random.bits(rng_seed, (), jnp.uint32))


def around(cells):
    """The cells near the player [2 NEAR, 2 NEAR]."""
    middle = slice(len(cells) // 2 - NEAR, len(cells) // 2 + NEAR)
    return cells[middle, middle]


def edit_level(rng, level, n_edits):
    """Swap two cells n_edits times, as in JaxUED's craftax_plr: a random cell near the player and a
    random cell of a kind that is drawn first. The player's own cell stays as it is."""
    size = len(level.map)
    own = np.arange(size**2) == size // 2 * (size + 1)
    near = np.zeros((size, size), bool)
    around(near)[:] = True
    near = near.ravel() & ~own
    kinds = jnp.array([BlockType[name].value for name in KINDS], jnp.uint8)

    def swap(cells, rng):  # [size^2]
        rng_kind, rng_near, rng_other = jax.random.split(rng, 3)
        pick = lambda rng, mask: jnp.argmax(mask * (1 + jax.random.uniform(rng, mask.shape)))
        of_kind = (cells == jax.random.choice(rng_kind, kinds)) & ~own
        one, other = pick(rng_near, near), pick(rng_other, of_kind)
        other = jnp.where(of_kind.any(), other, one)
        return cells.at[one].set(cells[other]).at[other].set(cells[one]), None

    cells, _ = jax.lax.scan(swap, level.map.ravel(), jax.random.split(rng, n_edits))
    return level._replace(map=cells.reshape(size, size))


def level_stats(level, max_steps):
    """How many cells near the player are of each kind."""
    return {name: jnp.sum(around(level.map) == BlockType[kind].value, dtype=jnp.int32)
            for name, kind in COUNTED.items()}  # fmt: skip


def level_code(level):
    """Four random sums of the level [4] uint32: equal for equal levels, hardly ever for others."""
    size = level.map.size + 1
    factors = np.random.default_rng(0).integers(2**32, size=(4, size), dtype=np.uint32) | 1
    cells = jnp.append(level.map.ravel().astype(jnp.uint32), level.seed)
    return jnp.sum(factors * cells, axis=1, dtype=jnp.uint32)


# --- pictures


draw = cache(lambda tile: jax.jit(make_craftax_pixel_renderer(tile)))


def render(level_or_state, tile=16):
    """Craftax's picture of a state, or the textures of the cells near the player in a level."""
    if not isinstance(level_or_state, EnvState):
        textures = np.asarray(load_all_textures()[tile]["block_textures"])[..., :3]
        cells = around(np.asarray(level_or_state.map))
        rows = [np.concatenate(textures[row], axis=1) for row in cells]
        picture = np.concatenate(rows).astype(np.uint8)
        y, x = (tile * (NEAR - n // 2) for n in OBS_DIM)
        height, width = (tile * n for n in OBS_DIM)  # without the inventory
        view = render(reset_one(level_or_state, 1)[1], tile)[:height]  # with the player
        picture[y : y + height, x : x + width] = view
        return picture
    world = level_or_state.world.replace(state_rng=jax.random.key(0))  # for the noise at night
    return np.asarray(draw(tile)(world)).astype(np.uint8)


# name -> a world, max_steps; the key of i has drawn the map, so that of its steps is another
fixed = lambda i: Level(jnp.asarray(opening(i).map, jnp.uint8), jnp.uint32(100 + i))
TEST_MAZES = {f"World{i}": (lambda rng, i=i: fixed(i), 250) for i in (1, 2, 3, 4)}
TEST_MAZES["Random"] = sample_level, 250
SUITES = {"worlds": ["World1", "World2", "World3", "World4"], "sampled": ["Random"]}
sample_mazes = partial(amaze.sample_mazes, mazes=TEST_MAZES, pad=list)
plot_levels = partial(amaze.plot_levels, render=render)
