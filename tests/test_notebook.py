"""From code and in a notebook, as from the command line: run, save, load; the example notebook."""

import json
import re
import signal
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from PIL import Image
from runs import ROOT, assert_same_state, contents, leaves, load, table
from tqdm import tqdm

sys.path.insert(0, str(ROOT))

import dr
import evaluate

CONFIG = dr.Config(height=5, width=5, n_walls=6, max_steps=12, num_envs=8, num_steps=16, rnn="none",
                   hidden_size=16, update_epochs=2, lr=1e-2, eval_suite="TrivialMaze,MiniMaze",
                   eval_episodes=2, log_interval=2, eval_interval=4, num_updates=12, seeds=2,
                   devices=1)  # fmt: skip
SIGNALS = signal.SIGINT, signal.SIGTERM


@pytest.fixture
def handlers():
    """Signal handlers of our own, as in a notebook; yields the signals that they caught."""
    caught = []
    before = [signal.signal(number, lambda n, _: caught.append(n)) for number in SIGNALS]
    ours = [signal.getsignal(number) for number in SIGNALS]
    yield caught
    assert [signal.getsignal(number) for number in SIGNALS] == ours
    for number, handler in zip(SIGNALS, before):
        signal.signal(number, handler)


def interrupted(monkeypatch, *numbers):
    """Send these signals after four updates."""

    class Bar(tqdm):
        def update(self, n):
            super().update(n)
            for number in numbers if self.n == 4 else ():
                signal.raise_signal(number)

    monkeypatch.setattr(dr, "tqdm", Bar)


@pytest.fixture(scope="module")
def whole(tmp):
    """Folder and states of an uninterrupted run."""
    folder = tmp / "whole"
    return folder, dr.run(replace(CONFIG, out=str(folder)))


@pytest.fixture(scope="module")
def in_code():
    """The same trainings, by make_train: states, metrics."""
    train = jax.jit(lambda rngs: jax.lax.map(dr.make_train(CONFIG), rngs))
    return train(jax.vmap(jax.random.key)(np.arange(2)))


def test_run_returns_what_make_train_does(whole, in_code):
    """This includes the keys, so train.update can continue the trainings."""
    state, theirs = whole[1], in_code[0]
    assert state.rng.dtype == theirs.rng.dtype
    plain = lambda state: state.replace(rng=jax.random.key_data(state.rng))
    ours, theirs = plain(state), plain(theirs)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert x.dtype == y.dtype
        assert np.allclose(x, y, 1e-3, 1e-4, True)
    assert state.cycles.tolist() == [12, 12]


def test_logs_hold_what_make_train_measures(whole, in_code):
    """A row is the mean over a chunk of two updates; evaluations are due every fourth."""
    rows, metrics = table(whole[0]), in_code[1]
    logged = [float(row["entropy"]) for row in rows]
    chunks = np.asarray(metrics["entropy"]).reshape(2, 6, 2).mean(2)
    assert np.allclose(logged, chunks.T.ravel(), 1e-3)
    logged = [float(row["eval_solve_rate"]) for row in rows if row["eval_solve_rate"]]
    assert np.allclose(logged, np.asarray(metrics["eval_solve_rate"])[:, 3::4].T.ravel(), 1e-3)


def test_an_error_is_raised_with_handlers_put_back(monkeypatch, tmp_path, handlers, whole):
    """A BadConfig in one line before anything is written; a FloatingPointError in training."""
    for wrong, must in (
        (dict(out=str(whole[0])), "a new folder, or --resume"),
        (dict(seed=-1), "from 0 to"),
        (dict(n_walls=24), "at most 23 walls"),
    ):
        with pytest.raises(dr.BadConfig, match=f"must be {must}"):
            dr.run(replace(CONFIG, **{"out": str(tmp_path / "run")} | wrong))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(dr, "check", lambda config: None)  # lets lr be absurd
    with pytest.raises(FloatingPointError, match="all trainings have diverged by cycle 2"):
        dr.run(replace(CONFIG, out=str(tmp_path / "run"), num_updates=2, lr=1e38))
    assert handlers == []


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupt_stops_after_a_chunk(monkeypatch, tmp_path, capsys, handlers, whole, number):
    """It leaves a checkpoint and says how to go on; resumed, it equals the whole run."""
    interrupted(monkeypatch, number)
    config = replace(CONFIG, out=str(tmp_path / "run"))
    with pytest.raises(KeyboardInterrupt) as stop:
        dr.run(config)
    assert stop.value.args == (128 + number,)
    assert load(tmp_path / "run")["cycles"] == 6
    assert handlers == []
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.endswith(f"python dr.py --resume --out {tmp_path / 'run'}")
    monkeypatch.undo()
    dr.run(replace(config, resume=True))
    assert_same_state(tmp_path / "run", whole[0])


