"""What disks, strangers and other processes may do to a run's folder: either it is refused in one
line that names the file, with nothing changed, or training goes on as if nothing had happened."""

import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np
import pytest
from runs import ROOT, TINY, assert_equal, contents, finish, last_update, load

sys.path.insert(0, str(ROOT))

import dr
import evaluate

BUFFER = "--buffer-size 16 --min-fill 0.5 --replay-prob 0.5".split()
SCRIPTS = {  # name: its options, small
    "dr": [],
    "plr": BUFFER,
    "accel": BUFFER,
    "paired": "--teacher-hidden-size 16 --teacher-filters 4".split(),
    "sfl": """--num-candidates 12 --candidates-at-once 4 --candidate-evals 2 --buffer-size 8
        --score-interval 3""".split(),
}
RUN = [*TINY, *"--num-updates 60 --checkpoint-interval 4 --plot-interval 20 --devices 1".split()]
SHORT = [*RUN, *"--num-updates 12 --archive-interval 4 --eval-interval 0".split()]
RNG = random.Random(57)


class Trains(Exception):
    """Raised when a run has passed all checks."""


@pytest.fixture(scope="module")
def whole(tmp, train):
    """A run of 12 cycles with its archives, and another run with another seed."""
    train(*SHORT, "--out", tmp / "whole")
    train(*SHORT, "--seed", 9, "--out", tmp / "other")
    return tmp / "whole"


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def resume(monkeypatch, capsys, folder, *options):
    """Run `dr.py --resume` up to the training -> None if it gets there, else the message."""

    def trains(*_):
        raise Trains

    monkeypatch.setattr(dr, "open_log", trains)
    monkeypatch.setattr(sys, "argv", ["dr.py", "--resume", *options, "--out", str(folder)])
    try:
        with pytest.raises(SystemExit) as stop:
            dr.main()
    except Trains:
        capsys.readouterr()
        return None
    err = capsys.readouterr().err
    assert stop.value.code == 2, err
    assert err.count("\n") == 1
    assert err.startswith("dr.py: error: ")
    return err


def refused(monkeypatch, capsys, folder, *options):
    """The message of a refusal, in one line; checks that nothing has changed."""
    before = contents(folder)
    said = resume(monkeypatch, capsys, folder, *options)
    assert said is not None
    assert contents(folder) == before
    return said


# --- killed


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_at_random_moments(tmp, launch, train, name):
    """Some of the kills are aimed at the moment when a file changes."""
    script, options = ROOT / f"{name}.py", [*RUN, *SCRIPTS[name]]
    train(*options, "--out", tmp / f"{name}_whole", script=script)
    folder = tmp / f"{name}_killed"
    listing = lambda: {path.name: path.stat().st_mtime_ns for path in sorted(folder.iterdir())}
    for kill in range(3):
        process = launch(*options, "--out", folder, script=script)
        begun, deadline = last_update(folder), time.time() + 300
        while last_update(folder) <= begun and process.poll() is None and time.time() < deadline:
            time.sleep(0.005)
        time.sleep(RNG.uniform(0, 0.05))
        if kill % 2 == 1:
            try:
                seen, deadline = listing(), time.time() + 1
                while listing() == seen and time.time() < deadline:
                    pass
            except FileNotFoundError:  # a file was replaced meanwhile: now
                pass
        process.send_signal(signal.SIGKILL)
        assert finish(process)[0] in (-signal.SIGKILL, 0)
        options = ["--resume"]
    train("--resume", "--out", folder, script=script)
    assert_equal(folder, tmp / f"{name}_whole")
    assert not list(folder.glob(".*.tmp"))


# --- read back


