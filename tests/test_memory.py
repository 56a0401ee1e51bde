"""examples/memory.py: compared with MiniGrid's MemoryEnv, and trained by copies of the scripts."""

import csv
from collections import Counter, deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from minigrid.envs import MemoryEnv
from PIL import Image
from parts import traced
from runs import ROOT, table
from test_examples import (  # noqa: F401
    MORE, TINY, commands, example, measured, module_of, script)  # fmt: skip


FORMS = [(size, random) for size in (7, 9, 11, 13, 17) for random in (False, True)]


@pytest.fixture(scope="module")
def memory():
    return example("memory")


def level_of(memory, env):
    """The level that an environment of the package holds."""
    middle, fork = env.height // 2, int(env.success_pos[0])
    kind = lambda x, y: {"key": memory.KEY, "ball": memory.BALL}[env.grid.get(x, y).type]
    things = kind(1, middle - 1), kind(fork, middle - 2)
    return memory.Level(fork - 4, middle, int(env.agent_pos[0]), *things)


def wander(rng, number):
    """Actions that mostly go on, so that many episodes reach the fork."""
    return rng.choice(7, number, p=[0.1, 0.1, 0.7, 0.025, 0.025, 0.025, 0.025])


def test_memory_is_minigrid(memory):
    """1,200 random steps of each form: images, directions, rewards and ends, then the next level,
    with MiniGrid's time limit and with short ones."""
    outcomes = Counter()

    @jax.jit
    def play(queue, limit, actions):
        obs, state = memory.reset(queue, limit)

        def move(state, action):
            obs, state, *rest = memory.step_and_reset(state, action)
            return state, (obs, *rest)

        return obs, jax.lax.scan(move, state, actions)[1]

    for number, (size, random) in enumerate(FORMS):
        limit = (5 * size**2, 30)[number % 3 == 2]
        env = MemoryEnv(size=size, random_length=random, max_steps=limit)
        levels = []
        for seed in range(300):
            env.reset(seed=seed)
            levels.append(level_of(memory, env))
        queue = jax.tree.map(lambda *x: jnp.array(x, jnp.int32), *levels)
        assert len({*queue.length.tolist()}) == (size - 6 if random else 1)
        actions = wander(np.random.default_rng(number), 1200)
        first, (obs, rewards, dones) = jax.device_get(play(queue, limit, actions))
        images = np.append(first.image[None], obs.image, 0)
        directions = np.append(first.direction, obs.direction)
        assert images.dtype == np.uint8
        assert rewards.dtype == np.float32
        episode, theirs = 0, env.reset(seed=0)[0]
        for t, action in enumerate(actions):
            assert np.array_equal(images[t], theirs["image"]), (size, random, t)
            assert directions[t] == theirs["direction"]
            theirs, reward, terminated, truncated, _ = env.step(action)
            assert rewards[t] == pytest.approx(reward, abs=1e-6)
            assert dones[t] == (terminated or truncated)
            if dones[t]:
                outcomes["right" if reward else "wrong" if terminated else "late"] += 1
                episode += 1
                theirs = env.reset(seed=episode % 300)[0]
    assert min(outcomes[x] for x in ("right", "wrong", "late")) >= 20


def test_every_view_is_minigrids(memory):
    """Every cell and direction that can be reached, in corridors of several lengths."""
    observe = jax.jit(jax.vmap(memory.observe))
    for size, random in FORMS:
        env = MemoryEnv(size=size, random_length=random)
        env.reset(seed=size)
        level = level_of(memory, env)
        fork = level.length + 4
        cells = [(x, y) for x in (1, 2, 3) for y in (level.middle - 1, level.middle + 1)]
        cells += [(x, level.middle) for x in range(1, fork + 1)]
        cells += [(fork, level.middle - 1), (fork, level.middle + 1)]
        cells = [(*x, d) for x in cells for d in range(4) if env.grid.get(*x) is None]
        x, y, direction = jnp.array(cells).T
        states = [memory.EnvState(level, *cell, 0, 1) for cell in cells]
        states = jax.tree.map(lambda *x: jnp.array(x, jnp.int32), *states)
        images = np.asarray(observe(states).image)
        for cell, image in zip(cells, images):
            env.agent_pos, env.agent_dir = np.array(cell[:2]), cell[2]
            assert np.array_equal(image, env.gen_obs()["image"]), (size, cell)


