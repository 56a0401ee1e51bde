"""The command line in processes: runs, checkpoints, resume, errors, sweeps, groups, devices."""

import csv
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import serialization

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import dr  # noqa: E402

TINY = """--height 5 --width 5 --n-walls 6 --max-steps 12 --num-envs 4 --num-steps 16 --rnn none
    --hidden-size 16 --update-epochs 2 --lr 1e-2 --eval-suite TrivialMaze --eval-episodes 2
    --log-interval 2 --eval-interval 4""".split()
SHORT = [*TINY, *"--num-updates 12 --checkpoint-interval 4 --archive-interval 4".split()]
LONG = [*TINY, *"--num-updates 600 --checkpoint-interval 30 --seeds 2".split()]
COLUMNS = """update grad_updates env_steps seed seconds train_return train_solve_rate
    train_episode_length policy_loss value_loss total_loss entropy approx_kl clip_fraction
    explained_variance grad_norm lr walls path_length solvable eval_solve_rate eval_return
    eval_solve_rate/TrivialMaze eval_return/TrivialMaze""".split()


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    """A folder for all runs. Processes share a compilation cache there, or the one that is set."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def launch(tmp):
    """Start `python dr.py ...`, or another script."""

    def launch(*args, devices=1, script="dr.py", **options):
        flags = f"--xla_force_host_platform_device_count={devices}"
        env = {"JAX_COMPILATION_CACHE_DIR": str(tmp / "cache")} | os.environ
        env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": "cpu"}
        env |= {"XLA_FLAGS": f"{flags} --xla_backend_optimization_level=0"}
        command = [sys.executable, str(ROOT / script), *map(str, args)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen(command, env=env, **pipes, **{"cwd": tmp} | options)

    return launch


def finish(process):
    """Wait for its end -> exit status, stdout, stderr; one that hangs is killed."""
    try:
        out, err = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


@pytest.fixture(scope="module")
def call(launch):
    """Run it to its end -> exit status, stdout, stderr."""

    def call(*args, **options):
        return finish(launch(*args, **options))

    return call


@pytest.fixture(scope="module")
def train(call):
    """Run it, and it must succeed -> stdout."""

    def train(*args, **options):
        status, out, err = call(*args, **options)
        assert status == 0, err
        return out

    return train


def load(folder):
    return serialization.msgpack_restore((folder / "checkpoint.msgpack").read_bytes())


def table(folder):
    """logs.csv without the column that differs from run to run."""
    with open(folder / "logs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: row[name] for name in row if name != "seconds"} for row in rows]


def leaves(checkpoint):
    """[shards, rows, ...] arrays of a checkpoint's state, by path; step is a number."""
    flat = jax.tree_util.tree_flatten_with_path(checkpoint["state"])[0]
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def assert_equal(folder, other):
    """The same run, bit for bit: keys, parameters, optimiser, log rows."""
    one, two = load(folder), load(other)
    assert one["step"] == two["step"] and one["rows"] == two["rows"]
    one, two = leaves(one), leaves(two)
    assert one.keys() == two.keys() and len(one) > 20
    assert [name for name in one if not np.array_equal(one[name], two[name])] == []
    assert table(folder) == table(other)


def assert_close(folder, rows, other, other_rows):
    """Rows of a run equal rows of another, to rounding; columns swept in only one may differ."""
    one, two = leaves(load(folder)), leaves(load(other))
    pick = lambda x, rows: x[:, rows] if x.ndim else x
    for name in one:
        x, y = pick(one[name], rows), pick(two[name], other_rows)
        assert np.allclose(x, y, 1e-3, 1e-4), name
    logs, n = [], []
    for path, chosen in ((folder, rows), (other, other_rows)):
        n.append(len(load(path)["rows"]))
        lines = table(path)
        logs.append([line for i, line in enumerate(lines) if i % n[-1] in chosen])
    assert len(logs[0]) == len(logs[1]) > 0
    for line, other_line in zip(*logs):
        for name in line.keys() & other_line.keys():
            x, y = line[name], other_line[name]
            assert (x == y == "") or np.isclose(float(x), float(y), 1e-3, 1e-4), name


def last_update(folder):
    """The update of the last whole row of logs.csv; 0 if there is none."""
    path = folder / "logs.csv"
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    return int(lines[-1].split(",")[0]) if lines else 0


