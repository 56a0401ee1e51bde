"""The command line: what a run writes, resume, refusals, sweeps, hacks, trackers, kept programs."""

import csv
import importlib
import inspect
import json
import re
import shutil
import struct
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal, get_args, get_origin
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from parts import cycle_rngs, part
from runs import (
    ROOT,
    SHORT,
    TINY,
    TOY,
    assert_close,
    assert_equal,
    contents,
    copy,
    leaves,
    load,
    table,
    toy,
)

sys.path.insert(0, str(ROOT))

import dr

SCRIPTS = ["dr", "plr", "accel", "paired", "sfl"]
FIRST = "update grad_updates env_steps seed seconds".split()
COLUMNS = """train_return train_solve_rate train_episode_length policy_loss value_loss total_loss
    entropy approx_kl clip_fraction explained_variance grad_norm param_norm current_lr walls
    path_length solvable optimal_return eval_solve_rate eval_return
    eval_solve_rate/TrivialMaze eval_return/TrivialMaze""".split()


# --- a run


@pytest.fixture(scope="module")
def toy_run(tmp):
    """A run of the toy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dr, "make_train", toy)
        dr.run(dr.parse([*TOY, "--seeds", "2", "--out", str(tmp / "toy")]))
    return tmp / "toy"


def test_what_a_run_writes(toy_run):
    found = {path.relative_to(toy_run).as_posix() for path in contents(toy_run)}
    files = {"config.json", "logs.csv", "curves.png", "levels/update_12.png"}
    assert found == files | {f"checkpoint{i}.msgpack" for i in ("", "_4", "_8", "_12")}
    for path in (toy_run / name for name in found if name.endswith("png")):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    config = json.loads((toy_run / "config.json").read_text())
    assert (config["script"], config["num_updates"], config["lr"]) == ("dr.py", 12, 0.1)
    assert {f.name for f in fields(dr.Config)} < config.keys()
    for cycles in (4, 8, 12):
        last = dr.read_checkpoint(toy_run / f"checkpoint_{cycles}.msgpack")
        assert last["cycles"] == cycles
        assert last["state"]["cycles"].tolist() == [cycles] * 2
        assert json.loads(last["config"]) == config
        assert last["rows"] == [{"seed": 0}, {"seed": 1}]
    log = table(toy_run)
    assert [(int(row["update"]), int(row["seed"])) for row in log] == [
        (update, seed) for update in range(2, 13, 2) for seed in (0, 1)
    ]
    for row in log:
        assert int(row["env_steps"]) == int(row["grad_updates"]) * 32 * 256
        assert (row["eval_solve_rate"] == "") == (int(row["update"]) % 4 != 0)


def test_a_run_says_that_it_compiles_before_it_does(toys, tmp_path, monkeypatch, capsys):
    """And what it trains where, and what comes next."""
    from runs import programs

    programs.clear()
    said, write_log = [], dr.write_log
    read = lambda *args: said.append(capsys.readouterr().out) or write_log(*args)
    monkeypatch.setattr(dr, "write_log", read)
    make = dr.make_programs

    def make_programs(*args):
        init, update, show, sharding = make(*args)
        traced = lambda *x: said.append(capsys.readouterr().out) or init(*x)
        return traced, update, show, sharding

    monkeypatch.setattr(dr, "make_programs", make_programs)
    folder = tmp_path / "run"
    end = toys("--out", folder)[1]
    assert said[0] == ""  # eval_shape
    assert said[1] == f"{folder}: 1 training(s) on 1 x cpu, dealt by seeds; compiling ...\n"
    assert re.fullmatch(rf"cycle 12, \d+ s; next: python evaluate.py {folder}\n", end)


def test_the_next_command_resumes(toys, toy_run, tmp_path):
    """`--resume --out X` begins where nothing is, goes on where something is, and ends."""
    folder = tmp_path / "run"
    words = "--seeds", 2, "--resume", "--out", folder
    assert toys(*words, "--num-updates", 6)[0] == 0
    assert load(folder)["cycles"] == 6
    assert toys(*words)[0] == 0
    assert load(folder)["cycles"] == 12
    assert_equal(folder, toy_run)
    before = contents(folder)
    assert toys(*words)[0] == 0
    assert contents(folder) == before


def test_lines_of_a_run_that_is_made_longer(toys, tmp_path):
    """They stand at multiples of log_interval again, and the seconds go on."""
    words = "--log-interval", 4, "--resume", "--out", tmp_path
    assert toys(*words, "--num-updates", 6)[0] == 0
    data = dr.read_checkpoint(tmp_path / "checkpoint.msgpack")
    body = dr.serialization.msgpack_serialize(data | {"seconds": 1000.0})
    checksum = dr.hashlib.sha256(body).digest()
    (tmp_path / "checkpoint.msgpack").write_bytes(checksum + body)
    assert toys(*words, "--num-updates", 14)[0] == 0
    with open(tmp_path / "logs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["update"]) for row in rows] == [4, 6, 8, 12, 14]
    assert [float(row["seconds"]) >= 1000 for row in rows] == [False] * 2 + [True] * 3


def test_a_folder_is_looked_at_under_its_lock(toys, toy_run, tmp_path, monkeypatch):
    """A run that ends there while another start is traced stays as it is."""
    folder, open_folder = tmp_path / "run", dr.open_folder
    late = lambda config: shutil.copytree(toy_run, folder) and open_folder(config)
    monkeypatch.setattr(dr, "open_folder", late)
    status, _, line = toys("--seeds", 2, "--out", folder)
    assert status == 2
    assert "must be a new folder, or --resume" in line
    assert [*contents(folder).values()] == [*contents(toy_run).values()]


def test_columns_of_a_resumed_run(tmp_path):
    """A metric less is blank; one more, which the header lacks, is refused."""
    with open(tmp_path / "logs.csv", "a+", newline="") as log:
        write = lambda *names: dr.write_log(
            log, dr.Config(), [{"seed": 0}], {x: np.ones((1, 1)) for x in names}, 1, 0.0
        )
        write("grad_updates", "rollouts", "a", "b")
        write("grad_updates", "rollouts", "b")
        assert [(row["a"], row["b"]) for row in table(tmp_path)] == [("1", "1"), ("", "1")]
        with pytest.raises(dr.BadConfig, match="logs.csv there lacks a metric's column"):
            write("grad_updates", "rollouts", "a", "b", "c")


def test_means_of_a_chunk(tmp_path):
    """Over what was measured; blank if nothing was; inf if one was not finite. Steps are counted
    beyond 32 bits."""
    nan, inf = np.nan, np.inf
    metrics = {"a": [[1, nan, 4], [nan] * 3], "b": [[1, inf, 2], [3, 4, 5]]}
    metrics = {name: np.array(x, np.float32) for name, x in metrics.items()}
    counts = {"grad_updates": [[1, 2, 3], [1, 1, 2]], "rollouts": [[2, 4, 6], [1, 2, 3]]}
    metrics |= {name: np.array(x, np.int32) for name, x in counts.items()}
    with open(tmp_path / "logs.csv", "a+", newline="") as log:
        config = dr.Config(num_envs=2, num_evals=3, num_steps=500_000_000)
        dr.write_log(log, config, [{"seed": 4}, {"seed": 5}], metrics, 3, 1.25)
    one, two = table(tmp_path)
    begin = dict(update="3", grad_updates="3", env_steps="18000000000")
    assert one == begin | dict(seed="4", a="2.5", b="inf")
    begin = dict(update="3", grad_updates="2", env_steps="9000000000")
    assert two == begin | dict(seed="5", a="", b="4")


def test_default_folders(toys, tmp_path, monkeypatch):
    """The next free one, also if it was free a moment ago."""
    monkeypatch.chdir(tmp_path)
    for i in (1, 2, 3):
        assert f"runs/dr-{i}: 1 training(s)" in toys()[1]
        if i == 2:
            monkeypatch.setattr(Path, "exists", lambda self: False)
    assert sorted(x.name for x in (tmp_path / "runs").iterdir()) == ["dr-1", "dr-2", "dr-3"]


@pytest.mark.slow
def test_a_training(tmp, train):
    """The real one: its columns, and it learns."""
    folder = tmp / "whole"
    train(*TINY, *"--num-updates 300 --devices 1 --seeds 2 --out".split(), folder)
    with open(folder / "logs.csv", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames[:5] == FIRST
    assert {*reader.fieldnames} == {*FIRST, *COLUMNS}
    for row in rows:
        update = int(row["update"])
        assert int(row["grad_updates"]) == update
        assert int(row["env_steps"]) == update * 8 * 16
        for name in COLUMNS:  # a value, but for evaluations that were not due
            assert (row[name] == "") == ("eval" in name and update % 4 != 0), (name, update)
        assert 0 < float(row["entropy"]) <= np.log(7) + 1e-3
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 0
    solved = [float(row["train_solve_rate"]) for row in rows]
    assert np.mean(solved[-40:]) > np.mean(solved[:40]) + 0.1


# --- refusals


@pytest.mark.parametrize("args", [
    "num_envs -1", "num_envs 0", "num_updates 0", "num_updates 3000000000", "num_steps 0",
    "num_evals 0", "update_epochs 0", "num_minibatches 3", "num_minibatches 64", "seeds 0",
    "seed -1", "seed 4294967301", "seeds_at_once -1", "lr -0.1", "lr nan", "lr inf", "gamma 1.1",
    "gae_lambda -0.1", "clip_eps 0", "max_grad_norm 0", "ent_coef -1", "vf_coef -1",
    "hidden_size 0", "s5_layers 0", "n_walls -1", "n_walls 24", "height 1", "width 0",
    "height 300", "max_steps 0", "eval_suite nowhere", "eval_suite Labyrinth,Nowhere",
    "eval_episodes 0", "eval_interval -1", "log_interval 0", "checkpoint_interval 0",
    "archive_interval -1", "plot_interval -1", "bptt_horizon 5", "devices -1", "devices 1000",
    "sweep num_envs=16,32", "sweep lr=fast", "sweep lr=", "sweep lr=log:1e-4:1e-2",
    "sweep lr=log:0:1:3", "sweep lr=log:1e-4:1e-2:-1", "sweep lr=log:1e-4:1e-2:0",
])  # fmt: skip
def test_bad_values(main, tmp_path, args):
    """One line before anything is compiled or written: field, value, what it must be."""
    name, value = args.split()
    words = f"--{name.replace('_', '-')}", value, "--out", tmp_path / "run"
    status, said, line = main(*TINY, *words)
    assert (status, said) == (2, "")
    assert line.startswith(f"dr.py: error: {name} = ")
    assert value in line.replace("3000000000.0", value)
    assert ": must be " in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("args, words", {
    "--eval-suite nowhere": "minimax",
    "--n-walls 24": "height = 5, width = 5: must be at most 23",
    "--num-minibatches 3": "must be a divisor of 8",
    "--sweep num_envs=16,32": "lr, gamma",
    "--sweep lr=1e-3 --sweep lr=1e-4": "each NAME once",
    "--sweep lr=0.1,0.2,0.10000001": "values of lr that differ in their first six digits",
    "--sweep gamma=0.9 --sweep lr=0.1,fast": "lr=log:0.01:0.1:8",
    "--sweep gamma=0.9,1.5": "gamma = 1.5: must be from 0 to 1",
    "--seeds 3 --devices 1 --seeds-at-once 2": "seeds_at_once = 2: must be a divisor of 3",
    "--resume --out ": "out = '': must be the folder",
}.items())  # fmt: skip
def test_what_it_must_be_is_said(main, args, words):
    status, _, line = main(*TINY, *args.split(" "))
    assert status == 2
    assert words in line


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_config_made_in_code_must_be(name):
    """Words are checked there, too, and JAX's own 64 bits."""
    module = importlib.import_module(name)
    words = "must be one of 'lstm', 'gru', 's5', 'none'"
    with pytest.raises(module.BadConfig, match=f"rnn = 'LSTM': {words}"):
        module.make_train(module.Config(rnn="LSTM"))
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(module.BadConfig, match="JAX_ENABLE_X64 = True: must be False"):
            module.make_train(module.Config())
    finally:
        jax.config.update("jax_enable_x64", False)


