"""The environments of examples/ in place of amaze.py: compared with their packages, and trained by
copies of the scripts that the commands in their docstrings make."""

import ast
import csv
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from parts import traced
from runs import ROOT, assert_equal, leaves, load, rewind, table

sys.path.insert(0, str(ROOT))

TINY = """--max-steps 12 --num-envs 8 --num-steps 16 --hidden-size 8 --update-epochs 2
    --eval-episodes 2 --eval-interval 4 --num-updates 12 --log-interval 2 --checkpoint-interval 4
    --archive-interval 4 --devices 1""".split()
REPLAY = "--buffer-size 16".split()
MORE = {"dr": [], "plr": REPLAY, "accel": [*REPLAY, "--num-edits", "2"],
        "sfl": "--num-candidates 16 --candidates-at-once 8 --candidate-evals 2 --buffer-size 8 "
               "--score-interval 4".split()}  # fmt: skip


def example(name):
    """The module of an example; skips if its package is not installed."""
    pytest.importorskip(
        {"cartpole": "gymnax", "craftax": "craftax", "navix": "navix"}.get(name, "jax")
    )
    return load_module(ROOT / f"examples/{name}.py", f"{name}_levels")


def load_module(path, name=""):
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def module_of(path, monkeypatch):
    """A script's copy, which imports an environment beside it."""
    monkeypatch.syspath_prepend(path.parent)
    return load_module(path)


def commands(name, of_paired=False):
    """The commands in the docstring: cp, patch, the flags of the training."""
    text = ast.get_docstring(ast.parse((ROOT / f"examples/{name}.py").read_text()))
    lines = re.findall(r"(?m)^    ((?:cp|patch|python) (?:.*\\\n)*.*)$", text)
    lines = [shlex.split(x.replace("\\\n", ""), comments=True) for x in lines]
    [patch] = [x for x in lines if x[:1] == ["patch"] and ("paired.py" in x) == of_paired]
    [copy] = [x for x in lines if x[:1] == ["cp"]]
    [train] = [x for x in lines if x[:2] == ["python", patch[2]]]
    return copy, patch, train[2 : train.index("--out")]


@pytest.fixture(scope="module")
def script(tmp):
    """The copy of a script for an environment, made by the docstring's commands."""
    if not shutil.which("patch"):
        pytest.skip("there is no `patch` here")

    def script(environment, name):
        copy, patch, _ = commands(environment, of_paired=name == "paired")
        patch = [re.sub(r"(?<![a-z])(dr|plr|accel)(?=\.py)", name, x) for x in patch]
        if not (tmp / patch[2]).exists():
            for words in copy, patch:
                there = [str(ROOT / x) if (ROOT / x).is_file() else x for x in words]
                done = subprocess.run(there, cwd=tmp, check=True, capture_output=True, text=True)
            assert "fuzz" not in done.stdout
        return tmp / patch[2]

    return script


@pytest.fixture(scope="module")
def cartpole():
    return example("cartpole")


@pytest.fixture(scope="module")
def trained(tmp, train, script, cartpole):
    """The folder and the script of a run of plr.py with two seeds."""
    flags = [*commands("cartpole")[2], *TINY, *REPLAY, "--seeds", 2]
    train(*flags, "--out", tmp / "plr", script=script("cartpole", "plr"))
    return tmp / "plr", script("cartpole", "plr")


@pytest.mark.slow
def test_the_agent_of_the_repository_plays_minigrid(call):
    """benchmarks/results/agent solves most of the package's own FourRooms, from any start."""
    agent, script = ROOT / "benchmarks/results/agent", ROOT / "examples/play_minigrid.py"
    assert sum(path.stat().st_size for path in agent.iterdir()) < 1.5e6
    status, out, err = call(agent, "--episodes", 20, script=script)
    assert status == 0, err
    assert float(re.search(r"FourRooms-v0: solved ([\d.]+) of 20 episodes", out)[1]) > 0.6


def measured(rows, column):
    return [float(row[column]) for row in rows if row[column]]


