"""evaluate.py against MiniGrid, breadth-first search, scipy, and checkpoints that lie."""

import csv
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import deque
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import serialization
from minigrid.core.grid import Grid
from minigrid.core.mission import MissionSpace
from minigrid.core.world_object import Goal, Wall
from minigrid.minigrid_env import MiniGridEnv
from PIL import Image

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


def execute(script, *arguments):
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def call(capsys, monkeypatch, *arguments):
    """evaluate.py's command line in this process: (exit status, stdout, errors)."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        evaluate.main()
    out, err = capsys.readouterr()
    return stop.value.code, out, [line for line in err.splitlines() if "error" in line]


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder of two seeds, trained for two updates."""
    folder = tmp_path_factory.mktemp("runs") / "dr"
    execute("dr.py", "--out", str(folder), *flags(TINY))
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "dr"))


# --- play


@cache
def some_mazes(episodes):
    """Open and occluded mazes of several sizes and time limits, one of them from text."""
    easy, dark = (jax.tree.map(lambda x: x[None], amaze.level_from_text(x)) for x in (EASY, DARK))
    names = "FourRooms,MiniMaze,TrivialMaze"
    mazes, _ = evaluate.choose_mazes(evaluate.Arguments(mazes=names, episodes=episodes, seed=3))
    return [evaluate.Maze("easy", easy, 30), evaluate.Maze("dark", dark, 60, False), *mazes]


@cache
def random_agents():
    """Four agents that differ and tell apart what they see: act, initial_carry, params, keys."""
    train = dr.make_train(dr.Config(**TINY))
    shapes = jax.eval_shape(train.init, jax.random.key(0)).student.params
    rng = np.random.default_rng(5)
    draw = lambda x: jnp.asarray(0.2 * rng.normal(size=(4, *x.shape)), x.dtype)
    params = jax.tree.map(draw, shapes)
    keys = evaluate.agent_keys(SimpleNamespace(agents=[{"seed": i} for i in range(4)]), 3)
    return train.act, train.initial_carry, params, keys


@cache
def played(batch_size, only=""):
    """returns, lengths [agents, mazes, 4 episodes]."""
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


def test_results_equal_a_loop_over_minigrid():
    act, initial_carry, params, keys = random_agents()
    returns, lengths = played(0)

    @jax.jit
    def choose(a, tag, t, memory, image, direction):
        of = jax.tree.map(lambda x: x[a], params)
        obs = amaze.Observation(image[None], direction[None])
        noise = evaluate.gumbel(keys[a], tag, t)[None]
        memory, action = act(of, memory, obs, (t == 0)[None], noise)[:2]
        return memory, action[0]

    for m, maze in enumerate(some_mazes(4)):
        for a, episode in np.ndindex(4, 4):
            i = episode % len(maze.levels.agent_dir)
            env = Copy(jax.tree.map(lambda x: np.asarray(x)[i], maze.levels), *maze[2:])
            seen, memory, total, done = env.reset()[0], initial_carry(1), 0.0, False
            tag = evaluate.tag(maze.name, episode)
            while not done:
                view = np.uint8(seen["image"]), np.int32(seen["direction"])
                memory, action = choose(a, tag, np.int32(env.step_count), memory, *view)
                seen, reward, terminated, truncated, _ = env.step(int(action))
                total, done = total + reward, terminated or truncated
            assert lengths[a, m, episode] == env.step_count
            assert returns[a, m, episode] == pytest.approx(total, abs=1e-6)
    solved = (returns > 0).mean((0, 2))
    assert (solved[:3] > 0).all() and (solved < 1).all()  # else little was compared


def test_batch_size_does_not_matter():
    for whole, small in zip(played(0), played(2)):  # 2: one lane for each of two agents
        assert np.array_equal(whole, small)


def test_padding_and_other_mazes_do_not_matter():
    m = [maze.name for maze in some_mazes(4)].index("TrivialMaze")
    for together, alone in zip(played(0), played(0, "TrivialMaze")):
        assert np.array_equal(together[:, m], alone[:, 0])


