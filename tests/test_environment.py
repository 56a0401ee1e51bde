"""Another environment in place of amaze. A copy of a script changes the import, the two functions
that read the levels' fields, what FAST says of these fields, and the network's first lines."""

import csv
import importlib.util
import re
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from PIL import Image
from parts import traced
from runs import ROOT, SHORT, assert_equal, copy, load, rewind, table

sys.path.insert(0, str(ROOT))
import amaze
import evaluate
import line
import plr

CHANGES = {
    "import amaze\n": "import line as amaze\n",
    "    room = config.height * config.width - 2  # agent and goal need a cell each\n": "",
    "    demand(config.n_walls <= room, config, "
    '"n_walls height width", f"at most {room} walls")\n': "",
    "    height: int = 13  # cells of a level, without the outer wall\n": "",
    "    width: int = 13  # cells of a level, without the outer wall\n": "",
    "    see_through_walls: bool = True": "    steepness: float = 0.05",
    "max_steps=config.max_steps, see_through_walls=config.see_through_walls):":
        "max_steps=config.max_steps):",
    "amaze.reset(level, max_steps, see_through_walls)": "amaze.reset(level, max_steps)",
    "amaze.sample_level(rng, config.n_walls, config.height, config.width)":
        "amaze.sample_level(rng, config.steepness)",
    "        direction = Embed(4, 5, embedding_init=orthogonal(1.0))(obs.direction)\n": "",
    "jnp.concatenate([convolution(obs.image, 16), direction], axis=-1)  # [T, B, 149]":
        "nn.tanh(nn.Dense(16)(obs.place))",
}  # fmt: skip
FLAGS = """--max-steps 12 --num-envs 8 --num-steps 24 --rnn none --hidden-size 16 --update-epochs 2
    --lr 1e-2 --eval-suite Left,Any --eval-episodes 4 --eval-interval 4 --log-interval 2
    --num-updates 12 --checkpoint-interval 4 --archive-interval 4 --devices 1""".split()
REPLAY = "--buffer-size 16 --min-fill 0.5".split()
MORE = {"dr": [], "plr": REPLAY, "accel": [*REPLAY, "--num-edits", "2"],
        "sfl": "--num-candidates 20 --candidates-at-once 10 --candidate-evals 2 --buffer-size 8 "
               "--score-interval 4".split()}  # fmt: skip


def line_script(folder, name, changes=()):
    """A copy of a script for the environment `line`, which is copied beside it."""
    shutil.copy(ROOT / "tests/line.py", folder)
    text = (ROOT / f"{name}.py").read_text()
    walls = re.findall(r" {4}n_walls: .*\n|n_walls=\d+, ", text)  # the field; of FAST
    changes = {**dict.fromkeys(walls, ""), **CHANGES, **dict(changes)}
    return copy(folder, f"line_{name}", changes, f"{name}.py")


def module_of(path):
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(tmp, train):
    """The folder and the script of a run of plr.py."""
    script = line_script(tmp, "plr")
    train(*FLAGS, *REPLAY, "--out", tmp / "plr", script=script)
    return tmp / "plr", script


@pytest.mark.parametrize("name", ["dr", "accel", "sfl"])
def test_a_cycle(tmp, name):
    copy = module_of(line_script(tmp, name))
    _, metrics, shown = traced(copy.make_train(copy.parse([*FLAGS, *MORE[name]])))
    of_levels = {"dr": "distance", "accel": "child_slope", "sfl": "replay_distance"}
    assert {of_levels[name], "train_return", "eval_return/Left"} < metrics.keys()
    assert not {x for x in metrics if "solvable" in x or "optimal" in x or "regret" in x}
    assert shown


def test_a_training(trained):
    folder, _ = trained
    rows = table(folder)
    assert [int(row["update"]) for row in rows] == [2, 4, 6, 8, 10, 12]
    columns, measured = {*rows[0]}, lambda name: [float(x[name]) for x in rows if x[name]]
    assert not {x for x in columns if "solvable" in x or "optimal" in x or "regret" in x}
    for column in measured("train_return"), measured("eval_return/Left"):
        assert max(column) < 0
        assert len({*column}) > 2
    for rates in measured("train_solve_rate"), measured("eval_solve_rate/Any"):
        assert 0 <= min(rates) < max(rates) <= 1
    assert len({*measured("buffer_distance")}) > 1
    assert (folder / "levels/update_12.png").exists()
    assert (folder / "curves.png").exists()
    buffer = load(folder)["state"]["buffer"]
    best = np.asarray(buffer["max_return"])[np.asarray(buffer["scored"])]
    assert best.size > 8
    assert best.max() < 0
    assert np.isfinite(best).all()


def test_a_run_goes_on_bit_for_bit(tmp, trained, train):
    folder, script = trained
    train("--resume", "--out", rewind(folder, tmp / "again", 8), script=script)
    assert_equal(folder, tmp / "again")


