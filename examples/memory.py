"""MiniGrid's Memory task in place of amaze.py: a level is a corridor and three objects.

A room has a key or a ball. A corridor leads from it to a fork with a key at one end and a ball at
the other. Walking up to the object that was in the room gives 1 - 0.9 t / max_steps, to the other
one 0; both end the episode. Observations (7 x 7 cells, not through walls), dynamics and rewards are
those of the `minigrid` package's MemoryEnv, byte for byte. Its MemoryS13 is length = 7, middle = 6.

    cp examples/memory.py memory_levels.py
    patch -o memory_dr.py dr.py examples/memory.diff    # also plr.py, accel.py, sfl.py
    python memory_dr.py --rnn gru --fast --no-anneal-lr --num-updates 800 --num-envs 64 \\
        --num-steps 48 --bptt-horizon 0 --max-steps 100 --update-epochs 4 --ent-coef 0.02 \\
        --gamma 0.99 --gae-lambda 0.95 --eval-suite Corridor7,Corridor31 --out runs/memory
    python evaluate.py runs/memory --suite corridors --gif Corridor31
    python evaluate.py runs/memory --suite minigrid

The agent starts somewhere in the room or in the corridor and looks towards the fork, so in most
levels it must first turn around, and go back, to see the object. An agent that does not do so
solves one half. In the suite `corridors` it starts beside the object and sees it at once; they are
up to 36 times as long as the longest corridors that `--longest 7` trains on.

The optimal return is that of an agent that looks at the object by the shortest way, if guessing is
not better in the time left. It is not known to the agent which object it is, so an agent that
guesses may by luck have a little more, and its regret on that level is negative.
"""

from functools import cache, partial
from typing import NamedTuple

import amaze
import jax
import jax.numpy as jnp
import numpy as np

NUM_ACTIONS = 7  # MiniGrid's; only LEFT, RIGHT and FORWARD have an effect
LEFT, RIGHT, FORWARD = 0, 1, 2
VIEW, HALF = 7, 3  # the agent sees VIEW x VIEW cells, HALF to each side
EMPTY, WALL, KEY, BALL, UNSEEN = range(5)  # indices of KINDS
KINDS = np.array([(1, 0, 0), (2, 5, 0), (5, 1, 0), (6, 1, 0), (0, 0, 0)], np.uint32)
# Word c has channel c of every kind of cell, in four bits each, as in amaze.py.
WORDS = (KINDS << 4 * np.arange(len(KINDS), dtype=np.uint32)[:, None]).sum(0, dtype=np.uint32)
LONGEST = 60  # no edit makes a longer corridor
MIDDLES = 3, 8  # MiniGrid's S7 to S17; beyond 7 the agent sees no difference


class Level(NamedTuple):
    """Cells are counted from the upper left corner of the outer wall, which is (0, 0)."""

    length: jax.Array  # [] int32, cells of the corridor: x = 4 to length + 3; the fork is after it
    middle: jax.Array  # [] int32, y of the corridor; there are 2 * middle + 1 rows
    start: jax.Array  # [] int32, x of the agent's start, 1 to length + 3
    thing: jax.Array  # [] int32, the object in the room: KEY or BALL
    above: jax.Array  # [] int32, the object at the fork's upper end; the other is at its lower end


class Observation(NamedTuple):
    image: jax.Array  # [7, 7, 3] uint8: [left to right, far to near, triple]
    direction: jax.Array  # [] int32


class EnvState(NamedTuple):
    level: Level
    x: jax.Array  # [] int32
    y: jax.Array  # [] int32
    direction: jax.Array  # [] int32: 0 right, 1 down, 2 left, 3 up
    t: jax.Array  # [] int32, actions taken
    max_steps: jax.Array  # [] int32


class Solution(NamedTuple):
    n_actions: jax.Array  # [] int32, fewest actions of an agent that must see the object first
    n_direct: jax.Array  # [] int32, fewest actions of an agent that knows the object


# --- dynamics and observation


