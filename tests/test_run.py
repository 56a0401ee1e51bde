"""The command line in processes: runs, checkpoints, resume, errors, sweeps, hacks, trackers."""

import csv
import importlib
import inspect
import json
import re
import shutil
import signal
import struct
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from runs import LONG, ROOT, SHORT, TINY, assert_close, assert_equal, contents, copy, interrupt
from runs import last_update, leaves, load, rewind, table

sys.path.insert(0, str(ROOT))

import dr
import plr

FIRST = "update grad_updates env_steps seed seconds".split()
COLUMNS = """train_return train_solve_rate train_episode_length policy_loss value_loss total_loss
    entropy approx_kl clip_fraction explained_variance grad_norm param_norm current_lr walls
    path_length solvable optimal_return eval_solve_rate eval_return
    eval_solve_rate/TrivialMaze eval_return/TrivialMaze""".split()
LOSSES = "policy_loss value_loss total_loss entropy approx_kl grad_norm param_norm".split()


# --- a run, and the same one interrupted


@pytest.fixture(scope="module")
def whole(tmp, train):
    """An uninterrupted run."""
    train(*LONG, "--out", tmp / "whole")
    return tmp / "whole"


@pytest.mark.slow
def test_what_a_run_writes(whole):
    found = {path.relative_to(whole).as_posix() for path in contents(whole)}
    files = {"config.json", "logs.csv", "checkpoint.msgpack", "curves.png", "lock"}
    files.add("checkpoint_previous.msgpack")
    assert found == files | {"levels/update_250.png", "levels/update_300.png"}
    for path in (whole / name for name in found if name.endswith("png")):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    config = json.loads((whole / "config.json").read_text())
    assert config["script"] == "dr.py"
    assert config["num_updates"] == 300
    assert config["lr"] == 1e-2
    assert {f.name for f in fields(dr.Config)} < config.keys()
    checkpoint = load(whole)
    assert checkpoint["cycles"] == 300
    assert checkpoint["state"]["cycles"] is None
    assert [row["seed"] for row in checkpoint["rows"].values()] == [0, 1]
    assert {len(x) for x in leaves(checkpoint).values()} == {2}