def interrupt(process, folder, update, number):
    """Send a signal once the run has logged that update -> exit status, stdout, stderr."""
    deadline = time.time() + 240
    while last_update(folder) < update and process.poll() is None and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(np.random.default_rng().uniform(0, 0.05))  # any moment will do
    process.send_signal(number)
    return finish(process)


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rewind(folder, other, update):
    """A copy of a run as it was when it wrote an archived checkpoint, its logs ahead of it."""
    shutil.copytree(folder, other)
    shutil.copy(other / f"checkpoint_{update}.msgpack", other / "checkpoint.msgpack")
    return other


# --- a run, and the same one interrupted


@pytest.fixture(scope="module")
def whole(tmp, train):
    """A run that nothing stopped."""
    train(*LONG, "--out", tmp / "whole")
    return tmp / "whole"


def test_what_a_run_writes(whole):
    found = {path.relative_to(whole).as_posix() for path in contents(whole)}
    files = {"config.json", "logs.csv", "checkpoint.msgpack", "curves.png"}
    assert found == files | {"levels/update_500.png", "levels/update_600.png"}
    for path in (whole / name for name in found if name.endswith("png")):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    config = json.loads((whole / "config.json").read_text())
    assert config["script"] == "dr.py" and config["num_updates"] == 600 and config["lr"] == 1e-2
    assert {f.name for f in fields(dr.Config)} < config.keys()
    checkpoint = load(whole)
    assert checkpoint["step"] == 600
    assert [row["seed"] for row in checkpoint["rows"].values()] == [0, 1]
    assert {x.shape[:2] for x in leaves(checkpoint).values() if x.ndim} == {(1, 2)}


def test_logs(whole):
    with open(whole / "logs.csv", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames[:5] == COLUMNS[:5] and set(reader.fieldnames) == set(COLUMNS)
    assert [int(row["update"]) for row in rows] == [i for i in range(2, 601, 2) for _ in "ab"]
    assert [int(row["seed"]) for row in rows] == [0, 1] * 300
    for row in rows:
        update = int(row["update"])
        assert int(row["grad_updates"]) == update and int(row["env_steps"]) == update * 4 * 16
        for name in COLUMNS[8:]:  # a value, but for evaluations that were not due
            assert (row[name] == "") == ("eval" in name and update % 4 != 0), (name, update)
        assert 0 < float(row["entropy"]) <= np.log(7) + 1e-3 and 0 <= float(row["solvable"]) <= 1
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds) and seconds[-1] > 0
    solved = [float(row["train_solve_rate"]) for row in rows if row["train_solve_rate"]]
    assert np.mean(solved[-40:]) > np.mean(solved[:40]) + 0.1  # it learns


def test_killed_at_any_moment(tmp, whole, launch, train):
    folder, args = tmp / "killed", LONG
    for update in (100, 300):
        process = launch(*args, "--out", folder)
        assert interrupt(process, folder, update, signal.SIGKILL)[0] == -signal.SIGKILL
        assert 0 < last_update(folder) - 30 <= load(folder)["step"] < 600
        args = ["--resume"]
    train("--resume", "--out", folder)
    assert_equal(folder, whole)


@pytest.fixture(scope="module")
def stopped(tmp, launch):
    """A run stopped by SIGINT, resumed as it says, and stopped by SIGTERM; what the two said."""
    folder, args, said = tmp / "stopped", [*LONG, "--out", tmp / "stopped"], []
    for update, number in ((60, signal.SIGINT), (200, signal.SIGTERM)):
        said.append(interrupt(launch(*args), folder, update, number))
        args = re.search(r"to go on: python \S+dr\.py (.*)", said[-1][1])[1].split()
    return folder, args, said


def test_signals_stop_after_the_chunk(tmp, stopped):
    folder, args, said = stopped
    assert args == ["--resume", "--out", str(folder)]
    assert [status for status, _, _ in said] == [130, 143]
    assert not any("Traceback" in err for _, _, err in said)
    steps = [int(re.search(r"stopped at update (\d+)", out)[1]) for _, out, _ in said]
    assert load(folder)["step"] == steps[1] == last_update(folder)
    assert 60 <= steps[0] < 200 <= steps[1] < 600
    assert (folder / "levels" / f"update_{steps[0]}.png").exists()