def kind_at(level, x, y):
    """What is on the cells (x, y), an index of KINDS. Cells that cannot be seen are WALL."""
    row, fork = y - level.middle, level.length + 4
    room = (x >= 1) & (x <= 3) & (abs(row) <= 1)
    corridor = (x >= 4) & (x < fork) & (row == 0)
    branches = (x == fork) & (abs(row) < level.middle)
    kind = jnp.where(room | corridor | branches, EMPTY, WALL)
    kind = jnp.where((x == 1) & (row == -1), level.thing, kind)
    kind = jnp.where((x == fork) & (row == -2), level.above, kind)
    return jnp.where((x == fork) & (row == 2), KEY + BALL - level.above, kind)


def towards(direction):
    """The step (dx, dy) in a direction."""
    d = jnp.asarray(direction)
    return (d == 0).astype(int) - (d == 2), (d == 1).astype(int) - (d == 3)


def in_view(state):
    """The cells (x, y) that the view shows, two arrays [left to right, far to near]."""
    dx, dy = towards(state.direction)
    right, ahead = np.arange(-HALF, HALF + 1)[:, None], np.arange(VIEW)[None, ::-1]
    return state.x + ahead * dx - right * dy, state.y + ahead * dy + right * dx


def visible(is_open):
    """MiniGrid's process_vis: light spreads sideways through open cells, then ahead and diagonally.
    is_open [left to right, far to near] -> the cells that are lit; a line of cells is a word."""
    across = np.arange(VIEW, dtype=np.uint32)[:, None]
    lines = jnp.sum(is_open.astype(jnp.uint32) << across, 0, dtype=jnp.uint32)  # [7], far to near
    lit, seen = jnp.uint32(1 << HALF), []
    for line in lines[::-1]:
        passing = lit & line
        for _ in range(VIEW - 1):
            passing = passing | ((passing << 1 | passing >> 1) & line)
        beyond = passing | passing << 1 | passing >> 1
        seen.append(lit | beyond)
        lit = beyond
    return jnp.stack(seen[::-1]) >> across & 1 == 1


def observe(state):
    kind = kind_at(state.level, *in_view(state))
    kind = jnp.where(visible(kind != WALL), kind, UNSEEN)
    image = WORDS >> (4 * kind[..., None]).astype(jnp.uint32) & 15
    return Observation(image.astype(jnp.uint8), state.direction)


def reset_one(level, max_steps):
    zero = jnp.zeros((), jnp.int32)
    state = EnvState(level, level.start, level.middle, zero, zero, max_steps)
    state = jax.tree.map(partial(jnp.asarray, dtype=jnp.int32), state)
    return observe(state), state


def step_one(state, action):
    level, x, y, direction, t, max_steps = state
    dx, dy = towards(direction)
    moves = (action == FORWARD) & (kind_at(level, x + dx, y + dy) == EMPTY)
    x, y, t = x + jnp.where(moves, dx, 0), y + jnp.where(moves, dy, 0), t + 1
    turn = jnp.where(action == LEFT, 3, 0) + jnp.where(action == RIGHT, 1, 0)
    state = EnvState(level, x, y, (direction + turn) % 4, t, max_steps)
    beside = (x == level.length + 4) & (y != level.middle)  # one of the fork's objects
    right = (level.thing == level.above) == (y < level.middle)
    reward = jnp.where(beside & right, 1 - 0.9 * (t / max_steps), 0).astype(jnp.float32)
    return observe(state), state, reward, beside | (t >= max_steps)


reset, step, step_and_reset = amaze.over_queues(reset_one, step_one, ndim=0)
solved = lambda total: total > 0


# --- levels


def draw_level(rng, lengths, middles=MIDDLES, starts=None):
    """A level with numbers uniform from the first to the last of two each. starts: MiniGrid's are
    all cells of the middle row up to the fork."""
    u = jax.random.uniform(rng, (5,))
    between = lambda u, low, high: low + (u * (high - low + 1)).astype(jnp.int32)
    length = between(u[0], *lengths)
    start = between(u[2], *(starts or (1, length + 3)))
    things = between(u[3], KEY, BALL), between(u[4], KEY, BALL)
    return Level(length, between(u[1], *middles), start, *things)


