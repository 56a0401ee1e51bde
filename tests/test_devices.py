"""The five scripts: killed and resumed, and dealt over devices and processes, they equal the same
training on one device."""

import os
import random
import signal
import socket
import sys
import time

import jax
import pytest
from runs import ROOT, TINY, TOY, assert_close, assert_equal, contents, finish, interrupt
from runs import last_update, leaves, load, rewind, table, toy

sys.path.insert(0, str(ROOT))

import dr

ROWS = [0, 1]
RNG = random.Random(57)
RUN = [*TINY, *"""--num-updates 12 --checkpoint-interval 2 --archive-interval 8 --eval-interval 0
    --seeds 2""".split()]  # fmt: skip
BUFFER = "--buffer-size 24 --min-fill 0.5 --replay-prob 0.5"
# candidates in three turns, which two devices do not share evenly
CANDIDATES = """--num-candidates 12 --candidates-at-once 4 --candidate-evals 2
    --buffer-size 8 --score-interval 3 --num-minibatches 2"""
VARIANTS = {  # name: script, its options
    "dr": ("dr.py", ""),
    "plr": ("plr.py", BUFFER),
    "accel": ("accel.py", f"{BUFFER} --parallel --num-minibatches 2"),
    "paired": ("paired.py", "--teacher-hidden-size 16 --teacher-filters 4"),
    "sfl": ("sfl.py", CANDIDATES),
}


@pytest.fixture(scope="module")
def whole(tmp, train):
    """whole(variant) -> the folder of its run on one device, from begin to end."""

    def whole(variant):
        script, options = VARIANTS[variant]
        folder = tmp / variant
        if not folder.exists():
            args = [*RUN, *options.split(), "--devices", 1, "--out", folder]
            train(*args, script=ROOT / script)
        return folder

    return whole


@pytest.mark.slow
def test_killed_at_a_random_moment(tmp, whole, launch, train):
    """Once a line is there; the command that began the run goes on."""
    folder, one = tmp / "killed", whole("plr")
    args = [*RUN, *BUFFER.split(), "--devices", 1, "--resume", "--out", folder]
    process = launch(*args, script=ROOT / "plr.py")
    while last_update(folder) == 0 and process.poll() is None:
        time.sleep(0.002)
    time.sleep(RNG.uniform(0, 0.05))
    process.send_signal(signal.SIGKILL)
    assert finish(process)[0] in (-signal.SIGKILL, 0)
    train(*args, script=ROOT / "plr.py")
    assert_equal(folder, one)
    assert {len(x) for x in leaves(load(folder)).values()} == {2}
    learnt = {int(row["grad_updates"]) for row in table(folder)[-2:]}
    assert 0 < max(learnt) < 12


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_levels_over_devices_give_the_training_of_one(tmp, whole, train, variant):
    """From cycle 8, which another layout has reached; sfl's candidates from the start."""
    script, options = VARIANTS[variant]
    folder, one = tmp / f"{variant} levels", whole(variant)
    args = [*RUN, *options.split(), *"--devices 2 --shard levels --resume --out".split(), folder]
    if variant != "sfl":
        rewind(one, folder, 8)
    said = train(*args, devices=2, script=ROOT / script)
    assert f"{folder}: 2 training(s) on 2 x cpu, dealt by levels" in said
    assert_close(folder, ROWS, one, ROWS)
    assert contents(folder).keys() == {folder / x.relative_to(one) for x in contents(one)}


# --- the same by the toy: groups, resumed elsewhere, longer, two processes


@pytest.fixture(scope="module")
def toy_script(tmp):
    (tmp / "toy.py").write_text("import dr, runs\n\ndr.make_train = runs.toy\ndr.main()\n")
    return tmp / "toy.py"


@pytest.fixture(scope="module")
def four(tmp):
    """Four seeds of the toy, one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dr, "make_train", toy)
        dr.run(dr.parse([*TOY, "--seeds", "4", "--out", str(tmp / "four")]))
    return tmp / "four"


PATHS = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


def start_together(launch, folder, *args):
    """Start two processes of two devices each that share one run of the toy, as mpirun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = PATHS | {
        "JAX_COORDINATOR_ADDRESS": address,
        "OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1:1",
    }
    env |= {"OMPI_COMM_WORLD_SIZE": "2"}
    words = [*TOY, "--seeds", 4, "--devices", 0, "--distributed", *args, "--out", folder]
    one = lambda i: launch(
        *words,
        script=folder.parent / "toy.py",
        devices=2,
        env=env | {f"OMPI_COMM_WORLD_{x}RANK": str(i) for x in ("", "LOCAL_")},
    )
    return [one(0), one(1)]


