"""What disks, strangers and other processes may do to a run: it is refused in one line, with
nothing changed, or goes on as if nothing had happened. Mostly with a toy for a training."""

import errno
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from flax import serialization
from runs import ROOT, TOY, assert_equal, contents, last_update, load, rewind, table, toy

sys.path.insert(0, str(ROOT))

import dr

RNG = random.Random(57)


@pytest.fixture(scope="module")
def whole(tmp):
    """A run of the toy with two seeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dr, "make_train", toy)
        dr.run(dr.parse([*TOY, "--seeds", "2", "--out", str(tmp / "whole")]))
    return tmp / "whole"


@pytest.fixture
def run(whole, tmp_path):
    """A copy of it, back at cycle 8."""
    return rewind(whole, tmp_path / "run", 8)


@pytest.fixture
def no_pictures(monkeypatch):
    """They take most of a toy's time."""
    monkeypatch.setattr(dr, "draw", lambda *_: None)


# --- killed


def test_killed_at_every_line(whole, toys, tmp_path, no_pictures):
    """What a SIGKILL would leave in the folder at each line of the script: the run goes on from all
    of it, by the command that began it, and equals the whole one bit for bit."""
    folder, seen = tmp_path / "run", []
    words = "--seeds", 2, "--resume", "--out", folder

    def look(frame, event, _):
        if frame.f_code.co_filename != dr.__file__:
            return None
        now = contents(folder)
        if not seen or now != seen[-1]:
            seen.append(now)
        return look

    sys.settrace(look)
    try:
        assert toys(*words)[0] == 0
    finally:
        sys.settrace(None)
    assert_equal(folder, whole)
    assert len(seen) > 25
    names = {re.sub(r"\.\w{16}\.", ".*.", x.name) for files in seen for x in files}
    assert {".checkpoint.msgpack.*.tmp", ".config.json.*.tmp", "logs.csv"} < names
    for files in seen:
        shutil.rmtree(folder)
        (folder / "levels").mkdir(parents=True)
        for path, data in files.items():
            path.write_bytes(data)
        assert toys(*words)[0] == 0
        assert_equal(folder, whole)


# --- stopped


class Tracker:
    """wandb or trackio: `log` does something at an update of seed 1; all is noted."""

    Image = str

    def __init__(self, act=lambda: None, at=4):
        self.act, self.at, self.about, self.lines = act, at, [], []

    def init(self, **about):
        self.about.append(about)
        return SimpleNamespace(log=self.log, finish=lambda: None)

    def log(self, line, step):
        self.lines.append(line)
        if (step, line.get("seed")) == (self.at, 1):
            self.act()


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_and_resumed(whole, toys, tmp_path, monkeypatch, no_pictures, number, status):
    """The next chunk ends, with a checkpoint; the printed command goes on, to the same end."""
    tracker = Tracker(lambda: signal.raise_signal(number))
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    folder = tmp_path / "run"
    code, said, _ = toys("--seeds", 2, "--out", folder, "--track", "trackio")
    assert code == status
    assert load(folder)["cycles"] == last_update(folder) == 6
    again = re.search(r"next: python dr.py (.*)", said)[1].split()
    assert again == ["--resume", "--out", str(folder)]
    assert toys(*again, "--track", "")[0] == 0
    assert_equal(folder, whole)


def test_a_second_signal_acts_as_before(monkeypatch):
    heard, before = [], signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, lambda *_: heard.append("before"))
        with dr.catch_signals() as caught:
            signal.raise_signal(signal.SIGTERM)
            assert (caught, heard) == ([signal.SIGTERM], [])
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert (caught, heard) == ([signal.SIGTERM], ["before"] * 2)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_run_in_another_thread(whole, toys, tmp_path, no_pictures):
    """As an optimiser's or a notebook's agent calls it; signals are left alone."""
    config = dr.parse([*TOY, "--seeds", "2", "--out", str(tmp_path / "run")])
    before, states = signal.getsignal(signal.SIGINT), []
    thread = threading.Thread(target=lambda: states.append(dr.run(config)))
    thread.start()
    thread.join()
    assert states[0].cycles.tolist() == [12, 12]
    assert jax.numpy.issubdtype(states[0].rng.dtype, jax.dtypes.prng_key)
    assert signal.getsignal(signal.SIGINT) == before
    assert_equal(tmp_path / "run", whole)


# --- what is not worth a training


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), RuntimeError("no key")])
def test_a_tracker_that_raises(whole, toys, tmp_path, monkeypatch, no_pictures, error):
    def fail():
        raise error

    monkeypatch.setitem(sys.modules, "trackio", Tracker(fail))
    out = "--seeds", 2, "--out", tmp_path / "run", "--track", "trackio"
    status, said, _ = toys(*out)
    assert status == 0
    assert f"no track: {error!r}\n" in said
    assert_equal(tmp_path / "run", whole)