def test_evaluate(trained, call):
    """The environment decides what the tables count as solved; they have no optimal return."""
    folder, script = trained
    more = "--episodes", 1, "--gif", "Left"
    status, out, err = call(folder, "--script", script, *more, script=ROOT / "evaluate.py")
    assert status == 0, err
    with open(folder / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["maze"] for row in rows] == ["Left", "Right"]
    assert {row["optimal_return"] for row in rows} == {""}
    assert "nan" not in out
    assert all(-30 < float(row["return"]) < 0 for row in rows)
    film = Image.open(folder / "film_plr_12_Left.gif")
    assert 2 < film.n_frames <= 1 + float(rows[0]["length"])  # two that are equal are one


@pytest.mark.slow
def test_evaluate_samples_levels_and_refuses_what_is_not_there(trained, call):
    folder, script = trained
    ask = lambda *args: call(folder, "--script", script, *args, script=ROOT / "evaluate.py")
    status, out, err = ask("--suite", "sampled", "--levels", 12, "--episodes", 4)
    assert status == 0, err
    assert "over 12 maze(s)" in out, err
    assert "worst 10%" in out, err
    for args, allowed in {("--suite", "minimax"): "must be of two, sampled",
                          ("--mazes", "Labyrinth"): "must be of Left, Right, Any",
                          ("--maze-file", script): "must be none"}.items():  # fmt: skip
        status, _, err = ask(*args)
        assert status == 2, err
        assert allowed in err, err
        assert len(err.splitlines()) == 1, err


def test_returns_equal_a_plain_loop():
    """evaluate.py's play on the wrapped environment, with an agent that always goes right."""
    act = lambda params, memory, obs, *_: (memory, jnp.full(len(obs.place), 2))
    agent = dict(act=act, initial_carry=lambda batch: (), reset=line.reset, step=line.step)
    names, _, _ = evaluate.choose_mazes(evaluate.Arguments(), line)
    mazes = evaluate.draw_mazes(names, evaluate.Arguments(episodes=2), False, line)
    rngs = jax.random.split(jax.random.key(0), 1)
    agent = SimpleNamespace(**agent)
    returns, lengths = evaluate.play(agent, jnp.zeros(1), rngs, mazes, 2, env=line)
    for m, (goal, slope, limit) in enumerate(((-0.6, 0.03, 20), (0.55, 0.0, 30))):
        position = total = t = 0
        while t < limit and not (t and abs(position - goal) < 0.1):
            position, t = position + 0.1 + slope, t + 1
            total -= abs(position - goal)
        assert np.allclose(returns[0, m], total, atol=1e-4)
        assert (lengths[0, m] == t).all()
    assert lengths[0, 0, 0] == 20
    assert lengths[0, 1, 0] < 8


def test_tables_count_what_the_environment_calls_solved():
    """The returns are -1 and -5; the environment calls an episode above -2.5 solved."""
    run = SimpleNamespace(name="a", algorithm="a", update=1, agents=[{"seed": 0}], env=line)
    returns, lengths = np.array([[[-1.0, -5, -1, -1]]]), np.ones((1, 1, 4))
    [row] = evaluate.tabulate(run, [SimpleNamespace(name="x")], [np.nan], returns, lengths)
    assert row["solve_rate"] == 0.75
    assert row["return"] == -2
    assert row["optimal_return"] == ""
    assert evaluate.summarise(returns, ["x"], 0, False, line)["mean"][0] == 0.75


def test_a_queue_goes_on_with_its_next_level():
    queue = line.Level(jnp.array([0.5, -0.5, 0.25]), jnp.zeros(3))
    obs, state = line.reset(queue, 40)
    opened, move = [obs.place[0].item()], jax.jit(line.step_and_reset)
    for _ in range(30):
        obs, state, _, done = move(state, 1 + jnp.sign(obs.place[0]).astype(int))
        opened += [obs.place[0].item()] if done else []
    assert np.allclose(opened, ([0.5, -0.5, 0.25] * 9)[: len(opened)])
    assert len(opened) > 4
    one = line.reset(jax.tree.map(lambda x: x[1], queue), 40)[0]
    assert one.place[0] == -0.5


def test_r_max_of_negative_returns():
    """A return of -4 with values of -3 scores -1, not 3; no ended episode means no R_max."""
    done = np.array([[False, False], [True, False]])
    reward = np.array([[-1.0, -1], [-3, -1]], np.float32)
    batch = plr.Transition(None, None, None, None, np.full((2, 2), -3, np.float32), reward, done)
    none, zero = np.full(2, -np.inf, np.float32), np.zeros((2, 2), np.float32)
    count, r_max, _, scores = plr.level_outcomes(batch, zero, none, {}, np.eye(2) > 0, np.nan)
    assert count.tolist() == [1, 0]
    assert r_max.tolist() == [-4, -np.inf]
    assert scores["max_mc"][0] == -1