def test_groups_and_longer_runs(toys, four, tmp_path):
    """Of another size after a resume; a run that was made longer equals a long one."""
    words = "--seeds", 4, "--resume", "--out", tmp_path / "run"
    assert toys(*words, "--seeds-at-once", 2, "--num-updates", 8)[0] == 0
    assert toys(*words, "--seeds-at-once", 1)[0] == 0
    assert_equal(tmp_path / "run", four)


@pytest.mark.slow
def test_seeds_over_devices(four, toy_script, train, tmp_path):
    """Two after four, each device a group of one."""
    words = "--seeds", 4, "--resume", "--devices"
    for number, updates in ((4, 6), (2, 12)):
        options = "--num-updates", updates, "--out", tmp_path / "run", "--seeds-at-once", 1
        said = train(*TOY, *words, number, *options, script=toy_script, devices=4, env=PATHS)
        assert f"4 training(s) on {number} x cpu, dealt by seeds" in said
    assert_equal(tmp_path / "run", four)


@pytest.mark.slow
def test_two_processes(tmp, tmp_path, monkeypatch, four, toy_script, launch):
    """Together they equal one; they refuse together; a signal to one stops both. The second one
    leaves no files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tmp / "two"
    both = [finish(process) for process in start_together(launch, folder)]
    assert [x[0] for x in both] == [0, 0], both
    assert "4 training(s) on 4 x cpu" in both[0][1]
    assert "training(s)" not in both[1][1]
    assert list(tmp_path.glob("*/logs.csv")) == []
    assert_equal(folder, four)
    before = contents(folder)
    both = [finish(process) for process in start_together(launch, folder)]
    assert [x[0] for x in both] == [2, 2], both
    assert all("out = " in err for _, _, err in both)
    assert contents(folder) == before

    folder = tmp / "stopped"
    one, other = start_together(launch, folder, "--num-updates", 10**6, "--plot-interval", 0)
    ends = [interrupt(other, folder, 10, signal.SIGTERM), finish(one)]
    assert [x[0] for x in ends] == [143, 143], ends
    assert load(folder)["cycles"] == last_update(folder) >= 10


@pytest.mark.parametrize("args, expected", [
    ("--seeds 8", "4 seeds"),
    ("--seeds 1", "4 levels"),
    ("--seeds 3", "4 levels"),
    ("--seeds 2 --num-envs 6", "3 levels"),
    ("--seeds 2 --num-envs 6 --shard seeds", "2 seeds"),
    ("--seeds 3 --num-envs 5", "3 seeds"),
    ("--seeds 9 --num-envs 5", "3 seeds"),
    ("--seeds 2 --sweep lr=0.1,0.2", "4 seeds"),
    ("--num-minibatches 4", "2 levels"),
    ("--seeds 4 --devices 1", "1 seeds"),
    ("--seeds 6 --devices 3", "3 seeds"),
    ("--seeds 4 --devices 3 --num-envs 6", "3 levels"),
    ("--seeds 4 --shard levels", "4 levels"),
    ("--seeds 2 --shard seeds", "2 seeds"),
    ("--seeds 4 --devices 3", "devices = 3, shard = '': must be "),
    ("--seeds 5 --devices 5", "devices = 5, shard = '': must be "),
    ("--seeds 1 --devices 4 --shard seeds", "devices = 4, shard = 'seeds': must be "),
    ("--devices 4 --num-minibatches 4", "devices = 4, shard = '': must be "),
])  # fmt: skip
def test_what_is_dealt(monkeypatch, args, expected):
    """By default seeds, if they deal evenly over four devices; levels if that uses more devices."""
    monkeypatch.setattr(jax, "devices", lambda: list("abcd"))
    config = dr.parse([*TINY, *args.split()])
    try:
        devices, shard = dr.choose_devices(config, len(dr.make_rows(config)))
        assert f"{len(devices)} {shard}" == expected
    except dr.BadConfig as error:
        assert str(error).startswith(expected)
        assert "must be" in expected


@pytest.mark.slow
def test_every_core_is_a_device(tmp, launch, toy_script):
    """This holds on a CPU, unless the user sets something else."""
    cores = len(os.sched_getaffinity(0))
    words = *TOY, "--seeds", 3 * cores, "--devices", 0, "--out", tmp / "cores"
    status, said, err = finish(launch(*words, script=toy_script, devices=None, env=PATHS))
    assert status == 0, err
    assert f"training(s) on {cores} x cpu, dealt by seeds" in said