def sample_level(rng, longest=7):
    """A random level with a corridor of at most `longest` cells. Half of them start beside the
    object, or else few would show it to an agent that has not yet learnt to look for it."""
    rng_level, rng_start = jax.random.split(rng)
    level = draw_level(rng_level, (1, longest))
    return level._replace(start=jnp.where(jax.random.bernoulli(rng_start), 1, level.start))


def sample_solvable(rng, sample=sample_level):
    """For --solvable-only; all levels can be solved."""
    return sample(rng)


def edit_level(rng, level, n_edits):
    """n_edits times: the corridor becomes one or two cells longer or shorter, or one of start, rows
    and objects is drawn anew."""

    def edit(level, rng):
        rng_kind, rng_level = jax.random.split(rng)
        kind = jax.random.randint(rng_kind, (), 0, 8)
        new = draw_level(rng_level, (level.length, level.length))
        change = jnp.array([-2, -1, 1, 2, 0, 0, 0, 0])[kind]
        pick = lambda at, *x: jnp.where(kind == at, *x)
        length = jnp.clip(level.length + change, 1, LONGEST)
        start = jnp.minimum(pick(4, new.start, level.start), length + 3)
        things = pick(6, new.thing, level.thing), pick(7, new.above, level.above)
        return Level(length, pick(5, new.middle, level.middle), start, *things), None

    return jax.lax.scan(edit, level, jax.random.split(rng, n_edits))[0]


def solve(level):
    """Exact. The agent sees the object at x = 1, after one turn up to x = 4, and after two turns
    from x = 7 on; it turns back as often. At the fork it turns once and makes a step."""
    n_direct = level.length + 4 - level.start + 2
    turns = jnp.where(level.start == 1, 0, jnp.where(level.start <= 4, 1, 2))
    n_look = 2 * (turns + jnp.maximum(level.start - 7, 0))
    return Solution(n_direct + n_look, n_direct)


def optimal_return(level, max_steps):
    """The largest expected return of an agent to which both objects are equally likely."""
    gain = lambda n: jnp.where(n <= max_steps, 1 - 0.9 * (n / max_steps), 0)
    solution = solve(level)
    best = jnp.maximum(gain(solution.n_actions), gain(solution.n_direct) / 2)
    return best.astype(jnp.float32)


def level_stats(level, max_steps=250):
    n_actions = solve(level).n_actions
    best = optimal_return(level, max_steps)
    return {"length": level.length, "n_actions": n_actions, "optimal_return": best}


level_code = lambda level: jnp.stack(level).astype(jnp.uint32)

CORRIDORS = 1, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255
TEST_MAZES = {f"Corridor{n}": (partial(draw_level, lengths=(n, n), starts=(1, 1)), 10 * (n + 6))
              for n in CORRIDORS}  # fmt: skip
for size in 7, 9, 11, 13, 17:
    middle = size // 2, size // 2
    for name, shortest in ("", size - 6), ("Random", 1):
        sample = partial(draw_level, lengths=(shortest, size - 6), middles=middle)
        TEST_MAZES[f"MemoryS{size}{name}"] = sample, 5 * size**2
TEST_MAZES["Sampled"] = sample_level, 250
SUITES = {"corridors": [x for x in TEST_MAZES if x.startswith("Corridor")],
          "minigrid": [x for x in TEST_MAZES if x.startswith("Memory")],
          "sampled": ["Sampled"]}  # fmt: skip
sample_mazes = partial(amaze.sample_mazes, mazes=TEST_MAZES, pad=list)


# --- text form and pictures


