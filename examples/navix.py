"""NAVIX's DoorKey (2407.19396) in place of amaze.py: a level is a layout.

A wall with a locked door divides the room; other walls stand in both halves. The agent must fetch
the key and open the door to reach the goal, which gives 1, however late. It sees 7 x 7 cells, also
behind walls, and whether it carries the key. Some layouts cannot be solved.

    pip install "navix>=4"    # needs Python 3.12
    cp examples/navix.py navix_levels.py    # navix is the package's name
    patch -o navix_plr.py plr.py examples/navix.diff    # also dr.py, accel.py, sfl.py
    python navix_plr.py --fast --rnn gru --gamma 0.99 --height 4 --width 4 --n-walls 3 \\
        --num-updates 600 --buffer-size 500 --out runs/navix
    python evaluate.py runs/navix --gif Walls8

Three seeds each solve 0.84 (DR), 0.80 (PLR), 0.85 (ACCEL) and 0.87 (SFL) of TEST_MAZES, of which
DoorKey8 and DoorKey16 are larger than the training levels (benchmarks/RESULTS.md). All had
--ent-coef 0.01 --seeds 3, ACCEL also --num-edits 3; DR and SFL --num-updates 400, and SFL
--num-candidates 500 --candidates-at-once 500 --buffer-size 100.
Height and width exclude the outer wall: 6 and 6 are NAVIX's DoorKey-8x8. NAVIX starts JAX when it
is imported: on a CPU, set the environment variable JAX_NUM_CPU_DEVICES=4 to use four cores.
"""

from functools import partial
from typing import NamedTuple

import amaze
import jax
import jax.numpy as jnp
import navix
import numpy as np
from navix.environments import DoorKey

ENV = navix.make("Navix-DoorKey-8x8-v0", observation_fn=navix.observations.none)
NUM_ACTIONS = len(ENV.action_set)
NAMES = "player", "key", "door", "goal"  # as NAVIX names its entities
DOOR = 2
SIDE = -1, -1, 0, 1  # where each of NAMES may be: left of the door's column, in it, right of it


class Level(NamedTuple):
    wall_map: jax.Array  # [H, W] bool, without the outer wall; the door's cell is free
    places: jax.Array  # [4, 2] int32 (row, column), in the order of NAMES
    direction: jax.Array  # [] int32, of the player


class EnvState(NamedTuple):
    timestep: NamedTuple  # NAVIX's own, with its state
    max_steps: jax.Array  # [] int32


def observe(state):
    """The view [7, 7, 3] uint8; the player's own cell shows what it carries, as in MiniGrid."""
    image, ids = navix.observations.symbolic_first_person(state), navix.entities.EntityIds
    carries = state.get_player().pocket != navix.components.EMPTY_POCKET_ID
    return image.at[-1, 3, 0].set(jnp.where(carries, ids.KEY, ids.FLOOR))


def reset_one(level, max_steps, *_):  # scripts pass see_through_walls, too
    height, width = level.wall_map.shape
    timestep = DoorKey.create(height + 2, width + 2)._reset(jax.random.key(0))  # any layout will do
    things = {name: timestep.state.entities[name].replace(position=level.places[None, i] + 1)
              for i, name in enumerate(NAMES)}  # fmt: skip
    things["player"] = things["player"].replace(direction=level.direction[None])
    grid = -jnp.pad(level.wall_map, 1, constant_values=True).astype(jnp.int32)
    # no key, as no step of DoorKey is random, and no cache of cell pictures, which takes 12 KB
    state = navix.states.State(key=None, grid=grid, cache=None, entities=things)
    timestep = timestep.replace(state=state, observation=jnp.zeros(0), info={"return": 0.0})
    return jax.tree.map(jnp.asarray, (observe(state), EnvState(timestep, max_steps)))


def step_one(state, action):
    # ENV.step would draw a new layout at each step of a batch: 34,000 steps/s, not 220,000
    timestep = ENV.replace(max_steps=state.max_steps)._step(state.timestep, action)
    state, obs = state._replace(timestep=timestep), observe(timestep.state)
    return obs, state, timestep.reward, timestep.is_done()


reset, step, step_and_reset = amaze.over_queues(reset_one, step_one, ndim=2)
solved = lambda total: total > 0.5