def test_stopped_and_resumed_equals_uninterrupted(tmp, stopped, whole, train):
    folder = shutil.copytree(stopped[0], tmp / "resumed")
    train("--resume", "--out", folder, "--checkpoint-interval", 500)
    assert_equal(folder, whole)
    before = contents(folder)
    train("--resume", "--out", folder)  # nothing is left to do
    assert table(folder) == table(whole) and contents(folder).keys() == before.keys()


@pytest.mark.parametrize("file", ["checkpoint.msgpack", "logs.csv"])
def test_a_full_disk_leaves_the_last_checkpoint(tmp, stopped, call, train, whole, file):
    """Files may not grow beyond a size, as if the disk were full."""
    folder = shutil.copytree(stopped[0], tmp / f"full_{len(file)}")
    log, checkpoint = ((folder / f).stat().st_size for f in ("logs.csv", "checkpoint.msgpack"))
    size = checkpoint - 1 if file == "checkpoint.msgpack" else log + 3000
    assert 3 * log < checkpoint
    before = (folder / "checkpoint.msgpack").read_bytes()
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
    interval = 10 if file == "checkpoint.msgpack" else 1000
    args = "--resume", "--checkpoint-interval", interval, "--out", folder
    status, _, err = call(*args, preexec_fn=limit)
    assert status == 1 and "Traceback" not in err
    line = err.splitlines()[-1]
    assert line.startswith("dr.py: error: ") and "File too large" in line and file in line
    assert (folder / "checkpoint.msgpack").read_bytes() == before
    assert not list(folder.rglob("*.tmp"))
    if file == "checkpoint.msgpack":
        train("--resume", "--out", folder)
        assert_equal(folder, whole)


# --- errors


def say(monkeypatch, capsys, *args):
    """dr.py's main in this process -> exit status, last line on stderr."""
    monkeypatch.setattr(sys, "argv", ["dr.py", *map(str, args)])
    with pytest.raises(SystemExit) as error:
        dr.main()
    return error.value.code, capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("args, field", [
    ("--num-envs -1", "num_envs = -1"),
    ("--num-envs 0", "num_envs = 0"),
    ("--num-updates 0", "num_updates = 0"),
    ("--num-steps 0", "num_steps = 0"),
    ("--num-evals 0", "num_evals = 0"),
    ("--update-epochs 0", "update_epochs = 0"),
    ("--num-minibatches 3", "num_minibatches = 3"),
    ("--num-minibatches 0", "num_minibatches = 0"),
    ("--num-minibatches 64", "num_minibatches = 64"),
    ("--seeds 0", "seeds = 0"),
    ("--seed -1", "seed = -1"),
    ("--seeds-at-once -1", "seeds_at_once = -1"),
    ("--lr -0.1", "lr = -0.1"),
    ("--lr nan", "lr = nan"),
    ("--gamma 1.1", "gamma = 1.1"),
    ("--gae-lambda -0.1", "gae_lambda = -0.1"),
    ("--clip-eps 0", "clip_eps = 0"),
    ("--max-grad-norm 0", "max_grad_norm = 0"),
    ("--ent-coef -1", "ent_coef = -1"),
    ("--vf-coef -1", "vf_coef = -1"),
    ("--hidden-size 0", "hidden_size = 0"),
    ("--s5-layers 0", "s5_layers = 0"),
    ("--n-walls -1", "n_walls = -1"),
    ("--n-walls 168", "n_walls = 168"),
    ("--height 1", "height = 1"),
    ("--width 0", "width = 0"),
    ("--max-steps 0", "max_steps = 0"),
    ("--eval-suite nowhere", "eval_suite = 'nowhere'"),
    ("--eval-suite Labyrinth,Nowhere", "eval_suite = 'Labyrinth,Nowhere'"),
    ("--eval-episodes 0", "eval_episodes = 0"),
    ("--eval-interval -1", "eval_interval = -1"),
    ("--log-interval 0", "log_interval = 0"),
    ("--checkpoint-interval 0", "checkpoint_interval = 0"),
    ("--archive-interval -1", "archive_interval = -1"),
    ("--plot-interval -1", "plot_interval = -1"),
    ("--devices -1", "devices = -1"),
    ("--devices 1000", "devices = 1000"),
    ("--sweep num_envs=16,32", "sweep = 'num_envs=16,32'"),
    ("--sweep lr=fast", "sweep = 'lr=fast'"),
    ("--sweep lr=", "sweep = 'lr='"),
    ("--sweep lr=log:1e-4:1e-2", "sweep = 'lr=log:1e-4:1e-2'"),
    ("--sweep lr=log:0:1:3", "sweep = 'lr=log:0:1:3'"),
    ("--sweep lr=log:1e-4:1e-2:0", "sweep = 'lr=log:1e-4:1e-2:0'"),
    ("--sweep lr=log:1e-4:1e-2:0 --sweep-random 2", "sweep = 'lr=log:1e-4:1e-2:0'"),
    ("--sweep lr=1e-3 --sweep lr=1e-4", "sweep = "),
    ("--sweep gamma=0.9,1.5", "gamma = 1.5"),
    ("--sweep-random 4", "sweep_random = 4"),
])  # fmt: skip
def test_bad_values(monkeypatch, capsys, tmp_path, args, field):
    """One line before anything is compiled or written: field, value, what is allowed."""
    out = tmp_path / "run"
    monkeypatch.setattr(dr, "open_run", lambda *_: pytest.fail("it went on"))
    status, line = say(monkeypatch, capsys, *args.split(), "--out", out)
    assert status == 2
    assert line.startswith(f"dr.py: error: {field}") and ": allowed is " in line
    assert not out.exists()


