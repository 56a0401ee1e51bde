"""Run the command line, in processes or with a toy for a training: fixtures and helpers."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forks import Fork

import amaze
import dr

ROOT = Path(__file__).resolve().parent.parent
TINY = """--height 5 --width 5 --n-walls 6 --max-steps 12 --num-envs 8 --num-steps 16 --rnn none
    --hidden-size 16 --update-epochs 2 --lr 1e-2 --eval-suite TrivialMaze --eval-episodes 2
    --log-interval 2 --eval-interval 4""".split()
TOY = """--num-updates 12 --log-interval 2 --eval-interval 4 --checkpoint-interval 4
    --archive-interval 4 --devices 1 --lr 0.1""".split()
SHORT = [*TINY, *"--num-updates 12 --checkpoint-interval 4 --archive-interval 4".split()]


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    """A folder for all runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def launch(tmp):
    """Start `python dr.py ...` or another script, as a fork if that makes no difference. devices:
    as if the user set XLA_FLAGS; env: further variables, in a new process."""

    def launch(*args, devices=1, script=ROOT / "dr.py", env=(), cwd=tmp):
        flags = os.environ["XLA_FLAGS"]
        flags += f" --xla_force_host_platform_device_count={devices}" if devices else ""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        defaults = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
        defaults |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        command = [*map(str, [script, *args])]
        if devices and script != "-c" and not env:
            folder = tmp / f"fork_{next(numbers)}"
            folder.mkdir()
            return Fork(folder, cwd, defaults, command)
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        command = [sys.executable, *command]
        return subprocess.Popen(command, env=defaults | dict(env), cwd=cwd, **pipes)

    numbers = count()
    return launch


def finish(process):
    """Wait for a process -> exit status, stdout, stderr; a process that hangs is killed."""
    try:
        out, err = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


@pytest.fixture(scope="module")
def call(launch):
    """Run a script to its end -> exit status, stdout, stderr."""

    def call(*args, **options):
        return finish(launch(*args, **options))

    return call


@pytest.fixture(scope="module")
def train(call):
    """Run a script, which must succeed -> stdout."""

    def train(*args, **options):
        status, out, err = call(*args, **options)
        assert status == 0, err
        return out

    return train


@pytest.fixture(scope="module")
def pool():
    """Two runs at a time, since a run mostly consists of starting its process."""
    with ThreadPoolExecutor(2) as pool:
        yield pool


def load(folder):
    return dr.read_checkpoint(folder / "checkpoint.msgpack")