def test_distributed_without_a_cluster(call):
    status, said, line = call("--distributed")
    assert (status, said) == (2, "")
    assert line == "dr.py: error: distributed = True: must be False without a cluster\n"


@pytest.mark.parametrize("args", ["--rnn elman", "--num-envs 1.5", "--lr slow", "--shard all",
                                  "--track paper", "--nonsense 1", "--anneal-lr True"])  # fmt: skip
def test_bad_types(main, args):
    assert main(*args.split())[0] == 2


def test_a_folder_that_holds_a_run_is_not_touched(toys, toy_run, tmp_path):
    """One in which nothing was trained is as good as a new one."""
    before = contents(toy_run)
    status, _, line = toys("--out", toy_run)
    assert status == 2
    assert line.endswith(": must be a new folder, or --resume")
    assert contents(toy_run) == before
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "logs.csv").write_text("")
    assert toys("--out", tmp_path)[0] == 0


def test_out_cannot_be_made(toys, tmp_path):
    (tmp_path / "file").write_text("precious")
    for out in ("file", "file/run"):
        status, _, line = toys("--out", tmp_path / out)
        assert status == 1
        assert "Not a directory" in line
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("args, field", {
    "--num-envs 4": "num_envs = 4", "--rnn gru": "rnn = 'gru'", "--lr 0.5": "lr = 0.5",
    "--anneal-lr": "anneal_lr = True", "--fast": "anneal_lr = True", "--seeds 3": "seeds = 3",
    "--seed 1": "seed = 1", "--sweep lr=0.1,0.2": "sweep = ['lr=0.1,0.2']"}.items())  # fmt: skip