def fewest_actions(env, must_see):
    """Breadth-first search by the package's own steps and views."""
    start = tuple(map(int, env.agent_pos)), 0
    thing = (1, env.height // 2 - 1)
    sees = lambda: bool(env.agent_sees(*thing))
    todo, found = deque([(*start, sees() or not must_see, 0)]), set()
    while todo:
        place, direction, seen, n = todo.popleft()
        if place == tuple(map(int, env.success_pos)):
            if seen:
                return n
            continue
        if (place, direction, seen) in found or place == tuple(map(int, env.failure_pos)):
            continue
        found.add((place, direction, seen))
        for action in range(3):
            env.agent_pos, env.agent_dir = np.array(place), direction
            env.step(action)
            at = tuple(map(int, env.agent_pos))
            todo.append((at, int(env.agent_dir), seen or sees(), n + 1))


def test_the_optimum_is_that_of_a_search(memory):
    """For each start in a short and in a long corridor, by breadth-first search in the package."""
    for size in (7, 17):
        env = MemoryEnv(size=size, max_steps=10**6)
        for start in range(1, size - 2):
            env.reset(seed=start)
            env.agent_pos = np.array([start, size // 2])
            level = level_of(memory, env)
            found = memory.solve(level)
            assert found.n_direct == fewest_actions(env, must_see=False)
            env.agent_pos, env.agent_dir = np.array([start, size // 2]), 0
            assert found.n_actions == fewest_actions(env, must_see=True)


def test_the_optimal_return(memory):
    """An agent looks or, where little time is left, guesses; the best of both on average."""
    level = memory.Level(*map(jnp.int32, (11, 8, 14, 2, 3)))  # a guess takes 3 actions, a look 18
    assert list(memory.solve(level)) == [21, 3]
    best = [float(memory.optimal_return(level, x)) for x in (2, 3, 20, 21, 30, 1000)]
    guess = lambda limit: (1 - 0.9 * 3 / limit) / 2
    expected = [0, guess(3), guess(20), guess(21), guess(30), 1 - 0.9 * 21 / 1000]
    np.testing.assert_allclose(best, expected, 1e-6)
    stats = memory.level_stats(level, 1000)
    assert stats["optimal_return"] == best[-1]
    assert (stats["length"], stats["n_actions"]) == (11, 21)


def test_levels_of_memory(memory):
    rngs = jax.random.split(jax.random.key(0), 2000)
    levels = jax.jit(jax.vmap(lambda rng: memory.sample_level(rng, 5)))(rngs)

    def check(levels, longest):
        assert set(levels.thing.tolist()) == set(levels.above.tolist()) == {2, 3}
        assert set(levels.middle.tolist()) == {*range(3, 9)}
        assert levels.length.min() == 1
        assert levels.length.max() <= longest
        assert levels.start.min() == 1
        assert (levels.start <= levels.length + 3).all()

    check(levels, 5)
    shares = np.bincount(levels.length)[1:] / 2000
    assert (abs(shares - 0.2) < 0.04).all()
    assert set(levels.start[levels.length == 5].tolist()) == {*range(1, 9)}
    assert abs((levels.start == 1).mean() - 0.5 - 0.5 * (1 / (np.arange(5) + 4)).mean()) < 0.04
    edit = lambda n: jax.jit(jax.vmap(lambda *x: memory.edit_level(*x, n)))
    one, many = edit(1)(rngs, levels), edit(40)(rngs, levels)
    changed = np.array([x != y for x, y in zip(levels, one)])  # [5, 2000]
    assert changed.any(1).all()
    assert (changed.sum(0) - (changed[0] & changed[2]) <= 1).all()  # a shorter one moves the start
    assert abs(one.length - levels.length).max() == 2
    check(one, 7)
    check(many, memory.LONGEST)
    assert many.length.max() > 12
    codes = np.asarray(jax.vmap(memory.level_code)(levels))
    assert len({x.tobytes() for x in codes}) == len({tuple(x) for x in np.array(levels).T.tolist()})
    solvable = memory.sample_solvable(rngs[0], lambda rng: memory.sample_level(rng, 5))
    assert [int(x) for x in solvable] == [int(x[0]) for x in levels]


def test_test_levels_of_memory(memory):
    """Lengths and rows as MiniGrid's; the suite `corridors` starts where the object is seen."""
    rngs = jax.random.split(jax.random.key(0), 300)
    for size, random in FORMS:
        sample, limit = memory.TEST_MAZES[f"MemoryS{size}{'Random' if random else ''}"]
        levels = jax.vmap(sample)(rngs)
        lengths = range(1, size - 5) if random else [size - 6]
        assert limit == MemoryEnv(size=size).max_steps
        assert set(levels.length.tolist()) == {*lengths}
        assert set(levels.middle.tolist()) == {size // 2}
        assert set(levels.start.tolist()) == {*range(1, size - 2)}
    for number in memory.CORRIDORS:
        sample, limit = memory.TEST_MAZES[f"Corridor{number}"]
        levels = jax.vmap(sample)(rngs)
        assert set(levels.length.tolist()) == {number}
        assert set(levels.start.tolist()) == {1}
        kinds = memory.reset_one(jax.tree.map(lambda x: x[0], levels), limit)[0].image[..., 0]
        assert kinds[2, 6] == levels.thing[0] + 3  # on the left
        assert (memory.optimal_return(levels, limit) > 0.85).all()


def test_pictures_and_text_of_memory(memory, tmp_path):
    """MiniGrid's own picture, of a short corridor without what lies behind the fork."""
    for number, (size, random) in enumerate([(7, False), (9, True), (13, False)]):
        env = MemoryEnv(size=size, random_length=random)
        env.reset(seed=number)
        level = level_of(memory, env)
        columns = level.length + 6
        picture = memory.render(level)
        theirs = env.get_frame(highlight=False, tile_size=16)[:, : 16 * columns]
        assert np.array_equal(picture, theirs)
        _, state = memory.reset(level, 99)
        for action in (2, 0, 0, 2, 1):
            env.step(action)
            state = memory.step(state, action)[1]
            theirs = env.get_frame(highlight=True, tile_size=16)[:, : 16 * columns]
            assert np.array_equal(memory.render(state.state), theirs)
        text = memory.level_to_text(level)
        assert memory.level_from_text(f"\n{text}\n") == level
        assert text.splitlines()[level.middle - 1][1] in "KB"
    for wrong in ("", "#", text.replace(">", "."), text.replace("K", "."), text[:-2] + ".."):
        with pytest.raises(ValueError):
            memory.level_from_text(wrong)
    long = memory.Level(191, 3, 1, memory.KEY, memory.BALL)
    assert memory.render(long).shape == (7 * 8, 197 * 8, 3)


@pytest.mark.parametrize("name", ["dr", "accel", "sfl"])
def test_a_cycle_on_memory(script, memory, name, monkeypatch):  # noqa: F811
    copy = module_of(script("memory", name), monkeypatch)
    words = [*commands("memory")[2], *TINY, *MORE[name], "--longest=2"]
    words += [] if name == "dr" else ["--score=oracle_regret"]
    _, metrics, shown = traced(copy.make_train(copy.parse(words)))
    of_levels = {"dr": "", "accel": "child_", "sfl": "replay_"}[name]
    assert {of_levels + "length", of_levels + "optimal_return"} < metrics.keys()
    assert shown


@pytest.mark.slow
def test_a_training_on_memory(tmp, train, call, script, memory):  # noqa: F811
    """By the docstring's flags but for their sizes; the true regret is the score."""
    path, folder = script("memory", "plr"), tmp / "memory"
    flags = [*commands("memory")[2], *TINY, *MORE["plr"], "--longest", 2, "--ent-coef", 0.1]
    flags += ["--score", "oracle_regret"]
    train(*flags, "--eval-suite", "Corridor1,MemoryS7", "--out", folder, script=path)
    rows = table(folder)
    assert len({*measured(rows, "buffer_length")}) > 1
    best = measured(rows, "buffer_optimal_return")
    assert all(0 < x < 1 for x in best)
    assert int(rows[-1]["grad_updates"]) > 1
    assert Image.open(folder / "levels/update_12.png").width > 1000
    more = "--mazes Corridor3,MemoryS9Random --episodes 4 --gif Corridor3 --show-levels".split()
    status, out, err = call(folder, "--script", path, *more, script=ROOT / "evaluate.py")
    assert status == 0, err
    with open(folder / "results.csv", newline="") as file:
        assert [row["maze"] for row in csv.DictReader(file)] == ["Corridor3", "MemoryS9Random"]
    assert Image.open(folder / "film_memory_12_Corridor3.gif").size[0] == 16 * 9
    assert Image.open(folder / "mazes.png").width > 1000
