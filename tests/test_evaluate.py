"""evaluate.py against MiniGrid, breadth-first search, scipy, simulations, and damaged folders."""

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
import scipy.stats
from flax import serialization
from minigrid.core.grid import Grid
from minigrid.core.mission import MissionSpace
from minigrid.core.world_object import Goal, Wall
from minigrid.minigrid_env import MiniGridEnv
from PIL import Image
from test_siblings import FILES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import amaze  # noqa: E402
import dr  # noqa: E402
import evaluate  # noqa: E402
import paired  # noqa: E402

TINY = dict(rnn="gru", hidden_size=8, height=5, width=5, n_walls=5, max_steps=12, num_envs=4,
            num_steps=8, num_updates=2, eval_interval=0, log_interval=1, archive_interval=1,
            seeds=2)  # fmt: skip
EASY = "..G\n...\n>.."
DARK = ">#G\n..."


def flags(settings):
    return [x for k, v in settings.items() for x in (f"--{k.replace('_', '-')}", str(v))]


def execute(*command, **environment):
    """Run Python on a script (or -c) in a process of its own -> stdout."""
    command = [sys.executable, *map(str, command)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | environment
    environment = {name: x for name, x in environment.items() if x is not None}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def call(capsys, monkeypatch, *arguments):
    """Run evaluate.py's command line in this process: (exit status, stdout, errors)."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments)])
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")  # as it is here
    with pytest.raises(SystemExit) as stop:
        evaluate.main()
    out, err = capsys.readouterr()
    return stop.value.code, out, [line for line in err.splitlines() if "error" in line]


def write_checkpoint(path, data):
    """Write any data as save_checkpoint does, after its checksum."""
    body = serialization.msgpack_serialize(data)
    dr.write(path, lambda file: file.writelines([hashlib.sha256(body).digest(), body]))


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def trained(tmp):
    """The folder of a run with two seeds, said to be trained for two updates."""
    config = dr.Config(**TINY)
    init = jax.jit(jax.vmap(dr.make_train(config).init))
    state = init(jax.vmap(jax.random.key)(np.arange(2)))
    evaluate.save(tmp / "dr", config, state.replace(cycles=np.full(2, 2)))
    data = dr.read_checkpoint(tmp / "dr" / "checkpoint.msgpack")
    write_checkpoint(tmp / "dr" / "checkpoint_1.msgpack", data | {"cycles": 1})
    return tmp / "dr"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained run's folder."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "dr"))


# --- play


def mazes_of(**settings):
    args = evaluate.Arguments(**settings)
    names, own, sampled = evaluate.choose_mazes(args)
    mazes = own + evaluate.draw_mazes(names[len(own) :], args, sampled)
    assert [maze.name for maze in mazes] == names
    return mazes


@cache
def some_mazes(episodes):
    """Open and occluded mazes of several sizes and time limits, two of them from text."""
    easy, dark = (jax.tree.map(lambda x: x[None], amaze.level_from_text(x)) for x in (EASY, DARK))
    names = "FourRooms,MiniMaze,TrivialMaze"
    mazes = mazes_of(mazes=names, episodes=episodes, seed=3)
    return [evaluate.Maze("easy", easy, 30), evaluate.Maze("dark", dark, 60, False), *mazes]


@cache
def random_agents():
    """Four different agents whose actions depend on what they see: train, params, keys."""
    train = dr.make_train(dr.Config(**TINY))
    shapes = jax.eval_shape(train.init, jax.random.key(0)).student.params
    rng = np.random.default_rng(5)
    draw = lambda x: jnp.asarray(0.2 * rng.normal(size=(4, *x.shape)), x.dtype)
    params = jax.tree.map(draw, shapes)
    keys = evaluate.agent_keys(SimpleNamespace(agents=[{"seed": i} for i in range(4)]), 3)
    return train, params, keys


@cache
def played(batch_size, only=""):
    """Play some_mazes: returns, lengths [agents, mazes, 4 episodes]."""
    mazes = [maze for maze in some_mazes(4) if maze.name.startswith(only)]
    return tuple(evaluate.play(*random_agents(), mazes, 4, batch_size))


class Copy(MiniGridEnv):
    """A Level as a MiniGrid environment."""

    def __init__(self, level, max_steps, see_through_walls):
        self.level = level
        height, width = level.wall_map.shape
        super().__init__(MissionSpace(lambda: "reach the goal"), width=width + 2, height=height + 2,
                         max_steps=max_steps, see_through_walls=see_through_walls,
                         agent_view_size=5)  # fmt: skip

    def _gen_grid(self, width, height):
        self.grid = Grid(width, height)
        self.grid.wall_rect(0, 0, width, height)
        for y, x in np.argwhere(self.level.wall_map):
            self.grid.set(int(x) + 1, int(y) + 1, Wall())
        self.put_obj(Goal(), *(int(v) + 1 for v in self.level.goal_pos))
        self.agent_pos = np.array([int(v) + 1 for v in self.level.agent_pos])
        self.agent_dir = int(self.level.agent_dir)


@pytest.mark.slow
def test_results_equal_a_loop_over_minigrid():
    train, params, keys = random_agents()
    returns, lengths = played(0)

    @jax.jit
    def choose(a, tag, t, memory, image, direction):
        of = jax.tree.map(lambda x: x[a], params)
        obs = amaze.Observation(image[None], direction[None])
        noise = evaluate.gumbel(keys[a], tag, t)[None]
        memory, action = train.act(of, memory, obs, (t == 0)[None], noise)[:2]
        return memory, action[0]

    for m, maze in enumerate(some_mazes(4)):
        for a, episode in np.ndindex(4, 4):
            i = episode % len(maze.levels.agent_dir)
            env = Copy(jax.tree.map(lambda x: np.asarray(x)[i], maze.levels), *maze[2:])
            seen, memory, total, done = env.reset()[0], train.initial_carry(1), 0.0, False
            tag = evaluate.tag(maze.name, episode)
            while not done:
                view = np.uint8(seen["image"]), np.int32(seen["direction"])
                memory, action = choose(a, tag, np.int32(env.step_count), memory, *view)
                seen, reward, terminated, truncated, _ = env.step(int(action))
                total, done = total + reward, terminated or truncated
            assert lengths[a, m, episode] == env.step_count
            assert returns[a, m, episode] == pytest.approx(total, abs=1e-6)
    solved = (returns > 0).mean((0, 2))
    assert solved.max() > 0
    assert (solved < 1).all()  # else little was compared


@pytest.mark.slow
def test_neither_batch_size_nor_vmap_matters(monkeypatch):
    """Agents play vmapped on a GPU, and in turn on a CPU."""
    in_turn, agents = played(0), random_agents()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    real, texts = evaluate.make_program, []

    def make_program(*args):
        program, dealt = real(*args)

        def recorded(*args):
            texts.append(program.lower(*args).as_text())
            return program(*args)

        return recorded, dealt

    monkeypatch.setattr(evaluate, "make_program", make_program)
    vmapped = evaluate.play(*agents, some_mazes(4), 4, batch_size=3)
    assert all(np.array_equal(x, y) for x, y in zip(in_turn, vmapped))
    assert "stablehlo.case" in texts[0]  # opening the next episodes stays a branch


@pytest.mark.slow
def test_devices_do_not_matter(tmp_path):
    """Four agents on three devices: twelve players, each with a third of an agent's episodes."""
    code = f"import test_evaluate as t; t.np.save({str(tmp_path / 'x.npy')!r}, t.played(0))"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    execute("-c", code, PYTHONPATH=path, JAX_NUM_CPU_DEVICES="3")
    assert np.array_equal(np.load(tmp_path / "x.npy"), played(0))


@pytest.mark.slow
def test_padding_and_other_mazes_do_not_matter():
    m = [maze.name for maze in some_mazes(4)].index("TrivialMaze")
    for together, alone in zip(played(0), played(0, "TrivialMaze")):
        assert np.array_equal(together[:, m], alone[:, 0])


def fewest_actions(level, max_steps):
    """Actions of a shortest plan to the goal, by breadth-first search over (x, y, direction)."""
    walls, goal = np.asarray(level.wall_map), tuple(map(int, level.goal_pos))
    start = (*map(int, level.agent_pos), int(level.agent_dir))
    plans, queue = {start: []}, deque([start])
    while queue:
        x, y, d = pose = queue.popleft()
        if (x, y) == goal:
            return plans[pose] + [6] * (max_steps - len(plans[pose]))
        dx, dy = [(1, 0), (0, 1), (-1, 0), (0, -1)][d]
        ahead = (x + dx, y + dy, d)
        inside = 0 <= x + dx < walls.shape[1] and 0 <= y + dy < walls.shape[0]
        for action, after in enumerate([(x, y, (d - 1) % 4), (x, y, (d + 1) % 4), ahead]):
            if after not in plans and (action < 2 or inside and not walls[after[1], after[0]]):
                plans[after] = plans[pose] + [action]
                queue.append(after)


@pytest.mark.slow
def test_oracle_gets_the_optimal_return_and_idler_nothing():
    names = [name for name in amaze.TEST_MAZES if name[-5:] not in ("Large", "azeXL")]
    mazes = mazes_of(mazes=",".join(names), episodes=1)
    levels = [jax.tree.map(lambda x: x[0], maze.levels) for maze in mazes]
    longest = max(maze.max_steps for maze in mazes)
    plans = [fewest_actions(level, longest) for level in levels] + [[6] * longest]

    def act(plan, carry, obs, is_first, noise):
        t = jnp.where(is_first, 0, carry)
        return t + 1, plan[t]

    train = SimpleNamespace(act=act, initial_carry=lambda batch: jnp.zeros(batch, int),
                            reset=amaze.reset, step=amaze.step)  # fmt: skip
    rngs = jax.random.split(jax.random.key(0), len(plans))
    returns, lengths = evaluate.play(train, jnp.array(plans), rngs, mazes, 1)
    m = np.arange(len(mazes))
    assert (returns[m, m, 0] > 0).all()
    assert np.allclose(returns[m, m, 0], evaluate.optimal_returns(mazes), atol=1e-6)
    assert (lengths[m, m, 0] == [plan.index(6) for plan in plans[:-1]]).all()
    assert (returns[-1] == 0).all()
    assert (lengths[-1, :, 0] == [maze.max_steps for maze in mazes]).all()


# --- mazes


@pytest.mark.slow
def test_levels_are_drawn_by_seed_name_and_episode():
    mazes = evaluate.draw(["FourRooms", "Labyrinth"], 3, 0)
    alone, other = (evaluate.draw(["FourRooms"], 3, seed)["FourRooms"] for seed in (0, 1))
    row = lambda levels, i: amaze.level_to_text(jax.tree.map(lambda x: x[i], levels))
    drawn = mazes["FourRooms"], alone, other
    texts, same, different = ([row(x, i) for i in range(3)] for x in drawn)
    assert texts == same
    assert len(set(texts + different)) == 6
    assert len(mazes["Labyrinth"].agent_dir) == 1


@pytest.mark.slow
def test_a_maze_named_twice_is_played_once():
    mazes = mazes_of(mazes="MiniMaze,Labyrinth,MiniMaze")
    assert [maze.name for maze in mazes] == ["MiniMaze", "Labyrinth"]


def test_a_picture_is_titled_with_the_best_return_of_its_level(tmp_path, capsys, monkeypatch):
    drawn, plot = [], amaze.plot_levels
    monkeypatch.setattr(amaze, "plot_levels", lambda *args: drawn.append(plot(*args)) or drawn[0])
    monkeypatch.chdir(tmp_path)
    options = "--mazes", "FourRooms", "--episodes", "5", "--show-levels"
    assert call(capsys, monkeypatch, *options)[0] == 0
    assert (tmp_path / "mazes.png").exists()
    levels, limit = (x := mazes_of(mazes="FourRooms", episodes=5)[0]).levels, x.max_steps
    steps = [fewest_actions(jax.tree.map(lambda x: x[i], levels), limit).index(6) for i in range(5)]
    best = [f"{1 - 0.9 * n / limit:.3g}" for n in steps]
    title = drawn[0].axes[0].texts[1].get_text()
    assert title == f"FourRooms\nbest return {best[0]}"
    assert len({*best}) > 1


def test_sampled_levels_are_solvable_and_differ():
    mazes = mazes_of(suite="sampled", levels=20)
    assert len(mazes) == 20
    assert mazes[3].name == "Sampled-3"
    assert (evaluate.optimal_returns(mazes) > 0).all()
    assert len({maze.levels.wall_map.tobytes() for maze in mazes}) == 20


def test_maze_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(f"\n{EASY}\n\n \n>.#.\n..#G\n")
    mazes = mazes_of(maze_file=str(path), max_steps=9)
    assert [(maze.name, *maze.levels.wall_map.shape) for maze in mazes] == [
        ("mine-1", 1, 3, 3), ("mine-2", 1, 2, 4)]  # fmt: skip
    assert evaluate.optimal_returns(mazes) == pytest.approx([1 - 0.9 * 5 / 9, 0])
    dark = mazes_of(maze_file=str(path), see_through_walls=False)
    assert [maze.see_through_walls for maze in mazes + dark] == [True, True, False, False]


def test_mazes_of_a_file(tmp_path):
    path = tmp_path / "mazes.txt"
    read = lambda text: (path.write_bytes(text), evaluate.read_mazes(path, 250))[1]
    assert len(read(b"\xef\xbb\xbf>.\n.G\n  \n\n#>G\r\n")) == 2
    for text, words in {b">  \n # \n  G": "unknown character ' ' at row 1, column 2",
                        b"\xff": "utf-8", b"": "no agent"}.items():  # fmt: skip
        with pytest.raises(evaluate.BadConfig, match=re.escape(words)):
            read(text)


def test_no_key_is_a_trainings():
    """A training splits key(seed); split(key, n)[i] is fold_in(key, i) by now."""
    words = lambda key: tuple(jax.random.key_data(key).tolist())
    trainings = {words(jax.random.key(seed)) for seed in range(9)}
    for seed in range(9):
        trainings |= set(map(words, jax.random.split(jax.random.key(seed), 8)))
    run = SimpleNamespace(agents=[{"seed": i} for i in range(9)])
    purposes = evaluate.LEVELS, evaluate.ACTIONS
    ours = [words(evaluate.root_key(seed, x)) for seed in range(9) for x in purposes]
    ours += [words(key) for seed in range(9) for key in evaluate.agent_keys(run, seed)]
    assert len({*ours}) == len(ours)
    assert not trainings & {*ours}


# --- statistics


def test_aggregates_by_hand_and_by_scipy():
    rng = np.random.default_rng(0)
    for shape in ((1, 3), (8, 12), (5, 7), (3, 1)):
        scores = rng.random(shape)
        assert evaluate.iqm(scores) == pytest.approx(scipy.stats.trim_mean(scores, 0.25, axis=None))
    scores = np.array([[0.0, 0.5, 1.0, 0.9], [0.2, 0.7, 1.0, 0.1]])
    found = {name: f(scores) for name, f in evaluate.AGGREGATES.items()}
    assert found == pytest.approx({"mean": 0.55, "IQM": 0.575, "optimality gap": 0.45})


def test_intervals_equal_scipys():
    scores = np.random.default_rng(1).random((6, 3)) ** [1, 2, 3]
    for statistic in evaluate.AGGREGATES.values():
        of = lambda *mazes: statistic(np.stack(mazes, axis=1))
        interval = scipy.stats.bootstrap(
            tuple(scores.T), of, n_resamples=2000, paired=True, vectorized=False,
            method="percentile", random_state=0).confidence_interval  # fmt: skip
        value, low, high = evaluate.bootstrap(scores, lambda x: np.array([statistic(x)]), 0)[0]
        assert value == statistic(scores)
        assert (low, high) == pytest.approx(tuple(interval), abs=0.02)
        assert high - low > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("num_mazes", [12, 300])
def test_intervals_hold_the_truth(num_mazes, monkeypatch):
    """In new trainings of a known population, 95% of the intervals contain its true values."""
    monkeypatch.setattr(evaluate, "RESAMPLES", 300)
    rng = np.random.default_rng(num_mazes)
    hardness = rng.normal(0.5, 1.5, num_mazes)

    def train(seeds):
        skill = rng.normal(0, 0.7, (seeds, 1)) + rng.normal(0, 0.5, (seeds, num_mazes))
        return rng.binomial(20, 1 / (1 + np.exp(hardness - skill))) / 20

    aggregates = lambda scores: np.array([f(scores) for f in evaluate.AGGREGATES.values()])
    statistic = aggregates if num_mazes < 50 else lambda scores: scores.mean(keepdims=True)[0]
    truth, trainings = statistic(train(20_000)), [train(32) for _ in range(400)]
    intervals = np.array([evaluate.bootstrap(scores, statistic, 0) for scores in trainings])
    held = (intervals[..., 1] <= truth) & (truth <= intervals[..., 2])
    assert (held.mean(0) >= 0.9).all(), held.mean(0)
    assert (held.mean(0) < 0.99).all(), held.mean(0)


def test_intervals_of_six_seeds_hold_the_truth_as_often_as_is_said(monkeypatch):
    """In 0.85 of cases. Seven mazes are alike, the others far from them: an interval of a median
    would hold the truth only 20 times in 100, so there is none."""
    monkeypatch.setattr(evaluate, "RESAMPLES", 200)
    rng, rates = np.random.default_rng(0), np.repeat([0.65, 0.9, 0.97], [7, 2, 3])
    train = lambda seeds: rng.binomial(100, rng.beta(rates, 1 - rates, (seeds, 12))) / 100
    aggregates = lambda scores: np.array([f(scores) for f in evaluate.AGGREGATES.values()])
    truth = aggregates(train(100_000))
    intervals = np.array([evaluate.bootstrap(train(6), aggregates, 0) for _ in range(300)])
    held = ((intervals[..., 1] <= truth) & (truth <= intervals[..., 2])).mean(0)
    assert ((0.78 < held) & (held < 0.92)).all(), dict(zip(evaluate.AGGREGATES, held))


def test_fewer_than_three_seeds_have_no_interval_and_one_no_iqm():
    returns = np.random.default_rng(0).random((4, 5, 6)) - 0.5
    for seeds in (1, 2, 3, 4):
        summary = evaluate.summarise(returns[:seeds], "abcde", 0, True)
        values = np.array([*summary.values()])
        assert np.isfinite(values[:, 0]).all()
        assert (np.isnan(values[:, 1:]) == (seeds < 3)).all()
        aggregates = [name for name in summary if name in evaluate.AGGREGATES]
        assert aggregates == ([*evaluate.AGGREGATES] if seeds > 1 else ["mean"])


def flip(rng, rates, episodes, seeds=1):
    """Returns [seeds, levels, episodes] of episodes with these solve rates."""
    return 0.7 * (rng.random((seeds, len(rates), episodes)) < np.reshape(rates, (-1, 1)))


def test_worst_levels_are_no_worse_than_they_are():
    """If every level is solved at 0.9, the worst are, too. Ranked and reported on the same ten
    episodes, they would read 0.715, 0.585 and 0.502."""
    returns = flip(np.random.default_rng(0), np.full(1000, 0.9), 10, seeds=32)
    summary = evaluate.summarise(returns, [str(i) for i in range(1000)], 0, True)
    assert [*summary] == [*evaluate.AGGREGATES, *evaluate.WORST]
    # 64 means (32 seeds, both ways round) of 100, 10 and 1 levels, of five episodes each
    for name, levels in zip(evaluate.WORST, (100, 10, 1)):
        error = (0.9 * 0.1 / (64 * levels * 5)) ** 0.5
        assert abs(summary[name][0] - 0.9) < 4 * error, (name, summary[name])


@pytest.mark.parametrize("levels, columns", [(9, 0), (10, 1), (999, 2), (1000, 3)])
def test_worst_shares_are_at_least_one_level(levels, columns):
    returns = flip(np.random.default_rng(2), np.full(levels, 0.9), 2, seeds=3)
    summary = evaluate.summarise(returns, [str(i) for i in range(levels)], 0, True)
    assert [name for name in summary if name in evaluate.WORST] == [*evaluate.WORST][:columns]


def test_worst_levels_are_found():
    rates = np.linspace(0, 1, 1000) ** 0.2
    returns = flip(np.random.default_rng(1), rates, 400, seeds=3)
    summary = evaluate.summarise(returns, [str(i) for i in range(1000)], 0, True)
    for name, levels in zip(evaluate.WORST, (100, 10, 1)):
        assert summary[name][0] == pytest.approx(rates[:levels].mean(), abs=0.02), name


def test_the_worst_are_those_of_the_published_protocol(tmp_path, capsys, monkeypatch):
    """Students of known solve rates, through the whole command, against plain loops: two sets of
    ten episodes; ties for the last places are broken at random."""
    rng, levels, drawn = np.random.default_rng(0), 1000, {x: [] for x in evaluate.WORST}
    rates = np.sort(rng.beta(1.5, 0.1, levels))
    for _ in range(1000):
        found, reported = rng.binomial(10, rates, (2, levels)) / 10
        order = np.argsort(found + 0.05 * rng.random(levels))
        for share, means in zip(evaluate.WORST.values(), drawn.values()):
            means.append(reported[order[: round(share * levels)]].mean())

    agents = [{"seed": i, "agent": "student"} for i in range(100)]
    run = evaluate.Run("a", tmp_path, "dr", 1, agents, {}, SimpleNamespace())
    maze = lambda name: evaluate.Maze(name, None, 250)
    play = lambda train, params, rngs, mazes, episodes, *_: np.stack(
        [flip(rng, rates, episodes, len(rngs))] * 2
    )
    for name, value in {"load_runs": lambda args: ([run], []), "play": play, "RESAMPLES": 10,
                        "draw_mazes": lambda names, *_: [*map(maze, names)],
                        "optimal_returns": lambda mazes, env: np.ones(len(mazes)),
                        "write": lambda path, save: None}.items():  # fmt: skip
        monkeypatch.setattr(evaluate, name, value)
    status, out, _ = call(capsys, monkeypatch, "a", "--suite", "sampled")
    header, line = (re.split("  +", x) for x in out.splitlines()[-2:])
    table = {name: float(x.split()[0]) for name, x in zip(header, line) if x[0] in "01"}
    assert status == 0
    for name, means in drawn.items():  # of 100 seeds, both ways round: at least 100 draws' worth
        assert abs(table[name] - np.mean(means)) < 4 * np.std(means) / 10 + 5e-4, (name, table)


def test_worst_levels_are_each_seeds_own_and_ties_share():
    halves = np.ones((2, 2, 1000))
    halves[:, 0, :50], halves[:, 1, 500:505] = 0.0, 0.4
    assert evaluate.worst(halves) == pytest.approx(np.array([[0.5, 0, 0], [0.97, 0.7, 0.4]]))
    halves = np.ones((2, 1, 1000))
    halves[0, 0, 300:304], halves[1, 0, 303] = 0.2, 0.6  # four levels for one place; and back
    assert evaluate.worst(halves)[0, 2] == pytest.approx((0.9 + 0.2) / 2)


def test_csv_round_trips_and_groups_by_swept_value():
    rng = np.random.default_rng(0)
    agents = [{"seed": s, "lr": lr, "agent": "student"} for lr in (1e-4, 0.3) for s in (0, 1)]
    run = evaluate.Run("dr", None, "dr", 7, agents, {}, None)
    returns = np.maximum(rng.random((4, 2, 3)) - 0.5, 0)
    mazes = [SimpleNamespace(name=name) for name in "AB"]
    table = list(evaluate.tabulate(run, mazes, [0.9, 0.8], returns, rng.integers(1, 9, (4, 2, 3))))
    groups = {"dr @7, lr 0.0001": [0, 1], "dr @7, lr 0.3": [2, 3]}
    assert [*evaluate.group_seeds(run).items()] == [*groups.items()]
    ranked = run._replace(ranking=("lr 0.3", "lr 0.0001"))
    assert [*evaluate.group_seeds(ranked).items()] == [*groups.items()][::-1]
    table.append(table[0] | {"run": "plr", "agent": "antagonist"})
    del table[-1]["lr"]
    lines = list(csv.DictReader(evaluate.to_csv(table).decode().splitlines()))
    assert lines[-1].pop("lr") == ""
    types = [{k: type(x) for k, x in row.items()} for row in table]
    assert [{k: t[k](x) for k, x in line.items()} for t, line in zip(types, lines)] == table
    assert table[3]["solve_rate"] == pytest.approx((returns[1, 1] > 0).mean(), abs=1e-6)


# --- pictures


def test_pictures_are_the_same_under_any_matplotlibrc(tmp_path):
    """A name with $ is no formula; levels are not upside down."""
    summary = {"a$": (0.5, 0.4, 0.6), "$\\frac{$": (0.2, 0.1, 0.3), "IQM": (0.3, np.nan, np.nan)}
    results = {"$\\frac{$": (np.ones((3, 2, 4)),) * 2}
    points = {"lr": np.array([1e-3, 1.0])}
    swept = points, "train_solve_rate", np.ones((2, 1)), np.ones((2, 3))
    drawn = {"results": (evaluate.plot_results, results, {"$\\frac{$": summary}),
             "sweep": (evaluate.plot_sweep, *swept),
             "mazes": (evaluate.plot_levels, mazes_of(mazes="Labyrinth"), amaze)}  # fmt: skip
    other = {"image.origin": "lower", "text.usetex": True, "savefig.dpi": 20, "figure.dpi": 30}
    for name, plot in drawn.items():
        evaluate.write_figure(tmp_path / name, *plot)
        with matplotlib.rc_context(other):
            evaluate.write_figure(tmp_path / "other", *plot)
        assert (tmp_path / "other").read_bytes() == (tmp_path / name).read_bytes(), name


@pytest.mark.parametrize("seeds", [1, 3])
def test_words_about_seeds(seeds):
    """With one seed there are none about intervals; with more, the picture says what tau is."""
    returns = np.random.default_rng(0).random((seeds, 2, 4)) - 0.5
    summary = evaluate.summarise(returns, ["a", "b"], 0, False)
    figure = evaluate.plot_results({"x": (returns, returns)}, {"x": summary})
    words = [axes.get_title() for axes in figure.axes]
    assert ("interval" in words[0]) == ("seeds" in words[1]) == (seeds > 1)
    assert words[1].endswith("mazes with a solve rate above tau")


def test_the_printed_numbers_are_those_of_the_mazes(capsys):
    """Solve rate, return, optimal return and length, over seeds and episodes; and the picture."""
    rng, mazes = np.random.default_rng(0), [SimpleNamespace(name=name) for name in "AB"]
    returns = np.maximum(rng.random((4, 2, 5)) - 0.4, 0)
    lengths, optimal = rng.integers(1, 250, (4, 2, 5)), np.array([0.9, np.nan])
    results = {"x": (returns, lengths)}
    summaries = {"x": evaluate.summarise(returns, ["A", "B"], 0, False)}
    evaluate.print_results(results, summaries, ["x"], mazes, optimal)
    said = capsys.readouterr().out.splitlines()
    lines = [re.split("  +", x) for x in said if x[:3] in ("A  ", "B  ")]
    assert len(lines) == 2
    for m, line in enumerate(lines):
        mean = (returns[:, m] > 0).mean(), returns[:, m].mean(), lengths[:, m].mean()
        numbers = [x.split()[0] for x in line[1:]]
        best = ["0.900"] if m == 0 else []
        assert numbers == [f"{mean[0]:.3f}", f"{mean[1]:.3f}", *best, f"{mean[2]:.3f}"]
    points, profile = evaluate.plot_results(results, summaries).axes
    [bars], [dots] = points.collections, points.lines
    values = np.array([*summaries["x"].values()])
    np.testing.assert_allclose(dots.get_ydata(), values[:, 0])
    np.testing.assert_allclose([x[:, 1] for x in bars.get_segments()], values[:, 1:])
    tau, share = profile.lines[0].get_data()
    rates = (returns > 0).mean(2)
    np.testing.assert_allclose(share, [(rates > x).mean() for x in tau])


# --- the command


@pytest.mark.slow
def test_a_run_from_end_to_end(run, capsys, monkeypatch):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    options = "--mazes", "FourRooms,MiniMaze", "--episodes", "1", "--gif", "MiniMaze"
    _, first, _ = call(capsys, monkeypatch, run, *options, "--show-levels")
    names = {"results.csv", "results.png", "mazes.png", "film_dr_2_MiniMaze.gif"}
    after = {path for path in run.rglob("*") if path.is_file()}
    assert {path.name for path in after - set(before)} == names
    assert all(path.read_bytes() == data for path, data in before.items())
    table, data = read(run / "results.csv"), (run / "results.csv").read_bytes()
    assert [(row["seed"], row["maze"]) for row in table] == [
        (seed, maze) for seed in "01" for maze in ("FourRooms", "MiniMaze")]  # fmt: skip
    assert {row["optimal_return"] for row in table if row["maze"] == "MiniMaze"} == {"0.8125"}
    assert [*table[0]] == ("run algorithm update seed agent maze episodes solve_rate return length "
                           "optimal_return").split()  # fmt: skip
    assert "results.csv written" in first
    assert "IQM" in first
    assert "[" not in first[first.index("maze  ") :]  # two seeds have no intervals
    assert "2 seed(s)" in first
    with Image.open(run / "film_dr_2_MiniMaze.gif") as gif:  # equal pictures in a row are merged
        durations = [gif.seek(i) or gif.info["duration"] for i in range(gif.n_frames)]
    assert sum(durations) == 100 * float(table[1]["length"]) + 1000

    one = "--trainings", "1", "--batch-size", "1"
    status, said, _ = call(capsys, monkeypatch, run / "checkpoint.msgpack", *options[:4], *one)
    assert status == 0
    assert (run / "results.csv").read_bytes() == b"".join(data.splitlines(True)[:3])
    assert not re.search("IQM|gap|interval|seeds", said)


@pytest.mark.slow
def test_good_runs_are_evaluated_and_bad_ones_named(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "runs" / "empty").mkdir()
    archive, out = run / "checkpoint_1.msgpack", tmp_path / "results"
    runs = tmp_path / "runs" / "empty", run, tmp_path / "nowhere", archive
    options = "--mazes", "MiniMaze", "--episodes", "2", "--out", out
    status, stdout, errors = call(capsys, monkeypatch, *runs, *options)
    assert status == 2
    assert len(errors) == 2
    assert errors[0].endswith(f"No such file or directory: '{runs[0]}/config.json'")
    assert errors[1].endswith(f"No such file or directory: '{runs[2]}'")
    assert {(row["run"], row["update"]) for row in read(out / "results.csv")} == {
        ("dr", "1"), ("dr", "2")}  # fmt: skip
    assert "dr @1" in stdout
    assert "dr @2" in stdout


def load(path, **settings):
    runs, refused = evaluate.load_runs(evaluate.Arguments(runs=(str(path),), **settings))
    assert not refused
    return runs[0]


@pytest.mark.slow
def test_agents_are_those_of_the_checkpoint(run):
    found = load(run)
    data = dr.read_checkpoint(run / "checkpoint.msgpack")
    assert found.agents == [{"seed": i, "agent": "student"} for i in (0, 1)]
    assert found.update == 2
    kernel = data["state"]["student"]["params"]["params"]["conv"]["kernel"]  # [rows, ...]
    assert np.array_equal(found.params["params"]["conv"]["kernel"], kernel)


@pytest.mark.slow
def test_an_agent_plays_its_average(run):
    data = dr.read_checkpoint(run / "checkpoint.msgpack")
    student = data["state"]["student"]
    student["average_params"] = jax.tree.map(lambda x: 2 * x, student["params"])
    write_checkpoint(run / "checkpoint_7.msgpack", data)
    kernel = student["params"]["params"]["conv"]["kernel"]
    found = load(run / "checkpoint_7.msgpack").params
    assert np.array_equal(found["params"]["conv"]["kernel"], 2 * kernel)


def test_students_of_paired(tmp_path):
    config = dict(rnn="none", teacher_rnn="none", teacher_filters=1, height=5, width=5, n_walls=2)
    init, rng = paired.make_train(paired.Config(**config)).init, np.random.default_rng(0)
    draw = lambda x: rng.normal(size=(2, *x.shape)).astype(x.dtype)  # [rows, S, ...]
    students = jax.tree.map(draw, jax.eval_shape(init, jax.random.key(0)).students)
    config |= {"script": "paired.py", "seed": 4, "sweep": ["lr=0.1,0.2"]}
    data = {"cycles": 3, "rows": [{"seed": 4, "lr": 0.1}, {"seed": 4, "lr": 0.2}],
            "state": {"students": serialization.to_state_dict(students)}}  # fmt: skip

    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        stored = json.dumps(config | {"jax_enable_x64": False})
        write_checkpoint(tmp_path / "checkpoint.msgpack", data | {"config": stored})

    write(config)
    kernel = students.params["params"]["conv"]["kernel"]
    for agent, names in {"protagonist": ["protagonist"], "antagonist": ["antagonist"],
                         "all": ["protagonist", "antagonist"]}.items():  # fmt: skip
        found = load(tmp_path, agent=agent)
        chosen = [name == "antagonist" for name in names]
        expected = np.concatenate([kernel[0, np.int32(chosen)], kernel[1, np.int32(chosen)]])
        assert np.array_equal(found.params["params"]["conv"]["kernel"], expected)
        assert found.agents == [{"seed": seed, "lr": lr, "agent": name}
                                for seed, lr in ((4, 0.1), (4, 0.2)) for name in names]  # fmt: skip
    write(config | {"regret": "population"})
    assert [a["agent"] for a in load(tmp_path, agent="all").agents] == ["0", "1", "0", "1"]
    assert [a["agent"] for a in load(tmp_path, agent="1").agents] == ["1", "1"]


def change_config(run, **changes):
    """Change the settings, as if the run was made so."""
    config = json.loads((run / "config.json").read_text()) | changes
    (run / "config.json").write_text(json.dumps(config))
    data = dr.read_checkpoint(run / "checkpoint.msgpack")
    write_checkpoint(run / "checkpoint.msgpack", data | {"config": json.dumps(config)})


@pytest.mark.slow
def test_a_hacked_copy_needs_script(run, tmp_path, capsys, monkeypatch):
    """No file is executed that only a run's folder names."""
    mine = tmp_path / "my_dr.py"
    mine.write_text((ROOT / "dr.py").read_text() + f"\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    for name in ("my_dr.py", "../my_dr.py", str(mine)):
        change_config(run, script=name)
        status, _, errors = call(capsys, monkeypatch, run)
        assert status == 2
        assert "my_dr.py" in errors[0]
        assert "--script" in errors[0]
        assert not (tmp_path / "ran").exists()
    assert load(run, script=(str(mine),)).algorithm == "my_dr"
    assert (tmp_path / "ran").exists()


def test_levels_of_a_script_without_a_run(tmp_path, capsys, monkeypatch):
    """Those of its environment; one line if that is not installed, or if it is no script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import amaze\n")
    options = "--mazes", "MiniMaze", "--episodes", "1", "--show-levels", "--script"
    assert call(capsys, monkeypatch, *options, "mine.py")[0] == 0
    (tmp_path / "other.py").write_text("import not_installed as amaze\n")
    for name, word in {"other.py": "not_installed", "mine": "must end in .py"}.items():
        status, _, errors = call(capsys, monkeypatch, *options, name)
        assert (status, len(errors)) == (2, 1)
        assert word in errors[0]


@pytest.mark.slow
def test_a_script_that_made_no_run_is_refused(run, tmp_path, capsys, monkeypatch):
    """Otherwise changes in this script would seem to have no effect."""
    for name in ("hot.py", "dr.py"):
        shutil.copy(ROOT / "dr.py", tmp_path / name)
    status, _, errors = call(capsys, monkeypatch, run, "--script", str(tmp_path / "hot.py"))
    assert status == 2
    assert f"script = {tmp_path / 'hot.py'}: must each have made a run" in errors[0]
    args = "--script", str(tmp_path / "dr.py"), "--mazes", "TrivialMaze", "--episodes", "1"
    assert call(capsys, monkeypatch, run, *args)[0] == 0


def test_a_script_that_lacks_a_field_of_the_run(run, capsys, monkeypatch):
    change_config(run, twist=1.0)
    status, _, errors = call(capsys, monkeypatch, run)
    assert (status, len(errors)) == (2, 1)
    assert errors[0].endswith("dr.py has no twist: must be the script that made the run")


def test_each_run_finds_its_own_script(tmp_path):
    """By the name in config.json; a renamed script is found if --script is given once."""
    choose = evaluate.choose_script
    both = one, other = str(tmp_path / "one.py"), str(tmp_path / "other.py")
    for recorded, given, found in (("one.py", both, one), ("other.py", both, other),
            ("dr.py", both, ROOT / "dr.py"), ("plr.py", (), ROOT / "plr.py"),
            ("dr.py", (str(tmp_path / "dr.py"),), tmp_path / "dr.py"),
            ("renamed.py", (one,), one)):  # fmt: skip
        assert choose(recorded, given) == Path(found)
    for recorded, given in (("renamed.py", both), ("renamed.py", ()), ("", ())):
        with pytest.raises(evaluate.BadConfig, match="a script beside evaluate.py or --script"):
            choose(recorded, given)


HACKED = '''
"""The student sees its last action and reward, and nothing else; every step costs 0.001."""
from dataclasses import dataclass
from typing import NamedTuple
import jax
import jax.numpy as jnp
import optax  # as any script would
import amaze
from flax import struct

@dataclass(frozen=True)
class Config:
    bias: float = 0.0
    sweep: tuple = ()

class Student(NamedTuple):
    params: dict

class RunnerState(struct.PyTreeNode):
    student: Student

class Last(NamedTuple):
    maze: amaze.EnvState
    rng: jax.Array

def make_train(config):
    def init(rng):
        return RunnerState(Student({"action": jnp.zeros((8, 7)), "reward": jnp.zeros(7)}))

    def reset(level, max_steps=250, see_through_walls=True):
        state = amaze.reset(level, max_steps, see_through_walls)[1]
        return {"action": jnp.full((), 7), "reward": jnp.zeros(())}, Last(state, jax.random.key(0))

    def step(state, action):
        _, maze, reward, done = amaze.step(state.maze, action)
        reward = reward - 0.001
        return {"action": action, "reward": reward}, Last(maze, state.rng), reward, done

    def act(params, carry, obs, is_first, noise):
        logits = params["action"][obs["action"]] + 1000 * obs["reward"][:, None] * params["reward"]
        return carry, jnp.argmax(logits + noise, axis=-1), None, None

    train = lambda rng: init(rng)
    train.init, train.act, train.reset, train.step = init, act, reset, step
    train.initial_carry = lambda batch: ()
    return train
'''


@pytest.mark.slow
def test_a_hacked_student_sees_what_it_was_trained_on(tmp_path, capsys, monkeypatch):
    mine, run, rng = tmp_path / "my_dr.py", tmp_path / "mine", np.random.default_rng(0)
    mine.write_text(HACKED)
    run.mkdir()
    config = json.dumps({"script": "my_dr.py", "bias": 0.5, "sweep": []})
    (run / "config.json").write_text(config)
    shapes = {"action": (2, 8, 7), "reward": (2, 7)}  # of two seeds
    params = {name: rng.normal(size=x).astype(np.float32) for name, x in shapes.items()}
    data = {"cycles": 1, "rows": [{"seed": 0}, {"seed": 9}], "config": config,
            "state": {"student": {"params": params}}}  # fmt: skip
    write_checkpoint(run / "checkpoint.msgpack", data)
    options = "--mazes", "MiniMaze", "--episodes", "1", "--gif", "MiniMaze", "--script", mine
    status, _, errors = call(capsys, monkeypatch, run, *options)
    assert status == 0, errors

    keys = evaluate.agent_keys(SimpleNamespace(agents=data["rows"]), 0)
    level, step = amaze.TEST_MAZES["MiniMaze"].sample(keys[0]), jax.jit(amaze.step)
    for i, row in enumerate(read(run / "results.csv")):
        state = amaze.reset(level, *amaze.TEST_MAZES["MiniMaze"][1:])[1]
        action, reward, total, done, t = 7, 0.0, 0.0, False, 0
        while not done:
            logits = params["action"][i, action] + 1000 * reward * params["reward"][i]
            noise = evaluate.gumbel(keys[i], evaluate.tag("MiniMaze", 0), t)
            action = int(np.argmax(logits + noise))
            _, state, reward, done = step(state, action)
            reward, t = float(reward) - 0.001, t + 1
            total += reward
        assert int(float(row["length"])) == t
        assert float(row["return"]) == pytest.approx(total, abs=1e-5)
    assert (run / "film_mine_1_MiniMaze.gif").exists()


def flip_a_bit(data):
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGED = {
    "half a checkpoint": lambda data: data[: len(data) // 2],
    "an empty file": lambda data: b"",
    "another file": lambda data: b"\x93\x01\x02\x03",
    "a bit": flip_a_bit,
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_checkpoints(damage, run, capsys, monkeypatch):
    path = run / "checkpoint.msgpack"
    path.write_bytes(DAMAGED[damage](path.read_bytes()))
    status, _, errors = call(capsys, monkeypatch, run)
    assert status == 2
    assert errors == [f"evaluate.py: error: {path} is damaged, or no checkpoint"]


def test_folders_without_files(run, capsys, monkeypatch):
    for name in ("checkpoint.msgpack", "config.json"):
        (run / name).unlink()
        status, _, errors = call(capsys, monkeypatch, run)
        assert (status, len(errors)) == (2, 1)
        assert errors[0].endswith(f"No such file or directory: '{run / name}'")
    (run / "config.json").write_text("[1")
    assert call(capsys, monkeypatch, run)[2] == [
        f"evaluate.py: error: {run / 'config.json'} is damaged"
    ]


def test_other_random_bits_are_refused(capsys, monkeypatch):
    """With rbg, numbers would depend on --batch-size."""
    monkeypatch.setattr(evaluate, "load_runs", None)
    jax.config.update("jax_default_prng_impl", "rbg")
    try:
        status, _, errors = call(capsys, monkeypatch, "x")
    finally:
        jax.config.update("jax_default_prng_impl", "threefry2x32")
    said = "evaluate.py: error: JAX_DEFAULT_PRNG_IMPL = rbg: must be threefry2x32"
    assert (status, errors) == (2, [said])


BAD = {
    "--mazes Labyrinth,Labyrint": "mazes = Labyrint: must be of SixteenRooms",
    "--suite dcdd": "suite = dcdd: must be of minimax, jaxued, dcd",
    "--agent antagonist": "agent = antagonist: must be of all, protagonist, student",
    "--episodes -1": "episodes = -1: must be from 0 to 1e+09",
    "--batch-size -1": "batch_size = -1: must be from 0 to 1e+09",
    "--seed 5000000000": "seed = 5000000000: must be from 0 to 1e+09",
    "--levels 0": "levels = 0: must be from 1 to 1e+09",
    "--mazes MiniMaze --out bad.txt": "File exists: 'bad.txt'",
    "--mazes MiniMaze --gif Labyrinth": "gif = Labyrinth: must be of MiniMaze",
    "--maze-file nowhere.txt": "No such file or directory: 'nowhere.txt'",
    "--maze-file bad.txt": "bad.txt, maze 2: unknown character",
    "--suite sampled --levels 5 --episodes 5": "episodes = 5: must be even for sampled levels",
    "--script nowhere.py": "script = nowhere.py: must each have made a run",
}


@pytest.mark.parametrize("arguments, named", BAD.items())
def test_bad_arguments(arguments, named, run, tmp_path, capsys, monkeypatch):
    (tmp_path / "bad.txt").write_text(f"{EASY}\n\n>?G")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "draw", None)  # refused before any level is drawn
    status, _, errors = call(capsys, monkeypatch, run, *arguments.split())
    assert status == 2, errors
    assert len(errors) == 1, errors
    assert named in errors[0], errors


def test_no_film_where_an_environment_has_no_pictures(run, capsys, monkeypatch):
    monkeypatch.delattr(amaze, "render")
    monkeypatch.setattr(evaluate, "draw", None)  # refused before any level is drawn
    status, _, errors = call(capsys, monkeypatch, run, *"--mazes MiniMaze --gif MiniMaze".split())
    assert (status, len(errors)) == (2, 1)
    assert errors[0].endswith("gif = MiniMaze: must be none, as there is no EnvState or render")


def test_a_run_that_is_not_there_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    status, _, errors = call(capsys, monkeypatch, tmp_path / "nope")
    assert (status, len(errors)) == (2, 1)
    assert errors[0].endswith(f"No such file or directory: '{tmp_path}/nope'")


def test_without_runs(capsys, monkeypatch):
    status, _, errors = call(capsys, monkeypatch)
    assert status == 2
    assert "runs: must be folders of runs" in errors[0]


# --- sweeps


def write_sweep(folder, scores, diverged=(), column="eval_solve_rate"):
    """Write logs.csv of a sweep as a run does; scores {(lr, gamma): one for each seed}."""
    folder.mkdir(exist_ok=True)
    config = {"script": "dr.py", "sweep": ["lr=log:1e-5:1e-3:3", "gamma=0.9,0.99"]}
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "logs.csv", "w", newline="") as file:
        names = ["update", "seed", "lr", "gamma", "policy_loss", "train_solve_rate"]
        names += ["eval_solve_rate"] * (column == "eval_solve_rate")
        log = csv.DictWriter(file, names, restval="")
        log.writeheader()
        for update in (10, 20, 30):
            for (lr, gamma), of_seeds in scores.items():
                for seed, score in enumerate(of_seeds):
                    lost = (lr, gamma, seed) in diverged
                    row = {"update": update, "seed": seed, "lr": lr, "gamma": gamma}
                    loss = {10: "0.1", 20: "inf" if lost else "0.1", 30: ""}[update]
                    row |= {"policy_loss": loss, "train_solve_rate": 0.77}
                    # another score at first, and none at the end but of what has diverged
                    row[column] = {10: 0.3, 20: score, 30: 0.99 if lost else ""}[update]
                    log.writerow(row)


def ranking(out):
    """The lines of the printed table of a sweep: [point, score, note]."""
    lines = out.split("seed(s)\n")[1].splitlines()
    return [re.split(r"  +", line.strip()) for line in lines if line[:2] in ("po", "lr")]


@pytest.mark.parametrize("column", ["eval_solve_rate", "train_solve_rate"])
def test_a_sweep_is_ranked_from_its_logs(column, tmp_path, capsys, monkeypatch):
    scores = {(1e-5, 0.9): [0.5, 0.6, 0.7, 0.6], (1e-5, 0.99): [0.9, 0.8, 0.8, 0.9],
              (1e-3, 0.9): [0.95, 0.95, 0.95, 0.95], (1e-3, 0.99): [0.0, 0.0, 0.0, 0.0],
              (1e-4, 0.9): [0.9, 0.9, 0.9, 0.9]}  # fmt: skip
    diverged = {(1e-3, 0.9, seed) for seed in range(4)} | {(1e-4, 0.9, 1)}
    write_sweep(tmp_path / "sweep", scores, diverged, column)
    _, out, errors = call(capsys, monkeypatch, tmp_path / "sweep")
    assert len(errors) == 1
    assert "checkpoint.msgpack" in errors[0]  # it was not needed till then
    table = ranking(out)
    assert table[0] == ["point", f"last {column}"]
    assert [line[0] for line in table[1:]] == [
        f"lr {lr}, gamma {gamma}" for lr, gamma in (("1e-05", 0.99), ("0.0001", 0.9),
                                ("1e-05", 0.9), ("0.001", 0.99), ("0.001", 0.9))]  # fmt: skip
    assert [line[2:] for line in table[1:]] == [[], ["1 diverged"], [], [], ["4 diverged"]]
    best, one_lost = (re.findall(r"[\d.]+", line[1]) for line in table[1:3])
    assert best[0] == "0.850"
    assert 0.8 <= float(best[1]) < 0.85 < float(best[2]) <= 0.9
    assert one_lost[0] == "0.675"
    assert float(one_lost[1]) < 0.5  # 0.9 with one of four 0
    with Image.open(tmp_path / "sweep" / "sweep.png") as image:
        assert image.width > image.height


def test_a_sweep_of_two_seeds_has_no_intervals(tmp_path, capsys, monkeypatch):
    write_sweep(tmp_path / "sweep", {(1e-5, 0.9): [0.5, 0.6], (1e-4, 0.9): [0.7, 0.8]})
    out = call(capsys, monkeypatch, tmp_path / "sweep", "--out", tmp_path / "results")[1]
    assert [line[1] for line in ranking(out)[1:]] == ["0.750", "0.550"]
    write_sweep(tmp_path / "other", {(1e-5, 0.9): [0.5, 0.6], (1e-4, 0.9): [0.7, 0.8]})
    monkeypatch.chdir(tmp_path)
    call(capsys, monkeypatch, "sweep", "other", "--out", "results")
    pictures = {path.name for path in (tmp_path / "results").iterdir()}
    assert {"sweep_sweep.png", "sweep_other.png"} < pictures


def test_a_sweep_whose_trainings_have_not_all_a_row(tmp_path, capsys, monkeypatch):
    """As while the first block of rows is being written."""
    write_sweep(tmp_path / "sweep", {(1e-5, 0.9): [0.5, 0.6], (1e-4, 0.9): [0.7]})
    status, _, errors = call(capsys, monkeypatch, tmp_path / "sweep", "--mazes", "MiniMaze")
    assert (status, len(errors)) == (2, 1)
    assert "logs.csv has no row yet of some trainings" in errors[0]


def test_a_sweeps_best_point_is_shown_and_others_on_request(tmp_path, capsys, monkeypatch):
    """All are played, and stand in results.csv; names are ordered as in --sweep, not by letters."""
    config = dr.Config(**TINY | {"sweep": ("lr=1e-5,1e-4", "gamma=0.9")})
    state = jax.vmap(dr.make_train(config).init)(jax.vmap(jax.random.key)(np.arange(4)))
    evaluate.save(tmp_path / "sweep", config, state.replace(cycles=np.ones(4, int)))
    write_sweep(tmp_path / "sweep", {(1e-5, 0.9): [0.5, 0.6], (1e-4, 0.9): [0.7, 0.8]})
    monkeypatch.setattr(evaluate, "play", lambda *args: np.ones((2, 4, 1, 2)))
    labels = [f"sweep @1, lr {lr}, gamma 0.9" for lr in (0.0001, "1e-05")]
    out = tmp_path / "results"
    options = tmp_path / "sweep", "--mazes", "MiniMaze", "--episodes", "2", "--out", out
    with open(tmp_path / "sweep" / "logs.csv", "a") as log:
        log.write("20,1,1e-05,0.9,0.")  # a line that is being written
    for number, more in {1: (), 2: ("--points", "0")}.items():
        status, said, _ = call(capsys, monkeypatch, *options, *more)
        assert status == 0
        assert re.findall(r"(?m)^(.*): 2 seed\(s\), 2 episodes", said) == labels[:number]
        assert [x[:7] for x in said.splitlines()[-5:-2]] == ["solve r", "sweep @", "sweep @"]
        assert len(read(out / "results.csv")) == 4
        assert [*read(out / "results.csv")[0]][3:6] == ["seed", "lr", "gamma"]


def test_a_point_has_all_its_agents(tmp_path, capsys, monkeypatch):
    write_sweep(tmp_path / "sweep", {(1e-5, 0.9): [0.5, 0.6], (1e-4, 0.9): [0.7, 0.8]})
    both = "protagonist", "antagonist"
    points = [{"lr": lr, "gamma": 0.9} for lr in (1e-5, 1e-4)]
    agents = [{"seed": s} | x | {"agent": name} for x in points for s in (0, 1) for name in both]
    run = evaluate.Run("sweep", tmp_path / "sweep", "paired", 1, agents, {}, SimpleNamespace())
    monkeypatch.setattr(evaluate, "load", lambda *args: run)
    monkeypatch.setattr(evaluate, "play", lambda *args: np.ones((2, 8, 1, 2)))
    options = "--mazes", "MiniMaze", "--episodes", "2", "--agent", "all", "--out", tmp_path / "out"
    for points, number in {1: 2, 2: 4, 0: 4}.items():
        said = call(capsys, monkeypatch, tmp_path / "sweep", *options, "--points", str(points))[1]
        labels = re.findall(r"(?m)^sweep @1(.*): 2 seed\(s\), 2 episodes", said)
        assert len(labels) == number
        assert all("lr 0.0001" in label for label in labels[:2])


# --- devices, help, requirements


@pytest.mark.slow
def test_every_core_is_a_device_unless_the_user_says_otherwise():
    code = """
import sys, jax, evaluate
sys.argv = ["evaluate.py"]
try:
    evaluate.main()
except SystemExit:
    print(len(jax.devices("cpu")))
"""
    cores = len(os.sched_getaffinity(0))
    flag = f"--xla_force_host_platform_device_count={cores + 2}"
    for environment, number in ({}, cores), ({"XLA_FLAGS": flag}, cores + 2):
        clean = {"JAX_NUM_CPU_DEVICES": None, "XLA_FLAGS": ""} | environment
        assert int(execute("-c", code, **clean)) == number


def test_help(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--help"])
    with pytest.raises(SystemExit):
        evaluate.main()
    out = capsys.readouterr().out
    for words in (
        "python evaluate.py runs/dr runs/plr --play",
        "W lanes take the first W",
        "--points",
    ):
        assert words in out


def test_every_script_is_known():
    """A copy beside them may have any name."""
    assert {f"{name}.py" for name in FILES} == set(evaluate.SCRIPTS)