def table(folder):
    """The rows of logs.csv, without the column that differs from run to run."""
    with open(folder / "logs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: row[name] for name in row if name != "seconds"} for row in rows]


def leaves(checkpoint):
    """The arrays [rows, ...] of a checkpoint's state, by path."""
    flat = jax.tree_util.tree_flatten_with_path(checkpoint["state"])[0]
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def assert_same_state(folder, other):
    """Two runs have the same state, bit for bit: keys, parameters, optimiser, buffer."""
    one, two = load(folder), load(other)
    assert one["cycles"] == two["cycles"]
    assert one["rows"] == two["rows"]
    one, two = leaves(one), leaves(two)
    assert one.keys() == two.keys()
    assert len(one) > 2
    assert [name for name in one if not np.array_equal(one[name], two[name], True)] == []


def assert_equal(folder, other):
    """Two runs are equal bit for bit: state and log rows."""
    assert_same_state(folder, other)
    assert table(folder) == table(other)


def assert_close(folder, rows, other, other_rows):
    """Rows of a run equal rows of another up to rounding, except for columns that only one run
    sweeps."""
    one, two = leaves(load(folder)), leaves(load(other))
    assert one.keys() == two.keys()
    assert len(one) > 2
    for name in one:
        assert np.allclose(one[name][rows], two[name][other_rows], 1e-3, 1e-4, True), name
    logs = []
    for path, chosen in ((folder, rows), (other, other_rows)):
        lines, number = table(path), len(load(path)["rows"])
        logs.append([line for i, line in enumerate(lines) if i % number in chosen])
    assert len(logs[0]) == len(logs[1]) > 0
    for line, other_line in zip(*logs):
        for name in line.keys() & other_line.keys():
            x, y = line[name], other_line[name]
            assert (x == y == "") or np.isclose(float(x), float(y), 1e-3, 1e-4), name


def last_update(folder):
    """The update of the last complete row of logs.csv; 0 if there is none."""
    path = folder / "logs.csv"
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    return int(lines[-1].split(",")[0]) if lines else 0


def interrupt(process, folder, update, number):
    """Send a signal once the run has logged this update -> exit status, stdout, stderr."""
    deadline = time.time() + 600
    while last_update(folder) < update and process.poll() is None and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(np.random.default_rng().uniform(0, 0.05))  # any moment will do
    process.send_signal(number)
    return finish(process)


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rewind(folder, other, update):
    """A copy of a run, back at an archived checkpoint, though its logs have gone on."""
    shutil.copytree(folder, other)
    shutil.copy(other / f"checkpoint_{update}.msgpack", other / "checkpoint.msgpack")
    return other


def copy(tmp, name, changes, script="dr.py"):
    """A copy of a script in which each key of `changes` is replaced by its value."""
    text = (ROOT / script).read_text()
    for old, new in changes.items():
        assert old in text.split("\n# --- command line\n")[0], old
        text = text.replace(old, new)
    (tmp / f"{name}.py").write_text(text)
    return tmp / f"{name}.py"


# --- a toy for a training: all below the mark `# --- command line`, in milliseconds


def toy(config, devices=1):
    """In place of make_train: a random walk of three numbers, which depends on every key."""

    def train(rng):
        raise NotImplementedError

    def cycle(state, _):
        noise = jax.random.normal(jax.random.fold_in(state.rng, state.cycles), 3)
        cycles, walk = state.cycles + 1, 0.9 * state.student + config.lr * noise
        due, diverged = cycles % config.eval_interval == 0, (config.lr > 1e3) & (cycles > 6)
        metrics = {"grad_updates": cycles, "rollouts": cycles}
        metrics["loss"] = jnp.where(diverged, jnp.inf, walk.sum())
        metrics["train_solve_rate"] = jax.nn.sigmoid(walk[0])
        metrics["eval_solve_rate"] = jnp.where(due, jax.nn.sigmoid(walk[1]), jnp.nan)
        return state.replace(cycles=cycles, student=walk), metrics

    def show(state):
        level = amaze.sample_level(state.rng, 3, 5, 5)
        return {"a level": (jax.tree.map(lambda x: x[None], level), {})}

    dr.check(config)
    train.init = lambda rng: dr.RunnerState(rng, jnp.zeros((), int), jnp.zeros(3))
    train.update = lambda state, cycles: jax.lax.scan(cycle, state, None, cycles)
    train.show = show
    return train


@pytest.fixture
def main(monkeypatch, capsys):
    """main(words) -> exit status, stdout, the error's line: of dr.py in this process."""

    def main(*words, module=dr):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, words)])
        handlers = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}
        status = 0
        try:
            module.main()
        except SystemExit as stop:
            status = stop.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        lines = re.findall(rf"(?m)^{module.SCRIPT}: error: .*", said.err)  # not after the bar
        return status, said.out, (lines or [""])[-1]

    return main


@pytest.fixture
def toys(monkeypatch, main):
    """The same, where a training is the toy's, on one device; compiled once."""
    monkeypatch.setattr(dr, "make_train", toy)
    make = dr.make_programs

    def make_programs(config, *args):
        key = str((replace(config, out="", resume=False, track=""), args[0], args[2]))
        programs[key] = programs.get(key) or make(config, *args)
        return programs[key]

    monkeypatch.setattr(dr, "make_programs", make_programs)
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 0.0)
    yield lambda *words: main(*TOY, *words)
    jax.config.update(name, before)


programs = {}