def test_a_tracker_that_cannot_start(toys, run, monkeypatch):
    """Before a resumed run's log is cut and its config.json written anew."""

    def init(**_):
        raise RuntimeError("no key")

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    line = refused(toys, run, "--resume", "--num-updates", 400, "--track", "trackio")
    assert line.endswith("track = 'trackio': must be able to start: RuntimeError('no key')")


def test_a_run_does_not_get_shorter(toys, run):
    line = refused(toys, run, "--resume", "--num-updates", 1)
    assert "num_updates = 1: must be " in line
    assert line.endswith(" or more")


@pytest.mark.parametrize("setting", ["text.usetex: True", "image.origin: lower", "no LaTeX"])
def test_pictures_do_not_depend_on_matplotlibrc(whole, toys, run, monkeypatch, setting):
    """If drawing fails all the same, a line says so, and the run goes on."""
    import matplotlib

    if setting == "no LaTeX":
        monkeypatch.setattr(dr.amaze, "plot_levels", Mock(side_effect=RuntimeError(setting)))
    else:
        name, value = setting.split(": ")
        monkeypatch.setitem(matplotlib.rcParams, name, value)
    pictures = [x.relative_to(whole) for x in contents(whole) if x.suffix == ".png"]
    assert len(pictures) == 2
    for name in pictures:
        (run / name).unlink()
    status, said, _ = toys("--resume", "--out", run)
    assert status == 0
    assert_equal(run, whole)
    if setting == "no LaTeX":
        assert "no picture: RuntimeError('no LaTeX')\n" in said
    else:
        assert all((run / x).read_bytes() == (whole / x).read_bytes() for x in pictures)


SURROUNDINGS = """
import os, pwd, dr, runs
def unknown(uid): raise KeyError(uid)
pwd.getpwuid = unknown
del os.environ["HOME"]
dr.jax.config.update("jax_compilation_cache_dir", None)
dr.make_train = runs.toy
dr.main()
"""


@pytest.mark.slow
def test_no_home_and_no_settings_of_matplotlib(whole, train, tmp_path):
    """There is no HOME, and the system does not know the user; matplotlib is to use LaTeX."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    (tmp_path / "toy.py").write_text(SURROUNDINGS)
    env = {"MATPLOTLIBRC": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    folder, script = tmp_path / "run", tmp_path / "toy.py"
    said = train(*TOY, "--seeds", 2, "--out", folder, script=script, env=env, cwd=tmp_path)
    assert "no picture" not in said
    assert_equal(folder, whole)


def test_the_checkpoint_comes_before_the_picture(toys, run, whole, monkeypatch):
    """A folder is in the picture's place."""
    (run / "levels" / "update_12.png").unlink()
    (run / "levels" / "update_12.png").mkdir()
    status, said, _ = toys("--resume", "--out", run)
    assert status == 0
    assert "no picture: IsADirectoryError" in said
    assert_equal(run, whole)
    assert not [*run.rglob("*.tmp")]


# --- disks