@pytest.mark.slow
def test_logs(whole):
    with open(whole / "logs.csv", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames[:5] == FIRST
    assert {*reader.fieldnames} == {*FIRST, *COLUMNS}
    assert [int(row["update"]) for row in rows] == [i for i in range(2, 301, 2) for _ in "ab"]
    assert [int(row["seed"]) for row in rows] == [0, 1] * 150
    for row in rows:
        update = int(row["update"])
        assert int(row["grad_updates"]) == update
        assert int(row["env_steps"]) == update * 8 * 16
        for name in COLUMNS:  # a value, but for evaluations that were not due
            assert (row[name] == "") == ("eval" in name and update % 4 != 0), (name, update)
        assert 0 < float(row["entropy"]) <= np.log(7) + 1e-3
        assert 0 <= float(row["solvable"]) <= 1
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 0
    solved = [float(row["train_solve_rate"]) for row in rows]
    assert np.mean(solved[-40:]) > np.mean(solved[:40]) + 0.1  # it learns


@pytest.mark.parametrize("name", ["dr", "sfl"])
def test_curves_are_means_of_what_seeds_have_at_an_update(monkeypatch, tmp_path, name):
    """Seeds differ in env_steps if only the steps of episodes count."""
    module, drawn = importlib.import_module(name), []
    monkeypatch.setattr(module, "write", lambda path, save: drawn.append(save.func.__self__))
    rows = ["update,env_steps,seed,train_solve_rate,eval_solve_rate"]
    rows += ["1,10,0,0.1,", "1,14,1,0.3,", "2,30,0,0.4,0.5", "2,20,1,0.6,1.0"]
    (tmp_path / "logs.csv").write_text("\n".join(rows))
    module.plot_curves(tmp_path, [])
    train, evaluated = (axes.lines[0].get_xydata() for axes in drawn[0].axes)
    np.testing.assert_allclose(train, [[12, 0.2], [25, 0.5]])
    np.testing.assert_allclose(evaluated, [[25, 0.75]])
    band = drawn[0].axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert np.isclose(band.min(), 0.1)
    assert np.isclose(band.max(), 0.6)

    rows[0] += ",gamma"
    rows[1:] = [f"{row},{gamma}" for row, gamma in zip(rows[1:], (0.9990, 0.9992) * 2)]
    (tmp_path / "logs.csv").write_text("\n".join(rows))
    module.plot_curves(tmp_path, ["gamma"])
    assert len(drawn[1].axes[0].lines) == 2  # a curve for each point of a sweep


@pytest.mark.slow
def test_killed_at_any_moment(tmp, whole, launch, train):
    folder, args = tmp / "killed", LONG
    for update in (50, 150):
        process = launch(*args, "--out", folder)
        assert interrupt(process, folder, update, signal.SIGKILL)[0] == -signal.SIGKILL
        assert 0 < last_update(folder) - 16 <= load(folder)["cycles"] < 300
        args = ["--resume"]
    train("--resume", "--out", folder)
    assert_equal(folder, whole)


@pytest.fixture(scope="module")
def stopped(tmp, launch):
    """A run stopped by SIGINT, resumed as printed, and stopped by SIGTERM; the two outputs."""
    folder, args, said = tmp / "stopped", [*LONG, "--out", tmp / "stopped"], []
    for update, number in ((30, signal.SIGINT), (100, signal.SIGTERM)):
        said.append(interrupt(launch(*args), folder, update, number))
        args = re.search(r"to go on: python \S+dr\.py (.*)", said[-1][1])[1].split()
    return folder, args, said


@pytest.mark.slow
def test_signals_stop_after_the_chunk(tmp, stopped):
    folder, args, said = stopped
    assert args == ["--resume", "--out", str(folder)]
    assert [status for status, _, _ in said] == [130, 143]
    assert not any("Traceback" in err for _, _, err in said)
    assert all(err.count("stops after these cycles; at once if asked again\n") == 1
               for _, _, err in said)  # fmt: skip
    steps = [int(re.search(r"stopped at cycle (\d+)", out)[1]) for _, out, _ in said]
    assert load(folder)["cycles"] == steps[1] == last_update(folder)
    assert 30 <= steps[0] < 100 <= steps[1] < 300
    assert (folder / "levels" / f"update_{steps[0]}.png").exists()


@pytest.mark.slow
def test_stopped_and_resumed_equals_uninterrupted(tmp, stopped, whole, train):
    folder = shutil.copytree(stopped[0], tmp / "resumed")
    train("--resume", "--out", folder, "--checkpoint-interval", 500)
    assert_equal(folder, whole)
    before = contents(folder)
    said = train("--resume", "--out", folder)  # nothing is left to do
    [evaluate] = re.findall(r"next: python (\S+evaluate.py) (?:\S+)\n", said)
    assert (tmp / evaluate).resolve() == ROOT / "evaluate.py"
    assert table(folder) == table(whole)
    assert contents(folder).keys() == before.keys()


def test_names_of_other_libraries():
    """Each name is given for one field only and is no field's own name; plr.py's get an answer."""
    names = [name for theirs in dr.OTHER_NAMES.values() for name in theirs.split()]
    assert len(names) == len({*names}) > 40
    known = {
        name
        for x in ("dr", "plr", "accel", "paired", "sfl")
        for name in importlib.import_module(x).TYPES
    }
    assert {*dr.OTHER_NAMES} < known
    assert not known & {*names}
    with pytest.raises(plr.BadConfig, match="--ued-score: did you mean --score?"):
        plr.refuse_words(["--ued_score", "l1_value_loss"])
    with pytest.raises(plr.BadConfig, match="did you mean --buffer-size?"):
        plr.refuse_words(["--level-buffer-capacity", "9"])
    dr.refuse_words(["--ued-score", "mna"])  # which has no score: tyro says so


def test_a_million():
    words = "--num-updates 1e6 --num-envs 2.5e1 --out 1e6 --lr 1e-3 --seeds 1.55e1".split()
    config = dr.parse(words[:-2])
    assert (config.num_updates, config.num_envs, config.out) == (1_000_000, 25, "1e6")
    assert config.lr == 1e-3
    with pytest.raises(SystemExit):  # no whole number
        dr.parse(words)


def test_what_an_environment_lacks_is_named(monkeypatch, capsys):
    """The message is one line, before anything is compiled."""
    monkeypatch.delattr(plr.amaze, "sample_solvable")
    with pytest.raises(plr.BadConfig, match="solvable_only = True: allowed is False: amaze has no"):
        plr.check(plr.FAST)
    plr.check(plr.Config())
    monkeypatch.delattr(plr.amaze, "level_code")
    monkeypatch.setattr(sys, "argv", ["plr.py", *TINY])
    with pytest.raises(SystemExit):
        plr.main()
    said = capsys.readouterr().err
    assert said == "plr.py: error: amaze.level_code is missing: plr.py needs it\n"


@pytest.mark.slow
@pytest.mark.parametrize("file", ["checkpoint.msgpack", "logs.csv"])
def test_a_full_disk_leaves_the_last_checkpoint(tmp, stopped, call, train, whole, file):
    """A limit on the size of files acts as a full disk."""
    folder = shutil.copytree(stopped[0], tmp / f"full_{len(file)}")
    log, checkpoint = ((folder / f).stat().st_size for f in ("logs.csv", "checkpoint.msgpack"))
    size = checkpoint - 1 if file == "checkpoint.msgpack" else log + 3000
    assert 3 * log < checkpoint
    before = (folder / "checkpoint.msgpack").read_bytes()
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
    interval = 10 if file == "checkpoint.msgpack" else 1000
    args = "--resume", "--checkpoint-interval", interval, "--out", folder
    status, _, err = call(*args, before=limit)
    assert status == 1
    assert "Traceback" not in err
    line = err.splitlines()[-1]
    assert line.startswith("dr.py: error: ")
    assert "File too large" in line
    assert file in line
    assert (folder / "checkpoint.msgpack").read_bytes() == before
    assert not list(folder.rglob("*.tmp"))
    if file == "checkpoint.msgpack":
        train("--resume", "--out", folder)
        assert_equal(folder, whole)


# --- errors


def say(monkeypatch, capsys, *args, module=dr):
    """Run dr.py's main in this process, with its devices -> exit status, output."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, args)])
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as error:
        module.main()
    signal.signal(signal.SIGINT, handler)
    captured = capsys.readouterr()
    assert "compil" not in captured.out
    assert "Traceback" not in captured.err
    return error.value.code, captured.err.splitlines()[-1] if captured.err else captured.out


@pytest.mark.parametrize("args, field", [
    ("--num-envs -1", "num_envs = -1"),
    ("--num-envs 0", "num_envs = 0"),
    ("--num-updates 0", "num_updates = 0"),
    ("--num-updates 3000000000", "num_updates = 3000000000"),
    ("--num-steps 0", "num_steps = 0"),
    ("--num-evals 0", "num_evals = 0"),
    ("--update-epochs 0", "update_epochs = 0"),
    ("--num-minibatches 3", "num_minibatches = 3"),
    ("--num-minibatches 0", "num_minibatches = 0"),
    ("--num-minibatches 64", "num_minibatches = 64"),
    ("--seeds 0", "seeds = 0"),
    ("--seed -1", "seed = -1"),
    ("--seed 4294967301", "seed = 4294967301"),
    ("--seeds-at-once -1", "seeds_at_once = -1"),
    ("--seeds 3 --devices 1 --seeds-at-once 2", "seeds_at_once = 2"),
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
    ("--n-walls 24", "n_walls = 24"),
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
    ("--sweep num_envs=16,32", "sweep = ('num_envs=16,32',)"),
    ("--sweep lr=fast", "sweep = ('lr=fast',)"),
    ("--sweep lr=", "sweep = ('lr=',)"),
    ("--sweep lr=log:1e-4:1e-2", "sweep = ('lr=log:1e-4:1e-2',)"),
    ("--sweep lr=log:0:1:3", "sweep = ('lr=log:0:1:3',)"),
    ("--sweep lr=log:-1e-4:1e-2:3", "sweep = ('lr=log:-1e-4:1e-2:3',)"),
    ("--sweep lr=log:1e-4:inf:3", "sweep = ('lr=log:1e-4:inf:3',)"),
    ("--height 300", "height = 300"),
    ("--sweep lr=log:1e-4:1e-2:0", "sweep = ('lr=log:1e-4:1e-2:0',)"),
    ("--sweep lr=log:1e-4:1e-2:0 --sweep-random 2", "sweep = ('lr=log:1e-4:1e-2:0',)"),
    ("--sweep lr=1e-3 --sweep lr=1e-4", "sweep = "),
    ("--sweep gamma=0.9,1.5", "gamma = 1.5"),
    ("--sweep-random 4", "sweep_random = 4"),
])  # fmt: skip
def test_bad_values(monkeypatch, capsys, tmp_path, args, field):
    """One line before anything is compiled or written: field, value, what is allowed."""
    out = tmp_path / "run"
    status, line = say(monkeypatch, capsys, *TINY, *args.split(), "--out", out)
    assert status == 2
    assert line.startswith(f"dr.py: error: {field}")
    assert ": allowed is " in line
    assert not out.exists()


def test_what_is_allowed_is_said(monkeypatch, capsys, tmp_path):
    cases = {
        "--eval-suite nowhere": "minimax",
        "--n-walls 24": "height = 5, width = 5: allowed is at most 23",
        "--num-envs 9 --num-minibatches 2": "num_envs = 9, num_evals = 1: allowed is a divisor",
        "--num-minibatches 3": "a divisor of 8",
        "--sweep num_envs=16,32": "a float: lr, gamma",
        "--sweep gamma=0.9 --sweep rnn=lstm,gru": "not 'rnn' (else a run for each value)",
        "--sweep gamma=0.9 --sweep lr=0.1,fast": "lr=log:0.01:0.1:8, not '0.1,fast'",
        "--sweep lr=log:1:2": "not 'log:1:2'",
        "--gamma 1.1": "from 0 to 1",
        "--resume --out /nowhere": "the folder of a run, to --resume it",
        "--learning-rate 0.1": "dr.py: error: --learning-rate: did you mean --lr?",
        "--discount 0.9": "--discount: did you mean --gamma?",
        "--n-rollout-steps 9": "did you mean --num-steps?",
        "--ppo_n_epochs 9": "did you mean --update-epochs?",
        "--n_total_updates=9": "did you mean --num-updates?",
        "--student-recurrent-arch lstm": "did you mean --rnn?",
        "--num-train-envs 9": "did you mean --num-envs?",
        "--n-parallel 9": "did you mean --num-envs?",
        "--LR 0.1": "--LR: did you mean --lr?",
        "--NUM_ENVS 9": "--NUM-ENVS: did you mean --num-envs?",
        "--total_timesteps=9": "--total-timesteps: did you mean --num-updates?",
        "--clip-coef 0.1": "did you mean --clip-eps?",
    }
    for args, words in cases.items():
        said = say(monkeypatch, capsys, *TINY, "--out", tmp_path / "run", *args.split())
        assert said[0] == 2
        assert words in said[1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("args", ["--rnn elman", "--num-envs 1.5", "--lr slow", "--shard all",
                                  "--track paper", "--nonsense 1"])  # fmt: skip
def test_bad_types(monkeypatch, capsys, args):
    assert say(monkeypatch, capsys, *args.split())[0] == 2


def test_bad_value_in_a_process(tmp, call):
    status, out, err = call("--num-envs", 0, "--out", tmp / "bad")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("dr.py: error: num_envs = 0: allowed is at least 1")
    assert not (tmp / "bad").exists()


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_not_touched(monkeypatch, capsys, whole):
    before = contents(whole)
    status, line = say(monkeypatch, capsys, *LONG, "--out", whole)
    assert status == 2
    assert "error: out = " in line
    assert "--resume" in line
    assert contents(whole) == before


def test_out_cannot_be_made(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("precious")
    status, line = say(monkeypatch, capsys, *SHORT, "--out", tmp_path / "file")
    assert status == 2
    assert "error: out = " in line
    status, line = say(monkeypatch, capsys, *SHORT, "--out", tmp_path / "file" / "run")
    assert status in (1, 2)
    assert "Not a directory" in line
    assert "the last checkpoint is intact" not in line  # there is none
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.slow
@pytest.mark.parametrize("args, field", [
    ("--num-envs 4", "num_envs = 4"),
    ("--rnn gru", "rnn = 'gru'"),
    ("--num-updates 200", "num_updates = 200"),
    ("--log-interval 10", "log_interval = 10"),
    ("--lr 0.5", "lr = 0.5"),
    ("--gamma 0.5", "gamma = 0.5"),
    ("--anneal-lr", "anneal_lr = True"),
    ("--seeds 3", "seeds = 3"),
    ("--seed 1", "seed = 1"),
    ("--sweep lr=0.1,0.2", "sweep = ('lr=0.1,0.2',)"),
])  # fmt: skip
def test_resume_refuses_another_run(monkeypatch, capsys, whole, args, field):
    before = contents(whole)
    status, line = say(monkeypatch, capsys, "--resume", "--out", whole, *args.split())
    assert status == 2
    assert line.startswith(f"dr.py: error: {field}: allowed is ")
    assert "as in the run to resume" in line
    assert contents(whole) == before
    assert ("more" in line) == field.startswith("num_updates")
    assert "longer" not in line


@pytest.mark.slow
@pytest.mark.parametrize("name", ["walls", "rooms"])  # a metric less, and another one
def test_resume_refuses_other_metrics(tmp, call, whole, name):
    """All rows of logs.csv need the columns of its header."""
    (tmp / name).mkdir()
    line = "metrics |= {k: jnp.nanmean(x) for k, x in level_stats(levels).items()}"
    change = {"walls": "; metrics.pop('walls')", "rooms": " | {'rooms': lr}"}[name]
    script = copy(tmp / name, "dr", {line: line + change})
    before = contents(whole)
    status, _, err = call("--resume", "--out", whole, "--num-updates", 400, script=script)
    assert status == 2
    found = {"walls": "'logged', in this run nothing", "rooms": "nothing, in this run 'logged'"}
    assert err.startswith(f"dr.py: error: {whole}/checkpoint.msgpack: metrics/{name} is ")
    assert found[name] in err
    assert contents(whole) == before


@pytest.mark.slow
def test_an_annealed_run_does_not_go_on(monkeypatch, capsys, tmp_path, whole):
    """Its learning rate was annealed over the original number of updates; the message says so."""
    stored = json.loads((whole / "config.json").read_text()) | {"anneal_lr": True}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    status, line = say(monkeypatch, capsys, "--resume", "--num-updates", 400, "--out", tmp_path)
    assert status == 2
    assert line.startswith("dr.py: error: num_updates = 400: allowed is 300")
    assert "anneal" in line


@pytest.mark.parametrize("name", ["dr", "plr", "accel", "paired", "sfl"])
def test_a_preset_is_where_flags_start(name):
    """Other flags override it, in any order; of two presets the first one in PRESETS counts."""
    module = importlib.import_module(name)
    assert module.parse([]) == module.Config()
    assert module.PRESETS["--fast"] == module.FAST
    for flag, preset in module.PRESETS.items():
        assert preset != module.Config()
        assert module.parse([flag]) == preset
        given = ["--lr", "0.5", flag, "--seeds", "3", "--sweep", "gamma=0.5,0.6"]
        wanted = replace(preset, lr=0.5, seeds=3, sweep=("gamma=0.5,0.6",))
        assert module.parse(given) == wanted
    if len(module.PRESETS) > 1:
        both = module.parse(["--parallel", "--fast"])
        assert both == replace(module.FAST, parallel=True)


@pytest.mark.parametrize("name", ["plr", "accel"])
def test_modes_are_presets(name):
    module = importlib.import_module(name)
    assert module.PARALLEL.parallel
    assert module.PARALLEL.num_updates == 30_000
    assert not module.PLAIN.robust
    assert module.PLAIN.num_updates == 30_000
    assert module.parse(["--parallel"]) == module.PARALLEL
    assert module.parse(["--no-robust"]) == module.PLAIN
    assert module.parse(["--no-robust", "--num-updates", "7"]).num_updates == 7


@pytest.mark.slow
def test_resume_takes_the_fields_of_the_run(whole):
    asked = dr.parse([*LONG, "--out", str(whole)])
    resumed = dr.parse(["--resume", "--out", str(whole)])
    assert resumed == replace(asked, resume=True)
    free = """--checkpoint-interval 7 --archive-interval 8 --plot-interval 9 --seeds-at-once 1
        --devices 4 --shard levels --track wandb --distributed auto""".split()
    changes = dict(checkpoint_interval=7, archive_interval=8, plot_interval=9, seeds_at_once=1)
    changes |= dict(devices=4, shard="levels", track="wandb", distributed="auto", resume=True)
    for longer in (300, 400):
        args = *LONG, *free, "--num-updates", str(longer)
        resumed = dr.parse(["--resume", "--out", str(whole), *args])
        assert resumed == replace(asked, **changes, num_updates=longer)


@pytest.mark.slow
def test_resume_needs_a_run(monkeypatch, capsys, tmp_path, whole):
    for args in ([], ["--out", tmp_path / "none"], ["--out", tmp_path]):
        status, line = say(monkeypatch, capsys, "--resume", *args)
        assert status == 2
        assert line.startswith("dr.py: error: out = ")
        assert "--resume" in line
    shutil.copy(whole / "config.json", tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"dr.py"', '"plr.py"'))
    status, line = say(monkeypatch, capsys, "--resume", "--out", tmp_path)
    assert status == 2
    assert "a run of dr.py" in line
    (tmp_path / "config.json").write_text(text.replace('"lr"', '"learning_rate"'))
    status, line = say(monkeypatch, capsys, "--resume", "--out", tmp_path)
    assert status == 2
    assert "config.json: dr.py does not know learning_rate" in line


def squeezed(text):
    """The text without spaces and the lines of a table."""
    return re.sub(r"[\s│╭╮╰╯─]", "", text)


@pytest.mark.parametrize("name", ["dr", "plr", "accel", "paired", "sfl"])
def test_help(monkeypatch, capsys, name):
    """The docstring unchanged; each field with its comment, choices and the value it will have."""
    module = importlib.import_module(name)
    about = dict(re.findall(r"(?m)^    (\w+): .*?  # (.*)", inspect.getsource(module.Config)))
    assert about.keys() == {f.name for f in fields(module.Config)}
    for args in [], *([flag] for flag in module.PRESETS):
        status, said = say(monkeypatch, capsys, *args, "--help", module=module)
        assert not status
        assert said.count(module.__doc__) == 1
        assert "~/.cache/amaze" in said
        said = squeezed(said.partition(module.__doc__)[2])
        for field in fields(module.Config):
            value, flag = getattr(module.parse(args), field.name), field.name.replace("_", "-")
            kind = {int: "INT", float: "FLOAT"}.get(field.type, "STR")
            if field.type is bool:
                kind = f",--no-{flag}"
            if get_origin(field.type) is Literal:
                kind = "{" + ",".join(get_args(field.type)) + "}"
            end = "(repeatable)" if field.name == "sweep" else f"(default:{value or repr(value)})"
            assert squeezed(f"--{flag}{kind}{about[field.name]}{end}") in said, (args, field.name)


@pytest.mark.parametrize("name", ["plr", "accel"])
@pytest.mark.parametrize("args", ["", "--fast", "--parallel", "--fast --parallel",
                                  "--fast --no-robust"])  # fmt: skip
def test_fast_says_for_which_modes_it_was_not_tuned(capsys, name, args):
    module = importlib.import_module(name)
    module.parse(args.split())
    other = args.removeprefix("--fast ")
    words = f"--fast was not tuned for {other}\n"
    assert capsys.readouterr().out == words * ("--fast " in args)


@pytest.mark.parametrize("given, hint", [
    ("--robust False", "--robust False: allowed is --robust or --no-robust"),
    ("--solvable-only=true", "--solvable-only true: allowed is --solvable-only or --no-"),
])  # fmt: skip
def test_a_boolean_takes_no_value(monkeypatch, capsys, given, hint):
    plr = importlib.import_module("plr")
    status, line = say(monkeypatch, capsys, *given.split(), module=plr)
    assert status == 2
    assert line.startswith(f"plr.py: error: {hint}")


# --- compiled programs, from one run to the next


UNSET = "os.environ.pop('JAX_COMPILATION_CACHE_DIR')"


def programs(folder):
    """The compiled programs in a cache folder: {path: bytes}."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*-cache")}


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--seeds 2", "--shard levels"])
def test_a_second_start_compiles_nothing_and_equals_the_first(tmp, train, options):
    """Bit for bit, on two devices, also resumed half way; and equal to a run without a cache."""
    folder = tmp / options.replace(" ", "_")
    env, args = {"XDG_CACHE_HOME": str(folder / "user")}, [*SHORT, *options.split()]
    start = partial(train, before=UNSET, devices=2)
    start(*args, "--out", folder / "none", env=env | {"JAX_ENABLE_COMPILATION_CACHE": "false"})
    assert not programs(folder)
    start(*args, "--out", folder / "first", env=env)
    kept = programs(folder / "user")
    assert kept
    assert len({path.parent for path in kept}) == 1
    start(*args, "--out", folder / "second", env=env)
    rewind(folder / "first", folder / "third", 8)
    start("--resume", "--out", folder / "third", env=env)
    assert programs(folder / "user") == kept
    for name in ("first", "second", "third"):
        assert_equal(folder / name, folder / "none")


