"""examples/sharded.diff: D buffers, each for its own levels of a cycle, of plr.py and accel.py."""

import shutil
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
import test_plr
from parts import from_text, traced
from runs import ROOT, SHORT, assert_close, load, rewind, table

sys.path.insert(0, str(ROOT))
import accel
import plr

BUFFERS = "--num-buffers=4 --buffer-size 32 --min-fill 0.5 --replay-prob 0.5 --seeds 2".split()


@pytest.fixture(scope="module")
def script(tmp):
    """The folder of the copies."""
    if not shutil.which("patch"):
        pytest.skip("there is no `patch` here")
    for name in "plr", "accel":
        words = "patch", "-F0", "-o", tmp / f"my_{name}.py", ROOT / f"{name}.py"
        subprocess.run([*words, ROOT / "examples/sharded.diff"], check=True, capture_output=True)
    return tmp


@pytest.fixture(scope="module")
def sharded(script):
    return from_text(plr, (script / "my_plr.py").read_text())


@pytest.mark.slow
def test_a_training_is_the_same_on_any_number_of_devices(script, train, tmp):
    """One that was begun on a device goes on on four."""
    one, four = tmp / "one", tmp / "four"
    words = *SHORT, *BUFFERS, "--num-envs=8", "--shard=levels"
    train(*words, "--devices=1", "--out", one, script=script / "my_plr.py", devices=4)
    words = "--resume", "--devices=4", "--out", rewind(one, four, 4)
    said = train(*words, script=script / "my_plr.py", devices=4)
    assert "2 training(s) on 4 x cpu, dealt by levels" in said
    assert_close(one, [0, 1], four, [0, 1])
    assert load(four)["state"]["buffer"]["score"].shape == (2, 4, 8)
    rows = table(four)
    assert 0 < int(rows[-1]["grad_updates"]) < 12
    assert 0 < float(rows[-1]["buffer_fill"]) <= 1


def test_a_cycle_of_accel(script):
    copy = from_text(accel, (script / "my_accel.py").read_text())
    config = copy.Config(**test_plr.SMALL, num_buffers=2)
    state, metrics, _ = traced(copy.make_train(config))
    assert state.buffer.score.shape == (2, 8)
    assert metrics["child_walls"].shape == (1,)


COUNT = """
import sys, jax, plr, my_plr
for script, words in (my_plr, sys.argv[1:]), (plr, sys.argv[2:]):
    config, row = script.parse(words), {"seed": jax.numpy.arange(2)}
    init, update, *_ = script.make_programs(config, 2, jax.devices(), "levels")
    state = jax.eval_shape(init, 0, row, None)[0]
    text = update(2).lower(0, row, state).compile().as_text()
    print(*(text.count(f" {x}(") for x in ("all-gather", "all-reduce")))
"""


@pytest.mark.slow
def test_no_device_gathers_from_others(script, train):
    """The exact form does, in every cycle."""
    words = *BUFFERS, *SHORT, "--num-envs=8", "--shard=levels", "--devices=4"
    found = train(COUNT, *words, script="-c", devices=4).split()
    assert found[0] == "0"
    assert min(map(int, found[1:])) > 0


SIZES = dict(num_envs=8, buffer_size=16, max_grad_norm=1e9, update_epochs=1)
HALF = SIZES | dict(num_envs=4, buffer_size=8)


def alone(rng, number, cycles, **changes):
    """States after each cycle of plr.py with the levels of one of the buffers."""
    states, state = [], test_plr.program(plr, **HALF | changes)[0].init(rng)
    state = state.replace(rng=jax.random.fold_in(state.rng, number))
    for _ in range(cycles):
        state = test_plr.program(plr, **HALF | changes)[1](state).after
        states.append(state)
    return states


def both(sharded, rng, cycles, **changes):
    """The states of a training with two buffers."""
    config = sharded.Config(**test_plr.SMALL | SIZES | changes, num_buffers=2)
    train = sharded.make_train(config)
    states, state, update = [], train.init(rng), jax.jit(lambda state: train.update(state, 1)[0])
    for _ in range(cycles):
        state = update(state)
        states.append(state)
    return states


def same(tree, other):
    """Whether two trees are equal, to rounding."""
    return all(map(test_plr.close, jax.tree.leaves(tree), jax.tree.leaves(other)))


@pytest.mark.slow
def test_each_buffer_is_that_of_a_training_with_its_levels(sharded):
    """With a learning rate of 0: ranks, ages and keys are the buffer's own. Gradients are averaged:
    Adam's first moment after one update without clipping is a tenth of the gradient."""
    rng, options = jax.random.key(3), dict(lr=0.0, robust=False)
    states = both(sharded, rng, 8, **options)
    singles = [alone(rng, number, 8, **options) for number in range(2)]
    for number, history in enumerate(singles):
        for state, single in zip(states, history):
            assert same(jax.tree.map(lambda x: x[number], state.buffer), single.buffer)
    assert (states[-1].buffer.code[0] != states[-1].buffer.code[1]).any()
    moment = lambda x: jax.tree.leaves(optax.tree_utils.tree_get(x.student.opt_state, "mu"))
    for x, *parts in zip(moment(states[0]), *(moment(history[0]) for history in singles)):
        np.testing.assert_allclose(x, np.mean(parts, axis=0), 1e-3, 1e-7)
    assert max(np.abs(x).max() for x in moment(states[0])) > 1e-3


@pytest.mark.parametrize("changes, most", [
    (dict(num_buffers=3), 32), (dict(num_buffers=0), 32), (dict(num_buffers=64), 32),
    (dict(num_buffers=8, num_minibatches=8), 4),
    (dict(num_buffers=32, buffer_size=4004), 4)])  # fmt: skip
def test_buffers_that_do_not_divide_levels_slots_or_minibatches(sharded, changes, most):
    with pytest.raises(sharded.BadConfig, match=f"^num_buffers = .*must be a divisor of {most}$"):
        sharded.make_train(sharded.Config(**changes))
