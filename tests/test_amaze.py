"""amaze.py against MiniGrid, networkx, plain Python and published numbers."""

import sys
import zlib
from collections import Counter
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from minigrid.core.grid import Grid
from minigrid.core.mission import MissionSpace
from minigrid.core.world_object import Goal, Wall
from minigrid.envs import CrossingEnv, FourRoomsEnv
from minigrid.minigrid_env import MiniGridEnv

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import amaze  # noqa: E402

AHEAD = [(1, 0), (0, 1), (-1, 0), (0, -1)]         # by direction
# Of the libraries' mazes: steps allowed, shortest path in cells, fewest actions.
PUBLISHED = {
    "SixteenRooms": (450, 20, 26), "SixteenRooms2": (450, 22, 28), "Labyrinth": (450, 96, 113),
    "LabyrinthFlipped": (450, 96, 113), "Labyrinth2": (450, 96, 113), "StandardMaze": (450, 40, 54),
    "StandardMaze2": (450, 56, 73), "StandardMaze3": (450, 39, 54), "SmallCorridor": (450, 13, 16),
    "LargeCorridor": (882, 19, 22), "TrivialMaze": (250, 6, 9), "TrivialMaze2": (250, 10, 13),
    "TrivialMaze3": (250, 14, 17), "NineRooms": (450, 20, 24), "NineRoomsFewerDoors": (450, 34, 42),
    "MiniMaze": (72, 10, 15), "MediumMaze": (200, 17, 25)}

optimised = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})


def host(tree):
    """A tree with its leaves as NumPy arrays."""
    return jax.tree.map(np.asarray, tree)


def row(tree, i):
    """Row i of a batch."""
    return jax.tree.map(lambda x: x[i], tree)


@cache
def batch_sampler(n_walls, height, width):
    return optimised(jax.vmap(lambda rng: amaze.sample_level(rng, n_walls, height, width)))


def keys(seed, count):
    return jax.random.split(jax.random.key(seed), count)


def random_levels(seed, count, n_walls=60, height=13, width=13):
    return batch_sampler(n_walls, height, width)(keys(seed, count))


solve_batch = optimised(jax.vmap(amaze.solve))


def graph_of(level):
    """As networkx: the free cells (x, y), and the poses (x, y, d) with an edge for each action."""
    height, width = level.wall_map.shape
    free = {(x, y) for y in range(height) for x in range(width) if not level.wall_map[y, x]}
    cells, poses = nx.Graph(), nx.DiGraph()
    cells.add_nodes_from(free)
    for x, y in free:
        for d, (dx, dy) in enumerate(AHEAD):
            poses.add_edge((x, y, d), (x, y, (d - 1) % 4), action=0)
            poses.add_edge((x, y, d), (x, y, (d + 1) % 4), action=1)
            if (x + dx, y + dy) in free:
                cells.add_edge((x, y), (x + dx, y + dy))
                poses.add_edge((x, y, d), (x + dx, y + dy, d), action=2)
    return cells, poses


def oracle(level):
    """From networkx: (moves between cells, fewest actions as a list), or None if unreachable."""
    cells, poses = graph_of(level)
    start, goal = tuple(map(int, level.agent_pos)), tuple(map(int, level.goal_pos))
    if not nx.has_path(cells, start, goal):
        return None
    poses.add_edges_from(((*goal, d), "goal") for d in range(4))
    path = nx.shortest_path(poses, (*start, int(level.agent_dir)), "goal")[:-1]
    return (nx.shortest_path_length(cells, start, goal),
            [poses.edges[a, b]["action"] for a, b in zip(path, path[1:])])


def assert_distributed(counts, probabilities):
    """Chi-square test: counts of outcomes fit these probabilities (within 5 deviations)."""
    total = sum(counts.values())
    assert set(counts) <= set(probabilities), set(counts) - set(probabilities)
    chi = sum((counts[k] - total * p) ** 2 / (total * p) for k, p in probabilities.items())
    freedom = len(probabilities) - 1
    assert chi < freedom + 5 * (2 * freedom) ** 0.5 + 5, (chi, freedom)


def uniform(outcomes):
    outcomes = list(outcomes)
    return dict.fromkeys(outcomes, 1 / len(outcomes))


def outcome(level):
    """A level as a hashable value, to count it."""
    return (level.wall_map.tobytes(), *level.agent_pos.tolist(), int(level.agent_dir),
            *level.goal_pos.tolist())


# --- MiniGrid


class Copy(MiniGridEnv):
    """A Level as a MiniGrid environment, built from MiniGrid's own classes."""

    def __init__(self, level, max_steps, see_through_walls):
        self.level = level
        height, width = level.wall_map.shape
        super().__init__(MissionSpace(lambda: "reach the goal"), width=width + 2, height=height + 2,
                         max_steps=max_steps, see_through_walls=see_through_walls,
                         agent_view_size=5)

    def _gen_grid(self, width, height):
        self.grid = Grid(width, height)
        self.grid.wall_rect(0, 0, width, height)
        for y, x in np.argwhere(self.level.wall_map):
            self.grid.set(int(x) + 1, int(y) + 1, Wall())
        self.put_obj(Goal(), *(int(v) + 1 for v in self.level.goal_pos))
        self.agent_pos = np.array([int(v) + 1 for v in self.level.agent_pos])
        self.agent_dir = int(self.level.agent_dir)


@jax.jit
@jax.vmap
def play(level, actions, max_steps, see_through_walls):
    """All observations, rewards and dones of one level under `actions`."""
    first, state = amaze.reset(level, max_steps, see_through_walls)

    def act(state, action):
        obs, state, reward, done = amaze.step(state, action)
        return state, (obs, reward, done)

    _, (later, rewards, dones) = jax.lax.scan(act, state, actions)
    obs = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, later)
    return obs, rewards, dones


@pytest.mark.parametrize("height, width, n_walls, count", [
    (13, 13, 60, 120), (5, 9, 8, 40), (3, 2, 1, 40), *(
        pytest.param(*sizes, marks=pytest.mark.slow) for sizes in (
            (13, 13, 0, 20), (13, 13, 25, 40), (13, 13, 150, 40),
            (30, 33, 250, 16), (2, 60, 20, 16)))])
