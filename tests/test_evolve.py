"""Test benchmarks/evolve.py at a tiny size: that it runs, stops and resumes."""

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(num_updates=1, num_envs=4, update_epochs=1)


@pytest.fixture(scope="module")
def evolve():
    sys.path.insert(0, str(ROOT))
    path = ROOT / "benchmarks" / "evolve.py"
    spec = importlib.util.spec_from_file_location("evolve", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LEVELS = 64
    return module


def test_a_network_of_zeros_is_the_squared_error(evolve):
    error, change = np.random.default_rng(0).normal(size=(2, 5, 7))
    net = np.zeros((evolve.HIDDEN, 4))
    np.testing.assert_allclose(evolve.value_loss(net, error, change), error**2, rtol=1e-6)
    net[2] = 0.5, -2.0, 0.1, 3.0
    expected = (error + 3 * np.tanh(0.5 * error - 2 * change + 0.1)) ** 2
    np.testing.assert_allclose(evolve.value_loss(net, error, change), expected, rtol=1e-5)


def test_levels_that_measure_fitness_share_no_key_with_the_training(evolve, monkeypatch):
    """No key of a level is one that a training could derive from its own, in three splits."""
    import dr

    seen, plain, now = {"train": [], "level": [], "init": []}, evolve.amaze.sample_level, ["level"]
    note = lambda name, rng: jax.debug.callback(seen[name].append, jax.random.key_data(rng))

    def sample_level(rng, *given):
        note(now[-1], rng)
        return plain(rng, *given)

    def make_train(config):
        real = dr.make_train(config)

        def train(rng):
            note("train", rng)
            now.append("init")
            student = real.init(rng).student
            now.pop()
            return (SimpleNamespace(student=student),)

        vars(train).update(vars(real))
        return train

    monkeypatch.setattr(evolve.amaze, "sample_level", sample_level)
    script = SimpleNamespace(Config=dr.Config, make_train=make_train)
    size = evolve.SMALL | dict(rnn="none", hidden_size=4, max_steps=2, height=3, width=3, n_walls=2)
    evolve.score(script, size, {}, jax.random.key(5))
    jax.effects_barrier()
    [key], derived = map(jax.random.wrap_key_data, seen["train"]), set()
    keys = key[None]
    for _ in range(4):
        derived |= {x.tobytes() for x in np.asarray(jax.random.key_data(keys))}
        keys = jax.vmap(lambda x: jax.random.split(x, 8))(keys).ravel()
    levels = {x.tobytes() for x in map(np.asarray, seen["level"])}
    assert len(levels) == 64
    assert not levels & derived


@pytest.mark.slow
@pytest.mark.parametrize("what", ["floats", "loss"])
def test_stopped_and_resumed_equals_uninterrupted(evolve, what, tmp_path):
    """Also, a member of a generation equals a training alone with its values and seed."""
    size = evolve.SMALL | TINY
    given = dict(what=what, population=2, seeds=2, seed=3, save_interval=1, compare=0)
    whole, parts = ({**given, "out": tmp_path / name} for name in ("whole", "parts"))
    runs = [(whole, 3, False), (parts, 1, False), (parts, 3, True)]
    found = []
    played = []
    plain, compiled = evolve.make_scores, []

    def recorded(script, size):
        compiled[:] = compiled or [plain(script, size)]  # once for the three runs
        return lambda *given: played.append((script, *given, compiled[0](*given))) or played[-1][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evolve, "make_scores", recorded)
        for run, generations, resume in runs:
            run["out"].mkdir(exist_ok=True)
            options = Namespace(**run, generations=generations, resume=resume)
            found.append(evolve.evolve(options, size))
    options.seeds = 3
    with pytest.raises(SystemExit, match="'seeds': 2.*not.*'seeds': 3"):
        evolve.evolve(options, size)
    jax.tree.map(np.testing.assert_array_equal, found[0], found[2])
    assert any((x != y).any() for x, y in zip(*map(jax.tree.leaves, (found[0], found[1]))))
    texts = [(tmp_path / name / f"{what}.csv").read_text() for name in ("whole", "parts")]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 4
    script, members, seeds, rates = played[0]
    assert len({x for *_, rates in played for x in rates.flat}) > 1
    member = jax.tree.map(lambda x: jnp.asarray(x[1]), members)
    alone = jax.jit(lambda member, rng: evolve.score(script, size, member, rng))
    np.testing.assert_allclose(alone(member, seeds[1]), rates[1, 1], atol=1e-6)


def test_a_save_is_neither_overwritten_nor_missed(evolve, tmp_path):
    options = dict(what="floats", population=2, seeds=2, seed=0, out=tmp_path, compare=0)
    options = Namespace(**options, resume=True)
    with pytest.raises(SystemExit, match="floats.msgpack: does not exist"):
        evolve.evolve(options, evolve.SMALL)
    (tmp_path / "floats.msgpack").write_bytes(b"")
    options.resume = False
    with pytest.raises(SystemExit, match="floats.msgpack: exists"):
        evolve.evolve(options, evolve.SMALL)