@pytest.mark.parametrize("file", ["checkpoint.msgpack", "logs.csv"])
def test_a_full_disk_leaves_the_last_checkpoint(toys, run, whole, monkeypatch, file):
    """A limit on the size of files acts as a full disk."""
    before = (run / "checkpoint.msgpack").read_bytes()
    name = "write" if file == "checkpoint.msgpack" else "write_log"
    function, (soft, hard) = getattr(dr, name), resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(target, *args):
        if Path(target.name).name == file:
            size = 50 + (os.path.getsize(target.name) if name == "write_log" else 0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            return function(target, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as patch:
        patch.setattr(dr, name, full)
        status, _, line = toys("--resume", "--out", run)
    assert status == 1
    assert line == f"dr.py: error: [Errno {errno.EFBIG}] File too large"
    assert (run / "checkpoint.msgpack").read_bytes() == before
    assert not [*run.rglob("*.tmp")]
    assert toys("--resume", "--out", run)[0] == 0
    assert_equal(run, whole)


def refused(toys, folder, *words):
    """The message of a refusal; checks that it is one line and that nothing has changed."""
    before = contents(folder)
    status, said, line = toys("--out", folder, *words)
    assert status == 2, line
    assert "compiling" not in said
    assert line.startswith("dr.py: error: ")
    assert contents(folder) == before
    return line


@pytest.mark.parametrize("kind", ["cut", "flipped", "zeros", "longer", "empty"])
def test_a_damaged_checkpoint(toys, run, kind):
    data = (run / "checkpoint.msgpack").read_bytes()
    for place in (0.01, RNG.random(), 0.99):
        at = int(place * len(data))
        flipped = bytes([data[at] ^ (1 << at % 8)])
        damaged = {"cut": data[:at], "flipped": data[:at] + flipped + data[at + 1 :],
                   "zeros": data[:at] + bytes(len(data) - at), "longer": data + bytes(10),
                   "empty": b""}  # fmt: skip
        (run / "checkpoint.msgpack").write_bytes(damaged[kind])
        assert "checkpoint.msgpack is damaged" in refused(toys, run, "--resume")


@pytest.mark.parametrize("change", [{"walk": 0}, {"student": None}, {"student": np.zeros((2, 4))}])
def test_a_checkpoint_of_other_code(toys, run, change):
    """The state of a run has a field more, a field less or another shape than this script's."""
    data = load(run)
    data["state"] = {k: x for k, x in (data["state"] | change).items() if x is not None}
    body = serialization.msgpack_serialize(data)
    (run / "checkpoint.msgpack").write_bytes(hashlib.sha256(body).digest() + body)
    line = refused(toys, run, "--resume")
    assert line.endswith("must be a run by this code: the state there has other fields or shapes")


@pytest.mark.parametrize("text", [b"", b'{"script": "dr.py", "lr"', b"[1, 2]", b'"dr.py"', b"{}",
                                  b'{"out": "\xff"}', b'{"sweep": 3}'])  # fmt: skip
def test_a_damaged_config_json(toys, run, text):
    (run / "config.json").write_bytes(text)
    assert "config.json is damaged" in refused(toys, run, "--resume")


# --- strangers and other processes


def test_links_are_not_followed(toys, run, whole, tmp_path, monkeypatch):
    """A stranger's folder has links to my file in the places of a run's files, and in those of the
    temporary ones, if he guesses their names."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (run / "logs.csv").rename(tmp_path / "logs.csv")
    for target in (mine, tmp_path / "nowhere"):
        (run / "logs.csv").symlink_to(target)
        assert "logs.csv is no link" in refused(toys, run, "--resume")
        (run / "logs.csv").unlink()
    (tmp_path / "logs.csv").rename(run / "logs.csv")
    for name in ("curves.png", "levels/update_12.png", "checkpoint_12.msgpack"):
        (run / name).unlink()
        (run / name).symlink_to(mine)
    assert toys("--resume", "--out", run)[0] == 0
    assert_equal(run, whole)
    assert not any(x.is_symlink() for x in run.rglob("*"))
    assert mine.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()

    monkeypatch.setattr(dr.secrets, "token_hex", lambda _: "guessed")
    (run / ".config.json.guessed.tmp").symlink_to(mine)
    with pytest.raises(FileExistsError):
        dr.write(run / "config.json", lambda file: file.write(b"new"))
    assert mine.read_text() == "mine"


def test_temporary_files_are_new_and_go(tmp_path):
    names = []

    def save(file):
        names.append(os.path.basename(file.name))
        raise OSError(28, "No space left on device")

    for _ in range(2):
        with pytest.raises(OSError, match="No space left on device"):
            dr.write(tmp_path / "a.txt", save)
    assert names[0] != names[1]
    assert list(tmp_path.iterdir()) == []


def test_one_process_trains_in_a_folder(toys, run):
    """The other one here is this process: the lock is that of an open file."""
    _, log = dr.open_folder(dr.Config(out=str(run), resume=True))
    with log:
        assert "out = " in refused(toys, run, "--resume")
        assert "no other process trains" in refused(toys, run, "--resume")
    assert toys("--resume", "--out", run)[0] == 0


@pytest.mark.parametrize("name, value", [("jax_threefry_partitionable", False),
                                         ("jax_default_prng_impl", "rbg")])  # fmt: skip
def test_other_random_numbers_are_refused(toys, run, name, value):
    before = getattr(jax.config, name)
    assert json.loads((run / "config.json").read_text())[name] == before
    jax.config.update(name, value)
    try:
        said = refused(toys, run, "--resume")
    finally:
        jax.config.update(name, before)
    assert said == f"dr.py: error: {name} = {value!r}: must be {before!r}, as in the run to resume"


def test_an_edited_log(toys, run, whole):
    """Rows after the checkpoint are written anew; without the earlier ones a run goes on, too."""
    with open(run / "logs.csv", "a") as log:
        log.write("14,1,2,ha")
    assert toys("--resume", "--out", run)[0] == 0
    assert_equal(run, whole)
    (run / "logs.csv").write_bytes(b"")
    assert toys("--resume", "--num-updates", 14, "--out", run)[0] == 0
    assert [row["update"] for row in table(run)] == ["14", "14"]