@pytest.mark.parametrize("name", ["dr", "evaluate"])
def test_where_programs_are_kept(monkeypatch, tmp_path, capsys, name):
    """In a folder for each kind of CPU; a warning if it is unwritable; the user's setting wins."""
    module, own = importlib.import_module(name), jax.config.jax_compilation_cache_dir
    handler = signal.getsignal(signal.SIGINT)
    info, update = tmp_path / "cpuinfo", partial(jax.config.update, "jax_compilation_cache_dir")
    cpu = "processor\t: 0\nmodel name\t: {}\ncpu MHz\t\t: {}\nflags\t\t: {}\n\n"
    replaced = {"/proc/cpuinfo": info}
    monkeypatch.setattr(dr, "Path", lambda *x: replaced.get(x[0]) or Path(*x))
    monkeypatch.setattr(module, {"dr": "run"}.get(name, name), lambda *_, **__: sys.exit())
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def start(text, given=None):
        info.write_text(text) if text else info.unlink(missing_ok=True)
        update(given)
        with pytest.raises(SystemExit) as error:
            module.main()
        assert not error.value.code
        return jax.config.jax_compilation_cache_dir, capsys.readouterr().err

    try:
        assert start("", given="gs://mine") == ("gs://mine", "")
        assert start("x", "") == ("", "")
        assert not (tmp_path / ".cache").exists()
        kinds = [("One", 1, "avx"), ("One", 2, "avx"), ("One", 1, "avx sse"), ("Two", 1, "avx")]
        one, same, *others = (start(cpu.format(*kind))[0] for kind in kinds)
        others += [start("Features\t: sve\n")[0], start("Features\t: neon\n")[0], start("")[0]]
        assert one == same
        assert len({one, *others}) == 6
        for folder in (one, *others):
            assert re.fullmatch(rf"jax-{jax.__version__}-[0-9a-f]{{9,16}}", Path(folder).name)
            assert Path(folder).is_dir()
            assert Path(folder).parent == tmp_path / ".cache/amaze"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert Path(start(cpu.format("One", 1, "avx"))[0]).parent == tmp_path / "xdg/amaze"
        monkeypatch.setenv("XDG_CACHE_HOME", str(info))
        kept, said = start("x")
        assert kept is None
        assert len(said.splitlines()) == 1
        assert said.startswith("warning: compiled programs are not kept: ")
        assert str(info) in said
    finally:
        update(own)
        signal.signal(signal.SIGINT, handler)


