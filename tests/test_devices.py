"""Runs on several devices and in several processes equal the same training on one device."""

import json
import os
import re
import signal
import socket
import sys
from concurrent.futures import wait
from itertools import count

import jax
import pytest
from runs import FOUR, LONG, ROOT, SHORT, TINY, assert_close, assert_equal, assert_same_state
from runs import contents, finish, interrupt, last_update, leaves, load, rewind, table

sys.path.insert(0, str(ROOT))

import dr

ROWS = [0, 1, 2, 3]
BUFFER = "--eval-interval 0 --buffer-size 24 --min-fill 0.5 --replay-prob 0.5"
TEACHER = "--eval-interval 0 --teacher-hidden-size 16 --teacher-filters 4"
# candidates in three turns, which neither two nor four devices share evenly
CANDIDATES = """--eval-interval 0 --num-candidates 12 --candidates-at-once 4 --candidate-evals 2
    --buffer-size 8 --score-interval 3 --num-minibatches 2"""
# name: script, its options, and on what the same four trainings run beside one device, from the
# start or after that run or another one until update 8
VARIANTS = {
    "dr": ("dr.py", "", ("4 levels", "2 seeds after 4 levels", "4 seeds, 2 processes")),
    "plr": ("plr.py", BUFFER, ("2 levels", "4 seeds after 2 levels", "4 levels, 2 processes")),
    "plr_parallel": ("plr.py", f"{BUFFER} --parallel", ("4 levels",)),
    "accel": ("accel.py", BUFFER, ("4 levels after 1 seeds",)),
    "accel_minibatches": ("accel.py", f"{BUFFER} --parallel --num-minibatches 2",
                          ("4 levels", "2 seeds after 4 levels")),
    "paired": ("paired.py", TEACHER, ("2 levels", "4 seeds after 2 levels")),
    "sfl": ("sfl.py", CANDIDATES, ("4 levels", "2 seeds after 4 levels")),
}  # fmt: skip