def test_a_training(trained, cartpole):
    folder, _ = trained
    rows = table(folder)
    assert [(int(x["update"]), x["seed"]) for x in rows] == [
        (update, seed) for update in (2, 4, 6, 8, 10, 12) for seed in "01"]  # fmt: skip
    for column in "eval_return/Nominal", "train_return", "entropy":
        values = measured(rows, column)
        assert len(values) >= 6
        assert 0 < min(values) < max(values) <= 1
    for corner in cartpole.CORNERS:
        assert set(measured(rows, f"eval_solve_rate/{corner}")) <= {0, 0.5, 1}
    low, high = cartpole.NOMINAL / cartpole.FACTOR, cartpole.NOMINAL * cartpole.FACTOR
    for number, least, most in zip(cartpole.NAMES, low, high):
        values = measured(rows, "buffer_" + number)
        assert len({*values}) > 1
        assert least < min(values) < max(values) < most
    assert not {x for x in rows[0] if "solvable" in x or "optimal" in x or "regret" in x}
    assert int(rows[-1]["grad_updates"]) > 2
    assert Image.open(folder / "curves.png").width > 800
    pictures = Image.open(folder / "levels/update_12.png")
    assert pictures.width > 1000
    assert len(pictures.convert("RGB").getcolors(99999)) > 100
    assert {len(x) for x in leaves(load(folder)).values()} == {2}


@pytest.mark.parametrize("name", ["dr", "accel", "sfl"])
def test_a_cycle(script, cartpole, name, monkeypatch):
    copy = module_of(script("cartpole", name), monkeypatch)
    _, metrics, shown = traced(copy.make_train(copy.parse([*TINY, *MORE[name]])))
    of_levels = {"dr": "", "accel": "child_", "sfl": "replay_"}[name]
    assert {of_levels + number for number in cartpole.NAMES} < metrics.keys()
    assert not {x for x in metrics if "solvable" in x or "optimal" in x or "regret" in x}
    assert shown