def is_taken(level):
    """Mask [H, W] of the cells where something stands, and of the door's column."""
    stands = jnp.zeros(level.wall_map.shape, bool).at[tuple(level.places.T)].set(True)
    return stands.at[:, level.places[DOOR, 1]].set(True)


def sample_level(rng, n_walls=8, height=6, width=6):
    """A layout of DoorKey-Random with walls on n_walls random cells, except on cells in use."""
    rng_layout, rng_walls = jax.random.split(rng)
    state = DoorKey.create(height + 2, width + 2, random_start=True)._reset(rng_layout).state
    places = jnp.stack([state.entities[name].position[0] - 1 for name in NAMES])
    cells = jax.random.randint(rng_walls, (n_walls,), 0, height * width)
    walls = jnp.zeros((height, width), bool).at[cells // width, cells % width].set(True)
    level = Level(walls, places, state.get_player().direction)
    walls = (walls & ~is_taken(level)).at[:, places[DOOR, 1]].set(True)
    return level._replace(wall_map=walls.at[tuple(places[DOOR])].set(False))


def edit_level(rng, level, n_edits):
    """Edit n_edits random cells: add or remove a wall there, or move one of NAMES there, if it may
    stand there."""

    def edit(level, rng):
        rng_cell, rng_kind = jax.random.split(rng)
        cell = jax.random.randint(rng_cell, (2,), 0, np.array(level.wall_map.shape))
        kind = jax.random.randint(rng_kind, (), 0, 10)  # an index of NAMES; 4 to 9: a wall
        walls, column = level.wall_map, level.places[DOOR, 1]
        taken, is_wall = is_taken(level)[tuple(cell)], walls[tuple(cell)]
        fits = jnp.sign(cell[1] - column) == jnp.array(SIDE)[kind]
        may = fits & ((kind == DOOR) | ~(taken | is_wall))
        place = jnp.where(may, cell, level.places[kind])
        places = level.places.at[kind].set(place, mode="drop")
        walls = walls.at[tuple(cell)].set(is_wall ^ ((kind >= len(NAMES)) & ~taken))
        walls = walls.at[:, column].set(True).at[tuple(places[DOOR])].set(False)
        return level._replace(wall_map=walls, places=places), None

    return jax.lax.scan(edit, level, jax.random.split(rng, n_edits))[0]


def level_stats(level, max_steps):
    """A level is solvable if the player can reach the key and, through the door, the goal."""
    x_y = level.places[:, ::-1]
    reach = lambda i: amaze.solve(amaze.Level(level.wall_map, x_y[0], level.direction, x_y[i]))
    can = reach(1).solvable & reach(3).solvable
    return {"walls": level.wall_map.sum(), "solvable": can, "optimal_return": can.astype(float)}


def sample_solvable(rng, sample=sample_level):
    """The first layout that can be solved, of random ones with the keys 0, 1, ... of rng."""
    draw = lambda i: sample(jax.random.fold_in(rng, i))
    fails = lambda i: ~level_stats(draw(i), 0)["solvable"]
    return draw(jax.lax.while_loop(fails, lambda i: i + 1, 0))


level_code = lambda level: jnp.concatenate([x.ravel().astype(jnp.uint32) for x in level])


@jax.jit
def draw(level_or_state):
    is_state = isinstance(level_or_state, EnvState)
    state = (level_or_state if is_state else reset_one(level_or_state, 1)[1]).timestep.state
    state = state.replace(cache=navix.rendering.cache.RenderingCache.init(state.grid))
    return navix.observations.rgb(state)  # 8 pixels a cell


plain = lambda n: (partial(sample_level, n_walls=0, height=n - 2, width=n - 2), 4 * n * n)
among = partial(sample_solvable, sample=partial(sample_level, n_walls=12))
TEST_MAZES = {f"DoorKey{n}": plain(n) for n in (5, 6, 8, 16)} | {"Walls8": (among, 256)}
SUITES = {"doorkey": [*TEST_MAZES], "sampled": ["Walls8"]}
sample_mazes = partial(amaze.sample_mazes, mazes=TEST_MAZES)
pad_levels = amaze.pad_levels
render = lambda level_or_state: np.asarray(draw(level_or_state)).repeat(2, 0).repeat(2, 1)
plot_levels = partial(amaze.plot_levels, render=render)