def start_together(launch, *args, **options):
    """Start two processes of two devices each that share one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    one = lambda i: launch(*args, "--distributed", f"{address},2,{i}", devices=2, **options)
    return [one(0), one(1)]


@pytest.fixture(scope="module")
def layouts(tmp, launch, train, pool):
    """layouts(variant, layout) -> folder; the first call starts all runs of the variant."""

    def run(variant, layout):
        script, options, _ = VARIANTS[variant]
        folder, number, shard = tmp / f"{variant} {layout}", *re.findall(r"\w+", layout)[:2]
        where = "--devices", number, "--shard", shard, "--out", folder
        args = [*SHORT, *options.split(), "--seeds", 4]
        if "after" in layout:
            rewind(layouts(variant, layout.split(" after ")[1]), folder, 8)
            args = ["--resume"]
        if "processes" in layout:  # alone: one waits no longer than 30 s for the other's compiler
            wait(other for name, other in runs[variant].items() if name != layout)
            both = start_together(launch, *args, *where, script=ROOT / script)
            (status, said, err), (other, _, other_err) = map(finish, both)
            assert status == other == 0, err + other_err
        else:
            said = train(*args, *where, devices=4, script=ROOT / script)
        assert f"{folder}: 4 training(s) on {number} x cpu, dealt by {shard}" in said
        return folder

    def layouts(variant, layout="1 seeds"):
        if variant not in runs:
            runs[variant] = {}
            for name in ("1 seeds", *VARIANTS[variant][2]):
                runs[variant][name] = pool.submit(run, variant, name)
        return runs[variant][layout].result()

    runs = {}
    return layouts


@pytest.fixture(scope="module")
def torn(tmp, launch):
    """A run of two processes: a signal to one stops both; resumed, one is killed. -> its folder,
    how the first two ended, the update they reached, and the process that was not killed"""
    folder = tmp / "torn"
    args = [*LONG, *"--num-updates 6000 --eval-interval 0 --shard levels --out".split(), folder]
    one, other = start_together(launch, *args)
    ends, stopped = [interrupt(other, folder, 10, signal.SIGTERM), finish(one)], last_update(folder)
    if load(folder)["cycles"] == stopped:
        one, other = start_together(launch, "--resume", "--out", folder)
        interrupt(other, folder, stopped + 40, signal.SIGKILL)
    return folder, ends, stopped, one


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both(torn):
    _, [(status, _, other_err), (other, out, err)], stopped, _ = torn
    assert status == other == 128 + signal.SIGTERM, err + other_err
    assert f"stopped at cycle {stopped};" in out
    assert stopped >= 10


@pytest.mark.slow
def test_what_one_of_two_processes_refuses_ends_both(layouts, launch):
    """The folder is taken, which only the process that writes it notices."""
    whole = layouts("dr")
    before = contents(whole)
    one, other = start_together(launch, *SHORT, "--seeds", 4, "--out", whole)
    status, _, err = finish(one)
    assert status == 2, err
    assert err.splitlines()[-1].startswith("dr.py: error: out = "), err
    assert finish(other)[0] not in (0, 2)
    assert contents(whole) == before


@pytest.mark.slow
def test_distributed_without_a_cluster(tmp, call, pool):
    values = "auto", "127.0.0.1:1", "127.0.0.1:1,2,2", "127.0.0.1:1,2", "127.0.0.1:1,two,0"
    run = lambda value: call(*TINY, "--distributed", value, "--out", tmp / "nowhere")
    for value, (status, _, err) in zip(values, pool.map(run, values)):
        line = err.splitlines()[-1]
        assert status == 2, err
        assert f"distributed = '{value}': allowed is" in line, err
        assert "HOST:PORT" in line
        assert not (tmp / "nowhere").exists()


@pytest.mark.slow
@pytest.mark.parametrize("variant, layout", [(k, x) for k, v in VARIANTS.items() for x in v[2]])
def test_any_devices_give_the_training_of_one(layouts, variant, layout):
    one, folder = layouts(variant), layouts(variant, layout)
    assert_close(folder, ROWS, one, ROWS)
    assert {len(x) for x in leaves(load(folder)).values()} == {4}
    written = {path.relative_to(folder) for path in contents(folder)}
    assert written == {path.relative_to(one) for path in contents(one)}
    learnt = {int(row["grad_updates"]) for row in table(folder)[-4:]}
    assert max(learnt) > 0
    assert variant not in ("plr", "accel") or max(learnt) < 12


@pytest.mark.slow
def test_a_finished_run_goes_on(tmp, layouts, train):
    """It equals a run of this length from the start, except for an evaluation at its old end."""
    folder, longer = tmp / "longer", layouts("dr")
    train(*FOUR, "--num-updates", 10, "--out", folder, devices=4)
    train("--resume", "--num-updates", 12, "--out", folder, devices=4)
    assert_same_state(folder, longer)
    log, expected = table(folder), table(longer)
    assert len(log) == len(expected) == 24
    for row, expected_row in zip(log, expected):
        for name in row:
            extra = row["update"] == "10" and name.startswith("eval_")
            assert row[name] == expected_row[name] or extra and row[name] != "", name
    assert json.loads((folder / "config.json").read_text())["num_updates"] == 12
    train("--resume", "--out", folder, devices=4)
    assert table(folder) == log


@pytest.mark.slow
def test_archives(layouts):
    four = layouts("dr")
    names = [f"checkpoint_{i}.msgpack" for i in (4, 8, 12, "previous")]
    assert sorted(path.name for path in four.glob("checkpoint_*")) == sorted(names)
    for i in (4, 8, 12):
        assert dr.read_checkpoint(four / f"checkpoint_{i}.msgpack")["cycles"] == i
    assert (four / names[2]).read_bytes() == (four / "checkpoint.msgpack").read_bytes()
    assert (four / names[1]).read_bytes() == (four / "checkpoint_previous.msgpack").read_bytes()


@pytest.mark.slow
def test_groups_equal_all_at_once(tmp, layouts, train):
    four, folder = layouts("dr"), tmp / "groups"
    train(*FOUR, "--seeds-at-once", 2, "--out", folder, devices=4)
    assert_close(folder, ROWS, four, ROWS)
    other = rewind(folder, tmp / "groups_other", 8)  # groups of another size go on with it
    train("--resume", "--out", other, "--seeds-at-once", 1, devices=4)
    assert_close(other, ROWS, four, ROWS)


@pytest.mark.slow
def test_resumed_with_levels_over_devices_bit_for_bit(tmp, layouts, train):
    folder = rewind(layouts("dr", "4 levels"), tmp / "levels_again", 4)
    train("--resume", "--out", folder, devices=4)
    assert_equal(folder, layouts("dr", "4 levels"))


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
    ("--seeds 4 --devices 3", "devices = 3: allowed is "),
    ("--seeds 5 --devices 5", "devices = 5: allowed is "),
    ("--seeds 1 --devices 4 --shard seeds", "devices = 4: allowed is "),
    ("--devices 4 --num-minibatches 4", "devices = 4: allowed is "),
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
        assert "allowed" in expected


@pytest.mark.slow
def test_every_core_is_a_device(tmp, launch, pool):
    """This holds on a CPU, unless the user sets something else."""
    cores = sorted(os.sched_getaffinity(0))
    one_core = dict(before=f"os.sched_setaffinity(0, {cores[:1]})")
    cases = [
        (len(cores), ["--seeds", len(cores)], {}),
        (1, ["--seeds", 2, "--num-envs", 8], one_core),
        (1, ["--seeds", 2, "--devices", 1], {}),
        (3, ["--seeds", 3], dict(env={"JAX_NUM_CPU_DEVICES": "3"})),
    ]

    def first_line(number, args, options):
        out = tmp / f"cores{next(numbers)}"
        process = launch(*SHORT, *args, "--out", out, **{"devices": None} | options)
        line = process.stdout.readline()
        process.kill()
        return line, process.communicate()[1]

    numbers = count()
    for (number, *_), (line, err) in zip(cases, pool.map(first_line, *zip(*cases))):
        assert f"training(s) on {number} x cpu, dealt by seeds" in line, err


@pytest.mark.slow
def test_where_one_of_two_processes_dies_the_other_ends(torn, launch):
    """This is the last test here: the other process may need half a minute to notice."""
    folder, _, stopped, one = torn
    status, _, err = finish(one)
    # the connection breaks; or JAX, which misses the heartbeat, ends the process; or Gloo does,
    # whose listener reads the dead one's last message where another collective's is due
    assert status, err
    ended_by = "another task died", "gloo::EnforceNotMet"
    assert "--resume" in err.splitlines()[-1] or any(x in err for x in ended_by), err
    step = load(folder)["cycles"]
    assert step > stopped

    process = launch("--resume", "--out", folder, devices=4)
    status, _, err = interrupt(process, folder, last_update(folder) + 2, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM, err
    assert load(folder)["cycles"] > step, err