def fewest_actions(level, max_steps):
    """Actions of a fastest way to the goal, by breadth-first search over (x, y, direction)."""
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


def test_oracle_gets_the_optimal_return_and_idler_nothing():
    names = [name for name in amaze.TEST_MAZES if name[-5:] not in ("Large", "azeXL")]
    mazes, _ = evaluate.choose_mazes(evaluate.Arguments(mazes=",".join(names), episodes=1))
    levels = [jax.tree.map(lambda x: x[0], maze.levels) for maze in mazes]
    longest = max(maze.max_steps for maze in mazes)
    plans = [fewest_actions(level, longest) for level in levels] + [[6] * longest]

    def act(plan, carry, obs, is_first, noise):
        t = jnp.where(is_first, 0, carry)
        return t + 1, plan[t]

    start = lambda batch: jnp.zeros(batch, int)
    agents = act, start, jnp.array(plans), jax.random.split(jax.random.key(0), len(plans))
    returns, lengths = evaluate.play(*agents, mazes, 1)
    m = np.arange(len(mazes))
    assert (returns[m, m, 0] > 0).all()
    assert np.allclose(returns[m, m, 0], evaluate.optimal_returns(mazes), atol=1e-6)
    assert (lengths[m, m, 0] == [plan.index(6) for plan in plans[:-1]]).all()
    assert (returns[-1] == 0).all()
    assert (lengths[-1, :, 0] == [maze.max_steps for maze in mazes]).all()


# --- mazes


def test_levels_are_drawn_by_seed_name_and_episode():
    mazes = evaluate.draw(["FourRooms", "Labyrinth"], 3, 0)
    alone, other = (evaluate.draw(["FourRooms"], 3, seed)["FourRooms"] for seed in (0, 1))
    row = lambda levels, i: amaze.level_to_text(jax.tree.map(lambda x: x[i], levels))
    drawn = mazes["FourRooms"], alone, other
    texts, same, different = ([row(x, i) for i in range(3)] for x in drawn)
    assert texts == same and len(set(texts + different)) == 6
    assert len(mazes["Labyrinth"].agent_dir) == 1


def test_sampled_levels_are_solvable_and_differ():
    mazes, sampled = evaluate.choose_mazes(evaluate.Arguments(suite="sampled", levels=20))
    assert sampled and len(mazes) == 20 and mazes[3].name == "Sampled-3"
    assert (evaluate.optimal_returns(mazes) > 0).all()
    assert len({maze.levels.wall_map.tobytes() for maze in mazes}) == 20


def test_maze_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(f"\n{EASY}\n\n \n>.#.\n..#G\n")
    mazes, _ = evaluate.choose_mazes(evaluate.Arguments(maze_file=str(path), max_steps=9))
    assert [(maze.name, *maze.levels.wall_map.shape) for maze in mazes] == [
        ("mine-1", 1, 3, 3), ("mine-2", 1, 2, 4)]  # fmt: skip
    assert evaluate.optimal_returns(mazes) == pytest.approx([1 - 0.9 * 5 / 9, 0])


# --- statistics


def test_aggregates_by_hand_and_by_scipy():
    rng = np.random.default_rng(0)
    for shape in ((1, 3), (8, 12), (5, 7), (3, 1)):
        scores = rng.random(shape)
        assert evaluate.iqm(scores) == pytest.approx(scipy.stats.trim_mean(scores, 0.25, axis=None))
    scores = np.array([[0.0, 0.5, 1.0, 0.9], [0.2, 0.7, 1.0, 0.1]])
    found = {name: f(scores) for name, f in evaluate.AGGREGATES.items()}
    by_hand = {"mean": 0.55, "median": 0.55, "IQM": 0.575, "optimality gap": 0.45}
    assert found == pytest.approx(by_hand)  # of the mazes' means .1 .6 1 .5, and of .2 .5 .7 .9