def test_an_error_without_a_file_is_said_as_it_is(monkeypatch, capsys):
    monkeypatch.setattr(dr, "run", Mock(side_effect=OSError("Network is unreachable")))
    status, line = say(monkeypatch, capsys)
    assert status == 1
    assert line.startswith("dr.py: error: Network is unreachable; the last")


# --- rows: seeds, groups, sweeps


SWEEP = "--sweep lr=1e-2,1e-3 --sweep ent_coef=1e-3,0.1 --seeds 2".split()


@pytest.fixture(scope="module")
def sweep(tmp, train):
    train(*SHORT, *SWEEP, "--out", tmp / "sweep")
    return tmp / "sweep"


@pytest.mark.slow
def test_sweep(tmp, sweep, train):
    points = [(lr, ent_coef) for lr in (1e-2, 1e-3) for ent_coef in (1e-3, 0.1)]
    expected = [(seed, *point) for point in points for seed in (0, 1)]
    log, names = table(sweep), ("seed", "lr", "ent_coef")
    assert [tuple(float(row[name]) for name in names) for row in log] == expected * 6
    assert list(log[0]).index("ent_coef") < 6
    rows = load(sweep)["rows"].values()
    assert [tuple(row[name] for name in names) for row in rows] == expected

    again = rewind(sweep, tmp / "sweep_again", 8)
    train("--resume", "--out", again)
    assert_equal(again, sweep)


