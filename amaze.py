"""AMaze: MiniGrid's mazes as arrays, for unsupervised environment design in JAX.

A level is a grid of walls, a goal, and the start position and direction of an agent. The agent sees
the 5 x 5 cells in front of it and must find the goal. Dynamics, observations and rewards are those
of the `minigrid` package, byte for byte; the tensorised form follows minimax's AMaze (2311.12716).
All but the text form and the drawing is pure and works under jit, vmap and scan.

    level = sample_level(rng)                            # or level_from_text, edit_level, ...
    obs, state = reset(level)                            # Observation(image, direction), EnvState
    obs, state, reward, done = step(state, action)       # no reset at the end of an episode
    obs, state, reward, done = step_and_reset(state, action)    # on done, obs starts a new episode

A state plays one level or a queue of K levels: `reset` takes either. On done `step_and_reset`
starts the queue's next level, after the last one the first. With K = 1 it restarts the same level.

Speed: a step changes a few numbers of the agent and never the grid. `reset` packs the walls into
32-bit words, once for each direction of the agent, so that the cells ahead are always the next five
words; an observation is one read of five words, a shift, and elementwise operations.

Conventions: arrays are indexed [y, x], positions are (x, y). Directions: 0 right, 1 down, 2 left,
3 up. Actions are MiniGrid's seven: 0 turn left, 1 turn right, 2 forward; 3 to 6 only pass time.

Another environment is a module with the names that examples/README.md lists.
"""

import textwrap
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NUM_ACTIONS = 7
LEFT, RIGHT, FORWARD = 0, 1, 2
VIEW = 5  # the agent sees VIEW x VIEW cells
EMPTY, WALL, GOAL = (1, 0, 0), (2, 5, 0), (8, 1, 0)
UNSEEN, AGENT = (0, 0, 0), (10, 0, 0)
# Word c has channel c of every kind of cell, in four bits each: a shift is faster than a look-up.
_KINDS = np.array([EMPTY, WALL, GOAL, UNSEEN], np.uint32)  # at most eight
_WORDS = (_KINDS << 4 * np.arange(len(_KINDS), dtype=np.uint32)[:, None]).sum(0, dtype=np.uint32)


class Level(NamedTuple):
    wall_map: jax.Array  # [H, W] bool, without the outer wall
    agent_pos: jax.Array  # [2] int32 (x, y)
    agent_dir: jax.Array  # [] int32
    goal_pos: jax.Array  # [2] int32 (x, y)


class Observation(NamedTuple):
    image: jax.Array  # [5, 5, 3] uint8: [left to right, far to near, triple]
    direction: jax.Array  # [] int32


class EnvState(NamedTuple):
    agent_pos: jax.Array  # [2] int32 (x, y)
    agent_dir: jax.Array  # [] int32
    t: jax.Array  # [] int32, actions taken in this episode
    front: jax.Array  # [] uint8, the kind of the cell ahead: image[2, 3, 0]
    slot: jax.Array  # [] int32, which level of the queue is being played
    levels: Level  # [K, ...], the queue; never changes
    walls: jax.Array  # [K * 4 * words * lines] uint32, pack_walls; never changes
    max_steps: jax.Array  # [] int32
    see_through_walls: jax.Array | None  # [] bool; None: always True, and no visibility is computed


class Solution(NamedTuple):
    path_length: jax.Array  # [] int32, moves between cells, -1 if unsolvable
    n_actions: jax.Array  # [] int32, fewest actions including turns, -1 if unsolvable
    solvable: jax.Array  # [] bool


# --- dynamics and observation


def pack_walls(wall_map):
    """Walls as bits in the agent's frame: [4 directions, words, S + 4 lines] uint32, S = max(H, W).

    Line v of direction d holds the cells v steps ahead of the edge at the agent's back; bit b of
    word w is the cell 28 w + b - 2 from the left edge. Words overlap by 4 cells, so the 5 cells
    around position u are bits u % 28 to u % 28 + 4 of word u // 28. Outside the grid there is wall.
    """
    size = max(wall_map.shape)
    square = jnp.pad(wall_map, [(0, size - n) for n in wall_map.shape], constant_values=True)
    turned = jnp.stack([square.T, square[:, ::-1], square.T[::-1, ::-1], square[::-1]])
    n_words = -(-size // 28)
    cells = jnp.pad(turned, ((0, 0), (0, 4), (2, 28 * n_words + 2 - size)), constant_values=True)
    windows = jnp.stack([cells[..., 28 * w : 28 * w + 32] for w in range(n_words)], axis=1)
    bits = windows.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)
    return jnp.sum(bits, axis=-1, dtype=jnp.uint32)


def _in_frame(pos, direction, size):
    """A position as (steps from the edge at the back, steps from the left edge) of the agent."""
    is_sideways = direction % 2 == 0
    ahead = jnp.where(is_sideways, pos[0], pos[1])
    across = jnp.where(is_sideways, pos[1], pos[0])
    ahead = jnp.where(direction >= 2, size - 1 - ahead, ahead)
    across = jnp.where((direction == 1) | (direction == 2), size - 1 - across, across)
    return ahead, across


def _visible(lines):
    """MiniGrid's process_vis on bits: walls of the 5 lines ahead (near first) -> visible cells.

    Light spreads sideways through the open cells of a line, then ahead and diagonally to the next.
    """
    lit = jnp.uint32(0b00100)
    visible = []
    for line in lines:
        is_open = ~line & 0b11111
        passing = lit & is_open
        for _ in range(VIEW - 1):
            passing = passing | ((passing << 1 | passing >> 1) & is_open)
        beyond = passing | passing << 1 | passing >> 1
        visible.append(lit | beyond)
        lit = beyond
    return jnp.stack(visible)