def test_what_is_allowed_is_said(monkeypatch, capsys, tmp_path):
    cases = {
        "--eval-suite nowhere": "minimax",
        "--n-walls 168": "at most 167",
        "--num-minibatches 3": "a divisor of 32",
        "--sweep num_envs=16,32": "a float: lr, gamma",
        "--sweep rnn=lstm,gru": "a run for each value",
        "--gamma 1.1": "from 0 to 1",
    }
    for args, words in cases.items():
        assert words in say(monkeypatch, capsys, *args.split(), "--out", tmp_path / "run")[1]


@pytest.mark.parametrize("args", ["--rnn elman", "--num-envs 1.5", "--lr slow", "--shard all",
                                  "--nonsense 1"])  # fmt: skip
def test_bad_types(monkeypatch, capsys, args):
    assert say(monkeypatch, capsys, *args.split())[0] == 2


def test_bad_value_in_a_process(tmp, call):
    status, out, err = call("--num-envs", 0, "--out", tmp / "bad")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("dr.py: error: num_envs = 0: allowed is at least 1")
    assert not (tmp / "bad").exists()


def test_a_folder_that_holds_a_run_is_not_touched(monkeypatch, capsys, whole):
    before = contents(whole)
    status, line = say(monkeypatch, capsys, *LONG, "--out", whole)
    assert status == 2 and "error: out = " in line and "--resume" in line
    assert contents(whole) == before