@pytest.mark.slow
def test_default_folders_and_rows_equal_solo_runs(tmp, sweep, train):
    (tmp / "home").mkdir()
    for seed, name in ((0, "dr-1"), (1, "dr-2")):
        args = [*SHORT, "--lr", 1e-3, "--ent-coef", 0.1, "--seed", seed]
        assert f"runs/{name}: 1 training(s) " in train(*args, cwd=tmp / "home")
        assert_close(sweep, [6 + seed], tmp / "home" / "runs" / name, [0])
    assert sorted(path.name for path in (tmp / "home" / "runs").iterdir()) == ["dr-1", "dr-2"]
    kernel = leaves(load(sweep))["['student']['params']['params']['conv']['kernel']"]
    assert not np.allclose(kernel[6], kernel[7], 1e-2, 1e-2)


def test_points_of_a_sweep():
    rows = dr.make_rows(dr.Config(seed=5, seeds=2, sweep=("lr=log:1e-4:1e-2:3", "gamma=0.5,0.6")))
    assert [row["seed"] for row in rows] == [5, 6] * 6
    assert [row["gamma"] for row in rows] == [0.5, 0.5, 0.6, 0.6] * 3
    assert np.allclose([row["lr"] for row in rows[::4]], [1e-4, 1e-3, 1e-2])
    config = dr.Config(seeds=2, sweep=("lr=log:1e-4:1e-2:3", "gamma=0.5,0.6"), sweep_random=200)
    rows = dr.make_rows(config)
    assert rows == dr.make_rows(config)
    assert len(rows) == 400
    assert {row["gamma"] for row in rows} == {0.5, 0.6}
    lr = np.log10([row["lr"] for row in rows[::2]])
    assert len(set(lr)) == 200
    assert lr.min() >= -4
    assert lr.max() <= -2
    assert np.histogram(lr, 4, (-4, -2))[0].min() > 25  # uniform in the logarithm
    assert all(a["lr"] == b["lr"] and a["seed"] != b["seed"] for a, b in zip(rows[::2], rows[1::2]))
    assert dr.make_rows(dr.Config(seeds=2)) == [{"seed": 0}, {"seed": 1}]
    rows = dr.make_rows(dr.Config(sweep=("lr=log:1e-4:1e-2:1",), sweep_random=9))
    assert len({row["lr"] for row in rows}) == 9  # the number of steps is that of the grid
    rows = dr.make_rows(dr.Config(sweep=("lr=log:1e-2:1e-4:3",)))
    assert np.allclose([row["lr"] for row in rows], [1e-2, 1e-3, 1e-4])  # downwards too