def observe(state):
    """What the agent sees: MiniGrid's gen_obs with a 5 x 5 view."""
    size = max(state.levels.wall_map.shape[-2:])
    n_words = -(-size // 28)
    ahead, across = _in_frame(state.agent_pos, state.agent_dir, size)
    goal_ahead, goal_across = _in_frame(_current(state).goal_pos, state.agent_dir, size)

    row = (state.slot * 4 + state.agent_dir) * n_words + across // 28
    lines = jax.lax.dynamic_slice(state.walls, (row * (size + 4) + ahead,), (VIEW,))
    lines = lines >> (across % 28).astype(jnp.uint32)  # [5], near to far

    i, j = np.arange(VIEW)[:, None], np.arange(VIEW)[None, :]  # across, far to near
    is_wall = lines[::-1] >> i.astype(np.uint32) & 1  # [5, 5]
    is_goal = (goal_across - across + 2 == i) & (goal_ahead - ahead == 4 - j)
    kind = jnp.where(is_goal, np.uint32(2), is_wall)  # an index into _KINDS
    kind = jnp.where((i == 2) & (j == 4), np.uint32(0), kind)  # the agent's own cell
    if state.see_through_walls is not None:
        is_visible = _visible(lines)[::-1] >> i.astype(np.uint32) & 1 == 1
        kind = jnp.where(is_visible | state.see_through_walls, kind, np.uint32(3))
    image = _WORDS >> 4 * kind[..., None] & 15  # [5, 5, 3]
    return Observation(image.astype(jnp.uint8), state.agent_dir)


def _current(state):
    """The level being played."""
    return jax.tree.map(lambda x: x[0] if len(x) == 1 else x[state.slot], state.levels)


def _look(state):
    obs = observe(state)
    return obs, state._replace(front=obs.image[VIEW // 2, VIEW - 2, 0])


def reset(level, max_steps=250, see_through_walls=True):
    """First observation and state of an episode on a level, or on a queue of levels [K, ...]."""
    queue = jax.tree.map(jnp.asarray, level)
    if queue.wall_map.ndim == 2:
        queue = jax.tree.map(lambda x: x[None], queue)
    see = None if see_through_walls is True else jnp.asarray(see_through_walls, bool)
    state = EnvState(
        agent_pos=queue.agent_pos[0],
        agent_dir=queue.agent_dir[0],
        t=jnp.zeros((), jnp.int32),
        front=jnp.zeros((), jnp.uint8),
        slot=jnp.zeros((), jnp.int32),
        levels=queue,
        walls=jax.vmap(pack_walls)(queue.wall_map).reshape(-1),
        max_steps=jnp.asarray(max_steps, jnp.int32),
        see_through_walls=see,
    )
    return _look(state)


def _act(state, action):
    """Turn or move -> (state, of which `front` is still old, reward, done)."""
    turn = jnp.where(action == LEFT, 3, 0) + jnp.where(action == RIGHT, 1, 0)
    is_forward = action == FORWARD
    moves = is_forward & (state.front != WALL[0])
    d = state.agent_dir
    dx = jnp.where(d == 0, 1, 0) - jnp.where(d == 2, 1, 0)
    dy = jnp.where(d == 1, 1, 0) - jnp.where(d == 3, 1, 0)
    pos = state.agent_pos + jnp.where(moves, jnp.stack([dx, dy]), 0)
    t = state.t + 1
    reached = is_forward & (state.front == GOAL[0])
    reward = jnp.where(reached, 1 - 0.9 * (t / state.max_steps), 0).astype(jnp.float32)
    state = state._replace(agent_pos=pos, agent_dir=(d + turn) % 4, t=t)
    return state, reward, reached | (t >= state.max_steps)


def step(state, action):
    """One action, without a reset: (Observation, EnvState, reward [] float32, done [] bool)."""
    state, reward, done = _act(state, action)
    obs, state = _look(state)
    return obs, state, reward, done


def step_and_reset(state, action):
    """As `step`, but on done the observation and state start an episode on the next level."""
    state, reward, done = _act(state, action)
    slot = jnp.where(done, state.slot + 1, state.slot) % len(state.levels.agent_dir)
    state = state._replace(slot=slot)
    start = _current(state)
    state = state._replace(
        agent_pos=jnp.where(done, start.agent_pos, state.agent_pos),
        agent_dir=jnp.where(done, start.agent_dir, state.agent_dir),
        t=jnp.where(done, 0, state.t),
    )
    obs, state = _look(state)
    return obs, state, reward, done


def solved(returns):
    """Whether episodes with these returns have reached the goal."""
    return returns > 0


class QueueState(NamedTuple):
    state: NamedTuple  # of the level being played
    slot: jax.Array  # [] int32, which level of the queue that is
    queue: NamedTuple  # [K, ...], levels; never changes
    rules: tuple  # the other arguments of reset; never changes


def over_queues(reset, step, ndim):
    """For other environments: make reset, step and step_and_reset as above from functions of one
    level, reset(level, *rules) and step(state, action); a level's first array has ndim axes."""

    def open_queue(level, *rules):
        queue = jax.tree.map(jnp.asarray, level)
        if jax.tree.leaves(queue)[0].ndim == ndim:
            queue = jax.tree.map(lambda x: x[None], queue)
        obs, state = reset(jax.tree.map(lambda x: x[0], queue), *rules)
        return obs, QueueState(state, jnp.zeros((), jnp.int32), queue, rules)

    def go_on(queued, action):
        obs, state, reward, done = step(queued.state, action)
        return obs, queued._replace(state=state), reward, done

    def go_on_and_reset(queued, action):
        obs, queued, reward, done = go_on(queued, action)
        n_levels = len(jax.tree.leaves(queued.queue)[0])
        slot = jnp.where(done, queued.slot + 1, queued.slot) % n_levels
        opening = reset(jax.tree.map(lambda x: x[slot], queued.queue), *queued.rules)
        obs, state = jax.tree.map(partial(jnp.where, done), opening, (obs, queued.state))
        return obs, queued._replace(state=state, slot=slot), reward, done

    return open_queue, go_on, go_on_and_reset


# --- random levels and edits


def _below(bits, n):
    """floor(bits * n / 2^32) without 64-bit integers: uniform on 0 .. n - 1, for n < 2^16."""
    n = jnp.asarray(n, jnp.uint32)
    return (((bits >> 16) * n + ((bits & 0xFFFF) * n >> 16)) >> 16).astype(jnp.int32)


def _kth(mask, k):
    """Index of the k-th True (from 0) of a flat mask; the mask's length if there are too few."""
    return jnp.sum(jnp.cumsum(mask) <= k)


def _xy(index, width):
    return jnp.stack([index % width, index // width]).astype(jnp.int32)


def _place(bits, wall_map):
    """A level on these walls: agent and goal uniform on distinct free cells, from bits [3]."""
    height, width = wall_map.shape
    free = ~wall_map.reshape(-1)
    n_free = jnp.sum(free)
    agent_rank, goal_rank = _below(bits[0], n_free), _below(bits[1], n_free - 1)
    goal_rank = jnp.where(goal_rank >= agent_rank, goal_rank + 1, goal_rank)  # skip the agent
    agent, goal = _kth(free, agent_rank), _kth(free, goal_rank)
    return Level(wall_map, _xy(agent, width), _below(bits[2], 4), _xy(goal, width))


def place(rng, wall_map):
    """A level on walls [H, W] with two or more free cells; agent, direction and goal are random."""
    return _place(jax.random.bits(rng, (3,), jnp.uint32), wall_map)


def _check_room(n_walls, height, width):
    if n_walls > height * width - 2:
        raise ValueError(f"{n_walls} walls leave no room for agent and goal on {height} x {width}")


def sample_level(rng, n_walls=60, height=13, width=13):
    """Random level: n_walls cells drawn with replacement, then agent, direction and goal."""
    _check_room(n_walls, height, width)
    bits = jax.random.bits(rng, (n_walls + 3,), jnp.uint32)
    cells = _below(bits[3:], height * width)
    wall_map = jnp.zeros(height * width, bool).at[cells].set(True)
    return _place(bits[:3], wall_map.reshape(height, width))


def edit_level(rng, level, n_edits):
    """ACCEL's editor: n_edits times one of {nothing, flip a wall, move the goal}, each uniform."""
    height, width = level.wall_map.shape
    n_cells = height * width
    index = jnp.arange(n_cells)
    agent = level.agent_pos[1] * width + level.agent_pos[0]

    def edit(carry, bits):  # bits [2] uint32
        walls, goal = carry  # [H * W] bool, [] int32
        kind = _below(bits[0], 3)
        flipped = _below(bits[1], n_cells - 2)  # skip agent and goal
        flipped = jnp.where(flipped >= jnp.minimum(agent, goal), flipped + 1, flipped)
        flipped = jnp.where(flipped >= jnp.maximum(agent, goal), flipped + 1, flipped)
        free = ~walls & (index != agent) & (index != goal)
        n_free = jnp.sum(free)
        moved = _kth(free, _below(bits[1], n_free))
        walls = walls ^ ((kind == 1) & (index == flipped))
        goal = jnp.where((kind == 2) & (n_free > 0), moved, goal)
        return (walls, goal), None

    goal = level.goal_pos[1] * width + level.goal_pos[0]
    carry = (level.wall_map.reshape(-1), goal)
    (walls, goal), _ = jax.lax.scan(edit, carry, jax.random.bits(rng, (n_edits, 2), jnp.uint32))
    return level._replace(wall_map=walls.reshape(height, width), goal_pos=_xy(goal, width))


# --- solver


def _on_gpu():
    """Whether a GPU runs this. There a while loop waits for the host at each trip, so few, long
    trips are faster, even if they do more than is needed."""
    return jax.default_backend() != "cpu"


def _words(mask):
    """Bits [..., n] as words [..., ceil(n / 32)] uint32; a word's first bit is its lowest."""
    bits = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % 32)])
    bits = bits.reshape(*mask.shape[:-1], -1, 32).astype(jnp.uint32)
    return (bits << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def _move(reached, free):
    """Cells reached by one more move, for each direction of the move, as rows of words: [4, H,
    words] from [4, H, words]."""
    from_left = jnp.pad(reached[0], ((0, 0), (1, 0)))[:, :-1] >> 31  # from the previous word
    from_right = jnp.pad(reached[2], ((0, 0), (0, 1)))[:, 1:] << 31
    right = reached[0] << 1 | from_left
    down = jnp.pad(reached[1], ((1, 0), (0, 0)))[:-1]
    left = reached[2] >> 1 | from_right
    up = jnp.pad(reached[3], ((0, 1), (0, 0)))[1:]
    return free & jnp.stack([right, down, left, up])


class Flood(NamedTuple):
    cells: jax.Array  # [H, words] uint32, cells reached by moves between cells
    poses: jax.Array  # [4, H, words] uint32, cells reached by actions, for each direction
    path_length: jax.Array  # [] int32, moves so far, until the goal is reached
    n_actions: jax.Array  # [] int32, actions so far, until the goal is reached
    goes_on: jax.Array  # [] bool


def solve(level):
    """Exact breadth-first search over cells and over (direction, cell) at once -> Solution. A row
    of cells is the bits of a few words, which takes a tenth of the time of single cells."""
    height, width = level.wall_map.shape
    y, x = jnp.arange(height)[:, None], jnp.arange(width)[None, :]
    start = _words((x == level.agent_pos[0]) & (y == level.agent_pos[1]))
    goal = _words((x == level.goal_pos[0]) & (y == level.goal_pos[1]))
    free = _words(~level.wall_map)

    def spread(cells, poses):
        moved = _move(jnp.broadcast_to(cells, poses.shape), free)
        turned = jnp.roll(poses, 1, axis=0) | jnp.roll(poses, -1, axis=0)
        cells = cells | moved[0] | moved[1] | moved[2] | moved[3]
        return cells, poses | turned | _move(poses, free)

    def trip(flood):
        cells, poses, path_length, n_actions, _ = flood
        for _ in range(16 if _on_gpu() else 1):  # after the goal no count changes
            path_length += jnp.where(jnp.any(cells & goal), 0, 1)
            n_actions += jnp.where(jnp.any(poses & goal), 0, 1)
            cells, poses = spread(cells, poses)
        # The cells settle no later than the poses do: a move between cells is at least one action.
        goes_on = jnp.any(poses != flood.poses) & ~jnp.any(poses & goal)
        return Flood(cells, poses, path_length, n_actions, goes_on)

    zero = jnp.zeros((), jnp.int32)
    poses = jnp.where(jnp.arange(4)[:, None, None] == level.agent_dir, start, 0)
    flood = Flood(start, poses, zero, zero, ~jnp.any(start & goal))
    flood = jax.lax.while_loop(lambda flood: flood.goes_on, trip, flood)
    solvable = jnp.any(flood.poses & goal)
    path_length = jnp.where(solvable, flood.path_length, -1)
    return Solution(path_length, jnp.where(solvable, flood.n_actions, -1), solvable)


def level_code(level):
    """The level as bits [words] uint32: equal codes mean equal levels (up to 2^14 cells)."""
    width = level.wall_map.shape[1]
    words = _words(level.wall_map.reshape(-1))
    agent = level.agent_pos[1] * width + level.agent_pos[0]
    goal = level.goal_pos[1] * width + level.goal_pos[0]
    places = (goal << 16) | (agent << 2) | level.agent_dir
    return jnp.append(words, places.astype(jnp.uint32))


def optimal_return(solution, max_steps):
    """1 - 0.9 n* / T, the optimal return with n* actions; 0 if the goal is out of reach in time."""
    in_time = solution.solvable & (solution.n_actions <= max_steps)
    return jnp.where(in_time, 1 - 0.9 * (solution.n_actions / max_steps), 0).astype(jnp.float32)


def level_stats(level, max_steps=250):
    """Numbers that describe a level, for logs and captions; NaN if one is not defined. The true
    regret needs optimal_return, which other environments may leave out."""
    solution = solve(level)
    return {
        "walls": jnp.sum(level.wall_map),
        "path_length": jnp.where(solution.solvable, solution.path_length, jnp.nan),
        "solvable": solution.solvable,
        "optimal_return": optimal_return(solution, max_steps),
    }


# --- text form


def level_from_text(text):
    """A level from text: '#' wall, '.' floor, 'G' goal, and the agent as '>', 'v', '<' or '^'. At
    most 128 rows and columns; common indentation is ignored. Errors: ValueError, with the place."""
    rows = textwrap.dedent(text).strip("\n").splitlines()
    if len(rows) > 128 or any(len(row) > 128 for row in rows):
        raise ValueError("more than 128 rows or columns")
    found = {}  # kind -> row, column, counted from 1
    for r, row in enumerate(rows, start=1):
        for c, char in enumerate(row, start=1):
            here = f"row {r}, column {c} (counted from 1)"
            if char not in "#.G>v<^":
                raise ValueError(f"unknown character {char!r} at {here}")
            if char in "#.":
                continue
            kind = "goal" if char == "G" else "agent"
            if kind in found:
                first = "row {}, column {}".format(*found[kind])
                raise ValueError(f"a second {kind} at {here}; the first is at {first}")
            found[kind] = r, c
        if len(row) != len(rows[0]):
            ends = f"ends at column {len(row)}, but row 1 ends at column {len(rows[0])}"
            raise ValueError(f"row {r} {ends} (counted from 1)")
    for kind in ("agent", "goal"):
        if kind not in found:
            size = f"rows 1 to {len(rows)}, columns 1 to {len(rows[0])}" if rows else "empty text"
            raise ValueError(f"no {kind} in {size}")
    (agent_y, agent_x), (goal_y, goal_x) = found["agent"], found["goal"]
    return Level(
        wall_map=jnp.array([[char == "#" for char in row] for row in rows]),
        agent_pos=jnp.array([agent_x - 1, agent_y - 1], jnp.int32),
        agent_dir=jnp.array(">v<^".index(rows[agent_y - 1][agent_x - 1]), jnp.int32),
        goal_pos=jnp.array([goal_x - 1, goal_y - 1], jnp.int32),
    )


def level_to_text(level):
    """The level as lines of characters; the inverse of level_from_text."""
    chars = np.where(np.asarray(level.wall_map), "#", ".")
    (agent_x, agent_y), (goal_x, goal_y) = np.asarray(level.agent_pos), np.asarray(level.goal_pos)
    chars[goal_y, goal_x] = "G"
    chars[agent_y, agent_x] = ">v<^"[int(level.agent_dir)]
    return "\n".join("".join(row) for row in chars)


# --- test mazes


class TestMaze(NamedTuple):
    sample: Callable  # rng -> Level
    max_steps: int
    see_through_walls: bool = True


def sample_fixed(rng, text):
    """The maze drawn in `text`, the same at each reset."""
    return level_from_text(text)


def sample_corridor(rng, text):
    """The maze drawn in `text`, with the goal in a random dead end beside the middle wall."""
    level = level_from_text(text)
    size = len(level.wall_map)
    ends = [(x, y) for y in (size // 2 - 1, size // 2 + 1) for x in range(2, size - 1, 2)]
    return level._replace(goal_pos=jax.random.choice(rng, jnp.array(ends, jnp.int32)))


def _neighbours(n):
    """The rooms right, below, left, above of n x n rooms [n * n, 4]; at an edge the room itself."""
    y, x = np.divmod(np.arange(n * n)[:, None], n)
    y = np.clip(y + [0, 1, 0, -1], 0, n - 1)
    x = np.clip(x + [1, 0, -1, 0], 0, n - 1)
    return jnp.array(n * y + x)


def _open_doors(size, rooms, parents):
    """Walls [size, size] around the even cells, with doors from `rooms` to `parents` [K]."""
    n = (size + 1) // 2  # n x n rooms
    wall_map = jnp.ones((size, size), bool).at[::2, ::2].set(False)
    return wall_map.at[rooms // n + parents // n, rooms % n + parents % n].set(False)


def _from_corner_to_corner(rng, wall_map):
    """A level on the walls [size, size]; start and goal are two different corners."""
    end = len(wall_map) - 1
    corners = jnp.array([[0, 0], [end, 0], [0, end], [end, end]], jnp.int32)
    start, goal = jax.random.permutation(rng, corners)[:2]
    return Level(wall_map, start, jnp.zeros((), jnp.int32), goal)


def sample_perfect_maze(rng, size):
    """Depth-first spanning tree of the even cells, as minimax (Apache-2.0); ends: two corners."""
    n = (size + 1) // 2
    rng_tree, rng_corners = jax.random.split(rng)
    bits = jax.random.bits(rng_tree, (2 * n * n,), jnp.uint32)
    root = _below(bits[-1], n * n)
    neighbours = _neighbours(n)

    def visit(k, carry):
        room, parent = carry  # [], [n * n]; -1 unvisited
        new = parent[neighbours[room]] < 0  # [4]
        pick = _kth(new, _below(bits[k], jnp.sum(new)))  # 4, back to the parent, if none
        next_room = jnp.append(neighbours[room], parent[room])[pick]
        next_parent = jnp.where(jnp.any(new), room, parent[next_room])
        return next_room, parent.at[next_room].set(next_parent)

    parent = jnp.full(n * n, -1).at[root].set(root)
    _, parent = jax.lax.fori_loop(0, 2 * n * n - 2, visit, (root, parent))
    return _from_corner_to_corner(rng_corners, _open_doors(size, jnp.arange(n * n), parent))


def sample_kruskal_maze(rng, size):
    """Spanning tree of the even cells by Kruskal's algorithm on shuffled edges, as dcd's MSTMazeEnv
    (CC BY-SA 4.0; none of its code is used): short dead ends; start and goal are two corners."""
    n = (size + 1) // 2
    rng_tree, rng_corners = jax.random.split(rng)
    room = np.arange(n * n).reshape(n, n)
    across = np.stack([room[:, 1:], room[:, :-1]], axis=-1).reshape(-1, 2)
    down = np.stack([room[1:], room[:-1]], axis=-1).reshape(-1, 2)
    edges = jax.random.permutation(rng_tree, jnp.concatenate([across, down]))  # [2n(n - 1), 2]

    def join(tree, edge):
        a, b = tree[edge]  # labels of the two parts
        return jnp.where(tree == a, b, tree), jnp.where(a == b, edge[1], edge[0])

    # an edge within one part opens no door: it joins a room to itself
    _, rooms = jax.lax.scan(join, jnp.arange(n * n), edges)
    return _from_corner_to_corner(rng_corners, _open_doors(size, rooms, edges[:, 1]))


def sample_four_rooms(rng):
    """MiniGrid-FourRooms-v0: four rooms of 8 x 8 with a door in each of the four wall segments."""
    bits = jax.random.bits(rng, (7,), jnp.uint32)
    doors = _below(bits[:4], 8) + np.array([0, 9, 0, 9])
    wall_map = jnp.zeros((17, 17), bool).at[8].set(True).at[:, 8].set(True)
    wall_map = wall_map.at[doors[:2], 8].set(False).at[8, doors[2:]].set(False)
    return _place(bits[4:], wall_map)


def sample_simple_crossing(rng):
    """MiniGrid-SimpleCrossingS11N5-v0: 5 walls (rivers), with openings along a monotone path."""
    rng_rivers, rng_openings = jax.random.split(rng)
    rivers = jax.random.permutation(rng_rivers, 8)[:5]
    is_column = rivers < 4  # [5]
    at = 2 * (rivers % 4) + 1  # that column, or row
    columns = jnp.sort(jnp.where(is_column, at, 9))  # [5], sorted; 9: none
    rows = jnp.sort(jnp.where(is_column, 9, at))
    x, y = jnp.arange(9)[None, :], jnp.arange(9)[:, None]
    wall_map = jnp.isin(x, columns) | jnp.isin(y, rows)
    # The random order of the rivers also decides when the path crosses a column and when a row. It
    # crosses each from a room between two columns and two rows.
    room_x = jnp.cumsum(jnp.append(0, is_column[:-1]))
    room_y = jnp.arange(5) - room_x
    limits_x = jnp.append(jnp.append(-1, columns), 9)
    limits_y = jnp.append(jnp.append(-1, rows), 9)
    left, right = limits_x[room_x], limits_x[room_x + 1]
    top, bottom = limits_y[room_y], limits_y[room_y + 1]
    bits = jax.random.bits(rng_openings, (5,), jnp.uint32)
    opening_x = jnp.where(is_column, right, left + 1 + _below(bits, right - left - 1))
    opening_y = jnp.where(is_column, top + 1 + _below(bits, bottom - top - 1), bottom)
    wall_map = wall_map.at[opening_y, opening_x].set(False)
    start, goal = jnp.zeros(2, jnp.int32), jnp.full(2, 8, jnp.int32)
    return Level(wall_map, start, jnp.zeros((), jnp.int32), goal)


def sample_solvable(rng, sample=sample_level):
    """A solvable level by rejection: 60 walls on 13 x 13 cells, or what another `sample` draws."""

    def split(rng, _):
        rng, rng_level = jax.random.split(rng)
        return rng, rng_level

    def draw(carry):  # several levels at once, of which the first solvable one is kept
        number = 8 if _on_gpu() else 1
        rng, rngs = jax.lax.scan(split, carry[0], length=number, unroll=number)
        levels = jax.vmap(sample)(rngs)
        solvable = jax.vmap(solve)(levels).solvable
        return rng, jax.tree.map(lambda x: x[jnp.argmax(solvable)], levels), jnp.any(solvable)

    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sample, rng))
    _, level, _ = jax.lax.while_loop(lambda carry: ~carry[2], draw, (rng, none, False))
    return level


def sample_prim_tree(rng, n):
    """Spanning tree of n x n rooms by Prim's algorithm from a corner; parents [n * n]."""
    bits = jax.random.bits(rng, (n * n,), jnp.uint32)
    neighbours = _neighbours(n)

    def grow(k, parent):  # -1: not in the tree
        border = (parent[neighbours] >= 0) & (parent < 0)[:, None]  # [n * n, 4]
        edge = _kth(border.reshape(-1), _below(bits[k], jnp.sum(border)))
        return parent.at[edge // 4].set(neighbours[edge // 4, edge % 4])

    corner = jnp.full(n * n, -1).at[0].set(0)
    return jax.lax.fori_loop(1, n * n, grow, corner)


def sample_wilson_tree(rng, n):
    """Uniform spanning tree of n x n rooms by Wilson's popping of cycles; parents [n * n]."""
    neighbours = _neighbours(n)
    rooms = jnp.arange(n * n)

    def pop(carry):
        k, parent, on_cycle = carry
        bits = jax.random.bits(jax.random.fold_in(rng, k), (n * n,), jnp.uint32)
        parent = jnp.where(on_cycle, neighbours[rooms, _below(bits, 4)], parent)
        later = jax.lax.fori_loop(0, (n * n).bit_length(), lambda _, at: at[at], parent)
        return k + 1, parent, jnp.isin(rooms, later) & (rooms > 0)  # room 0 is the root

    carry = (0, jnp.zeros_like(rooms), rooms > 0)
    _, parent, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[2]), pop, carry)
    return parent


# --- the suite `families`, 13 x 13 cells: each returns masks [13, 13] of starts, walls and goals


class Dice(NamedTuple):
    rng: jax.Array  # a key
    noise: jax.Array  # [13, 13] uniform from 0 to 1, one number for each cell
    others: jax.Array  # [13, 13] uniform from 0 to 1, for everything else that is random
    u: jax.Array  # [13, 13] the column, with a random offset
    v: jax.Array  # [13, 13] the row, with a random offset


_Y, _X = np.mgrid[:13, :13]
_RING = np.minimum(np.minimum(_X, _Y), np.minimum(12 - _X, 12 - _Y))  # 0 along the edge
_OUTSIDE, _MIDDLE = _RING == 0, _RING > 3
_LEFT_EDGE, _RIGHT_EDGE = _X == 0, _X == 12


def _whole(uniform, n):
    """Uniform numbers from 0 to 1 as whole numbers from 0 to n - 1."""
    return (uniform * n).astype(jnp.int32)


def _one_of_each(groups, mask, noise):
    """One random cell of the mask in each group, as a mask; groups [13, 13] are below 64."""
    noise = jnp.where(mask, noise, -1)
    largest = jax.ops.segment_max(noise.ravel(), groups.ravel(), 64)
    return mask & (noise == largest[groups])


def _count_near(mask):
    """How many of the 3 x 3 cells around each cell are in the mask, [13, 13]."""
    mask = mask.astype(jnp.int32)
    return jax.lax.reduce_window(mask, 0, jax.lax.add, (3, 3), (1, 1), "SAME")


def spiral(dice):
    """One corridor that winds from the edge to the middle."""
    walls = _RING % 2 == 1
    turns = (_Y == _X + 1) & (_X < 6)  # here a ring of floor is closed and a ring of wall open
    return _OUTSIDE, np.where(turns, ~walls, walls), _MIDDLE


def serpentine(dice):
    """One corridor, up and down between walls with gaps near alternate ends."""
    shift = _whole(dice.others[1], 4)
    gap = jnp.where(_X % 4 == 1, shift, 12 - shift)
    return _LEFT_EDGE, (_X % 2 == 1) & (_Y != gap), _RIGHT_EDGE


def rings(dice):
    """Walls in rings around the middle, each with one gap."""
    walls = _RING % 2 == 1
    corners = (_X == _Y) | (_X == 12 - _Y)
    gaps = _one_of_each(_RING, walls & ~corners, dice.noise)
    return _OUTSIDE, walls & ~gaps, _MIDDLE


def comb(dice):
    """Dead ends of random lengths, side by side off one corridor; start and goal are at tips."""
    tip = 12 - _whole(dice.others[0], 6)
    tips = (_Y == tip) & (_X % 2 == 0)
    walls = (_Y > tip) | ((_Y > 0) & (_X % 2 == 1))
    return tips, walls, tips


def rooms_with_doors(dice):
    """Rooms of 3 x 3 cells, smaller at the edge; most walls between two rooms have a door."""
    left_wall, upper_wall = dice.u % 4 == 0, dice.v % 4 == 0
    room = dice.u // 4 * 4 + dice.v // 4
    sides = jnp.where(left_wall, room, room + 16)
    doors = _one_of_each(sides, left_wall != upper_wall, dice.noise) & (dice.noise <= 0.9)
    return _LEFT_EDGE, (left_wall | upper_wall) & ~doors, _RIGHT_EDGE


def streets(dice):
    """Blocks of 2 x 2 cells of wall in a grid of streets, some of them blocked."""
    blocks = (_X % 3 > 0) & (_Y % 3 > 0)
    bars = (_X % 3 + _Y % 3 == 1) & (dice.noise < 0.35)
    return _LEFT_EDGE, blocks | bars, _RIGHT_EDGE


def staircase(dice):
    """Diagonal walls, each with one gap, and staircases between them."""
    walls = (dice.u + _Y) % 3 == 0
    return _LEFT_EDGE, walls & ~_one_of_each(_X + _Y, walls, dice.noise), _RIGHT_EDGE


def pillars(dice):
    """An open hall with single cells of wall at most places of a grid with spacing 2."""
    places = (dice.u % 2 == 0) & (dice.v % 2 == 0)
    return _LEFT_EDGE, places & (dice.noise > 0.1), _RIGHT_EDGE


def caves(dice):
    """Wide caves: random walls, smoothed twice by a majority vote of the 3 x 3 cells around."""
    walls = dice.noise < 0.48
    for _ in range(2):
        walls = _count_near(walls) > 4
    return _LEFT_EDGE, walls, _RIGHT_EDGE


def prim_maze(dice):
    """A perfect maze with many short dead ends."""
    parents = sample_prim_tree(dice.rng, 7)
    return _LEFT_EDGE, _open_doors(13, jnp.arange(49), parents), _RIGHT_EDGE


def wilson_maze(dice):
    """A perfect maze, uniform over all perfect mazes."""
    parents = sample_wilson_tree(dice.rng, 7)
    return _LEFT_EDGE, _open_doors(13, jnp.arange(49), parents), _RIGHT_EDGE


def braided_maze(dice):
    """A maze with loops: a perfect one in which most dead ends are opened."""
    _, walls, _ = wilson_maze(dice)
    dead_ends = ~walls & (_count_near(~walls) == 2)
    doors = (_count_near(dead_ends) > 0) & ((_X + _Y) % 2 == 1) & (dice.noise >= 0.5)
    return _LEFT_EDGE, walls & ~doors, _RIGHT_EDGE


# To add a family, write a function like these and add its name here.
FAMILIES = {"Spiral": spiral, "Serpentine": serpentine, "Rings": rings, "Comb": comb,
            "RoomsWithDoors": rooms_with_doors, "Streets": streets, "Staircase": staircase,
            "Pillars": pillars, "Caves": caves, "PrimMaze": prim_maze, "WilsonMaze": wilson_maze,
            "BraidedMaze": braided_maze}  # fmt: skip


def sample_family(rng, kind):
    """A random 13 x 13 maze of the suite `families`, in a random symmetry of the square."""
    rng_tree, rng_noise = jax.random.split(rng)
    noise, places, others = jax.random.uniform(rng_noise, (507,)).reshape(3, 13, 13)
    u = _X + 1 + _whole(others[2, 0], 3)
    v = _Y + 1 + _whole(others[2, 1], 3)
    masks = jnp.stack(FAMILIES[kind](Dice(rng_tree, noise, others, u, v)))
    for axis in range(3):  # 0: start and goal change places
        masks = jnp.where(others[3, axis] < 0.5, jnp.flip(masks, axis), masks)
    starts, walls, goals = jnp.where(others[3, 3] < 0.5, masks.swapaxes(1, 2), masks)
    start = jnp.argmax(jnp.where(starts & ~walls, places, -1))
    goal = jnp.argmin(jnp.where(goals & ~walls, places, 2))  # differs from the start
    return Level(walls, _xy(start, 13), _whole(others[4, 0], 4), _xy(goal, 13))


_MAPS = """
SixteenRooms  SixteenRooms2 Labyrinth     LabyrinthFlipped Labyrinth2    SmallCorridor
...#..#..#... ...#.....#... ............. .............    >#........... .............
.>.......#... .>....#..#... .###########. .###########.    .#.#########. .#.#.#.#.#.#.
...#..#...... ...#..#..#... .#.........#. .#.........#.    .#.#.......#. .#.#.#.#.#.#.
#.###.##.###. ####.##.###.# .#.#######.#. .#.#######.#.    .#.#.#####.#. .#.#.#.#.#.#.
...#......... ...#..#...... .#.#.....#.#. .#.#.....#.#.    .#.#.#...#.#. .#.#.#.#.#.#.
......#..#... ......#..#... .#.#.###.#.#. .#.#.###.#.#.    ...#.#.#.#.#. .#G#.#.#.#.#.
##.#.##.###.# #.#####.##### .#.#.#G#.#.#. .#.#.#G#.#.#.    ####.#G#.#.#. >###########.
...#.....#... ...#..#..#... .#.#.#.#.#.#. .#.#.#.#.#.#.    ...#.###.#.#. .#.#.#.#.#.#.
...#..#...... ...#......... .#...#...#.#. .#.#...#...#.    .#.#.....#.#. .#.#.#.#.#.#.
.####.##.#.## ##.##.##.#### .#########.#. .#.#########.    .#.#######.#. .#.#.#.#.#.#.
...#..#..#... ...#..#..#... .....#.....#. .#.....#.....    .#.........#. .#.#.#.#.#.#.
......#....G. ......#....G. ####.#.#####. .#####.#.####    .###########. .#.#.#.#.#.#.
...#.....#... ...#..#..#... >....#....... .......#....<    ............. .............

StandardMaze  StandardMaze2 StandardMaze3 NineRooms     NineRoomsFewerDoors
.....#>...#.. ...#.#....#.. ...>#.#...... ........#.... ....#...#....
.###.####.##. .#.#.####...# .####.#.####. .>..#........ .>..#........
.#........... .#........#.. .#....#.#.... ....#...#.... ....#...#....
.########.### .########.### ...####.#.#.# ....#...#.... ....#...#....
........#.... ...#..#.#.#.G ##.#....#.#.. #.###.######. #.###.######.
######.#####. ##.#.##.#.#.. ...#.##.#.##. ....#........ ....#...#....
....#..#..... >#.#....#.##. .#.#.#..#..#G ........#.... ........#....
.##...##.#### .#.##.###..#. .#.#.#.###.## ....#...#.... ....#...#....
..#.#..#...#. .#..#..###.#. .#...#.#.#... ###.###.##.## ###.##.###.##
#.#.##.###.#. .##.##.#.#.#. .###.#.#.###. ....#...#.... ....#...#....
#.#..#...#... .#...#.#.#.#. .#...#.#...#. ........#.... ........#....
#.##.###.###. .#.#.#.#.#.#. .#.###.#.#.#. ....#......G. ....#...#..G.
...#..G#.#... ...#...#..... .#...#...#... ....#...#.... ....#...#....

LargeCorridor       MediumMaze TrivialMaze3 TrivialMaze2 MiniMaze TrivialMaze
................... .#..>##.   .......      .....        >...     ...
.#.#.#.#.#.#.#.#.#. .#.#.#..   .......      .....        ###.     .#.
.#.#.#.#.#.#.#.#.#. .#.####.   .......      ..#..        G#..     >#G
.#.#.#.#.#.#.#.#.#. .....#..   ...#...      ..#..        ...#
.#.#.#.#.#.#.#.#.#. ####.#.#   ...#...      >.#.G
.#.#.#.#.#.#.#.#.#. ........   ...#...
.#.#.#.#.#.#.#.#.#. .######.   >..#..G
.#.#.#.#.#.#.#.#.#. ..G#....
.#G#.#.#.#.#.#.#.#.
>#################.
.#.#.#.#.#.#.#.#.#.
.#.#.#.#.#.#.#.#.#.
.#.#.#.#.#.#.#.#.#.
.#.#.#.#.#.#.#.#.#.
.#.#.#.#.#.#.#.#.#.
.#.#.#.#.#.#.#.#.#.
.#.#.#.#.#.#.#.#.#.
.#.#.#.#.#.#.#.#.#.
...................
"""


def _maps():
    """{name: text}: blocks of mazes drawn side by side, taller ones first, names above."""
    maps = {}
    for block in _MAPS.strip().split("\n\n"):
        names, *rows = (line.split() for line in block.splitlines())
        for k, name in enumerate(names):
            maps[name] = "\n".join(row[k] for row in rows if k < len(row))
    return maps


SUITES = {
    "minimax": ["SixteenRooms", "Labyrinth", "StandardMaze"],
    "jaxued": ["SixteenRooms", "SixteenRooms2", "Labyrinth", "LabyrinthFlipped", "Labyrinth2",
               "StandardMaze", "StandardMaze2", "StandardMaze3"],
    "dcd": ["SixteenRooms", "SixteenRooms2", "Labyrinth", "Labyrinth2", "StandardMaze",
            "StandardMaze2", "StandardMaze3", "SimpleCrossing", "FourRooms", "SmallCorridor",
            "LargeCorridor", "PerfectMazeMedium"],
    "families": [*FAMILIES],
    "sampled": ["Sampled"],
}  # fmt: skip
MAX_STEPS = {"TrivialMaze": 250, "TrivialMaze2": 250, "TrivialMaze3": 250, "MiniMaze": 72,
             "MediumMaze": 200, "LargeCorridor": 882}  # fmt: skip


def _test_mazes():
    mazes = {}
    for name, text in _maps().items():
        sample = sample_corridor if name.endswith("Corridor") else sample_fixed
        mazes[name] = TestMaze(partial(sample, text=text), MAX_STEPS.get(name, 450))
    for kind, size in {"": 13, "Medium": 19, "Large": 49, "XL": 99}.items():
        sample = sample_kruskal_maze if kind else sample_perfect_maze
        mazes["PerfectMaze" + kind] = TestMaze(partial(sample, size=size), 2 * (size + 2) ** 2)
    mazes["FourRooms"] = TestMaze(sample_four_rooms, 100, see_through_walls=False)
    mazes["SimpleCrossing"] = TestMaze(sample_simple_crossing, 484, see_through_walls=False)
    mazes["Sampled"] = TestMaze(sample_solvable, 250)
    for name in FAMILIES:
        sample = partial(sample_family, kind=name)
        if name in ("RoomsWithDoors", "Streets", "Caves"):  # some of these cannot be solved
            sample = partial(sample_solvable, sample=sample)
        mazes[name] = TestMaze(sample, 450 if name == "Staircase" else 250)
    return mazes


TEST_MAZES = _test_mazes()


def pad_level(level, height, width):
    """The level, or levels [..., H, W], with wall added on the right and below; plays the same."""
    *batch, rows, columns = level.wall_map.shape
    pad = [*[(0, 0)] * len(batch), (0, height - rows), (0, width - columns)]
    return level._replace(wall_map=jnp.pad(level.wall_map, pad, constant_values=True))


def pad_levels(levels):
    """Levels of several sizes, padded to one size."""
    size = [max(level.wall_map.shape[i] for level in levels) for i in (-2, -1)]
    return [pad_level(level, *size) for level in levels]


def sample_mazes(rng, names, episodes=1, mazes=TEST_MAZES, pad=pad_levels):
    """Levels of M test mazes for E episodes on each, padded to one size, and their rules:
    (Level [M * E, ...], max_steps [M * E] int32, see_through_walls [M * E] bool)."""
    if unknown := [name for name in names if name not in mazes]:
        raise ValueError(f"unknown maze {unknown[0]!r}; choose from {', '.join(mazes)}")
    samples, *rules = zip(*(mazes[name] for name in names))

    def draw(rng):
        rngs = jax.random.split(rng, len(samples))
        levels = pad([sample(rng) for sample, rng in zip(samples, rngs)])
        return jax.tree.map(lambda *x: jnp.stack(x), *levels)

    levels = jax.vmap(draw, out_axes=1)(jax.random.split(rng, episodes))  # [M, E, ...]
    levels = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), levels)
    rules = [jnp.repeat(jnp.array(rule), episodes) for rule in rules]
    return levels, *rules


# --- the teacher's MDP (PAIRED): n_walls wall actions, then the goal, then the agent


class TeacherState(NamedTuple):
    level: Level  # what is placed so far; complete after the last step
    n_walls: jax.Array  # [] int32, the budget
    t: jax.Array  # [] int32, actions taken


class TeacherObservation(NamedTuple):
    image: jax.Array  # [H + 2, W + 2, 3] uint8 [y, x, triple], with the border
    time: jax.Array  # [] int32
    noise: jax.Array  # [50] float32, uniform, redrawn at each step


def _teacher_observe(rng, state):
    level = state.level
    height, width = level.wall_map.shape
    x, y = jnp.arange(-1, width + 1)[None, :, None], jnp.arange(-1, height + 1)[:, None, None]
    is_wall = jnp.pad(level.wall_map, 1, constant_values=True)[:, :, None]
    is_goal = (x == level.goal_pos[0]) & (y == level.goal_pos[1]) & (state.t > state.n_walls)
    is_agent = (x == level.agent_pos[0]) & (y == level.agent_pos[1]) & (state.t > state.n_walls + 1)
    agent = jnp.array(AGENT).at[2].set(level.agent_dir)
    image = jnp.where(is_wall, np.array(WALL), np.array(EMPTY))
    image = jnp.where(is_agent, agent, jnp.where(is_goal, np.array(GOAL), image))
    return TeacherObservation(image.astype(jnp.uint8), state.t, jax.random.uniform(rng, (50,)))


def teacher_size(n_walls=60, height=13, width=13):
    """The number of steps of a design, and of actions (cells) at each."""
    return n_walls + 2, height * width


def teacher_reset(rng, n_walls=60, height=13, width=13):
    """An empty grid to design on: (TeacherObservation, TeacherState)."""
    _check_room(n_walls, height, width)
    zero = jnp.zeros((), jnp.int32)
    corner = jnp.zeros(2, jnp.int32)
    empty = Level(jnp.zeros((height, width), bool), corner, zero, corner)
    state = TeacherState(empty, jnp.asarray(n_walls, jnp.int32), zero)
    return _teacher_observe(rng, state), state


def teacher_step(rng, state, action):
    """Place the next object on cell `action` (row-major): (TeacherObservation, TeacherState, done).

    Goal and agent replace a wall on their cell; an agent on the goal moves to a random free cell.
    """
    rng_place, rng_noise = jax.random.split(rng)
    bits = jax.random.bits(rng_place, (2,), jnp.uint32)
    level, n_walls, t = state
    height, width = level.wall_map.shape
    index = jnp.arange(height * width)
    puts_wall, puts_goal, puts_agent = t < n_walls, t == n_walls, t == n_walls + 1
    goal = jnp.where(puts_goal, action, level.goal_pos[1] * width + level.goal_pos[0])
    walls = level.wall_map.reshape(-1)
    walls = jnp.where(index == action, puts_wall, walls)
    free = ~walls & (index != goal)
    elsewhere = _kth(free, _below(bits[0], jnp.sum(free)))
    agent = jnp.where(action == goal, elsewhere, action)
    level = level._replace(
        wall_map=walls.reshape(height, width),
        goal_pos=_xy(goal, width),
        agent_pos=jnp.where(puts_agent, _xy(agent, width), level.agent_pos),
        agent_dir=jnp.where(puts_agent, _below(bits[1], 4), level.agent_dir),
    )
    state = TeacherState(level, n_walls, t + 1)
    return _teacher_observe(rng_noise, state), state, state.t >= n_walls + 2


# --- drawing (NumPy, on the host)


@cache
def _tile(kind, direction, lit, size):
    """One cell as MiniGrid draws it, [size, size, 3] uint8, downsampled from 3 times the size."""
    centre = (np.arange(3 * size) + 0.5) / (3 * size)
    x, y = centre[None, :], centre[:, None]
    pixels = np.zeros((3 * size, 3 * size, 3))
    pixels[(x <= 0.031) | (y <= 0.031)] = 100  # grid lines
    if kind != EMPTY[0]:
        pixels[:] = (100, 100, 100) if kind == WALL[0] else (0, 255, 0)
    if direction is not None:  # a red triangle, turned
        cos, sin = np.cos(np.pi / 2 * direction), np.sin(np.pi / 2 * direction)
        along, side = (x - 0.5) * cos + (y - 0.5) * sin, (y - 0.5) * cos - (x - 0.5) * sin
        pixels[(along >= -0.38) & (np.abs(side) <= (0.37 - along) * 0.31 / 0.75)] = (255, 0, 0)
    if lit:
        pixels = np.floor(pixels + 0.3 * (255 - pixels))
    return pixels.reshape(size, 3, size, 3, 3).mean(axis=(1, 3)).astype(np.uint8)


def render(level_or_state, tile=16):
    """MiniGrid's picture with the outer wall, [h, w, 3] uint8; a state's visible cells are lit."""
    level, is_state = level_or_state, isinstance(level_or_state, EnvState)
    if is_state:  # with the agent where it is now
        level = _current(level)._replace(agent_pos=level.agent_pos, agent_dir=level.agent_dir)
    level = jax.tree.map(np.asarray, level)
    kinds = np.where(np.pad(level.wall_map, 1, constant_values=True), WALL[0], EMPTY[0])
    kinds[level.goal_pos[1] + 1, level.goal_pos[0] + 1] = GOAL[0]
    lit = np.zeros(kinds.shape, bool)
    agent_x, agent_y = level.agent_pos + 1
    d = int(level.agent_dir)
    if is_state:
        dx, dy = [(1, 0), (0, 1), (-1, 0), (0, -1)][d]
        for i, j in np.argwhere(np.asarray(observe(level_or_state).image)[..., 0] != UNSEEN[0]):
            ahead, right = VIEW - 1 - j, i - VIEW // 2
            x, y = agent_x + ahead * dx - right * dy, agent_y + ahead * dy + right * dx
            if 0 <= y < lit.shape[0] and 0 <= x < lit.shape[1]:
                lit[y, x] = True
    facing = np.full(kinds.shape, None)
    facing[agent_y, agent_x] = d
    rows = [[_tile(*cell, tile) for cell in zip(*row)] for row in zip(kinds, facing, lit)]
    return np.concatenate([np.concatenate(row, axis=1) for row in rows])


def _caption(values):
    """A line for each item of {name: number or words}; NaNs are left out."""
    lines = []
    for name, value in values.items():
        if isinstance(value, str):
            lines.append(f"{name} {value}".strip())
        elif not np.isnan(float(value)):
            lines.append(f"{name} {float(value):.3g}".strip())
    return "\n".join(lines)


def plot_levels(sections, columns=8, render=render):
    """A matplotlib Figure of {title: (levels [K, ...], captions {name: K numbers or words})}.

    All levels share one axes, in inches: an axes for each would take ten times as long to draw."""
    from matplotlib.figure import Figure  # imported here, as it is slow

    figure = Figure()
    axes = figure.add_axes((0, 0, 1, 1))
    top = 0.0
    for title, (levels, captions) in sections.items():
        levels = jax.tree.map(np.asarray, levels)
        if title:
            top += 0.3
        axes.text(0.8 * columns, top, title, ha="center", va="bottom", fontsize=12)
        for k in range(len(jax.tree.leaves(levels)[0])):
            picture = render(jax.tree.map(lambda x: x[k], levels))
            height, width = 1.4 * np.array(picture.shape[:2]) / max(picture.shape)
            if k % columns == 0:
                top += 0.2 + 0.14 * len(captions) + height
            x = 1.6 * (k % columns) + 0.8
            extent = (x - width / 2, x + width / 2, top, top - height)
            axes.imshow(picture, extent=extent, origin="upper")  # whatever matplotlibrc says
            text = _caption({name: values[k] for name, values in captions.items()})
            axes.text(x, top - height - 0.05, text, ha="center", va="bottom", fontsize=8)
    figure.set_size_inches(1.6 * columns, top + 0.1)
    axes.set(xlim=(0, 1.6 * columns), ylim=(top + 0.1, 0), xticks=[], yticks=[], frame_on=False)
    return figure