def test_without_an_optimal_return_there_is_no_oracle(tmp, trained, call):
    _, script = trained
    out = tmp / "oracle"
    status, _, err = call(*FLAGS, *REPLAY, "--score", "oracle_regret", "--out", out, script=script)
    assert status == 2
    assert "score = 'oracle_regret': must be another" in err
    assert not out.exists()
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_an_import_that_starts_jax(tmp, launch, call):
    """The devices that JAX has started with are used."""
    (tmp / "early").mkdir()
    script = line_script(tmp / "early", "dr")
    with open(tmp / "early/line.py", "a") as file:
        file.write("STARTED = jnp.zeros(3)\n")
    arguments = [x for x in FLAGS if x not in ("--devices", "1")]
    status, out, err = call(*arguments, "--out", tmp / "early/run", script=script, devices=None)
    assert status == 0, err
    assert "on 1 x cpu" in out


def test_runs_of_two_environments_are_refused(tmp, trained, train, call):
    folder, script = trained
    train(*SHORT, "--devices", 1, "--out", tmp / "maze")
    status, _, err = call(folder, tmp / "maze", "--script", script, script=ROOT / "evaluate.py")
    assert status == 2
    assert "different environments" in err
    assert len(err.splitlines()) == 1


def test_weight_decay_gets_the_parameters(tmp):
    """A copy whose optimiser needs the parameters."""
    decay = {"optax.adam(lr, eps=1e-5)": "optax.adamw(lr, weight_decay=0.1)"}
    module = module_of(line_script(tmp, "dr", decay))
    small = dict(num_envs=4, num_steps=8, max_steps=8, rnn="none", hidden_size=4, num_updates=1)
    jax.eval_shape(module.make_train(module.Config(**small)), jax.random.key(0))


@struct.dataclass
class Slope:
    """A level as a dataclass, as in JaxUED."""

    numbers: jax.Array  # [2] goal, slope


LEVELS = {  # kind of level: from line's level, and back
    "dataclass": (lambda level: Slope(jnp.stack(level)), lambda level: line.Level(*level.numbers)),
    "dict": (lambda level: level._asdict(), lambda level: line.Level(**level)),
}  # fmt: skip


def packed(kind):
    """The environment `line` with another kind of levels, and an agent that goes right."""
    pack, unpack = LEVELS[kind]
    env = SimpleNamespace(**vars(line))
    env.TEST_MAZES = {}
    for name, (sample, limit) in line.TEST_MAZES.items():
        asarrays = lambda rng, sample=sample: pack(jax.tree.map(jnp.float32, sample(rng)))
        env.TEST_MAZES[name] = asarrays, limit
    env.reset_one = lambda level, max_steps: line.reset_one(unpack(level), max_steps)
    ndim = 1 if kind == "dataclass" else 0
    env.reset, env.step, _ = amaze.over_queues(env.reset_one, line.step_one, ndim=ndim)
    env.level_stats = lambda level, max_steps: line.level_stats(unpack(level), max_steps)
    draw = lambda x: line.render(x if isinstance(x, line.EnvState) else unpack(x))
    env.render, env.plot_levels = draw, partial(amaze.plot_levels, render=draw)
    act = lambda params, memory, obs, *_: (memory, jnp.full(len(obs.place), 2))
    agent = dict(act=act, initial_carry=lambda batch: (), reset=env.reset, step=env.step)
    return env, SimpleNamespace(**agent)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEVELS)
def test_a_level_is_any_tree(tmp_path, capsys, kind):
    """Tables, film, pictures and sampled levels are the same as with levels that are tuples."""
    told = {}
    for env, train in ((line, packed("dict")[1]), packed(kind)):
        if env is line:
            train.reset, train.step = line.reset, line.step
        out = tmp_path / str(env is line)
        agents = [{"seed": 0, "agent": "student"}]
        run = evaluate.Run("a", out, "dr", 1, agents, {"x": np.zeros((1, 1))}, train, env)
        for suite in ("two", "sampled"):
            args = evaluate.Arguments(suite=suite, levels=20, episodes=2, show_levels=True)
            names, own, sampled = evaluate.choose_mazes(args, env)
            mazes = own + evaluate.draw_mazes(names, args, sampled, env)
            evaluate.write_figure(out / "mazes.png", evaluate.plot_levels, mazes, env)
            evaluate.write_results(out, [run], mazes, args, sampled)
            told[env is line, suite] = (out / "results.csv").read_text()
        evaluate.write_film(out, run, mazes[0], 0)
        assert Image.open(out / "mazes.png").width > 200
        assert (out / "film_a_1_Any-0.gif").exists()
    assert told[True, "two"] == told[False, "two"]
    assert len(told[False, "sampled"].splitlines()) == 21