@pytest.mark.parametrize("number", [0, 50])
def test_no_training_twice_in_a_sweep(number):
    rows = dr.make_rows(dr.Config(seeds=2, sweep=("lr=0.1,0.1,0.2",), sweep_random=number))
    assert sorted(row["lr"] for row in rows) == [0.1, 0.1, 0.2, 0.2]


@pytest.mark.slow
def test_a_picture_that_cannot_be_written_is_made_again(tmp, sweep, call, train):
    """The checkpoint is written after the picture; here a folder is in the picture's place."""
    folder = rewind(sweep, tmp / "no_picture", 8)
    picture = folder / "levels" / "update_12.png"
    picture.unlink()
    picture.mkdir()
    status, _, err = call("--resume", "--out", folder)
    assert status == 1
    assert "update_12.png" in err.splitlines()[-1]
    assert load(folder)["cycles"] == 8
    picture.rmdir()
    (folder / "checkpoint_12.msgpack").unlink()
    train("--resume", "--out", folder)
    assert_equal(folder, sweep)
    assert contents(folder).keys() == {folder / x.relative_to(sweep) for x in contents(sweep)}


@pytest.mark.slow
def test_divergence(tmp, sweep, train):
    """A training that has diverged is printed once and logs nan; the others continue."""
    folder = tmp / "diverged"
    said = train(*SHORT, "--sweep", "lr=1e-2,1e38", "--out", folder)
    named = re.findall("^diverged at cycle 1: .*", said, re.MULTILINE)
    assert len(named) == said.count("diverged at") == 1
    assert "1e+38" in named[0]
    assert "0.01" not in named[0]
    assert_close(folder, [0], sweep, [0])
    for row in table(folder)[1::2]:
        assert {row[name] for name in LOSSES} == {"nan"}
        assert row["eval_return"] == ("0" if int(row["update"]) % 4 == 0 else "")  # not measured
        assert float(row["walls"]) > 0