def test_equals_minigrid(height, width, n_walls, count):
    rng = np.random.default_rng(height * width + n_walls)
    levels = random_levels(n_walls, count, n_walls, height, width)
    max_steps = rng.choice([7, 40, 250], count, p=[0.2, 0.3, 0.5])
    see = rng.random(count) < 0.5
    actions = rng.choice(7, (count, 250), p=[0.15, 0.15, 0.5, 0.05, 0.05, 0.05, 0.05])
    obs, rewards, dones = host(play(levels, actions, max_steps, see))
    assert obs.image.dtype == np.uint8
    assert rewards.dtype == np.float32
    ends = Counter()
    for i in range(count):
        env = Copy(row(host(levels), i), int(max_steps[i]), bool(see[i]))
        (theirs, _), terminated, truncated = env.reset(), False, False
        for t in range(251):
            assert np.array_equal(obs.image[i, t], theirs["image"]), (i, t)
            assert obs.direction[i, t] == theirs["direction"]
            if terminated or truncated:
                break
            theirs, reward, terminated, truncated, _ = env.step(actions[i, t])
            assert rewards[i, t] == pytest.approx(reward, abs=1e-6)
            assert dones[i, t] == (terminated or truncated)
        assert dones[i, t - 1]
        ends[bool(terminated)] += 1
    assert ends[False]
    assert (ends[True] or count == 16)      # few reach the goal of a large grid


def test_occlusion_of_any_pattern():
    """Views of 5 x 5 cells, with random densities of walls, against MiniGrid's process_vis."""
    rng = np.random.default_rng(0)
    walls = rng.random((2000, 5, 5)) < rng.random((2000, 5, 1))
    walls[:, 4, 2] = False
    one = amaze.level_from_text("G....\n.....\n.....\n.....\n..^..")

    @jax.jit
    @jax.vmap
    def first(wall_map):
        return amaze.reset(one._replace(wall_map=wall_map), see_through_walls=False)[0]

    images = np.asarray(first(walls).image)
    for wall_map, image in zip(walls, images):
        grid = Grid(5, 5)
        for y, x in np.argwhere(wall_map):
            grid.set(int(x), int(y), Wall())
        assert np.array_equal(image[..., 0] > 0, grid.process_vis((2, 4)))


@pytest.mark.slow
def test_see_through_constant_equals_array():
    levels = random_levels(1, 8)
    actions = np.random.default_rng(1).integers(0, 7, (8, 50))

    @jax.jit
    @jax.vmap
    def play_constant(level, actions):
        first, state = amaze.reset(level)
        assert state.see_through_walls is None
        return jax.lax.scan(lambda s, a: amaze.step(s, a)[1::-1], state, actions)[1]

    longer = np.pad(actions, ((0, 0), (0, 200)))
    array, _, _ = play(levels, longer, np.full(8, 250), np.full(8, True))
    constant = play_constant(levels, actions)
    assert np.array_equal(constant.image, array.image[:, 1:51])


@pytest.mark.slow
def test_step_and_reset_takes_the_queue_in_turn():
    rng = np.random.default_rng(2)
    queues = jax.tree.map(lambda x: x.reshape(20, 3, *x.shape[1:]), random_levels(2, 60, 2, 4, 4))
    step, both = (jax.jit(jax.vmap(f)) for f in (amaze.step, amaze.step_and_reset))
    reset = jax.jit(jax.vmap(lambda level: amaze.reset(level, 9)))
    for n_slots in (1, 3):
        queue = jax.tree.map(lambda x: x[:, :n_slots], queues)
        by_slot = jax.tree.map(lambda x: x.swapaxes(0, 1), queue)
        fresh = [reset(row(by_slot, k)) for k in range(n_slots)]
        obs, state = reset(queue)
        plain_obs, plain = fresh[0]                       # each its own single level, reset by hand
        slots = np.zeros(20, int)
        for _ in range(60):
            assert np.array_equal(obs.image, plain_obs.image)
            assert np.array_equal(obs.direction, plain_obs.direction)
            assert np.array_equal(state.slot, slots)
            actions = rng.choice(7, 20, p=[0.15, 0.15, 0.5, 0.05, 0.05, 0.05, 0.05])
            obs, state, reward, done = both(state, actions)
            plain_obs, plain, plain_reward, plain_done = step(plain, actions)
            assert np.array_equal(reward, plain_reward)
            assert np.array_equal(done, plain_done)
            slots = (slots + done) % n_slots
            for k in range(n_slots):
                new = np.asarray(done & (slots == k))
                plain_obs, plain = jax.tree.map(
                    lambda a, b: np.where(new.reshape(-1, *[1] * (a.ndim - 1)), a, b), fresh[k],
                    (plain_obs, plain))
            assert np.array_equal(state.t, plain.t)


@pytest.mark.slow
def test_padding_changes_nothing():
    levels = random_levels(3, 60, 12, 6, 9)
    rng = np.random.default_rng(3)
    see, steps = rng.random(60) < 0.5, np.full(60, 200)
    actions = rng.choice(7, (60, 250), p=[0.15, 0.15, 0.5, 0.05, 0.05, 0.05, 0.05])
    padded = jax.vmap(lambda level: amaze.pad_level(level, 31, 12))(levels)
    assert padded.wall_map.shape == (60, 31, 12)
    for a, b in zip(jax.tree.leaves((play(levels, actions, steps, see), solve_batch(levels))),
                    jax.tree.leaves((play(padded, actions, steps, see), solve_batch(padded)))):
        assert np.array_equal(a, b)


# --- random levels and edits