def test_evaluate(trained, call):
    folder, script = trained
    more = "--episodes", 4, "--gif", "Twig", "--show-levels"
    status, out, err = call(folder, "--script", script, *more, script=ROOT / "evaluate.py")
    assert status == 0, err
    with open(folder / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 6
    assert rows[0]["maze"] == "Nominal"
    assert "nan" not in out
    for row in rows:  # each step gives 1 / 500
        assert float(row["return"]) == pytest.approx(float(row["length"]) / 500, abs=1e-5)
        assert row["optimal_return"] == ""
    film = Image.open(folder / "film_plr_12_Twig.gif")
    assert film.size == (240, 240)
    assert film.n_frames > 5
    assert Image.open(folder / "mazes.png").width > 1000


# --- beside gymnax and JaxUED


def rollout(environment, level, max_steps, actions):
    """Observations, rewards and dones of an episode, and of the steps after its end."""
    obs, state = environment.reset(level, max_steps)

    def move(state, action):
        obs, state, reward, done = environment.step(state, action)
        return state, (obs, reward, done)

    _, (later, reward, done) = jax.jit(lambda *x: jax.lax.scan(move, *x))(state, actions)
    return jax.tree.map(lambda x, y: np.append(x[None], y, 0), obs, later), reward, done


@pytest.mark.parametrize("number", range(3))
def test_cartpole_is_gymnax(cartpole, number):
    """CartPole-v1 unchanged, and random levels, by gymnax's step with the physics set by hand."""
    import gymnax

    env, params = gymnax.make("CartPole-v1")
    rng = jax.random.key(number)
    level, limit = cartpole.sample_level(rng), 40
    if number == 0:
        level, limit = cartpole.TEST_MAZES["Nominal"][0](rng), 500
        _, state = env.reset_env(rng, params)
        np.testing.assert_array_equal(env.get_obs(state), level.start)
    else:
        gravity, cart, pole, length, force = level.physics
        params = params.replace(gravity=gravity, masscart=cart, masspole=pole, length=length)
        params = params.replace(force_mag=force, total_mass=cart + pole)
        params = params.replace(polemass_length=pole * length, max_steps_in_episode=limit)
        state = type(env.reset_env(rng, params)[1])(0, *level.start)
    # the pole's lean and fall decide, so that episodes are long; some actions are random
    noise, actions, expected, balance = np.random.default_rng(number), [], [], state
    for _ in range(limit):
        obs = env.get_obs(balance)
        action = int(obs[2] + 0.3 * obs[3] + 0.05 * noise.normal() > 0)
        obs, balance, reward, terminated, _ = env.step_env(rng, balance, action, params)
        actions.append(action)
        done = terminated | env.is_truncated(balance, params)
        expected.append((obs, reward / limit, done))
        if done:
            break
    found = rollout(cartpole, level, limit, jnp.array(actions))
    np.testing.assert_array_equal(found[0][0], env.get_obs(state))
    for x, y in zip((found[0][1:], *found[1:]), zip(*expected)):
        np.testing.assert_allclose(x, np.stack(y), 1e-4, 1e-5)
    assert found[2].tolist() == [False] * (len(actions) - 1) + [True]
    assert len(actions) > 20
    assert number != 2 or len(actions) == limit


def test_solved_is_475_of_500_steps(cartpole):
    """For returns summed up in float32."""
    step = jnp.float32(1.0) / 500
    totals = np.add.accumulate(np.full(500, step, np.float32), dtype=np.float32)
    assert np.flatnonzero(cartpole.solved(totals)).tolist() == [*range(474, 500)]


def test_levels_of_cartpole(cartpole):
    rngs = jax.random.split(jax.random.key(0), 200)
    powers = lambda level: np.log(level.physics / cartpole.NOMINAL) / np.log(cartpole.FACTOR)
    levels = jax.vmap(cartpole.sample_level)(rngs)
    drawn = powers(levels)
    assert (abs(drawn) <= 1 + 1e-5).all()
    assert (abs(drawn.mean(0)) < 0.15).all()
    assert (abs(drawn.std(0) - 3**-0.5) < 0.08).all()
    assert (abs(levels.start) <= 0.05).all()
    flat = cartpole.sample_level(rngs[0], 0.0)
    np.testing.assert_allclose(flat.physics, cartpole.NOMINAL, 1e-6)
    for number in (1, 3):
        edited = jax.vmap(lambda rng, level: cartpole.edit_level(rng, level, number))(rngs, levels)
        change = powers(edited) - drawn
        assert set((abs(change) > 1e-5).sum(1)) <= {*range(number + 1)}
        assert 0.1 < abs(change).sum(1).mean() / number < 0.3
        assert (abs(powers(edited)) <= 1 + 1e-5).all()
        assert (edited.start == levels.start).all()
    codes = jax.vmap(cartpole.level_code)(levels)
    assert len({x.tobytes() for x in np.asarray(codes)}) == 200
    heavy = cartpole.TEST_MAZES["Freight"][0](rngs[0]).physics
    np.testing.assert_allclose(heavy, [19.6, 4, 0.8, 0.5, 5], 1e-6)


def test_designs_of_cartpole(cartpole):
    """The teacher's numbers, one per step, by hand; a random start; new noise in each step."""
    steps, choices = cartpole.teacher_size()
    assert (steps, choices) == (5, 9)
    for spread, actions in (1.0, [0, 8, 4, 2, 7]), (0.5, [8, 0, 1, 4, 4]):
        powers, chosen = spread * (np.array(actions) / 4 - 1), np.zeros(5)
        obs, state = cartpole.teacher_reset(jax.random.key(3), spread)
        seen, starts = [obs], [state.level.start]
        for t, action in enumerate(actions):
            np.testing.assert_allclose(seen[-1].powers, chosen, atol=1e-5)
            assert seen[-1].time == t
            obs, state, done = cartpole.teacher_step(jax.random.key(t), state, action)
            seen, starts = [*seen, obs], [*starts, state.level.start]
            chosen[t] = powers[t]
            assert done == (t == 4)
        np.testing.assert_allclose(
            state.level.physics, cartpole.NOMINAL * cartpole.FACTOR**powers, 1e-5)  # fmt: skip
        assert len({x.noise.tobytes() for x in seen}) == 6
        assert len({np.asarray(x).tobytes() for x in starts}) == 1
    other = cartpole.teacher_reset(jax.random.key(4))[1].level.start
    assert (abs(other) <= 0.05).all()
    assert (other != starts[0]).all()


def test_paired_on_cartpole(script, cartpole, monkeypatch):
    copy = module_of(script("cartpole", "paired"), monkeypatch)
    config = copy.parse([*commands("cartpole", True)[2], *TINY])
    state, metrics, shown = traced(copy.make_train(config))
    assert {*cartpole.NAMES, "regret", "teacher_entropy"} < metrics.keys()
    assert shown


def test_pictures_of_cartpole(cartpole):
    level = cartpole.place(jax.random.key(0), cartpole.NOMINAL)._replace(start=jnp.zeros(4))
    black = lambda picture: np.argwhere((picture[120:] == 0).all(-1)).mean(0)[1]
    assert abs(black(cartpole.render(level)) - 119.5) < 1
    moved = cartpole.render(level._replace(start=jnp.array([1.2, 0, 0, 0])))
    assert black(moved) > 125
    _, state = cartpole.reset(level, 500)
    assert (cartpole.render(state[0]) != cartpole.render(level)).any()  # the step's number
    assert (cartpole.render(level)[95:205] == cartpole.render(state[0])[95:205]).all()


@pytest.fixture(scope="module")
def jaxued():
    pytest.importorskip("jaxued")
    return pytest.importorskip("jaxued.environments")


def test_what_is_written_for_jaxued_runs(cartpole, jaxued):
    """JaxUED's maze by its own step, with random walls: the same episodes, then the next level."""
    from jaxued.environments.maze import make_level_generator

    env = jaxued.Maze(max_height=13, max_width=13, agent_view_size=5, normalize_obs=True)
    assert env.action_space(env.default_params).n == 7
    generate = make_level_generator(13, 13, 25)
    queue = jax.vmap(generate)(jax.random.split(jax.random.key(0), 3))
    reset, step, step_and_reset = cartpole.from_jaxued(env, ndim=2)
    rng, limit = jax.random.key(1), 30
    params = env.default_params.replace(max_steps_in_episode=limit)
    obs, state = reset(queue, limit)
    move, opened = jax.jit(step_and_reset), 0
    level = lambda i: jax.tree.map(lambda x: x[i % 3], queue)
    theirs, inner = env.reset_to_level(rng, level(0), params)
    for action in np.random.default_rng(0).choice([0, 2, 2, 1, 2], 100):
        jax.tree.map(np.testing.assert_array_equal, obs, theirs)
        obs, state, reward, done = move(state, action)
        theirs, inner, expected, ended, _ = env.step(rng, inner, action, params)
        assert reward == expected
        assert done == ended
        if done:
            opened += 1
            theirs, inner = env.reset_to_level(rng, level(opened), params)
    assert opened >= 3


@pytest.mark.parametrize("derive", [
    lambda rng: rng, lambda rng: jax.random.split(rng)[0], lambda rng: jax.random.split(rng)[1],
    lambda rng: jax.random.fold_in(rng, 0)])  # fmt: skip
def test_the_luck_of_a_level(cartpole, derive):
    """A random start and random steps of the environment are the same each time for a level, and
    the start's random numbers are not those of a step, however the environment uses its key."""

    class Drift:
        env, default_params = cartpole.CartPole.env, cartpole.CartPole.default_params

        def reset_env_to_level(self, rng, level, params):
            return jax.random.uniform(derive(rng)), level

        def step_env(self, rng, state, action, params):
            return jax.random.uniform(rng), state, 0.0, False, {}

    reset, step, _ = cartpole.from_jaxued(Drift(), ndim=0)

    def play(level):
        obs, state = reset(level, 9)
        seen = [obs]
        for _ in range(3):
            obs, state, *_ = step(state, 0)
            seen.append(obs)
        return np.array(seen).tolist()

    one, other = play((jnp.array(1.0), jnp.array(2))), play((jnp.array(2.0), jnp.array(1)))
    assert one == play((jnp.array(1.0), jnp.array(2)))
    assert len({*one, *other}) == 8


# --- Craftax


@pytest.fixture(scope="module")
def craftax():
    return example("craftax")


@pytest.mark.slow
def test_craftax_is_its_package(craftax):
    """Worlds as the package draws them, by its own step; on done, the next world starts."""
    from craftax.craftax_classic.envs.craftax_symbolic_env import (
        CraftaxClassicSymbolicEnvNoAutoReset as Craftax)  # fmt: skip

    env, limit = Craftax(), 60
    params = env.default_params.replace(max_timesteps=limit)
    keys = jax.random.split(jax.random.key(0), 2)
    queue = jax.vmap(craftax.sample_level)(keys)
    worlds = [env.reset(jax.random.split(rng)[0], params) for rng in keys]
    obs, state = craftax.reset(queue, limit)
    bare = lambda world: world.replace(state_rng=None)
    equal = partial(np.testing.assert_allclose, rtol=1e-6)  # the light is a power
    same = lambda *trees: jax.tree.map(equal, *trees)
    (theirs, world), number, rewards = worlds[0], 0, []
    move = jax.jit(craftax.step_and_reset)
    for action in np.random.default_rng(1).choice([1, 2, 3, 4, 5, 5, 7, 8, 10, 11], 90):
        same(obs, theirs)
        if world.timestep % 9 == 8:
            same(state[0].world, bare(world))
        rng = jax.random.fold_in(jax.random.key(queue.seed[number % 2]), world.timestep)
        theirs, world, expected, ended, _ = env.step(rng, world, action, params)
        obs, state, reward, done = move(state, action)
        assert reward == expected
        assert done == ended
        rewards.append(float(reward))
        if done:
            number += 1
            theirs, world = worlds[number % 2]
    assert number >= 1
    assert max(rewards) >= 0.9
    assert craftax.solved(np.array([5.9, 5.9999995, 6.0])).tolist() == [False, True, True]
    world = craftax.TEST_MAZES["World2"][0](None)  # a fixed one
    _, theirs = env.reset(jax.random.key(2), params)
    np.testing.assert_array_equal(craftax.reset(world, limit)[1][0].world.map, theirs.map)


def data(rngs):
    """The numbers of random keys."""
    return {x.tobytes() for x in np.asarray(jax.random.key_data(rngs))}


def test_no_step_of_a_fixed_world_has_a_key_that_drew_it(craftax):
    for i in (1, 2, 3, 4):
        world = jax.random.key(i)
        seed = craftax.TEST_MAZES[f"World{i}"][0](None).seed
        steps = jax.vmap(lambda t: jax.random.fold_in(jax.random.key(seed), t))(jnp.arange(250))
        assert len(data(steps)) == 250
        assert not data(steps) & (data(jax.random.split(world, 20)) | data(world[None]))


@pytest.mark.slow
def test_levels_of_craftax(craftax):
    from craftax.craftax_classic.constants import BlockType

    rngs = jax.random.split(jax.random.key(0), 20)
    levels = jax.vmap(craftax.sample_level)(rngs)
    edited = jax.vmap(lambda *x: craftax.edit_level(*x, 5))(rngs, levels)
    before, after = np.asarray(levels.map), np.asarray(edited.map)
    changed = before != after
    assert (changed.sum((1, 2)) <= 10).all()
    assert changed.sum((1, 2)).mean() > 5
    near = changed[:, 24:40, 24:40]
    assert near.any((1, 2)).all()
    assert near.sum() < changed.sum()
    assert not changed[:, 32, 32].any()
    assert (before[:, 32, 32] == BlockType.GRASS.value).all()
    count = lambda maps: [np.bincount(x.ravel(), minlength=17).tolist() for x in maps]
    assert count(before) == count(after)
    sand = jnp.full((64, 64), BlockType.SAND.value, jnp.uint8).at[0, 0].set(BlockType.PATH.value)
    nothing = craftax.edit_level(rngs[0], craftax.Level(sand, levels.seed[0]), 9)
    np.testing.assert_array_equal(nothing.map, sand)  # of no kind there is a cell
    stats = jax.vmap(lambda level: craftax.level_stats(level, 250))(levels)
    water = (before[:, 24:40, 24:40] == BlockType.WATER.value).sum((1, 2))
    np.testing.assert_array_equal(stats["water"], water)
    codes = [jax.vmap(craftax.level_code)(x) for x in (levels, edited, levels)]
    assert len({x.tobytes() for code in codes for x in np.asarray(code)}) == 40
    reseeded = levels._replace(seed=levels.seed + 1)
    assert (jax.vmap(craftax.level_code)(reseeded) != codes[0]).all()


def test_a_cycle_on_craftax(script, craftax, monkeypatch):
    copy = module_of(script("craftax", "plr"), monkeypatch)
    config = copy.parse([*commands("craftax")[2], *TINY, *REPLAY])
    state, metrics, shown = traced(copy.make_train(config))
    assert state.buffer.level.map.shape == (16, 64, 64)
    assert {"buffer_water", "eval_return/World1", "train_return"} <= metrics.keys()
    assert [level.map.shape for level, _ in shown.values()] == [(16, 64, 64)] * 2


# --- NAVIX


@pytest.fixture(scope="module")
def navix():
    if sys.version_info < (3, 12):
        pytest.skip("navix 4 needs Python 3.12")
    return example("navix")


def test_navix_is_its_package(navix):
    """The package's own environment step by step, on layouts that it draws: observations (but for
    what the player carries, which only our module shows), rewards, ends, then the next layout."""
    import navix as package

    see = package.observations.symbolic_first_person
    env = package.make("Navix-DoorKey-Random-5x5-v0", observation_fn=see, max_steps=90)
    keys = jax.random.split(jax.random.key(0), 3)
    draw = partial(navix.sample_level, n_walls=0, height=3, width=3)
    obs, state = navix.reset(jax.vmap(draw)(keys), 90)
    theirs = env.reset(keys[0])
    move, step = jax.jit(navix.step_and_reset), jax.jit(env.step)
    rewards, lengths, carried, opened = [], [], 0, 0
    often = [0.15, 0.15, 0.4, 0.1, 0.02, 0.15, 0.03]  # left, right, forward, ...
    for action in np.random.default_rng(0).choice(7, 900, p=often):
        image = np.array(theirs.observation)
        assert image[-1, 3].tolist() == [1, 0, 0]
        if theirs.state.get_player().pocket != -1:
            image[-1, 3, 0], carried = 5, carried + 1
        np.testing.assert_array_equal(obs, image)
        opened += int(theirs.state.get_doors().open[0])
        theirs = step(theirs, int(action))
        obs, state, reward, done = move(state, int(action))
        assert reward == theirs.reward
        assert done == theirs.is_done()
        if done:
            rewards.append(float(reward))
            lengths.append(int(theirs.t))
            theirs = env.reset(keys[len(rewards) % 3])
    assert {*rewards} == {0, 1}
    assert max(lengths) == 90
    assert min(carried, opened) > 20
    assert navix.solved(np.array([0.0, 1.0])).tolist() == [False, True]


def reached(walls, start):
    """The cells that a walk reaches, moving from cell to cell."""
    seen, todo = {start}, [start]
    while todo:
        y, x = todo.pop()
        for cell in (y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1):
            inside = 0 <= cell[0] < len(walls) and 0 <= cell[1] < len(walls[0])
            if inside and not walls[cell] and cell not in seen:
                seen.add(cell)
                todo.append(cell)
    return seen


def test_levels_of_navix(navix):
    rngs = jax.random.split(jax.random.key(0), 300)
    of_all = lambda function: jax.jit(jax.vmap(function))
    levels = of_all(partial(navix.sample_level, n_walls=9, height=5, width=6))(rngs)
    one = of_all(lambda *x: navix.edit_level(*x, 1))(rngs, levels)
    some = of_all(lambda *x: navix.edit_level(*x, 12))(rngs, levels)
    can = of_all(lambda level: navix.level_stats(level, 9)["solvable"])
    found = []
    for batch in levels, one, some:
        for walls, places, direction, solvable in zip(
            *map(np.asarray, batch), np.asarray(can(batch))
        ):
            player, key, door, goal = map(tuple, places.tolist())
            assert (places >= 0).all()
            assert (places < (5, 6)).all()
            assert len({player, key, door, goal}) == 4
            assert max(player[1], key[1]) < door[1] < goal[1]
            assert not any(walls[place] for place in (player, key, door, goal))
            assert walls[:, door[1]].sum() == 4
            assert direction in range(4)
            at_home = reached(walls | (np.arange(6) == door[1]), player)
            assert solvable == (key in at_home and goal in reached(walls, player))
            found.append(bool(solvable))
    assert 0.2 < np.mean(found) < 0.8
    walls = np.asarray(levels.wall_map).sum((1, 2)) - 4
    assert walls.max() <= 9
    assert 3 < walls.mean() < 7
    flipped = (np.asarray(one.wall_map) != np.asarray(levels.wall_map)).sum((1, 2))
    moved = (np.asarray(one.places) != np.asarray(levels.places)).any(2)
    assert (flipped <= 2).all()  # the door's old cell and its new one
    assert (moved.sum(1) <= 1).all()
    assert moved.any(0).all()
    assert ((flipped == 2) == moved[:, 2]).all()
    assert 0.4 < (flipped == 1).mean() < 0.5  # 0.6 of the cells that are not taken, 22 of 30
    assert (one.direction == levels.direction).all()
    codes = np.concatenate([of_all(navix.level_code)(x) for x in (levels, some, levels)])
    assert 590 < len({x.tobytes() for x in codes}) <= 600
    draw = partial(navix.sample_level, n_walls=12, height=5, width=6)
    fine = of_all(lambda rng: navix.sample_solvable(rng, draw))(rngs[:50])
    assert can(fine).all()
    assert len({x.tobytes() for x in np.asarray(of_all(navix.level_code)(fine))}) == 50


def test_a_layout_that_is_drawn_again_has_no_key_of_the_one_before(navix, monkeypatch):
    """Whatever `sample` makes of its key, by split or fold_in."""
    tries = []
    sample = lambda rng: jax.debug.callback(lambda x: tries.append(x), jax.random.key_data(rng))
    stats = lambda level, max_steps: {"solvable": jnp.array(len(tries) > 4)}
    monkeypatch.setattr(navix, "level_stats", stats)
    with jax.disable_jit():
        navix.sample_solvable(jax.random.key(3), sample)
    keys = jax.random.wrap_key_data(jnp.stack(tries[:5]))
    made = [data(jax.random.split(x, 9)) | data(x[None]) for x in keys]
    assert len(set().union(*made)) == 5 * 10


def test_pictures_of_navix(navix):
    """NAVIX's own picture, twice as large."""
    import navix as package

    env = package.make("Navix-DoorKey-Random-8x8-v0", observation_fn=package.observations.rgb)
    theirs = env.reset(jax.random.key(3))
    level = navix.sample_level(jax.random.key(3), n_walls=0)
    _, state = navix.reset(level, 9)
    np.testing.assert_array_equal(navix.render(level)[1::2, ::2], theirs.observation)
    assert navix.render(level).shape == (128, 128, 3)
    for action in 0, 2, 2:
        theirs, state = env.step(theirs, action), navix.step(state, action)[1]
        np.testing.assert_array_equal(navix.render(state.state)[::2, 1::2], theirs.observation)
    assert (navix.render(state.state) != navix.render(level)).any()


@pytest.mark.slow
def test_a_training_on_navix(tmp, train, call, script, navix):
    path, folder = script("navix", "plr"), tmp / "navix"
    more = "--height 3 --width 3 --n-walls 1 --max-steps 30 --num-steps 32 --bptt-horizon 16"
    flags = [*commands("navix")[2], *TINY, *REPLAY, *more.split(), "--eval-suite", "DoorKey5"]
    options = dict(env={"PYTHONPATH": str(ROOT)})  # with wandb, which NAVIX imports
    train(*flags, "--out", folder, script=path, **options)
    rows = table(folder)
    assert len({*measured(rows, "buffer_walls")}) > 1
    assert int(rows[-1]["grad_updates"]) > 1
    assert max(measured(rows, "train_return")) > 0
    train("--resume", "--out", rewind(folder, tmp / "navix-again", 8), script=path, **options)
    assert_equal(folder, tmp / "navix-again")
    more = "--mazes", "DoorKey5,DoorKey6", "--episodes", 2, "--gif", "DoorKey6"
    status, out, err = call(folder, "--script", path, *more, script=ROOT / "evaluate.py", **options)
    assert status == 0, err
    assert "DoorKey6" in out, err
    film = Image.open(folder / "film_navix_12_DoorKey6.gif")
    assert film.size == (96, 96)
    assert Image.open(folder / "levels/update_12.png").width > 1000