def test_a_second_interrupt_does_what_it_did_before(monkeypatch, tmp_path, handlers):
    """In a notebook it raises KeyboardInterrupt at once."""
    interrupted(monkeypatch, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        dr.run(replace(CONFIG, out=str(tmp_path / "ours")))
    assert handlers == [signal.SIGINT]
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        dr.run(replace(CONFIG, out=str(tmp_path / "run")))
    assert signal.signal(signal.SIGINT, ours) == signal.default_int_handler


def test_a_finished_run_is_given_back(whole, capsys):
    """Resumed when nothing is left to do; the hint names the next command."""
    before = table(whole[0])
    state = dr.run(replace(CONFIG, out=str(whole[0]), resume=True))
    assert state.cycles.tolist() == [12, 12]
    assert table(whole[0]) == before
    assert capsys.readouterr().out.endswith(f"evaluate.py {whole[0]}\n")


# --- save and load


def figures(folder, monkeypatch, capsys):
    """The numbers in evaluate.py's results.csv, without the run's name."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(folder), "--mazes", "TrivialMaze,MiniMaze",
                                      "--episodes", "3"])  # fmt: skip
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    with pytest.raises(SystemExit) as stop:
        evaluate.main()
    assert stop.value.code == 0, capsys.readouterr().err
    return [line.split(",")[1:] for line in (folder / "results.csv").read_text().splitlines()]


def test_what_is_saved_is_evaluated_as_the_run(monkeypatch, tmp_path, capsys, whole):
    folder, state = whole
    evaluate.save(tmp_path / "saved", CONFIG, state)
    ours, theirs = (figures(x, monkeypatch, capsys) for x in (tmp_path / "saved", folder))
    assert ours == theirs
    assert len(ours) == 1 + 2 * 2
    ours, theirs = (leaves(load(x)) for x in (tmp_path / "saved", folder))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name], True) for name in ours)


def test_trainings_in_code_go_on_from_the_command_line(tmp_path, whole):
    """Saved half way and resumed as `dr.py --resume` does."""
    train = dr.make_train(CONFIG)
    half = jax.jit(lambda rngs: jax.lax.map(lambda rng: train.update(train.init(rng), 6)[0], rngs))
    state = half(jax.vmap(jax.random.key)(np.arange(2)))
    evaluate.save(tmp_path / "half", replace(CONFIG, seeds=1), state)
    dr.run(dr.parse(["--resume", "--out", str(tmp_path / "half")]))
    ours, theirs = (leaves(load(x)) for x in (tmp_path / "half", whole[0]))
    assert all(np.allclose(ours[name], theirs[name], 1e-3, 1e-4, True) for name in theirs)
    assert [row["update"] for row in table(tmp_path / "half")] == ["8", "8", "10", "10", "12", "12"]


def test_load_gives_the_run_to_film_and_play(tmp_path, whole, in_code):
    folder, state = whole
    one = jax.tree.map(lambda x: x[1], in_code[0])
    evaluate.save(tmp_path / "one", replace(CONFIG, seed=1), one)  # a training, not a batch
    whole, one = evaluate.load(folder), evaluate.load(str(tmp_path / "one"))
    assert [x["seed"] for x in whole.agents] == [0, 1]
    assert [x["seed"] for x in one.agents] == [1]
    assert one.update == 12
    assert one.algorithm == "dr"
    assert one.name == "one"
    assert whole.folder == folder.resolve()
    kernel = one.params["params"]["conv"]["kernel"]
    assert np.allclose(kernel[0], state.student.params["params"]["conv"]["kernel"][1], 1e-3, 1e-4)
    [maze] = evaluate.draw_mazes(["TrivialMaze"])
    pictures = evaluate.film(one, 0, maze)
    played = list(evaluate.play(one.train, one.params, evaluate.agent_keys(one, 0), [maze], 1))
    assert len(pictures) == 1 + played[1]
    assert pictures[0].ndim == 3


def test_a_sweep_in_code_is_saved_with_its_points(tmp_path, in_code):
    """Also in two dimensions: [points, seeds], in the order of the command line's rows."""
    config = replace(CONFIG, seeds=1, sweep=("lr=0.01,0.001",))
    evaluate.save(tmp_path / "sweep", config, in_code[0])
    assert [x["lr"] for x in evaluate.load(tmp_path / "sweep").agents] == [0.01, 0.001]
    config = replace(CONFIG, sweep=("lr=0.01,0.001",))
    grid = jax.tree.map(lambda x: np.stack([x, x]), in_code[0].replace(rng=None))
    grid = grid.replace(rng=jax.numpy.stack([in_code[0].rng] * 2))
    evaluate.save(tmp_path / "grid", config, grid)
    agents = evaluate.load(tmp_path / "grid").agents
    assert [(x["lr"], x["seed"]) for x in agents] == [(0.01, 0), (0.01, 1), (0.001, 0), (0.001, 1)]


def test_save_refuses(tmp_path, in_code):
    """Before anything is written; existing files stay."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious").write_text("mine")
    state, before = in_code[0], contents(tmp_path)
    with pytest.raises(FileExistsError):
        evaluate.save(tmp_path / "full", CONFIG, state)
    words = re.escape("sweep = ('lr=0.1,0.2,0.3',), seeds = 2: must be as many as the state's 2")
    with pytest.raises(dr.BadConfig, match=words):
        evaluate.save(tmp_path / "new", replace(CONFIG, sweep=("lr=0.1,0.2,0.3",)), state)
    assert contents(tmp_path) == before


# --- the example


NOTEBOOK = ROOT / "examples/notebook.ipynb"
CELLS = """
import json, sys
from unittest.mock import Mock

display = sys.modules["IPython.display"] = sys.modules["IPython"] = Mock(version_info=(9, 0))
display.display = display
names = {}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        shell = lambda line: line.strip()[:1] == "!"
        code = "".join("    pass\\n" if shell(x) else x for x in cell["source"])
        code = code.replace("\\nconfig = ", f"\\nSIZES |= {sys.argv[2]}\\nconfig = ")
        exec(compile(code, cell["id"], "exec"), names)
display.Image.assert_called_once_with("runs/notebook/film.gif")
assert names["config"].num_updates == 8 and len(names["metrics"]["entropy"]) == 3
assert len(names["log"]) == 4 and len(names["x"]) > 0, (names["log"], names["x"])
"""
SMALL = dict(num_updates=8, num_envs=4, num_steps=8, rnn="none", hidden_size=4, buffer_size=8,
             num_candidates=16, candidates_at_once=8, candidate_evals=2, num_minibatches=1,
             update_epochs=1, eval_suite="TrivialMaze", eval_interval=2, eval_episodes=1,
             log_interval=4)  # fmt: skip


@pytest.mark.slow
def test_the_notebook(tmp_path, call):
    """Run its cells one after the other, with smaller SIZES."""
    status, out, err = call(CELLS, NOTEBOOK, SMALL, script="-c",
                            cwd=tmp_path, env={"MPLBACKEND": "Agg"})  # fmt: skip
    assert status == 0, err
    assert "runs/notebook: 2 training(s)" in out
    assert Image.open(tmp_path / "runs/notebook/film.gif").n_frames > 1
    agents = evaluate.load(tmp_path / "runs/rates").agents
    assert [x["lr"] for x in agents] == [3e-4, 1e-3, 3e-3]


def test_the_notebook_is_small():
    """It has about ten short cells, and outputs that a page can show."""
    assert NOTEBOOK.stat().st_size < 300_000
    cells = [x for x in json.loads(NOTEBOOK.read_text())["cells"] if x["cell_type"] == "code"]
    assert len(cells) <= 12
    assert max(len(x["source"]) for x in cells) <= 20
    assert not any(x["output_type"] == "error" for cell in cells for x in cell["outputs"])