def test_intervals_equal_scipys():
    scores = np.random.default_rng(1).random((6, 3)) ** [1, 2, 3]
    for statistic in evaluate.AGGREGATES.values():
        of = lambda *mazes: statistic(np.stack(mazes, axis=1))
        interval = scipy.stats.bootstrap(scores.T, of, n_resamples=2000, vectorized=False,
                                         method="percentile", random_state=0).confidence_interval
        value, low, high = evaluate.bootstrap(scores, lambda x: np.array([statistic(x)]), 0)[0]
        assert value == statistic(scores)
        assert (low, high) == pytest.approx(tuple(interval), abs=0.02)
        assert high - low > 0.1


def test_worst_levels_are_each_seeds_own():
    scores = np.ones((2, 1000))
    scores[0, :50], scores[1, 500:505] = 0.0, 0.4
    assert evaluate.worst(scores) == pytest.approx(np.array([[0.5, 0, 0], [0.97, 0.7, 0.4]]))
    summary = evaluate.summarise(scores, [str(i) for i in range(1000)], 0, True)
    assert [*summary] == [*evaluate.AGGREGATES, *evaluate.WORST]
    assert summary["worst 0.1%"] == pytest.approx([0.2, 0, 0.4])


def test_csv_round_trips_and_groups_by_swept_value():
    rng = np.random.default_rng(0)
    agents = [{"seed": s, "lr": lr, "agent": "student"} for lr in (1e-4, 0.3) for s in (0, 1)]
    run = SimpleNamespace(name="dr", algorithm="dr", update=7, agents=agents)
    returns = np.maximum(rng.random((4, 2, 3)) - 0.5, 0)
    mazes = [SimpleNamespace(name=name) for name in "AB"]
    table = list(evaluate.tabulate(run, mazes, [0.9, 0.8], returns, rng.integers(1, 9, (4, 2, 3))))
    table.append(table[0] | {"run": "plr", "agent": "antagonist"})
    del table[-1]["lr"]
    lines = list(csv.DictReader(evaluate.to_csv(table).decode().splitlines()))
    assert lines[-1].pop("lr") == ""
    types = [{k: type(x) for k, x in row.items()} for row in table]
    assert [{k: t[k](x) for k, x in line.items()} for t, line in zip(types, lines)] == table
    assert table[3]["solve_rate"] == pytest.approx((returns[1, 1] > 0).mean(), abs=1e-6)
    sizes = {label: len(rows) for label, rows in evaluate.group_seeds(table).items()}
    assert sizes == {"dr, lr 0.0001": 4, "dr, lr 0.3": 4, "plr, antagonist": 1}
    table[-1] |= {"run": "dr", "update": 9, "agent": "student"}
    assert "dr @9" in evaluate.group_seeds(table)


# --- the command


def test_a_run_from_end_to_end(run, capsys, monkeypatch):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    options = "--mazes", "FourRooms,MiniMaze", "--episodes", "1", "--gif", "MiniMaze"
    first = execute("evaluate.py", str(run), *options, "--show-levels")
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
    assert "written" in first.stdout and "IQM" in first.stdout and "2 seed(s)" in first.stdout
    with Image.open(run / "film_dr_2_MiniMaze.gif") as gif:  # equal pictures in a row are merged
        durations = [gif.seek(i) or gif.info["duration"] for i in range(gif.n_frames)]
    assert sum(durations) == 100 * float(table[1]["length"]) + 1000

    status, again, _ = call(capsys, monkeypatch, run / "checkpoint.msgpack", *options[:4])
    assert status == 0 and (run / "results.csv").read_bytes() == data
    assert "results.csv replaced" in again


def test_good_runs_are_evaluated_and_bad_ones_named(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "runs" / "empty").mkdir()
    archive, out = run / "checkpoint_1.msgpack", tmp_path / "results"
    runs = tmp_path / "runs" / "empty", run, tmp_path / "nowhere", archive
    options = "--mazes", "MiniMaze", "--episodes", "2", "--out", out
    status, stdout, errors = call(capsys, monkeypatch, *runs, *options)
    assert status == 2 and len(errors) == 2
    assert str(runs[0]) in errors[0] and "allowed" in errors[0] and str(runs[2]) in errors[1]
    assert {(row["run"], row["update"]) for row in read(out / "results.csv")} == {
        ("dr", "1"), ("dr", "2")}  # fmt: skip
    assert "dr @1" in stdout and "dr @2" in stdout