def test_out_cannot_be_made(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("precious")
    status, line = say(monkeypatch, capsys, *SHORT, "--out", tmp_path / "file")
    assert status == 2 and "error: out = " in line
    status, line = say(monkeypatch, capsys, *SHORT, "--out", tmp_path / "file" / "run")
    assert status in (1, 2) and "Not a directory" in line
    assert "the last checkpoint is intact" not in line  # there is none
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("args, field", [
    ("--num-envs 8", "num_envs = 8"),
    ("--rnn gru", "rnn = 'gru'"),
    ("--num-updates 700", "num_updates = 700"),
    ("--log-interval 10", "log_interval = 10"),
    ("--lr 0.5", "lr = 0.5"),
    ("--gamma 0.5", "gamma = 0.5"),
    ("--anneal-lr", "anneal_lr = True"),
    ("--seeds 3", "seeds = 3"),
    ("--seed 1", "seed = 1"),
    ("--shard levels", "shard = 'levels'"),
    ("--sweep lr=0.1,0.2", "sweep = ('lr=0.1,0.2',)"),
])  # fmt: skip
def test_resume_refuses_another_run(monkeypatch, capsys, whole, args, field):
    before = contents(whole)
    status, line = say(monkeypatch, capsys, "--resume", "--out", whole, *args.split())
    assert status == 2 and line.startswith(f"dr.py: error: {field}: allowed is ")
    assert "as in the run to resume" in line and contents(whole) == before


def test_resume_takes_the_fields_of_the_run(whole):
    asked = dr.parse([*LONG, "--out", str(whole)])
    resumed = dr.parse(["--resume", "--out", str(whole)])
    assert resumed == replace(asked, resume=True)
    free = "--checkpoint-interval 7 --archive-interval 8 --plot-interval 9 --seeds-at-once 1"
    resumed = dr.parse(["--resume", "--out", str(whole), *LONG, *free.split()])
    changes = dict(checkpoint_interval=7, archive_interval=8, plot_interval=9, seeds_at_once=1)
    assert resumed == replace(asked, resume=True, **changes)


def test_resume_needs_a_run(monkeypatch, capsys, tmp_path, whole):
    for args in ([], ["--out", tmp_path / "none"], ["--out", tmp_path]):
        status, line = say(monkeypatch, capsys, "--resume", *args)
        assert status == 2 and line.startswith("dr.py: error: out = ") and "--resume" in line
    shutil.copy(whole / "config.json", tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"dr.py"', '"plr.py"'))
    status, line = say(monkeypatch, capsys, "--resume", "--out", tmp_path)
    assert status == 2 and "a run of dr.py" in line


# --- rows: seeds, groups, sweeps


@pytest.fixture(scope="module")
def three(tmp, train):
    train(*SHORT, "--seeds", 3, "--out", tmp / "three")
    return tmp / "three"


def test_default_folders_and_seeds_equal_solo_runs(tmp, three, train):
    (tmp / "home").mkdir()
    for i in (1, 2):
        assert f"runs/dr-{i}" in train(*SHORT, "--seed", i, cwd=tmp / "home")
        assert_close(three, [i], tmp / "home" / "runs" / f"dr-{i}", [0])
    assert sorted(path.name for path in (tmp / "home" / "runs").iterdir()) == ["dr-1", "dr-2"]
    params = leaves(load(three))["['student']['params']['params']['conv']['kernel']"]
    assert not np.allclose(params[:, 0], params[:, 1], 1e-2, 1e-2)


def test_archives(tmp, three, train):
    names = [f"checkpoint_{i}.msgpack" for i in (4, 8, 12)]
    assert sorted(path.name for path in three.glob("checkpoint_*")) == sorted(names)
    for i in (4, 8, 12):
        data = (three / f"checkpoint_{i}.msgpack").read_bytes()
        assert serialization.msgpack_restore(data)["step"] == i
    assert (three / names[-1]).read_bytes() == (three / "checkpoint.msgpack").read_bytes()


def test_groups_equal_all_at_once(tmp, three, train):
    folder = tmp / "groups"
    train(*SHORT, "--seeds", 3, "--seeds-at-once", 2, "--out", folder)
    assert_close(folder, [0, 1, 2], three, [0, 1, 2])
    assert [row["seed"] for row in table(folder)] == [row["seed"] for row in table(three)]
    again = rewind(folder, tmp / "groups_again", 4)
    train("--resume", "--out", again)
    assert_equal(again, folder)
    other = rewind(folder, tmp / "groups_other", 8)  # groups of another size go on with it
    train("--resume", "--out", other, "--seeds-at-once", 0)
    assert_close(other, [0, 1, 2], three, [0, 1, 2])


def test_sweep(tmp, train):
    folder, solo = tmp / "sweep", tmp / "solo"
    sweep = "--sweep lr=1e-2,1e-3 --sweep ent_coef=0,0.1 --seeds 2".split()
    said = train(*SHORT, *sweep, "--out", folder)
    points = [(lr, ent_coef) for lr in (1e-2, 1e-3) for ent_coef in (0, 0.1)]
    expected = [(seed, *point) for point in points for seed in (0, 1)]
    log = table(folder)
    names = "seed", "lr", "ent_coef"
    assert [tuple(float(row[name]) for name in names) for row in log] == expected * 6
    assert list(log[0]).index("ent_coef") < 6
    rows = load(folder)["rows"].values()
    assert [tuple(row[name] for name in names) for row in rows] == expected

    train(*SHORT, "--lr", 1e-3, "--ent-coef", 0.1, "--seed", 1, "--out", solo)
    assert_close(folder, [7], solo, [0])

    header, *ranked = said[said.index("lr\tent_coef") :].splitlines()[:5]
    assert "solve rate" in header
    scores = {}
    for row in log[-8:]:
        point = float(row["lr"]), float(row["ent_coef"])
        scores.setdefault(point, []).append(float(row["eval_solve_rate"]))
    means = []
    for line in ranked:
        lr, ent_coef, score = line.split("\t")
        mean, _, interval = score.split()
        values = scores.pop((float(lr), float(ent_coef)))
        assert float(mean) == pytest.approx(np.mean(values), abs=1e-3)
        half = 1.96 * abs(values[0] - values[1]) / 2  # of two numbers: std / sqrt(2) = |a - b| / 2
        assert float(interval) == pytest.approx(half, abs=1e-3)
        means.append(float(mean))
    assert not scores and means == sorted(means, reverse=True)
    assert (folder / "sweep.png").read_bytes()[1:4] == b"PNG"

    again = rewind(folder, tmp / "sweep_again", 8)
    train("--resume", "--out", again)
    assert_equal(again, folder)


def test_points_of_a_sweep():
    rows = dr.make_rows(dr.Config(seed=5, seeds=2, sweep=("lr=log:1e-4:1e-2:3", "gamma=0.5,0.6")))
    assert [row["seed"] for row in rows] == [5, 6] * 6
    assert [row["gamma"] for row in rows] == [0.5, 0.5, 0.6, 0.6] * 3
    assert np.allclose([row["lr"] for row in rows[::4]], [1e-4, 1e-3, 1e-2])
    config = dr.Config(seeds=2, sweep=("lr=log:1e-4:1e-2:3", "gamma=0.5,0.6"), sweep_random=200)
    rows = dr.make_rows(config)
    assert rows == dr.make_rows(config) and len(rows) == 400
    assert {row["gamma"] for row in rows} == {0.5, 0.6}
    lr = np.log10([row["lr"] for row in rows[::2]])
    assert len(set(lr)) == 200 and lr.min() >= -4 and lr.max() <= -2
    assert np.histogram(lr, 4, (-4, -2))[0].min() > 25  # uniform in the logarithm
    assert all(a["lr"] == b["lr"] and a["seed"] != b["seed"] for a, b in zip(rows[::2], rows[1::2]))
    assert dr.make_rows(dr.Config(seeds=2)) == [{"seed": 0}, {"seed": 1}]


# --- devices


def test_seeds_over_devices_equal_one_device(tmp, three, train):
    folder = tmp / "two_devices"
    said = train(*SHORT, "--seeds", 4, "--devices", 2, "--out", folder, devices=4)
    assert "4 training(s) on 2 x cpu" in said
    assert_close(folder, [0, 1, 2], three, [0, 1, 2])
    other = rewind(folder, tmp / "four_devices", 8)  # other devices go on with it; 0: all
    said = train("--resume", "--out", other, "--devices", 0, devices=4)
    assert "4 training(s) on 4 x cpu" in said
    assert_close(other, [0, 1, 2, 3], folder, [0, 1, 2, 3])


@pytest.fixture(scope="module")
def levels(tmp, train):
    said = train(*SHORT, "--shard", "levels", "--out", tmp / "levels", devices=4)
    assert "1 training(s) on 4 x cpu" in said
    return tmp / "levels"


def test_levels_over_four_devices(tmp, levels, train):
    for name, x in leaves(load(levels)).items():
        assert x.ndim == 0 or x.shape[:2] == (4, 1) and (x == x[:1]).all(), name
    assert len(table(levels)) == 6
    again = rewind(levels, tmp / "levels_again", 4)
    train("--resume", "--out", again, devices=4)
    assert_equal(again, levels)


BUFFER = "--buffer-size 16 --min-fill 0.5 --replay-prob 0.5".split()


@pytest.mark.parametrize("script, options", [
    ("plr.py", BUFFER),
    ("plr.py", [*BUFFER, "--parallel"]),
    ("accel.py", BUFFER),
    ("paired.py", "--teacher-hidden-size 16 --teacher-filters 4".split()),
])
def test_levels_of_every_script_over_devices(tmp, train, script, options):
    """Each device has its own share of the buffer, and the same of everything else."""
    folder = tmp / f"{script}{len(options)}"
    args = [*SHORT, "--num-updates", 8, "--shard", "levels", *options, "--out", folder]
    said = train(*args, devices=4, script=script)
    assert "1 training(s) on 4 x cpu" in said
    checkpoint, sizes = load(folder), []
    for name, x in leaves(checkpoint).items():
        if "buffer" in name:
            sizes.append(x.shape[0] * x.shape[2])
            assert x.shape[:3] == (4, 1, 4), name
        else:
            assert x.ndim == 0 or x.shape[:2] == (4, 1) and (x == x[:1]).all(), name
    if script != "paired.py":
        assert len(sizes) > 5 and set(sizes) == {16}
        boards = checkpoint["state"]["buffer"]["level"]["wall_map"]
        assert len({x.tobytes() for x in boards.reshape(16, -1)}) > 8, "shards hold the same levels"
        assert int(table(folder)[-1]["grad_updates"]) > 0


def test_levels_split_otherwise_are_another_run(tmp, levels, call):
    """The shards of a checkpoint are tied to the number of devices."""
    folder = rewind(levels, tmp / "levels_two", 8)
    before = contents(folder)
    status, _, err = call("--resume", "--out", folder, "--devices", 2, devices=4)
    assert status == 2 and err.splitlines()[-1].startswith("dr.py: error: devices = 2"), err
    assert contents(folder) == before


def test_levels_of_a_device_in_minibatches(tmp, call):
    """Two minibatches of one trajectory: no."""
    args = [*SHORT, "--shard", "levels", "--num-minibatches", 2, "--out", tmp / "parts"]
    status, _, err = call(*args, "--devices", 4, devices=4)
    assert status == 2 and err.splitlines()[-1].startswith("dr.py: error: num_minibatches = 2"), err
    assert not (tmp / "parts").exists()


# --- processes


def start_together(launch, *args, **options):
    """Two processes of two devices each that make one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = "127.0.0.1:%d" % free.getsockname()[1]
    args = [*args, "--distributed", "--coordinator", coordinator, "--num-processes", 2]
    return [launch(*args, "--process-id", i, devices=2, **options) for i in range(2)]


@pytest.mark.parametrize("options", ["--shard levels", "--seeds 8 --seeds-at-once 4"])
def test_two_processes_equal_one(tmp, launch, levels, three, options):
    folder = tmp / f"processes{len(options)}"
    processes = start_together(launch, *SHORT, *options.split(), "--out", folder)
    for status, _, err in map(finish, processes):
        assert status == 0, err
    rows, other = ([0], levels) if "levels" in options else ([0, 1, 2], three)
    assert_close(folder, rows, other, rows)
    written = {path.relative_to(folder) for path in contents(folder)}
    assert written == {path.relative_to(other) for path in contents(other)}


def test_one_of_two_processes_is_stopped_or_dies(tmp, launch, train):
    """A signal to one stops both after the chunk; where one is killed, the other ends."""
    folder = tmp / "torn"
    args = [*LONG, "--num-updates", 6000, "--shard", "levels", "--out", folder]
    one, other = start_together(launch, *args)
    status, _, err = interrupt(other, folder, 10, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM, err
    status, out, err = finish(one)
    assert status == 128 + signal.SIGTERM and "stopped at update" in out, err
    stopped = last_update(folder)
    assert load(folder)["step"] == stopped >= 10

    one, other = start_together(launch, "--resume", "--out", folder)
    status, _, err = interrupt(other, folder, stopped + 40, signal.SIGKILL)
    assert status == -signal.SIGKILL, err
    status, _, err = finish(one)
    # the connection breaks, or JAX, which misses the heartbeat, ends the process
    assert status and ("--resume" in err.splitlines()[-1] or "another task died" in err), err
    step = load(folder)["step"]
    assert step >= stopped

    process = launch("--resume", "--out", folder, devices=4)
    status, _, err = interrupt(process, folder, last_update(folder) + 2, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM and load(folder)["step"] > step, err


def test_what_one_of_two_processes_refuses_ends_both(tmp, launch, whole):
    """The folder is taken, which only the process that writes it finds out."""
    before = contents(whole)
    one, other = start_together(launch, *SHORT, "--seeds", 4, "--out", whole)
    status, _, err = finish(one)
    assert status == 2 and err.splitlines()[-1].startswith("dr.py: error: out = "), err
    assert finish(other)[0] not in (0, 2)
    assert contents(whole) == before


@pytest.mark.parametrize("args", ["", "--coordinator 127.0.0.1:1", "--coordinator 127.0.0.1:1 "
                                  "--num-processes 2 --process-id 2"])
def test_distributed_without_a_cluster(tmp, call, args):
    status, _, err = call(*TINY, "--distributed", *args.split(), "--out", tmp / "nowhere")
    assert status == 2 and "distributed = True: allowed is" in err.splitlines()[-1], err
    assert not (tmp / "nowhere").exists()