def test_resume_refuses_another_run(main, toy_run, args, field):
    before = contents(toy_run)
    status, said, line = main("--resume", "--out", toy_run, *args.split())
    assert (status, said) == (2, "")
    assert line.startswith(f"dr.py: error: {field}: must be ")
    assert "as in the run to resume" in line
    assert contents(toy_run) == before


def test_a_preset_beside_resume_is_so_many_flags(tmp_path):
    """The same command goes on with what else it has asked for, and with what it has not."""
    config = replace(dr.FAST, out=str(tmp_path), seeds=4, archive_interval=500, devices=1)
    (tmp_path / "config.json").write_text(dr.to_json(config))
    again = ["--resume", "--out", str(tmp_path)]
    for words in ([], ["--fast"]):
        assert dr.parse([*words, *again]) == replace(config, resume=True)
    (tmp_path / "config.json").write_text(dr.to_json(dr.Config(seeds=4)))
    assert dr.parse(["--fast", *again]) == replace(dr.FAST, out=str(tmp_path), seeds=4, resume=True)


def test_runs_cannot_be_made(toys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to("nowhere")
    status, _, line = toys()
    assert status == 1
    assert "File exists" in line


def test_resume_refuses_another_script(main, toy_run, tmp_path):
    """Also where no checkpoint has been written yet."""
    plr, early = importlib.import_module("plr"), tmp_path / "early"
    early.mkdir()
    for name in ("config.json", "logs.csv"):
        shutil.copy(toy_run / name, early)
    for folder in (toy_run, early):
        before = contents(folder)
        status, _, line = main("--resume", "--devices", 1, "--out", folder, module=plr)
        assert status == 2
        assert line.startswith(f"plr.py: error: out = '{folder}': must be ")
        assert "a run of plr.py" in line
        assert contents(folder) == before


def test_an_annealed_run_does_not_go_on(toys, tmp_path):
    """Its learning rate was annealed over the original number of updates; the message says so."""
    assert toys("--anneal-lr", "--out", tmp_path)[0] == 0
    status, _, line = toys("--resume", "--out", tmp_path, "--num-updates", 14)
    assert status == 2
    assert line.startswith("dr.py: error: num_updates = 14: must be 12, as in the run")
    assert line.endswith("whose lr is annealed")
    assert "num_updates, which is then fixed" in inspect.getsource(dr.Config)


def test_divergence(toys, tmp_path):
    """One that has diverged logs inf, and the others continue; if all have, the run ends."""
    assert toys("--sweep", "lr=0.1,1e4", "--out", tmp_path / "one")[0] == 0
    log = table(tmp_path / "one")
    assert [row["loss"] == "inf" for row in log] == [False] * 7 + [True] + [False, True] * 2
    status, _, line = toys("--sweep", "lr=1e4,1e5", "--out", tmp_path / "all")
    assert status == 1
    assert line == "dr.py: error: all trainings have diverged by cycle 8"
    assert load(tmp_path / "all")["cycles"] == 4
    assert [row["loss"] == "inf" for row in table(tmp_path / "all")] == [False] * 6 + [True] * 2


# --- flags


@pytest.mark.parametrize("name", SCRIPTS)
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
    if name in ("plr", "accel"):
        assert module.parse(["--parallel", "--fast"]) == replace(module.FAST, parallel=True)
        assert module.parse(["--no-robust", "--num-updates", "7"]).num_updates == 7
        assert module.parse(["--no_robust"]) == module.PLAIN
        assert module.PARALLEL.num_updates == module.PLAIN.num_updates == 30_000
        assert (module.PARALLEL.parallel, module.PLAIN.robust) == (True, False)


PUBLISHED = dict(  # of dr.py; what other methods change of it
    lr=1e-4, num_updates=30_000, num_envs=32, num_evals=1, num_steps=256, update_epochs=5,
    num_minibatches=1, bptt_horizon=0, gamma=0.995, gae_lambda=0.98, clip_eps=0.2, ent_coef=1e-3,
    vf_coef=0.5, clip_vloss=True, max_grad_norm=0.5, anneal_lr=False, rnn="lstm", hidden_size=256,
    s5_layers=2, s5_norm="after", n_walls=60, height=13, width=13, max_steps=250,
    see_through_walls=True, solvable_only=False, polyak_averaging=False)  # fmt: skip
REPLAYS = dict(lr=3e-4, gamma=0.999, ent_coef=0.0, num_edits=20, buffer_size=4000, min_fill=0.5)
OTHER = {
    "dr": {}, "plr": REPLAYS | dict(num_updates=60_000, temperature=0.3, staleness_coef=0.3),
    "accel": REPLAYS | dict(num_updates=37_500, n_walls=0, temperature=0.3, staleness_coef=0.5),
    "paired": dict(teacher_lr=1e-4, teacher_gamma=0.995, teacher_gae_lambda=0.98,
                   teacher_ent_coef=0.05, teacher_hidden_size=256, num_students=2),
    "sfl": dict(lr=2.5e-4, anneal_lr=True, num_updates=4_578, num_envs=256, update_epochs=4,
                num_minibatches=4, gamma=0.99, gae_lambda=0.95, clip_eps=0.04, ent_coef=0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_defaults_are_the_published_ones(name):
    config = importlib.import_module(name).Config()
    expected = {k: x for k, x in (PUBLISHED | OTHER[name]).items() if hasattr(config, k)}
    assert {k: getattr(config, k) for k in expected} == expected


def test_resume_takes_the_fields_of_the_run(toy_run):
    asked = dr.parse([*TOY, "--seeds", "2", "--out", str(toy_run)])
    words = ["--resume", "--out", str(toy_run)]
    assert dr.parse(words) == replace(asked, resume=True)
    free = dict(checkpoint_interval=7, archive_interval=8, plot_interval=9, seeds_at_once=1)
    free |= dict(devices=4, shard="levels", track="wandb", num_updates=400, log_interval=3)
    flags = [str(x) for k, v in free.items() for x in (f"--{k.replace('_', '-')}", v)]
    config = dr.parse([*words, "--distributed", *flags])
    assert config == replace(asked, resume=True, distributed=True, **free)
    state = jax.eval_shape(jax.vmap(toy(config).init), jax.random.split(jax.random.key(0), 2))
    assert dr.load_checkpoint(config, state)["cycles"] == 12


def squeezed(text):
    """The text without spaces and the lines of a table."""
    return re.sub(r"[\s│╭╮╰╯─]", "", text)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(main, name):
    """The docstring; each field with its comment, choices and the value it will have."""
    module = importlib.import_module(name)
    about = dict(re.findall(r"(?m)^    (\w+): .*?  # (.*)", inspect.getsource(module.Config)))
    assert about.keys() == {f.name for f in fields(module.Config)}
    status, said, _ = main("--fast", "--help", module=module)
    assert not status
    said = squeezed(said)
    assert squeezed(module.__doc__) in said
    for field in fields(module.Config):
        value, flag = getattr(module.FAST, field.name), field.name.replace("_", "-")
        kind = {int: "INT", float: "FLOAT"}.get(field.type, "STR")
        if field.type is bool:
            kind = f",--no-{flag}"
        if get_origin(field.type) is Literal:
            kind = "{" + ",".join(get_args(field.type)) + "}"
        end = "(repeatable)" if field.name == "sweep" else f"(default:{value or repr(value)})"
        assert squeezed(f"--{flag}{kind}{about[field.name]}{end}") in said, field.name


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_last_cycles_of_a_training(name):
    """lr falls to a third, and would be 0 in a fourth cycle; the evaluation after the last cycle,
    and before only every second one, is of the student that has learned."""
    module = importlib.import_module(name)
    numbers = dict(dr=(4, 3), accel=(6, 4)).get(name, (5, 4))  # of keys in a cycle; evaluate's
    small = dict(
        rnn="none", hidden_size=4, height=4, width=4, n_walls=2, max_steps=6, num_envs=4,
        num_steps=8, num_updates=3, lr=0.03, teacher_lr=0.03, anneal_lr=True, update_epochs=2,
        num_minibatches=1, robust=False, buffer_size=8, num_edits=1, num_candidates=8,
        candidate_evals=2, teacher_rnn="none", teacher_filters=1, eval_interval=2,
        eval_suite="TrivialMaze,MiniMaze", eval_episodes=32)  # fmt: skip
    known = {k: x for k, x in small.items() if hasattr(module.Config, k)}
    train = module.make_train(module.Config(**known))
    learner, prefixes = ("students", ["", "antagonist_"]) if name == "paired" else ("student", [""])
    cycle, states, logs = jax.jit(lambda state: train.update(state, 1)), [], []
    state = jax.jit(train.init)(jax.random.key(1))
    for _ in range(4):
        state, metrics = cycle(state)
        states.append(state)
        logs.append(jax.tree.map(lambda x: x[0], metrics))
    state, after = states[2:]
    lrs = [metrics["current_lr"] for metrics in logs]
    np.testing.assert_allclose(lrs, [0.03, 0.02, 0.01, 0], 1e-5, 1e-9)
    last = cycle_rngs(state.replace(cycles=2), numbers[0])[numbers[1]]
    found = jax.jit(part(train, "evaluate"))(last, getattr(state, learner))
    for key, values in found.items():
        for prefix, value in zip(prefixes, np.atleast_1d(values)):
            logged = [metrics[prefix + key] for metrics in logs[:3]]
            assert np.isnan(logged).tolist() == [True, False, False]
            assert logged[2] == pytest.approx(value, abs=1e-6)
    for agent in {learner, "teacher"} & {*vars(state)}:
        leaves_ = [jax.tree.leaves(getattr(x, agent).params) for x in (state, after)]
        assert all(np.array_equal(x, y) for x, y in zip(*leaves_)), agent


# --- rows: seeds and sweeps


def test_points_of_a_sweep():
    rows = dr.make_rows(dr.Config(seed=5, seeds=2, sweep=("lr=log:1e-4:1e-2:3", "gamma=0.5,0.6")))
    assert [row["seed"] for row in rows] == [5, 6] * 6
    assert [row["gamma"] for row in rows] == [0.5, 0.5, 0.6, 0.6] * 3
    assert np.allclose([row["lr"] for row in rows[::4]], [1e-4, 1e-3, 1e-2])
    assert dr.make_rows(dr.Config(seeds=2)) == [{"seed": 0}, {"seed": 1}]
    rows = dr.make_rows(dr.Config(sweep=("lr=log:1e-2:1e-4:3",)))
    assert np.allclose([row["lr"] for row in rows], [1e-2, 1e-3, 1e-4])  # downwards too


def test_curves_of_a_sweep(toys, tmp_path, monkeypatch):
    """A line for each row, through what was measured."""
    drawn, write = [], dr.write
    look = lambda path, save: drawn.append(getattr(save, "func", None)) or write(path, save)
    monkeypatch.setattr(dr, "write", look)
    said = toys("--sweep", "lr=0.1,0.2", "--out", tmp_path)[1]
    assert "no picture" not in said
    axes, log = drawn[-1].__self__.axes, table(tmp_path)
    for axis, name in zip(axes, ("train_solve_rate", "eval_solve_rate")):
        assert axis.get_title() == name
        for i, line in enumerate(axis.lines):
            values = [float(row[name]) for row in log[i::2] if row[name]]
            np.testing.assert_allclose(line.get_ydata(), values)
        assert len(axis.lines) == 2
    assert [x.get_text() for x in axes[0].get_legend().get_texts()] == [
        "seed: 0, lr: 0.1", "seed: 0, lr: 0.2"]  # fmt: skip


@pytest.mark.slow
def test_rows_equal_solo_runs(tmp, train):
    """Of real trainings: a sweep with two seeds, and one of its rows."""
    folder = tmp / "sweep"
    train(*SHORT, *"--sweep lr=1e-2,1e-3 --seeds 2 --devices 1 --out".split(), folder)
    rows = [(row["lr"], row["seed"]) for row in table(folder)]
    assert rows == [("0.01", "0"), ("0.01", "1"), ("0.001", "0"), ("0.001", "1")] * 6
    train(*SHORT, "--seed", 1, "--devices", 1, "--out", tmp / "solo")
    assert_close(folder, [1], tmp / "solo", [0])
    kernel = leaves(load(folder))["['student']['params']['params']['conv']['kernel']"]
    assert all(not np.allclose(kernel[1], kernel[i], 1e-2, 1e-2) for i in (0, 2, 3))


# --- copies that were hacked


@pytest.mark.slow
def test_a_new_float_and_another_generator(tmp, train):
    """A float that is used in rollout is swept; a field that is gone has no range."""
    act = "action, log_prob, value = act(params, memory, obs, is_first, "
    text = (ROOT / "dr.py").read_text()
    field = re.search(r"    n_walls: int = .*\n", text)[0]
    check = re.search(r"    room = .*\n    demand\(config.n_walls.*\n", text)[0]
    generator = """def dotted(rng, config):
    walls = jnp.zeros((config.height, config.width), bool).at[1::2, 1::2].set(True)
    return amaze.place(rng, walls)


def make_train("""
    changes = {
        field: "    noise: float = 1.0  # of the student's actions\n", check: "",
        " n_walls=90,": "",
        f"memory, {act}noise)": f"memory, {act}noise * config.noise)",
        "amaze.sample_level(rng, config.n_walls, config.height, config.width)":
            "dotted(rng, config)", "def make_train(": generator}  # fmt: skip
    script, folder = copy(tmp, "noisy", changes), tmp / "hacked"
    args = " ".join(SHORT).replace("--n-walls 6 ", "").split()
    train(*args, *"--devices 1 --sweep noise=1,0.1 --out".split(), folder, script=script)
    log = table(folder)
    assert [row["noise"] for row in log] == ["1.0", "0.1"] * 6
    assert {float(row["walls"]) for row in log} == {4.0}
    assert all(log[i]["policy_loss"] != log[i + 1]["policy_loss"] for i in range(0, 12, 2))
    config = json.loads((folder / "config.json").read_text())
    assert (config["script"], config["noise"]) == ("noisy.py", 1.0)


# --- trackers


def grouped(row):
    """What a tracker gets of a row of logs.csv."""
    groups = {"train_solve_rate": "train/solve_rate", "eval_solve_rate": "eval/solve_rate"}
    return {groups.get(name, name): float(x) for name, x in row.items() if x != ""}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_what_a_tracker_is_told(monkeypatch, toys, toy_run, tmp_path, name):
    """A run for each row, with its configuration and its rows of logs.csv; pictures of levels."""
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    runs, about = [Mock(), Mock(finish=Mock(side_effect=OSError("offline")))], []
    tracker = Mock(init=lambda **x: about.append(x) or runs[len(about) - 1])
    monkeypatch.setitem(sys.modules, name, tracker)
    words = "--seeds", 2, "--track", name, "--out", tmp_path / "run"
    assert toys(*words)[0] == 0
    assert_equal(tmp_path / "run", toy_run)
    log = table(tmp_path / "run")
    for i, x in enumerate(about):
        assert (x["project"], x["group"], x["name"]) == ("mine", "run", f"run-{i}")
        assert (x["config"]["seed"], x["config"]["num_updates"]) == (i, 12)
        assert ("dir" in x) == (name == "wandb")
        runs[i].finish.assert_called_once_with()  # and one that fails is no failure
        calls = runs[i].log.call_args_list
        if i == 0:  # the levels' picture, once
            assert calls.pop() == (({"levels": tracker.Image.return_value},), {"step": 12})
            tracker.Image.assert_called_once_with(f"{tmp_path}/run/levels/update_12.png")
        for call, row in zip(calls, log[i::2], strict=True):
            logged = {k: v for k, v in call.args[0].items() if k != "seconds"}
            assert logged == grouped(row)
            assert call.kwargs == {"step": int(row["update"])}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_is_imported_only_when_asked_for(monkeypatch, toys, tmp_path, name):
    monkeypatch.setitem(sys.modules, name, None)
    assert toys("--out", tmp_path / "run")[0] == 0
    status, _, line = toys("--track", name, "--out", tmp_path / "tracked")
    assert status == 2
    assert name in line


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


TOY_SCRIPT = "import dr, runs\n\ndr.make_train = runs.toy\ndr.main()\n"
PATHS = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


@pytest.mark.slow
def test_wandb(tmp, toy_run, train):
    """The real one, offline."""
    folder = tmp / "tracked"
    (tmp / "toy.py").write_text(TOY_SCRIPT)
    env = PATHS | {f"WANDB_{x}_DIR": str(tmp / "wandb") for x in ("CONFIG", "CACHE", "DATA")}
    words = "--seeds", 2, "--track", "wandb", "--out", folder
    train(*TOY, *words, script=tmp / "toy.py", env=env | {"WANDB_MODE": "offline"})
    assert_equal(folder, toy_run)
    log, seen = table(folder), {}
    for path in folder.rglob("*.wandb"):
        records = list(wandb_records(path))
        run = next(x.run for x in records if x.WhichOneof("record_type") == "run")
        assert (run.run_group, run.project) == (folder.name, "dr.py")
        config = {x.key: json.loads(x.value_json) for x in run.config.update}
        seen[run.display_name] = config["seed"]
        history = [x.history for x in records if x.WhichOneof("record_type") == "history"]
        names = [{x.key or x.nested_key[0] for x in entry.item} for entry in history]
        assert ["levels" in x for x in names] == [config["seed"] == 0 and x == 5 for x in range(6)]
        for entry, line in zip(history, log[config["seed"] :: 2], strict=True):
            values = {x.key or "/".join(x.nested_key): x.value_json for x in entry.item}
            others = "_", "seconds", "levels"  # wandb's own, the clock, the picture
            values = {k: float(v) for k, v in values.items() if not k.startswith(others)}
            assert values == grouped(line)
            assert entry.step.num == int(line["update"])
    assert seen == {f"{folder.name}-{i}": i for i in (0, 1)}


# --- compiled programs, from one run to the next


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp, train, toy_run):
    """Programs are kept in the home folder, unless the user names another; results are the same."""
    home, script = tmp / "home", tmp / "kept.py"
    kept = []
    forget = "dr.jax.config.update('jax_compilation_cache_dir', None)\n"
    script.write_text(TOY_SCRIPT.replace("dr.main", f"{forget}dr.main"))
    programs = lambda: {x.relative_to(home): x.read_bytes() for x in home.rglob("*-cache")}
    for name in ("first", "second"):
        words = "--seeds", 2, "--out", tmp / name
        train(*TOY, *words, script=script, env=PATHS | {"HOME": str(home)})
        kept.append(programs())
        assert_equal(tmp / name, toy_run)
    assert kept[0] == kept[1] != {}
    assert {path.parts[:2] for path in kept[0]} == {(".cache", "amaze")}