def load(path, **settings):
    runs, refused = evaluate.load_runs(evaluate.Arguments(runs=(str(path),), **settings))
    assert not refused
    return runs[0]


def test_agents_are_those_of_the_checkpoint(run):
    found = load(run)
    data = serialization.msgpack_restore((run / "checkpoint.msgpack").read_bytes())
    assert found.agents == [{"seed": i, "agent": "student"} for i in (0, 1)] and found.update == 2
    kernel = data["state"]["student"]["params"]["params"]["conv"]["kernel"]  # [shards, rows, ...]
    assert np.array_equal(found.params["params"]["conv"]["kernel"], kernel[0])


def test_students_of_paired(tmp_path):
    config = dict(rnn="none", teacher_rnn="none", teacher_filters=1, height=5, width=5, n_walls=2)
    init, rng = paired.make_train(paired.Config(**config)).init, np.random.default_rng(0)
    draw = lambda x: rng.normal(size=(1, 2, *x.shape)).astype(x.dtype)  # [shards, rows, S, ...]
    students = jax.tree.map(draw, jax.eval_shape(init, jax.random.key(0)).students)
    data = {"step": 3, "rows": {"0": {"seed": 4, "lr": 0.1}, "1": {"seed": 5, "lr": 0.2}},
            "state": {"students": serialization.to_state_dict(students)}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"script": "paired.py"} | config))
    (tmp_path / "checkpoint.msgpack").write_bytes(serialization.msgpack_serialize(data))
    kernel = students.params["params"]["conv"]["kernel"][0]
    for agent, names in {"protagonist": ["protagonist"], "antagonist": ["antagonist"],
                         "all": ["protagonist", "antagonist"]}.items():  # fmt: skip
        found = load(tmp_path, agent=agent)
        chosen = [name == "antagonist" for name in names]
        expected = np.concatenate([kernel[0, np.int32(chosen)], kernel[1, np.int32(chosen)]])
        assert np.array_equal(found.params["params"]["conv"]["kernel"], expected)
        assert found.agents == [{"seed": seed, "lr": lr, "agent": name}
                                for seed, lr in ((4, 0.1), (5, 0.2)) for name in names]  # fmt: skip
    config |= {"regret": "population"}
    (tmp_path / "config.json").write_text(json.dumps({"script": "paired.py"} | config))
    assert [a["agent"] for a in load(tmp_path, agent="all").agents] == ["0", "1", "0", "1"]
    assert [a["agent"] for a in load(tmp_path, agent="1").agents] == ["1", "1"]


def change_config(run, **changes):
    config = json.loads((run / "config.json").read_text()) | changes
    (run / "config.json").write_text(json.dumps(config))