@pytest.mark.slow
def test_all_trainings_diverge(tmp, call):
    """They diverge after a checkpoint, which stays."""
    lr = "lr = config.lr * "
    script = copy(tmp, "diverge", {lr: f"{lr}jnp.where(state.cycles == 6, 1e38, 1.0) * "})
    folder = tmp / "all_diverged"
    status, out, err = call(*SHORT, "--seeds", 2, "--out", folder, script=script)
    assert status == 1
    assert "Traceback" not in err
    assert re.findall(r"diverged at cycle 7: .*'seed': (\d)", out) == ["0", "1"]
    line = err.splitlines()[-1]
    assert line.startswith("diverge.py: error: ")
    assert "diverged" in line
    checkpoint = (folder / "checkpoint.msgpack").read_bytes()
    assert checkpoint == (folder / "checkpoint_4.msgpack").read_bytes()
    log = table(folder)
    assert [row["update"] for row in log] == [str(i) for i in (2, 4, 6, 8) for _ in "ab"]
    assert "nan" not in {x for row in log[:6] for x in row.values()}
    assert {row[name] for row in log[6:] for name in LOSSES} == {"nan"}


# --- copies that were hacked


@pytest.mark.slow
def test_a_new_float_is_swept(tmp, sweep, train):
    """It is a field of Config and used in rollout; no other change is needed."""
    act = "action, log_prob, value = act(params, memory, obs, is_first, "
    changes = {
        "    n_walls: int": "    noise: float = 1.0  # of the student's actions\n    n_walls: int",
        f"{act}noise)": f"{act}noise * config.noise)",
    }
    script, folder = copy(tmp, "noisy", changes), tmp / "hacked"
    said = train(*SHORT, "--sweep", "noise=1,0.1", "--out", folder, script=script)
    assert f"next: python evaluate.py {folder} --script {script}" in said
    assert [row["noise"] for row in table(folder)] == ["1.0", "0.1"] * 6
    assert_close(folder, [0], sweep, [0])
    log = table(folder)
    assert all(log[i]["policy_loss"] != log[i + 1]["policy_loss"] for i in range(0, 12, 2))
    status = json.loads((folder / "config.json").read_text())
    assert status["script"] == "noisy.py"
    assert status["noise"] == 1.0