def test_small_levels_have_the_exact_distribution():
    """2 x 2 cells, 2 draws with replacement: enumerate every level with its probability."""
    places = [(0, 0), (1, 0), (0, 1), (1, 1)]
    expected = Counter()
    for draw in [(a, b) for a in places for b in places]:
        walls = np.zeros((2, 2), bool)
        for x, y in draw:
            walls[y, x] = True
        free = [p for p in places if p not in draw]
        for agent in free:
            for goal in (p for p in free if p != agent):
                for d in range(4):
                    expected[(walls.tobytes(), *agent, d, *goal)] += (
                        1 / 16 / len(free) / (len(free) - 1) / 4)
    assert sum(expected.values()) == pytest.approx(1)
    levels = host(random_levels(4, 60_000, 2, 2, 2))
    assert_distributed(Counter(outcome(row(levels, i)) for i in range(60_000)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("n_walls, walls, solvable, path", [
    (0, 0, 1, 8.73), (25, 23.3, 0.994, 9.05), (60, 50.6, 0.845, 10.6)])
def test_reference_statistics(n_walls, walls, solvable, path):
    levels = random_levels(5, 8192, n_walls)
    solution = host(solve_batch(levels))
    assert np.mean(np.sum(levels.wall_map, axis=(1, 2))) == pytest.approx(walls, abs=0.15)
    assert solution.solvable.mean() == pytest.approx(solvable, abs=0.015)
    assert solution.path_length[solution.solvable].mean() == pytest.approx(path, abs=0.25)
    if n_walls == 0:
        assert solution.path_length.max() <= 24
        assert_distributed(Counter(map(tuple, np.asarray(levels.agent_pos).tolist())),
                           uniform((x, y) for x in range(13) for y in range(13)))


@pytest.mark.parametrize("text", ["#.#\n...\n##.", ".#\n#.", "...."])
def test_agent_goal_and_direction_are_placed_uniformly(text):
    """On given walls, which stay the same, every way to place them is equally likely."""
    walls = np.array([[c == "#" for c in line] for line in text.split("\n")])
    free = [(int(x), int(y)) for y, x in np.argwhere(~walls)]
    ways = [(walls.tobytes(), *agent, d, *goal)
            for agent in free for goal in free if goal != agent for d in range(4)]
    levels = host(jax.jit(jax.vmap(lambda rng: amaze.place(rng, walls)))(keys(16, 30_000)))
    assert [x.dtype for x in levels] == [bool, np.int32, np.int32, np.int32]
    assert_distributed(Counter(outcome(row(levels, i)) for i in range(30_000)), uniform(ways))


def test_too_many_walls():
    with pytest.raises(ValueError, match="168 walls leave no room .* 13 x 13"):
        amaze.sample_level(jax.random.key(0), 168)


def plain_edit(level):
    """{level: probability} after one edit by the rules; a level is (walls, agent, goal, cells)."""
    walls, agent, goal, cells = level
    after = Counter({level: 1 / 3})
    others = [c for c in cells if c not in (agent, goal)]
    for c in others:
        after[(walls ^ {c}, agent, goal, cells)] += 1 / 3 / len(others)
    free = [c for c in others if c not in walls]
    for c in free:
        after[(walls, agent, c, cells)] += 1 / 3 / len(free)
    if not free:
        after[level] += 1 / 3
    return after


@pytest.mark.parametrize("n_edits", [1, 4])
def test_edits_have_the_exact_distribution(n_edits):
    """Edits of a 2 x 3 level, compared with all their outcomes under a plain Python editor."""
    level = amaze.level_from_text("G#>\n.##")
    cells = tuple((x, y) for y in range(2) for x in range(3))
    expected = {(frozenset({(1, 0), (1, 1), (2, 1)}), (2, 0), (0, 0), cells): 1}
    for _ in range(n_edits):
        later = Counter()
        for before, p in expected.items():
            for after, q in plain_edit(before).items():
                later[after] += p * q
        expected = later
    edit = jax.jit(jax.vmap(lambda rng: amaze.edit_level(rng, level, n_edits)))
    edited = host(edit(keys(6, 40_000)))
    counts = Counter()
    for i in range(40_000):
        one = row(edited, i)
        walls = frozenset((int(x), int(y)) for y, x in np.argwhere(one.wall_map))
        assert int(one.agent_dir) == 0
        counts[(walls, tuple(one.agent_pos.tolist()), tuple(one.goal_pos.tolist()), cells)] += 1
    assert_distributed(counts, expected)


@pytest.mark.slow
def test_edits_of_full_size_levels():
    levels = random_levels(7, 500)
    edit = jax.jit(jax.vmap(lambda rng, level, n: amaze.edit_level(rng, level, n), (0, 0, None)),
                   static_argnums=2)
    same = edit(keys(7, 500), levels, 0)
    assert all(np.array_equal(a, b) for a, b in zip(same, levels))
    assert [x.dtype for x in same] == [x.dtype for x in levels]
    edited = host(edit(keys(7, 500), levels, 20))
    assert np.array_equal(edited.agent_pos, levels.agent_pos)
    assert np.array_equal(edited.agent_dir, levels.agent_dir)
    i = np.arange(500)
    assert not edited.wall_map[i, edited.agent_pos[:, 1], edited.agent_pos[:, 0]].any()
    assert not edited.wall_map[i, edited.goal_pos[:, 1], edited.goal_pos[:, 0]].any()
    assert (edited.agent_pos != edited.goal_pos).any(axis=1).all()
    flips = (edited.wall_map != levels.wall_map).sum(axis=(1, 2))
    assert flips.max() <= 20
    assert flips.mean() == pytest.approx(20 / 3, abs=0.6)


# --- solver


@pytest.mark.slow
@pytest.mark.parametrize("height, width, n_walls, count", [
    (13, 13, 60, 400), (13, 13, 25, 200), (13, 13, 100, 250), (4, 9, 14, 150)])
def test_solve_equals_networkx(height, width, n_walls, count):
    levels = random_levels(8, count, n_walls, height, width)
    solution = host(solve_batch(levels))
    for i in range(count):
        theirs = oracle(row(host(levels), i))
        path, actions = (theirs[0], len(theirs[1])) if theirs else (-1, -1)
        assert (solution.path_length[i], solution.n_actions[i]) == (path, actions), i
        assert solution.solvable[i] == (theirs is not None)
    assert 0 < solution.solvable.mean() < 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_solve_equals_published_numbers(name):
    maze = amaze.TEST_MAZES[name]
    level = amaze.level_from_text(amaze._maps()[name])
    solution = solve_batch(row(amaze.pad_level(level, 19, 19), None))
    steps, path, actions = PUBLISHED[name]
    assert (maze.max_steps, int(solution.path_length[0]), int(solution.n_actions[0])) == (
        steps, path, actions)
    assert maze.see_through_walls


FIXED = {  # crc32 of the text of a fixed maze
    "SixteenRooms": 2812900701, "SixteenRooms2": 3557406444, "Labyrinth": 3634028714,
    "LabyrinthFlipped": 3967544589, "Labyrinth2": 598092610, "StandardMaze": 2062761702,
    "StandardMaze2": 3450628495, "StandardMaze3": 1269599942, "SmallCorridor": 3207999333,
    "LargeCorridor": 2767475205, "TrivialMaze": 1108888631, "TrivialMaze2": 1136935811,
    "TrivialMaze3": 1624132929, "NineRooms": 3746799761, "NineRoomsFewerDoors": 4177241662,
    "MiniMaze": 3992697662, "MediumMaze": 1904478544}


@pytest.mark.parametrize("name", FIXED)
def test_fixed_mazes_are_those_of_the_libraries(name):
    """To a cell: 157 of 167 cells of SixteenRooms may be changed with no change of the path."""
    assert zlib.crc32(amaze._maps()[name].encode()) == FIXED[name]


def test_optimal_return():
    n = np.array([-1, 25, 250, 251])
    solution = amaze.Solution(n, n, n >= 0)
    best = amaze.optimal_return(solution, 250)
    assert best.dtype == np.float32
    assert np.asarray(best) == pytest.approx([0, 0.91, 0.1, 0], abs=1e-6)


SMALL = [n for n in amaze.TEST_MAZES if n not in ("PerfectMazeLarge", "PerfectMazeXL")]


@pytest.mark.slow
@pytest.mark.parametrize("names", [SMALL, ["PerfectMazeLarge"], ["PerfectMazeXL"]],
                         ids=["small", "large", "xl"])
def test_shortest_path_earns_the_optimal_return(names):
    levels, max_steps, see = jax.jit(lambda rng: amaze.sample_mazes(rng, names))(jax.random.key(9))
    paths = [oracle(row(host(levels), i)) for i in range(len(names))]
    longest = max(len(actions) for _, actions in paths)
    actions = np.array([actions + [6] * (longest - len(actions)) for _, actions in paths])
    _, rewards, dones = host(play(levels, actions, max_steps, see))
    solution = solve_batch(levels)
    best = host(amaze.optimal_return(solution, max_steps))
    for i, (path, shortest) in enumerate(paths):
        assert (solution.path_length[i], solution.n_actions[i]) == (path, len(shortest))
        assert len(shortest) <= max_steps[i]
        assert np.flatnonzero(dones[i])[0] == len(shortest) - 1
        assert rewards[i, : len(shortest)].sum() == pytest.approx(best[i], abs=1e-6)
        assert best[i] == pytest.approx(1 - 0.9 * len(shortest) / int(max_steps[i]), abs=1e-6)


# --- text


@st.composite
def drawings(draw):
    height, width = draw(st.integers(1, 7)), draw(st.integers(2, 9))
    chars = draw(st.lists(st.sampled_from("#."), min_size=height * width, max_size=height * width))
    agent, goal = draw(st.permutations(range(height * width)))[:2]
    chars[agent], chars[goal] = draw(st.sampled_from(">v<^")), "G"
    return "\n".join("".join(chars[y * width : (y + 1) * width]) for y in range(height))


@settings(max_examples=100, deadline=None)
@given(drawings())
def test_text_round_trip(text):
    level = amaze.level_from_text(text)
    assert amaze.level_to_text(level) == text
    assert [x.dtype for x in level] == [bool, np.int32, np.int32, np.int32]


def test_text_positions():
    level = amaze.level_from_text("\n  ..#\n  .<G\n")
    assert np.array_equal(level.wall_map, [[False, False, True], [False, False, False]])
    assert level.agent_pos.tolist() == [1, 1]
    assert level.agent_dir == 2
    assert level.goal_pos.tolist() == [2, 1]


@pytest.mark.parametrize("text, message", [
    (">.\n.>\n.G", "second agent at row 2, column 2"),
    ("G.\n.G\n.>", "second goal at row 2, column 2"),
    (".G\n..", "no agent in rows 1 to 2, columns 1 to 2"), (".>\n..", "no goal in rows 1 to 2"),
    (">G.\n..", "row 2 ends at column 2, but row 1 ends at column 3"),
    (">G\n.x", "unknown character 'x' at row 2, column 2"), ("", "no agent in empty text"),
    (" \n ", "no agent in empty text")])
def test_malformed_text(text, message):
    with pytest.raises(ValueError, match=message) as error:
        amaze.level_from_text(text)
    assert "\n" not in str(error.value)
    assert not text.strip() or ("row" in str(error.value) and "column" in str(error.value))


# --- test mazes


@cache
def sampled(name, count):
    return host(optimised(jax.vmap(amaze.TEST_MAZES[name].sample))(keys(10, count)))


def minigrid_resets(env, count):
    """Levels of a MiniGrid environment, one from each reset."""
    levels = []
    for seed in range(count):
        env.reset(seed=seed)
        kinds = env.grid.encode()[1:-1, 1:-1, 0].T
        ((goal_y, goal_x),) = np.argwhere(kinds == 8)
        levels.append(amaze.Level(kinds == 2, np.array(env.agent_pos) - 1, np.array(env.agent_dir),
                                  np.array([goal_x, goal_y])))
    return jax.tree.map(lambda *x: np.stack(x), *levels)


def assert_same_walls(ours, theirs):
    """Cells, and pairs of neighbours, are walls equally often in both (within 5 deviations)."""
    for f in (lambda w: w, lambda w: w[:, 1:] & w[:, :-1], lambda w: w[:, :, 1:] & w[:, :, :-1]):
        p, q = f(ours.wall_map).mean(axis=0), f(theirs.wall_map).mean(axis=0)
        deviation = np.sqrt(p * (1 - p) / len(ours.wall_map) + q * (1 - q) / len(theirs.wall_map))
        assert np.all(np.abs(p - q) <= 5 * deviation + 1e-9)


def assert_four_rooms(levels):
    doors = []
    for walls in levels.wall_map:
        cross = np.zeros((17, 17), bool)
        cross[8], cross[:, 8] = True, True
        opened = [(int(y), int(x)) for y, x in np.argwhere(walls != cross)]
        assert cross[8, 8]
        assert len(opened) == 4
        left, right = (x for y, x in sorted(opened, key=lambda d: d[1]) if y == 8)
        above, below = (y for y, x in sorted(opened) if x == 8)
        assert left < 8 < right
        assert above < 8 < below
        doors.append((above, below - 9, left, right - 9))
    return doors


def test_four_rooms_follows_minigrid():
    ours, theirs = sampled("FourRooms", 4000), minigrid_resets(FourRoomsEnv(), 300)
    assert_four_rooms(theirs)
    for doors in zip(*assert_four_rooms(ours)):
        assert_distributed(Counter(doors), uniform(range(8)))
    assert_same_walls(ours, theirs)
    assert_distributed(Counter(ours.agent_dir.tolist()), uniform(range(4)))
    assert solve_batch(ours).solvable.all()
    assert (ours.agent_pos != ours.goal_pos).any(axis=1).all()
    for place in (ours.agent_pos, ours.goal_pos):
        assert not ours.wall_map[np.arange(4000), place[:, 1], place[:, 0]].any()
        rooms = [(x > 8, y > 8) for x, y in place.tolist() if x != 8 and y != 8]
        assert_distributed(Counter(rooms), uniform((a, b) for a in (0, 1) for b in (0, 1)))
    assert amaze.TEST_MAZES["FourRooms"][1:] == (100, False)


def assert_crossing(levels):
    for walls, agent, direction, goal in zip(*levels):
        rows, columns = ([k for k in range(9) if line[k].sum() == 8] for line in (walls, walls.T))
        assert len(rows) + len(columns) == 5
        assert set(rows + columns) <= {1, 3, 5, 7}
        rivers = np.zeros((9, 9), bool)
        rivers[rows], rivers[:, columns] = True, True
        assert np.sum(rivers & ~walls) == 5
        assert not np.any(walls & ~rivers)
        assert agent.tolist() == [0, 0]
        assert direction == 0
        assert goal.tolist() == [8, 8]
        yield len(rows)


@pytest.mark.slow
def test_simple_crossing_follows_minigrid():
    ours = sampled("SimpleCrossing", 4000)
    theirs = minigrid_resets(CrossingEnv(size=11, num_crossings=5, obstacle_type=Wall), 1500)
    assert list(assert_crossing(theirs))
    # 5 of 8 rivers, of which 4 are rows: hypergeometric
    rows = Counter(assert_crossing(ours))
    assert_distributed(rows, {1: 4 / 56, 2: 24 / 56, 3: 24 / 56, 4: 4 / 56})
    assert_same_walls(ours, theirs)
    assert solve_batch(ours).solvable.all()
    assert amaze.TEST_MAZES["SimpleCrossing"][1:] == (484, False)


def plain_perfect_maze(rng, n):
    """Rooms joined by depth-first search in plain Python, as a networkx tree."""
    tree, stack = nx.Graph(), [(int(rng.integers(n)), int(rng.integers(n)))]
    tree.add_node(stack[0])
    while stack:
        x, y = stack[-1]
        new = [(x + dx, y + dy) for dx, dy in AHEAD if 0 <= x + dx < n and 0 <= y + dy < n
               and (x + dx, y + dy) not in tree]
        if new:
            stack.append(new[rng.integers(len(new))])
            tree.add_edge((x, y), stack[-1])
        else:
            stack.pop()
    return tree


def plain_kruskal_maze(rng, n):
    """networkx's minimum spanning tree of a grid whose edges have random weights."""
    grid = nx.grid_2d_graph(n, n)
    for edge in grid.edges:
        grid.edges[edge]["weight"] = rng.random()
    return nx.minimum_spanning_tree(grid)


@pytest.mark.slow
@pytest.mark.parametrize("name, size, plain", [("PerfectMaze", 13, plain_perfect_maze),
                                               ("PerfectMazeMedium", 19, plain_kruskal_maze)])
def test_perfect_mazes(name, size, plain):
    levels, n, end = sampled(name, 300), (size + 1) // 2, size - 1
    corners = {(0, 0), (end, 0), (0, end), (end, end)}
    ends = Counter()
    for i in range(300):
        level = row(levels, i)
        cells, _ = graph_of(level)
        assert nx.is_tree(cells)
        assert cells.number_of_nodes() == 2 * n**2 - 1
        assert not level.wall_map[::2, ::2].any()
        ends[(tuple(level.agent_pos.tolist()), tuple(level.goal_pos.tolist()))] += 1
    assert_distributed(ends, uniform((a, b) for a in corners for b in corners if a != b))
    assert not levels.agent_dir.any()
    # As long and as winding as the algorithm makes them: rooms with one and with three doors.
    rng = np.random.default_rng(11)
    plain = [Counter(d for _, d in plain(rng, n).degree) for _ in range(300)]
    doors = ~np.pad(levels.wall_map, ((0, 0), (1, 1), (1, 1)), constant_values=True)
    degree = (doors[:, :-2:2, 1:-1:2] * 1 + doors[:, 2::2, 1:-1:2] + doors[:, 1:-1:2, :-2:2]
              + doors[:, 1:-1:2, 2::2])
    for d in (1, 3):
        ours, theirs = (degree == d).sum(axis=(1, 2)), np.array([c[d] for c in plain])
        assert abs(ours.mean() - theirs.mean()) < 5 * np.hypot(ours.std(), theirs.std()) / 300**0.5


def test_sizes_of_perfect_mazes():
    for kind, size in {"": 13, "Medium": 19, "Large": 49, "XL": 99}.items():
        maze = amaze.TEST_MAZES["PerfectMaze" + kind]
        assert maze.max_steps == 2 * (size + 2) ** 2
        assert maze.see_through_walls
        assert jax.eval_shape(maze.sample, jax.random.key(0)).wall_map.shape == (size, size)


@pytest.mark.slow
def test_floods_and_draws_for_a_gpu_give_the_same(monkeypatch):
    """With many steps or many levels per trip; some paths are longer, some levels unsolvable."""
    sample = lambda rng: amaze.sample_level(rng, 22, 6, 7)
    out = []
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        draw = lambda rng: (sample(rng), amaze.sample_solvable(rng, sample))
        solved = lambda levels: jax.tree.map(jax.vmap(amaze.solve), levels, is_leaf=is_level)
        is_level = lambda x: isinstance(x, amaze.Level)
        levels = jax.jit(jax.vmap(draw))(keys(4, 200))
        out.append(host((levels, jax.jit(solved)(levels))))
    assert jax.tree.all(jax.tree.map(np.array_equal, *out))
    any_level, solvable = out[0][1]
    assert solvable.solvable.all()
    assert 0.1 < any_level.solvable.mean() < 0.6  # more than eight draws for some
    assert any_level.n_actions.max() > 16


@pytest.mark.slow
def test_sampled_mazes_are_solvable():
    levels = sampled("Sampled", 500)
    solution = host(solve_batch(levels))
    assert solution.solvable.all()
    unfiltered = host(solve_batch(random_levels(12, 8192)))
    expected = unfiltered.path_length[unfiltered.solvable]
    assert solution.path_length.mean() == pytest.approx(expected.mean(), abs=1)
    assert amaze.TEST_MAZES["Sampled"][1:] == (250, True)


@pytest.mark.parametrize("name, xs, ys", [("SmallCorridor", range(2, 12, 2), (5, 7)),
                                          ("LargeCorridor", range(2, 18, 2), (8, 10))])
def test_corridors_draw_their_goal(name, xs, ys):
    levels = sampled(name, 2000)
    goals = Counter(map(tuple, levels.goal_pos.tolist()))
    assert_distributed(goals, uniform((x, y) for x in xs for y in ys))
    assert (levels.wall_map == levels.wall_map[0]).all()


def room_graph(parents, n):
    """n x n rooms joined to their parents, as a networkx graph."""
    graph = nx.empty_graph(n * n)
    graph.add_edges_from((room, int(parent)) for room, parent in enumerate(parents) if room)
    return graph


def plain_prim(grid):
    """{tree: probability}: grow from room 0; each edge that leaves the tree is equally likely."""
    trees = {frozenset(): 1.0}
    for _ in range(len(grid) - 1):
        larger = Counter()
        for tree, p in trees.items():
            border = list(nx.edge_boundary(grid, {0}.union(*tree)))
            for edge in border:
                larger[tree | {frozenset(edge)}] += p / len(border)
        trees = larger
    return trees


def plain_spanning_trees(grid):
    return uniform(frozenset(map(frozenset, tree.edges)) for tree in nx.SpanningTreeIterator(grid))


@pytest.mark.parametrize("sample, plain", [
    (amaze.sample_prim_tree, plain_prim), (amaze.sample_wilson_tree, plain_spanning_trees)])
def test_trees_have_the_exact_distribution(sample, plain):
    """All 192 spanning trees of 3 x 3 rooms, with their probabilities."""
    grid = nx.convert_node_labels_to_integers(nx.grid_2d_graph(3, 3), ordering="sorted")
    expected = plain(grid)
    assert len(expected) == 192 == round(nx.number_of_spanning_trees(grid))
    draw = optimised(jax.vmap(lambda rng: sample(rng, 3)))
    rows = Counter(map(tuple, np.asarray(draw(keys(17, 40_000))).tolist()))
    counts = Counter()
    for parents, number in rows.items():
        counts[frozenset(map(frozenset, room_graph(parents, 3).edges))] += number
    assert_distributed(counts, expected)


def symmetries(walls):
    """The eight images of squares [..., 13, 13] under rotations and reflections."""
    turned = [np.rot90(walls, k, axes=(-2, -1)) for k in range(4)]
    return [*turned, *(np.swapaxes(x, -2, -1) for x in turned)]


def dead_ends(cells):
    return sum(degree == 1 for _, degree in cells.degree)


def is_maze(walls, cells):
    """Whether these are 7 x 7 connected rooms with walls between posts."""
    return nx.is_connected(cells) and not walls[::2, ::2].any() and walls[1::2, 1::2].all()


def residues(numbers, n):
    return len({*(np.array(numbers) % n)})


# What the walls and the graph of free cells are to be like, by the names of the mazes.
KINDS = {
    "Spiral": lambda walls, cells: nx.is_tree(cells) and dead_ends(cells) == 2 and len(cells) == 97,
    "Serpentine": lambda walls, cells: nx.is_tree(cells) and nx.diameter(cells) >= 60 and 6 in (
        (walls.sum(axis=0) == 12).sum(), (walls.sum(axis=1) == 12).sum()),
    "Rings": lambda walls, cells: nx.is_connected(cells) and len(nx.cycle_basis(cells)) == 3,
    "Comb": lambda walls, cells: nx.is_tree(cells) and dead_ends(cells) == 7,
    "RoomsWithDoors": lambda walls, cells: all(
        (lines >= 9).sum() == 3 and (lines <= 3).sum() == 10
        for lines in (walls.sum(axis=0), walls.sum(axis=1))),
    "Streets": lambda walls, cells: not walls[::3, ::3].any() and all(
        walls[y::3, x::3].all() for y in (1, 2) for x in (1, 2)),
    "Staircase": lambda walls, cells: nx.is_connected(cells) and walls.sum() == 48 and 1 in (
        residues(np.add(*np.nonzero(walls)), 3), residues(np.subtract(*np.nonzero(walls)), 3)),
    "Pillars": lambda walls, cells: nx.is_connected(cells) and walls.sum() > 20 and all(
        residues(places, 2) == 1 for places in np.nonzero(walls)),
    "Caves": lambda walls, cells: len(nx.cycle_basis(cells)) > 20,      # wide, not corridors
    "PrimMaze": lambda walls, cells: is_maze(walls, cells) and nx.is_tree(cells),
    "WilsonMaze": lambda walls, cells: is_maze(walls, cells) and nx.is_tree(cells),
    "BraidedMaze": lambda walls, cells: is_maze(walls, cells) and dead_ends(cells) <= 10 and (
        3 <= len(nx.cycle_basis(cells)) <= 30)}


@pytest.mark.parametrize("name", KINDS)
def test_families(name):
    """1,000 levels are valid, none has a fixed maze's walls; some have their kind's structure."""
    maze, levels = amaze.TEST_MAZES[name], sampled(name, 1000)
    solution, i = host(solve_batch(levels)), np.arange(1000)
    assert levels.wall_map.shape == (1000, 13, 13)
    assert maze.see_through_walls
    assert [x.dtype for x in levels] == [bool, np.int32, np.int32, np.int32]
    assert solution.solvable.all()
    assert maze.max_steps >= 2 * solution.n_actions.max()
    for place in (levels.agent_pos, levels.goal_pos):
        assert (0 <= place).all()
        assert not levels.wall_map[i, place[:, 1], place[:, 0]].any()
    assert (levels.agent_pos != levels.goal_pos).any(axis=1).all()
    assert_distributed(Counter(levels.agent_dir.tolist()), uniform(range(4)))
    fixed = [host(amaze.level_from_text(x)).wall_map for x in amaze._maps().values()]
    fixed = {x.tobytes() for walls in fixed if walls.shape == (13, 13) for x in symmetries(walls)}
    assert len(fixed) > 50
    assert not fixed & {x.tobytes() for x in levels.wall_map}
    assert len({outcome(row(levels, k)) for k in range(1000)}) > 950
    for k in range(40):
        cells, _ = graph_of(row(levels, k))
        assert KINDS[name](levels.wall_map[k], cells)
        ends = (tuple(map(int, place[k])) for place in (levels.agent_pos, levels.goal_pos))
        assert solution.path_length[k] == nx.shortest_path_length(cells, *ends)
    # The walls, the agent and the goal lie alike under all eight symmetries, and in each other's
    # place: the share of each cell within 5 deviations.
    here = lambda place: (np.mgrid[:13, :13][::-1] == place[..., None, None]).all(axis=1)
    agent, goal = here(levels.agent_pos), here(levels.goal_pos)
    for ours, theirs in [(x, y) for x in (levels.wall_map, agent) for y in symmetries(x)] + [
            (agent, goal)]:
        p, q = ours.mean(axis=0), theirs.mean(axis=0)
        mean = (p + q) / 2
        assert np.all(abs(p - q) <= 5 * np.sqrt(2 * mean * (1 - mean) / 1000) + 1e-9)


def test_families_are_turned_together():
    """All eight spirals are equally likely, and so are the ways inwards and outwards."""
    levels = sampled("Spiral", 1000)
    corridor = host(levels.wall_map[0])
    spirals = [x.tobytes() for x in symmetries(corridor)]
    assert len({*spirals}) == 8
    assert_distributed(Counter(x.tobytes() for x in levels.wall_map), uniform(spirals))
    outside = lambda place: np.abs(place - 6).max(axis=1) == 6
    agent, goal = outside(levels.agent_pos), outside(levels.goal_pos)
    assert np.all(agent != goal)
    assert_distributed(Counter(agent.tolist()), uniform([False, True]))


def test_suites_and_batches():
    lengths = {"minimax": 3, "jaxued": 8, "dcd": 12, "families": 12, "sampled": 1}
    assert {suite: len(names) for suite, names in amaze.SUITES.items()} == lengths
    assert [*KINDS] == amaze.SUITES["families"]
    assert not {*KINDS} & {*amaze.SUITES["dcd"], *amaze._maps()}
    for names in amaze.SUITES.values():
        assert {*names} <= {*amaze.TEST_MAZES}
    levels, max_steps, see = amaze.sample_mazes(jax.random.key(0), ["MiniMaze", "TrivialMaze"])
    assert levels.wall_map.shape == (2, 4, 4)
    assert max_steps.tolist() == [72, 250]
    assert see.tolist() == [True, True]
    assert amaze.level_to_text(row(levels, 1)) == "...#\n.#.#\n>#G#\n####"
    with pytest.raises(ValueError, match="unknown maze 'Maze51'; choose from Six") as error:
        amaze.sample_mazes(jax.random.key(0), ["Labyrinth", "Maze51"])
    assert "\n" not in str(error.value)


def test_each_episode_has_its_own_level_and_its_mazes_rules():
    names = ["FourRooms", "SmallCorridor", "MiniMaze"]
    sample = jax.jit(lambda rng: amaze.sample_mazes(rng, names, 20))
    levels, max_steps, see = host(sample(jax.random.key(15)))
    assert max_steps.tolist() == [100] * 20 + [450] * 20 + [72] * 20
    assert see.tolist() == [False] * 20 + [True] * 40
    same = amaze.pad_level(amaze.TEST_MAZES["MiniMaze"].sample(None), 17, 17)
    assert all(outcome(row(levels, i)) == outcome(host(same)) for i in range(40, 60))
    assert len({outcome(row(levels, i)) for i in range(20)}) == 20
    assert len({outcome(row(levels, i)) for i in range(20, 40)}) > 4
    assert_four_rooms(jax.tree.map(lambda x: x[:20], levels))
    (corridor,) = {walls.tobytes() for walls in levels.wall_map[20:40]}
    padded = amaze.pad_level(row(sampled("SmallCorridor", 1), 0), 17, 17)
    assert corridor == np.asarray(padded.wall_map).tobytes()


@pytest.mark.slow
def test_level_codes_tell_levels_apart():
    levels = host(random_levels(4, 60_000, 2, 2, 2))
    codes = np.asarray(jax.jit(jax.vmap(amaze.level_code))(levels))
    pairs = {(outcome(row(levels, i)), codes[i].tobytes()) for i in range(60_000)}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) == 144
    level = host(amaze.TEST_MAZES["PerfectMazeXL"].sample(jax.random.key(0)))
    other = level._replace(wall_map=level.wall_map.copy())
    other.wall_map[98, 97] ^= True
    assert np.any(amaze.level_code(level) != amaze.level_code(other))


# --- the teacher


def plain_image(walls, goal, agent, direction, size):
    image = np.tile(np.uint8([2, 5, 0]), (size + 2, size + 2, 1))
    for y in range(size):
        for x in range(size):
            image[y + 1, x + 1] = [2, 5, 0] if (x, y) in walls else [1, 0, 0]
    for place, triple in ((goal, [8, 1, 0]), (agent, [10, 0, direction])):
        if place:
            image[place[1] + 1, place[0] + 1] = triple
    return image


@pytest.mark.slow
@pytest.mark.parametrize("size, n_walls, count", [(3, 5, 3000), (13, 60, 100)])
def test_teacher_places_as_a_plain_builder(size, n_walls, count):
    rng = np.random.default_rng(size)
    steps = n_walls + 2
    actions = rng.integers(0, size * size, (count, steps))

    @jax.jit
    @jax.vmap
    def design(rng, actions):
        rng, rng_reset = jax.random.split(rng)
        first, state = amaze.teacher_reset(rng_reset, n_walls, size, size)

        def place(carry, action):
            rng, state = carry
            rng, rng_step = jax.random.split(rng)
            obs, state, done = amaze.teacher_step(rng_step, state, action)
            return (rng, state), (obs, done)

        (_, state), (later, done) = jax.lax.scan(place, (rng, state), actions)
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, later), done, \
            state.level

    obs, done, levels = host(design(keys(size, count), actions))
    assert obs.image.dtype == np.uint8
    assert obs.image.shape[2:] == (size + 2, size + 2, 3)
    assert np.array_equal(done, np.broadcast_to(np.arange(1, steps + 1) == steps, done.shape))
    assert np.array_equal(obs.time, np.broadcast_to(np.arange(steps + 1), obs.time.shape))
    moved, everywhere = Counter(), {(x, y) for x in range(size) for y in range(size)}
    for i in range(count):
        level, cells = row(levels, i), [(int(a) % size, int(a) // size) for a in actions[i]]
        walls, goal, agent = set(), None, None
        for t in range(steps + 1):
            assert np.array_equal(obs.image[i, t], plain_image(
                walls, goal, agent, int(level.agent_dir), size)), (i, t)
            if t < n_walls:
                walls.add(cells[t])
            elif t == n_walls:
                goal = cells[t]
                walls.discard(goal)
            elif t == n_walls + 1:
                agent = tuple(level.agent_pos.tolist())
                if cells[t] == goal:
                    free = sorted(everywhere - walls - {goal})
                    moved[len(free), free.index(agent)] += 1
                else:
                    walls.discard(cells[t])
                    assert agent == cells[t]
        assert walls == {(int(x), int(y)) for y, x in np.argwhere(level.wall_map)}
        assert tuple(level.goal_pos.tolist()) == goal != agent
        assert agent not in walls
    assert_distributed(Counter(levels.agent_dir.tolist()), uniform(range(4)))
    if size == 3:
        counts = Counter(index for (n, index) in moved.elements() if n == 5)
        assert sum(counts.values()) > 50
        assert_distributed(counts, uniform(range(5)))
    noise = obs.noise
    assert noise.shape == (count, steps + 1, 50)
    assert noise.dtype == np.float32
    assert noise.min() >= 0
    assert noise.max() < 1
    assert len(np.unique(noise[0])) > 0.99 * noise[0].size
    assert_distributed(Counter((noise.ravel() * 20).astype(int).tolist()), uniform(range(20)))
    assert not (noise[:, 1:] == noise[:, :-1]).all(axis=-1).any()


# --- drawing and the command line


@pytest.mark.slow
def test_render_equals_minigrid():
    levels = host(random_levels(13, 6, 40, 9, 7))
    for i in range(6):
        level = row(levels, i)
        for see in (True, False):
            env = Copy(level, 250, see)
            env.reset()
            _, state = amaze.reset(level, 250, see)
            for tile in (16, 10):
                theirs = env.get_frame(highlight=True, tile_size=tile)
                assert np.array_equal(amaze.render(state, tile), theirs)
            assert np.array_equal(amaze.render(level), env.get_frame(highlight=False, tile_size=16))


def test_plot_levels(tmp_path):
    levels, walls = random_levels(14, 10), np.arange(10)
    captions = {"walls": walls, "score": walls / 3}
    sections = {"in training": (levels, captions), "children": (row(levels, slice(3)), {})}
    figure = amaze.plot_levels(sections)
    figure.savefig(tmp_path / "levels.png")
    [axes] = figure.axes
    texts = [f"walls {k}\nscore {k / 3:.3g}" for k in range(10)]
    assert [x.get_text() for x in axes.texts] == ["in training", *texts, "children", "", "", ""]
    boxes = [x.get_window_extent() for x in (*axes.texts[1:11], *axes.texts[12:])]
    pictures = [x.get_window_extent() for x in axes.images]
    for k, (picture, box) in enumerate(zip(pictures, boxes, strict=True)):
        assert abs(picture.width / picture.height - 1) < 1e-6
        assert np.allclose(picture.x0 + picture.x1, box.x0 + box.x1, atol=2)
        assert box.y0 > picture.y1
        assert not any(box.overlaps(other) for other in pictures)
        level = row(levels, k if k < 10 else k - 10)
        assert np.array_equal(axes.images[k].get_array(), amaze.render(level))
        assert picture.x0 >= 0
        assert picture.y0 >= 0
        assert picture.x1 <= figure.bbox.x1