def test_a_hacked_copy_needs_script(run, tmp_path, capsys, monkeypatch):
    mine = tmp_path / "my_dr.py"
    mine.write_text((ROOT / "dr.py").read_text() + f"\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    change_config(run, script="my_dr.py")
    status, _, errors = call(capsys, monkeypatch, run)
    assert status == 2 and "my_dr.py" in errors[0] and "--script" in errors[0]
    assert not (tmp_path / "ran").exists()
    assert load(run, script=str(mine)).algorithm == "my_dr"
    assert (tmp_path / "ran").exists()


class Payload:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def evil_script(name):
    def lie(run, mark):
        (run / "evil.py").write_text(f"import os; os.mkdir({str(mark)!r})")
        (run.parent / "evil.py").write_text(f"import os; os.mkdir({str(mark)!r})")
        change_config(run, script=name.format(run=run))
        os.chdir(run)
    return lie


def false_dr(run, mark):
    """A dr.py and an amaze.py in the run's folder, which is also the present one."""
    for name in ("dr.py", "amaze.py", "s5.py"):
        (run / name).write_text(f"import os; os.mkdir({str(mark)!r})")
    change_config(run, hidden_size=9)
    os.chdir(run)


def edit(change):
    """A lie told by the checkpoint: bytes -> bytes."""
    def lie(run, mark):
        path = run / "checkpoint.msgpack"
        path.write_bytes(change(path.read_bytes(), mark))
    return lie


def edit_state(change):
    def bytes_to_bytes(data, mark):
        data = serialization.msgpack_restore(data)
        change(data["state"]["student"])
        return serialization.msgpack_serialize(data)
    return edit(bytes_to_bytes)


def forget_kernel(student):
    del student["params"]["params"]["conv"]["kernel"]


def fewer_rows(student):
    conv = student["params"]["params"]["conv"]
    conv["bias"] = conv["bias"][:, :1]


LIES = {
    "script in the parent folder": (evil_script("../evil.py"), "../evil.py"),
    "script in the run's folder": (evil_script("evil.py"), "evil.py"),
    "script by its whole path": (evil_script("{run}/evil.py"), "evil.py"),
    "a false dr.py": (false_dr, "not of config.json"),
    "a pickle": (edit(lambda data, mark: pickle.dumps(Payload(mark))), "truncated"),
    "half a checkpoint": (edit(lambda data, mark: data[: len(data) // 2]), "truncated"),
    "an empty file": (edit(lambda data, mark: b""), "truncated"),
    "another file": (edit(lambda data, mark: b"\x93\x01\x02\x03"), "truncated"),
    "a missing parameter": (edit_state(forget_kernel), "other parts"),
    "too few rows": (edit_state(fewer_rows), "conv/bias"),
    "another network": (lambda run, mark: change_config(run, hidden_size=16), "kernel"),
    "another core": (lambda run, mark: change_config(run, rnn="lstm"), "not of config.json"),
    "an unknown setting": (lambda run, mark: change_config(run, humour=1), "humour"),
    "a bad value": (lambda run, mark: change_config(run, rnn="transformer"), "lstm | gru"),
    "a wrong type": (lambda run, mark: change_config(run, hidden_size="8"), "hidden_size"),
    "no config": (lambda run, mark: (run / "config.json").unlink(), "config.json"),
    "config of no sense": (lambda run, mark: (run / "config.json").write_text("[1"), "config.json"),
    "no checkpoint": (lambda run, mark: (run / "checkpoint.msgpack").unlink(), "allowed"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_and_nothing_is_executed(lie, run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tell, named = LIES[lie]
    tell(run, tmp_path / "executed")
    status, _, errors = call(capsys, monkeypatch, run, "--mazes", "MiniMaze", "--episodes", "1")
    assert status == 2 and len(errors) == 1, errors
    assert str(run) in errors[0] and named in errors[0]
    assert not (tmp_path / "executed").exists()
    assert not (run / "results.csv").exists()


@pytest.mark.parametrize("arguments, named", {
    "--mazes Labyrinth,Labyrint": "Labyrint'",
    "--agent antagonist": "protagonist",
    "--episodes 0": "at least 1",
    "--batch-size -1": "at least 0",
    "--mazes MiniMaze --gif Labyrinth": "MiniMaze",
    "--maze-file nowhere.txt": "nowhere.txt",
    "--maze-file bad.txt": "maze 2: unknown character",
    "--script nowhere.py": "",
}.items())  # fmt: skip
def test_bad_arguments(arguments, named, run, tmp_path, capsys, monkeypatch):
    (tmp_path / "bad.txt").write_text(f"{EASY}\n\n>?G")
    monkeypatch.chdir(tmp_path)
    if "script" in arguments:
        change_config(run, script="nowhere.py")
    status, _, errors = call(capsys, monkeypatch, run, *arguments.split())
    assert status == 2 and len(errors) == 1 and named in errors[0], errors


def test_without_runs(capsys, monkeypatch):
    status, _, errors = call(capsys, monkeypatch)
    assert status == 2 and "no runs" in errors[0]