@pytest.mark.slow
def test_a_level_generator_without_n_walls(tmp, train):
    text = (ROOT / "dr.py").read_text()
    field = re.search(r"    n_walls: int = .*\n", text)[0]
    check = re.search(r"    room = .*\n    demand\(config.n_walls.*\n", text)[0]
    generator = """def dotted(rng, config):
    walls = jnp.zeros((config.height, config.width), bool).at[1::2, 1::2].set(True)
    return amaze.place(rng, walls)


def make_train("""
    draw = "amaze.sample_level(rng, config.n_walls, config.height, config.width)"
    changes = {field: "", check: "", draw: "dotted(rng, config)", "def make_train(": generator}
    script, folder = copy(tmp, "dotted", changes), tmp / "dotted_run"
    args = " ".join(SHORT).replace("--n-walls 6 ", "").split()
    said = train(*args, "--num-updates", 2, "--out", folder, script=script)
    assert f"next: python evaluate.py {folder} --script {script}" in said
    assert [float(row["walls"]) for row in table(folder)] == [4.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grad_updates", "rollouts"])
def test_a_metric_is_missing(tmp, call, name):
    """If the command line needs it: one line, before anything is compiled or written."""
    script = copy(tmp, f"no_{name}", {f'"{name}": cycles': f'"my_{name}": cycles'})
    folder = tmp / f"run_without_{name}"
    status, out, err = call(*SHORT, "--out", folder, script=script)
    assert status == 2
    assert "Traceback" not in err
    assert "compil" not in out
    assert err.startswith(f"no_{name}.py: error: ")
    assert len(err.splitlines()) == 1
    assert name in err
    assert not folder.exists()


# --- trackers


def wandb_records(path):
    """Records of a file that wandb writes offline: LevelDB's log format, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:
            at += -at % 32768  # the rest of a block
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


@pytest.mark.slow
def test_track_wandb(tmp, sweep, train):
    """Each row has a run, in one group, with its configuration and its rows of logs.csv."""
    folder = tmp / "tracked"
    env = {f"WANDB_{x}_DIR": str(tmp / "wandb") for x in ("CONFIG", "CACHE", "DATA")}
    env |= {"WANDB_MODE": "offline", "PYTHONPATH": "", "WANDB_PROJECT": "mine"}
    train(*SHORT, *SWEEP, "--track", "wandb", "--out", folder, env=env)
    assert_equal(folder, sweep)
    log, seen, names = table(folder), {}, ("seed", "lr", "ent_coef")
    for path in folder.rglob("*.wandb"):
        records = list(wandb_records(path))
        run = next(x.run for x in records if x.WhichOneof("record_type") == "run")
        assert run.run_group == folder.name
        assert run.project == "mine"
        config = {x.key: json.loads(x.value_json) for x in run.config.update}
        assert config["num_updates"] == 12
        assert config["eval_suite"] == "TrivialMaze"
        row = [config[name] for name in names]
        seen[run.display_name] = tuple(row)
        expected = [line for line in log if [float(line[name]) for name in names] == row]
        history = [x.history for x in records if x.WhichOneof("record_type") == "history"]
        assert len(history) == len(expected) == 6
        for entry, line in zip(history, expected):
            values = {x.key or "/".join(x.nested_key): x.value_json for x in entry.item}
            values = {k: float(v) for k, v in values.items() if k[0] != "_" and k != "seconds"}
            assert values == {name: float(x) for name, x in line.items() if x != ""}
            assert entry.step.num == int(line["update"])
    assert len(seen) == len({*seen.values()}) == 8


@pytest.mark.parametrize("env", [{}, {"WANDB_PROJECT": "mine", "WANDB_NAME": "trial"}])
def test_what_a_tracker_calls_a_run(monkeypatch, capsys, tmp_path, env):
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    library = Mock(**{"init.side_effect": dr.BadConfig("enough")})
    monkeypatch.setitem(sys.modules, "wandb", library)
    library.__spec__ = library
    args = [*SHORT, "--num-updates", 2, "--track", "wandb", "--out", tmp_path / "run"]
    assert say(monkeypatch, capsys, *args)[0] == 2
    about = library.init.call_args.kwargs
    expected = ("mine", "trial-0", "run") if env else ("dr.py", "run-0", "run")
    assert (about["project"], about["name"], about["group"]) == expected
    assert about["config"]["num_updates"] == 2
    assert about["dir"] == tmp_path / "run"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_tracker_is_not_installed(monkeypatch, capsys, tmp_path, name):
    monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "run"
    status, line = say(monkeypatch, capsys, *SHORT, "--track", name, "--out", out)
    assert status == 2
    assert line.startswith(f"dr.py: error: track = '{name}': allowed is ")
    assert f"pip install {name}" in line
    assert not out.exists()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_is_imported_only_when_asked_for(call, name):
    """`launch` puts a module in the tracker's place that ends any run which imports it."""
    assert call(f"import {name}", script="-c") == (1, "", f"{name} is imported\n")