def drawn(level):
    """Kinds of all cells [rows, columns], as MiniGrid has them: what no wall is near is EMPTY."""
    level = Level(*map(int, level))
    y, x = np.mgrid[: 2 * level.middle + 1, : level.length + 6]
    kinds = np.array(kind_at(level, x, y))
    padded = np.pad(kinds != WALL, 1)
    height, width = kinds.shape
    near = np.any([padded[i:, j:][:height, :width] for i, j in np.ndindex(3, 3)], 0)
    outer = (x == 0) | (y == 0) | (x == width - 1) | (y == height - 1)
    return np.where(near | outer, kinds, EMPTY)


def level_to_text(level):
    """The level as lines of characters: # wall, . empty, K key, B ball, > the agent's start."""
    chars = np.array([*".#KB"])[drawn(level)]
    chars[int(level.middle), int(level.start)] = ">"
    return "\n".join("".join(row) for row in chars)


def level_from_text(text):
    """The inverse of level_to_text."""
    rows = text.strip().splitlines() or [""]
    middle, length = len(rows) // 2, len(rows[0]) - 6
    try:
        things = rows[middle - 1][1], rows[middle - 2][length + 4]
        things = [{"K": KEY, "B": BALL}[x] for x in things]
        level = Level(*map(jnp.int32, (length, middle, rows[middle].index(">"), *things)))
        fits = level_to_text(level).splitlines() == rows and length > 0 and middle > 2
    except (IndexError, KeyError, ValueError):
        fits = False
    if not fits:
        raise ValueError("no room, corridor and fork as level_to_text draws them")
    return level


@cache
def tile(kind, direction, lit, size):
    """One cell as MiniGrid draws it, [size, size, 3] uint8, downsampled from 3 times the size."""
    if kind not in (KEY, BALL):
        return amaze._tile(int(KINDS[kind, 0]), direction, lit, size)
    centre = (np.arange(3 * size) + 0.5) / (3 * size)
    x, y = centre[None, :], centre[:, None]
    bar = lambda left, right, top, bottom: (x >= left) & (x <= right) & (y >= top) & (y <= bottom)
    disc = lambda u, v, radius: (x - u) ** 2 + (y - v) ** 2 <= radius**2
    teeth = bar(0.38, 0.5, 0.59, 0.66) | bar(0.38, 0.5, 0.81, 0.88)
    key = bar(0.5, 0.63, 0.31, 0.88) | teeth | disc(0.56, 0.28, 0.19)
    pixels = np.zeros((3 * size, 3 * size, 3))
    pixels[(x <= 0.031) | (y <= 0.031)] = 100  # grid lines
    pixels[disc(0.5, 0.5, 0.31) if kind == BALL else key] = (0, 255, 0)
    pixels[disc(0.56, 0.28, 0.064) & (kind == KEY)] = 0
    if lit:
        pixels = np.floor(pixels + 0.3 * (255 - pixels))
    return pixels.reshape(size, 3, size, 3, 3).mean(axis=(1, 3)).astype(np.uint8)


def render(level_or_state):
    """MiniGrid's picture, [h, w, 3] uint8, at most 1,600 pixels wide if a cell has 4 or more; a
    state's visible cells are lit."""
    is_state = isinstance(level_or_state, EnvState)
    state = level_or_state if is_state else reset_one(level_or_state, 1)[1]
    kinds = drawn(state.level)
    size = int(np.clip(1600 // kinds.shape[1], 4, 16))
    lit, facing = np.zeros(kinds.shape, bool), np.full(kinds.shape, None)
    facing[int(state.y), int(state.x)] = int(state.direction)
    if is_state:
        x, y = map(np.asarray, in_view(state))
        seen = np.asarray(observe(state).image)[..., 0] > 0
        seen &= (y >= 0) & (y < len(kinds)) & (x >= 0) & (x < kinds.shape[1])
        lit[y[seen], x[seen]] = True
    rows = [[tile(*cell, size) for cell in zip(*row)] for row in zip(kinds, facing, lit)]
    return np.concatenate([np.concatenate(row, axis=1) for row in rows])


plot_levels = partial(amaze.plot_levels, render=render)