def damage(path, kind, place):
    """Cut, change or replace a file; place in [0, 1)."""
    data = path.read_bytes()
    at = int(place * len(data))
    changed = {
        "cut": data[:at],
        "flipped": data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :],
        "zeros": data[:at] + bytes(len(data) - at),
        "longer": data + bytes(10),
    }
    path.write_bytes(changed[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut", "flipped", "zeros", "longer"])
def test_a_damaged_checkpoint(run, monkeypatch, capsys, kind):
    data = (run / "checkpoint.msgpack").read_bytes()
    for _ in range(10):
        damage(run / "checkpoint.msgpack", kind, RNG.random())
        said = refused(monkeypatch, capsys, run)
        assert "checkpoint.msgpack is damaged" in said or "another format" in said
        assert "what helps: checkpoint_" in said
        (run / "checkpoint.msgpack").write_bytes(data)


@pytest.mark.slow
def test_what_is_said_to_help_does(run, monkeypatch, capsys):
    damage(run / "checkpoint.msgpack", "cut", 0.5)
    helps = re.search(r"what helps: (\S+) or", refused(monkeypatch, capsys, run))[1]
    shutil.copy(run / helps, run / "checkpoint.msgpack")
    assert resume(monkeypatch, capsys, run) is None
    (run / "checkpoint.msgpack").unlink()
    assert "what helps" in refused(monkeypatch, capsys, run)  # it does not begin from nothing


def test_the_checkpoint_before_is_kept(whole):
    assert load(whole)["cycles"] == 12
    assert dr.read_checkpoint(whole / "checkpoint_previous.msgpack")["cycles"] == 8


def other_state(data):
    student = data["state"]["student"]["params"]["params"]
    student["conv"]["kernel"] = student["conv"]["kernel"][:, :, :-1]


def forget(*place):
    def change(data):
        for name in place[:-1]:
            data = data[name]
        del data[place[-1]]

    return change


CHANGES = {  # what a well-formed checkpoint says: a change of it, and what is said
    "another shape": (other_state, "conv/kernel is float32"),
    "a part is missing": (forget("state", "student", "params"), "is nothing, in this run"),
    "no state": (forget("state"), "is nothing, in this run"),
    "another type": (lambda x: x["state"].update(rng=x["state"]["rng"].astype(int)), "state/rng"),
    "a name too many": (lambda x: x["state"].update(more=np.ones(3)), "state/more is float64[3]"),
    "a number as a name": (lambda x: x["state"].update({"7": {"8": 1}}), "state/7/8"),
    "another seed": (lambda x: x["rows"]["0"].update(seed=5), "rows/0/seed is 5"),
    "no rows": (lambda x: x.update(rows={}), "rows"),
    "another script": (lambda x: x["config"].update(script="plr.py"), "config/script is 'plr.py'"),
    "another lr": (lambda x: x["config"].update(lr=0.5), "config/lr is 0.5, in this run 0.01"),
    "many cycles": (lambda x: x.update(cycles=10**9), "1000000000 cycles"),
    "less than none": (lambda x: x.update(cycles=-1), "-1 cycles"),
    "words": (lambda x: x.update(cycles="8"), "cycles is str, in this run int"),
    "a gigabyte of rows": (lambda x: x.update(log_bytes=10**9), "logs.csv lacks the rows"),
    "no end of time": (lambda x: x.update(seconds=None), "seconds is NoneType"),
    "a list": (lambda x: x.update(metrics=[1, 2]), "metrics"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_is_not_of_this_run(run, monkeypatch, capsys, change):
    edit, words = CHANGES[change]
    data = load(run)
    edit(data)
    dr.write_checkpoint(run / "checkpoint.msgpack", data)
    assert words in refused(monkeypatch, capsys, run)


@pytest.mark.slow
def test_files_of_another_run(whole, run, monkeypatch, capsys):
    for name in ("checkpoint.msgpack", "config.json"):
        before = (run / name).read_bytes()
        shutil.copy(whole.parent / "other" / name, run / name)
        assert "seed is" in refused(monkeypatch, capsys, run)
        (run / name).write_bytes(before)
    assert resume(monkeypatch, capsys, run) is None


CONFIGS = {
    "empty": b"",
    "cut": b'{"script": "dr.py", "lr"',
    "a list": b"[1, 2]",
    "a word": b'"dr.py"',
    "no script": b'{"lr": 0.1}',
    "no UTF-8": b'{"script": "dr.py", "out": "\xff"}',
    "deep": b"[" * 100_000,
    "a word for a number": b'{"script": "dr.py", "lr": "1e-3"}',
    "a list for a number": b'{"script": "dr.py", "num_envs": [8]}',
    "not a number": b'{"script": "dr.py", "lr": NaN}',
    "a number for a list": b'{"script": "dr.py", "sweep": 3}',
    "numbers in a list": b'{"script": "dr.py", "sweep": [3]}',
    "200 names": json.dumps({"script": "dr.py", "sweep": [f"x{i}=1,2" for i in range(200)]}),
    "many points": b'{"script": "dr.py", "sweep": ["lr=log:1e-5:1e-3:1000000000"]}',
    "many seeds": b'{"script": "dr.py", "seeds": 1000000000}',
    "a wide core": b'{"script": "dr.py", "rnn": "s5", "hidden_size": 40000}',
    "unknown": b'{"script": "dr.py", "humour": 1}',
    "another script's": b'{"script": "plr.py"}',
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_config_json(tmp_path, monkeypatch, capsys, kind):
    text = CONFIGS[kind]
    (tmp_path / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    refused(monkeypatch, capsys, tmp_path)
    with pytest.raises(ValueError, match=".") as error:  # evaluate.py, one line too
        evaluate.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_byte_order_mark(run, monkeypatch, capsys):
    data = (run / "config.json").read_bytes()
    (run / "config.json").write_bytes(b"\xef\xbb\xbf" + data)
    assert resume(monkeypatch, capsys, run) is None


@pytest.mark.slow
def test_logs(run, monkeypatch, capsys):
    path = run / "logs.csv"
    rows = path.read_bytes()
    lies = {"cut": rows[:-1], "half": rows[: len(rows) // 2], "header": rows.replace(b"lr", b"rl"),
            "a word": rows.replace(b"0.01", b"0.x1"), "NULs": rows[:-20] + bytes(20),
            "a cell less": rows.replace(b",0.01", b"00001", 1),
            "another digit": rows.replace(b",0.01", b",0.02", 1)}  # fmt: skip
    for name, lie in lies.items():
        path.write_bytes(lie)
        assert lie != rows, name
        assert "logs.csv lacks the rows" in refused(monkeypatch, capsys, run), name
    path.unlink()
    assert "an empty file to go on without" in refused(monkeypatch, capsys, run)
    path.write_bytes(b"")
    assert resume(monkeypatch, capsys, run) is None
    assert path.read_bytes() == b""


@pytest.mark.slow
def test_without_its_rows_a_run_goes_on(run, train):
    (run / "logs.csv").write_bytes(b"")
    train("--resume", "--num-updates", 14, "--out", run)
    with open(run / "logs.csv", newline="") as file:
        assert [row["update"] for row in csv.DictReader(file)] == ["14"]


@pytest.mark.slow
def test_on_another_number_of_devices(run, train):
    said = train("--resume", "--num-updates", 14, "--devices", 2, "--shard", "levels", "--out", run,
                 devices=2)  # fmt: skip
    assert "before on 1 x cpu, dealt by seeds: results are equal up to rounding" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoint.msgpack", "config.json", "logs.csv"])
def test_no_file_but_something_else(run, monkeypatch, capsys, name):
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")):
        path = run / name
        (path.rmdir if path.is_dir() else path.unlink)()
        make(path)
        assert name in resume(monkeypatch, capsys, run)


# --- written


def test_links_are_not_followed(tmp_path, capsys):
    """A stranger's folder has links to other places under the names of a run's files."""
    mine, folder = tmp_path / "mine", tmp_path / "folder"
    mine.write_text("mine")
    folder.mkdir()
    for name in ("config.json", "config.json.tmp", "results.csv", "results.csv.tmp"):
        (folder / name).symlink_to(mine)
    for write in (dr.write, evaluate.write):
        for name in ("config.json", "results.csv"):
            write(folder / name, lambda file: file.write(b"new"))
            assert (folder / name).read_text() == "new"
            assert not (folder / name).is_symlink()
    assert mine.read_text() == "mine"
    for name in ("logs.csv", "lock", "levels"):
        (folder / name).symlink_to(mine)
        with pytest.raises(dr.BadConfig, match=f"{name} is no link"):
            dr.make_folder(dr.Config(out=str(folder), resume=True))
        (folder / name).unlink()


def test_temporary_files_are_new_and_go(tmp_path, monkeypatch):
    names = []

    def save(file):
        names.append(os.path.basename(file.name))
        raise OSError(28, "No space left on device")

    for _ in range(2):
        with pytest.raises(OSError, match=r"No space left on device: '.*a\.txt'"):
            dr.write(tmp_path / "a.txt", save)
    assert names[0] != names[1]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_which_nothing_was_trained_is_new(tmp_path):
    config = dr.Config(out=str(tmp_path / "run"))
    (tmp_path / "run" / "levels").mkdir(parents=True)
    for name in ("config.json", "lock", ".config.json.12ab.tmp"):
        (tmp_path / "run" / name).write_text("")
    (tmp_path / "run" / "logs.csv").write_text("update,seed\r\n")
    assert dr.make_folder(config) == tmp_path / "run"
    (tmp_path / "run" / "logs.csv").write_text("update,seed\r\n2,0\r\n")
    with pytest.raises(dr.BadConfig, match="a new one, or --resume"):
        dr.make_folder(config)
    (tmp_path / "run" / "logs.csv").unlink()
    (tmp_path / "run" / "thesis.tex").write_text("")
    with pytest.raises(dr.BadConfig, match="a new one, or --resume"):
        dr.make_folder(config)
    assert not (tmp_path / "run" / "logs.csv").exists()


def test_default_folders_are_taken_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(dr.make_folder, [dr.Config()] * 16))
    assert sorted(folders) == sorted(dr.Path(f"runs/dr-{i}") for i in range(1, 17))


def test_a_folder_is_held_by_one(tmp_path):
    config = dr.Config(out=str(tmp_path))
    hold = lambda: dr.hold_folder(config, tmp_path)
    (tmp_path / ".logs.csv.12ab.tmp").write_text("")
    with hold():
        assert not list(tmp_path.glob(".*.tmp"))
        with pytest.raises(dr.BadConfig, match="`lock` no other process holds"), hold():
            pass
    with hold():
        pass


@pytest.mark.slow
def test_two_processes_in_one_folder(tmp, launch, call):
    """The second one is refused, and the first one continues."""
    args, folder = [*RUN, "--num-updates", 300], tmp / "both"
    first = launch(*args, "--out", folder)
    while last_update(folder) < 4:
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)  # as one that ends its chunk
    before = contents(folder)
    status, _, err = call("--resume", "--out", folder)
    assert status == 2
    assert err.count("\n") == 1
    assert "`lock`" in err
    assert contents(folder) == before
    first.send_signal(signal.SIGCONT)
    first.send_signal(signal.SIGTERM)
    assert finish(first)[0] == 143
    assert last_update(folder) == load(folder)["cycles"] < 300


# --- surroundings


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["| head -1", "> /dev/full 2> /dev/full", ">&- 2>&-"])
def test_speech_that_is_not_heard(whole, tmp_path, ending):
    words = [sys.executable, str(ROOT / "dr.py"), *SHORT, "--out", str(tmp_path / "run")]
    command = f"set -o pipefail; {' '.join(words)} {ending}"
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    options = dict(executable="/bin/bash", capture_output=True, text=True, env=environment)
    done = subprocess.run(command, shell=True, **options)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    assert_equal(tmp_path / "run", whole)


def test_what_steers_a_terminal_is_not_printed(capsys):
    dr.say("runs/\x1b[2J\x07")
    assert capsys.readouterr().out == "runs/?[2J?\n"


def test_no_home(monkeypatch, capsys):
    """There is no HOME, and the system does not know the user."""
    import pwd

    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    dr.keep_programs()
    assert "warning: compiled programs are not kept" in capsys.readouterr().err
    assert dr.parse(["--out", "~/run"]).out == "~/run"


def test_the_home_folder_in_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert dr.parse(["--out", "~/run"]).out == str(tmp_path / "run")


@pytest.mark.parametrize("name", ["jax_enable_x64", "jax_debug_nans"])
def test_what_jax_is_set_to(name):
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        with pytest.raises(dr.BadConfig, match=f"{name.upper()} = True: allowed is False"):
            dr.make_train(dr.Config())
    finally:
        jax.config.update(name, before)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_a_platform_that_is_not_there(call, platform):
    status, _, err = call("--num-updates", 1, env={"JAX_PLATFORMS": platform})
    assert status == 2
    assert f"JAX_PLATFORMS = {platform}: " in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_backend_of_a_notebook(call, tmp):
    """Neither the script nor evaluate.py needs the backend in MPLBACKEND."""
    env = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    out = tmp / "backend"
    status, _, err = call(*SHORT, "--num-updates", 2, "--out", out, env=env)
    assert status == 0, err
    assert (out / "curves.png").exists()
    script = ROOT / "evaluate.py"
    status, _, err = call(out, "--mazes", "MiniMaze", "--episodes", 1, script=script, env=env)
    assert status == 0, err


def test_a_tracker_that_is_a_folder_beside_the_script(tmp_path, monkeypatch):
    (tmp_path / "wandbx").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not dr.is_installed("wandbx")
    (tmp_path / "wandbx" / "__init__.py").write_text("")
    assert dr.is_installed("wandbx")
    assert not dr.is_installed("nowhere_to_be_found")


def test_a_tracker_that_does_not_start(monkeypatch, tmp_path):
    class Tracker:
        def init(**about):
            raise RuntimeError("no API key\nconfigured")

    monkeypatch.setattr(dr.importlib, "import_module", lambda name: Tracker)
    config = replace(dr.Config(), track="wandb")
    with pytest.raises(dr.BadConfig, match=r"'wandb': allowed is a tracker.*\(no API key\)"):
        dr.start_trackers(config, [{"seed": 0}], tmp_path)


def test_commands_that_are_printed_are_quoted(capsys):
    dr.say_end(dr.Config(num_updates=2), dr.Path("a b;$(c)"), 1, 0.0)
    assert capsys.readouterr().out.endswith("--resume --out 'a b;$(c)'\n")


# --- evaluate.py


@pytest.mark.parametrize("cell, refused", {
    "0.5": False, "1e308": True, "inf": True, "-1": True, "x" * 200_000: True}.items(),
    ids=["fine", "large", "inf", "below", "long"])  # fmt: skip
def test_cells_of_a_sweep(tmp_path, cell, refused):
    (tmp_path / "logs.csv").write_text(f"seed,lr,train_solve_rate\n0,0.1,0.5\n0,0.2,{cell}\n")
    if refused:
        with pytest.raises(evaluate.Refused, match="logs.csv"):
            evaluate.read_sweep(tmp_path / "logs.csv", ["lr"])
    else:
        evaluate.read_sweep(tmp_path / "logs.csv", ["lr"])


def test_mazes_of_a_file(tmp_path):
    path = tmp_path / "mazes.txt"
    read = lambda text: (path.write_bytes(text), evaluate.read_mazes(path, 250))[1]
    assert len(read(b"\xef\xbb\xbf>.\n.G\n  \n\n#>G\r\n")) == 2
    for text, words in {b">  \n # \n  G": "unknown character ' ' at row 1, column 2",
                        b"  >.\n .G": "unknown character ' ' at row 1, column 1",
                        b"\xff": "utf-8", b"": "no agent",
                        b"." * 5000 + b">G": "more than 128"}.items():  # fmt: skip
        with pytest.raises(evaluate.Refused, match=re.escape(words)):
            read(text)


def test_names_that_matplotlib_would_read_as_formulas():
    scores = np.ones((3, 2, 4))
    summary = evaluate.summarise(scores, ["a$", "$\\frac{$"], 0, False)
    figure = evaluate.plot_results({"$\\frac{$": (scores, scores)}, {"$\\frac{$": summary})
    figure.canvas.draw()


def test_long_episodes_are_not_for_the_page(tmp_path, monkeypatch):
    (tmp_path / "mazes.txt").write_text(">G")
    args = evaluate.Arguments(runs=("x",), play=True, maze_file=str(tmp_path / "mazes.txt"))
    made = evaluate.Run("x", tmp_path, "dr", 1, [], {}, None)
    monkeypatch.setattr(evaluate, "load_runs", lambda args: ([made], []))
    with pytest.raises(evaluate.Refused, match="max_steps = 100000: allowed with --play"):
        evaluate.evaluate(replace(args, max_steps=100_000))
