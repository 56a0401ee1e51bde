"""Recipes of README and examples: each diff changes a copy of its script, and the copy trains."""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parts import part, traced
from runs import ROOT

sys.path.insert(0, str(ROOT))
import amaze

README = (ROOT / "README.md").read_text()
read = lambda name: (ROOT / "examples" / name).read_text()
TARGETS = {  # diff: the scripts that it is meant for
    "attention": "dr plr accel paired sfl", "rows": "dr plr accel sfl", "ncc": "plr",
    "cartpole": "dr plr accel sfl", "craftax": "dr plr accel sfl", "navix": "dr plr accel sfl",
    "memory": "dr plr accel sfl", "sharded": "plr accel", "next_level": "plr accel",
    "cartpole_paired": "paired", "traced": "plr", "value_disagreement": "plr accel"}  # fmt: skip
STUDENT, LEVELS, REPLAY, TRACED, DISAGREEMENT = (
    "attention", "rows", "ncc", "traced", "value_disagreement")  # fmt: skip


def hack(recipe, folder, name=""):
    """A changed copy of the script that the diff names, or of another one."""
    if not shutil.which("patch"):
        pytest.skip("there is no `patch` here")
    script = f"{name}.py" if name else re.match(r"--- (\w+\.py)\n", read(f"{recipe}.diff"))[1]
    path = folder / f"my_{script}"
    words = ["patch", "-F0", "-o", path, ROOT / script, ROOT / f"examples/{recipe}.diff"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout  # -F0: as it stands
    return path


@pytest.mark.parametrize("recipe, name", [(k, x) for k, v in TARGETS.items() for x in v.split()])
def test_a_diff_applies_exactly(recipe, name, tmp_path):
    """Its removed lines go and its added lines come, above the mark of the command line."""
    before = (ROOT / f"{name}.py").read_text()
    after = hack(recipe, tmp_path, name).read_text()
    diff = read(f"{recipe}.diff").splitlines()[2:]
    lines = lambda sign: Counter(x[1:] for x in diff if x[:1] == sign)
    expected = Counter(before.splitlines()) - lines("-") + lines("+")
    assert Counter(after.splitlines()) == expected
    lower = lambda text: text.split("# --- command line")[1]
    assert lower(after) == lower(before) or recipe == "sharded"  # what devices hold
    compile(after, f"{recipe}_{name}", "exec")


def test_every_diff_is_known():
    assert {path.stem for path in (ROOT / "examples").glob("*.diff")} == TARGETS.keys()


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = dict(height=5, width=5, n_walls=6, max_steps=12, num_envs=4, num_steps=16, rnn="none",
    update_epochs=1, buffer_size=16, min_fill=0.5, eval_interval=0, hidden_size=8)  # fmt: skip


def config(module, **changes):
    known = vars(module.Config())
    return module.Config(**{k: x for k, x in (SMALL | changes).items() if k in known})


def cycle(module, **changes):
    """What a cycle of the copy would log. It is traced, and not compiled."""
    return traced(module.make_train(config(module, **changes)))[1]


@pytest.mark.slow
def test_another_student(tmp_path):
    module = load(hack(STUDENT, tmp_path))
    core = module.Attention(16)
    x = jax.random.normal(jax.random.key(0), (12, 2, 5))
    is_first = np.zeros((12, 2), bool)
    is_first[0] = is_first[5, 1] = True
    params = core.init(jax.random.key(1), core.initial_carry(2), x, is_first)
    apply, carry = jax.jit(core.apply), core.initial_carry(2)
    _, whole = apply(params, carry, x, is_first)
    for t in range(12):  # acting is learning step by step
        carry, y = apply(params, carry, x[t : t + 1], is_first[t : t + 1])
        np.testing.assert_allclose(y[0], whole[t], 1e-4, 1e-5)
    other = apply(params, core.initial_carry(2), x.at[4].add(1.0), is_first)[1]
    same = jnp.isclose(other, whole, atol=1e-5).all(-1)  # seen for eight steps of an episode
    assert np.flatnonzero(~same[:, 0]).tolist() == list(range(4, 12))
    assert np.flatnonzero(~same[:, 1]).tolist() == [4]
    assert "entropy" in cycle(module, rnn=module.Config().rnn)


@pytest.mark.slow
@pytest.mark.parametrize("name, changes", [
    ("plr", {}), ("plr", dict(parallel=True, num_evals=2)), ("accel", dict(num_edits=0)),
])  # fmt: skip
def test_the_next_level_begins(name, changes, tmp_path):
    """After a replayed level another one of the cycle; each is scored by all of its episodes."""
    path = hack("next_level", tmp_path, name)
    line = "        entries, slot = score(state, levels, mutations, batch, last_value, owner)\n"
    keep = "        jax.debug.callback(print, replayed, levels, batch, owner)\n"
    path.write_text(path.read_text().replace(line, keep + line + "        KEEP(entries)\n"))
    module, seen = load(path), []
    module.print = lambda *x: seen.append(jax.tree.map(np.asarray, x))
    scored = []
    module.KEEP = lambda entries: jax.debug.callback(scored.append, entries)
    sizes = dict(max_steps=6, num_steps=24, replay_prob=0.5, see_through_walls=False)
    train = module.make_train(config(module, **sizes, **changes))
    update = jax.jit(train.update, static_argnums=1)
    jax.block_until_ready(update(train.init(jax.random.key(0)), 12))
    E = changes.get("num_evals", 1)
    reset = jax.jit(lambda level: amaze.reset(level, 6, see_through_walls=False)[0])
    shared = 0
    for (replayed, levels, batch, owner), entries in zip(seen, scored):
        N, first, best = len(replayed), np.flatnonzero(replayed), {}
        for b in range(N * E):
            turn, value, total = 0, [], 0.0
            for t in range(24):
                level = b // E
                if replayed[level]:
                    level = first[(list(first).index(level) + turn) % len(first)]
                    shared += turn > 0
                assert owner[t, b] == level
                if batch.is_first[t, b]:
                    obs = reset(jax.tree.map(lambda x: x[level], levels))
                    assert all((x[t, b] == y).all() for x, y in zip(batch.obs, obs))
                value, total = [*value, batch.value[t, b]], total + batch.reward[t, b]
                if batch.done[t, b]:
                    best.setdefault(level, []).append((total, np.mean(value)))
                    turn, value, total = turn + 1, [], 0.0
        for level, episodes in best.items():
            r_max = max(entries.max_return[level], max(r for r, _ in episodes))
            assert entries.max_return[level] == pytest.approx(r_max)
            score = np.mean([r_max - value for _, value in episodes])
            assert entries.score[level] == pytest.approx(score, abs=1e-5)
    assert shared > 20


def test_a_new_level_generator(tmp_path):
    module = load(hack(LEVELS, tmp_path))
    train = module.make_train(config(module))
    levels = part(train, "sample_levels")(jax.random.key(0), 50)
    assert set(np.asarray(levels.wall_map).sum((1, 2))) == {8}  # agent and goal take no wall away
    assert jax.vmap(lambda x: amaze.level_stats(x, 99)["solvable"])(levels).all()
    assert "entropy" in cycle(module)


@pytest.mark.slow
def test_a_learned_distribution_over_the_buffer(tmp_path):
    """Replay probabilities and updates of the logits, cycle by cycle, compared with NumPy."""
    module = load(hack(REPLAY, tmp_path))
    train = module.make_train(module.Config(**SMALL | {"num_envs": 8}))
    state, update = train.init(jax.random.key(0)), jax.jit(train.update, static_argnums=1)
    for _ in range(8):
        old, state = state.buffer, update(state, 1)[0]
        new, same = state.buffer, (old.code == state.buffer.code).all(-1) & old.scored
        taken = np.asarray(new.score)[np.asarray(new.scored)]
        above = (np.asarray(new.score) - taken.mean()) / taken.std()
        before, after = old.remembered["logit"], new.remembered["logit"]
        logit = 0.95 * np.where(same, before, 0) + 0.1 * above
        np.testing.assert_allclose(after[new.scored], logit[new.scored], 1e-4, 1e-5)
    weight = np.where(new.scored, np.exp(after), 0)
    p = module.replay_probabilities(new, state.cycles, 0.3, 0.0)
    np.testing.assert_allclose(p, weight / weight.sum(), 1e-5)
    assert same.any()
    assert p.std() > 0.01
    assert state.grad_updates > 0


def played(path, score):
    """The script, make_train's training, a state, levels, and a rollout on them [T, B]."""
    module = load(path)
    config = module.Config(**SMALL | dict(num_evals=2, score=score, hidden_size=16, buffer_size=8))
    train = module.make_train(config)
    sample_levels, rollout = part(train, "sample_levels", "rollout")
    state = jax.jit(train.init)(jax.random.key(0))
    levels = sample_levels(jax.random.key(1), 4)
    queue = jax.tree.map(lambda x: x[:, None], levels)
    batch, last = jax.jit(rollout)(jax.random.key(2), state.student.params, queue)
    assert batch.done.any()
    return module, train, state, levels, batch, last


@pytest.mark.slow
def test_traced(tmp_path):
    """2506.19997: difficulty is positive value loss plus the transition error; a level's score also
    counts what later levels have gained. Compared with plain loops."""
    path = hack(TRACED, tmp_path)
    module, train, state, levels, batch, last = played(path, "traced")
    predict, score, co_learnability = part(train, "predict", "score", "co_learnability")
    predicted = np.random.default_rng(0).random(batch.obs.image.shape, np.float32)
    errors = np.asarray(module.transition_errors(predicted, batch))
    for b in range(8):
        pairs = [
            (np.asarray(batch.obs.image[t + 1, b], float) / 10, predicted[t, b])
            for t in range(15)
            if not batch.done[t, b]  # else the next image is of another episode
        ]
        np.testing.assert_allclose(errors[b], np.mean([abs(x - y) for x, y in pairs]), 1e-5)

    predict, agent = jax.jit(predict), state.predictor
    first = predict(agent, batch)[1].mean()
    for _ in range(200):
        agent, errors = predict(agent, batch)
    assert errors.mean() < 0.3 * first  # it learns

    arguments = levels, jnp.zeros(4, int), batch, last, errors
    entries, slot = jax.jit(score)(state, *arguments)
    of_level = np.asarray(errors).reshape(4, 2).mean(1)
    advantage = module.gae(batch, last, module.Config().gamma, module.Config().gae_lambda)
    same, none = np.eye(4) > 0, np.zeros(4, np.float32)
    scores = module.level_outcomes(batch, advantage, none, {}, same, none)[3]
    difficulty = np.asarray(scores["positive_value_loss"]) + of_level
    np.testing.assert_allclose(entries.score, difficulty, 1e-5)
    np.testing.assert_allclose(entries.remembered["difficulty"], difficulty, 1e-5)

    now = jnp.array(9)
    before = jnp.arange(8.0) / 8
    buffer = state.buffer._replace(
        scored=jnp.arange(8) < 7, score=before + 1, touched=jnp.array([8, 8, 3, 7, 8, 2, 9, 8]),
        remembered=state.buffer.remembered | {"difficulty": before})  # fmt: skip
    state = state.replace(cycles=now, buffer=buffer)
    slot = jnp.array([2, 3, 8, 5])  # the third is new
    after = co_learnability(state, entries, slot)
    gain = np.mean([before[slot[i]] - difficulty[i] for i in (0, 1, 3)])
    expected = np.array(before) + 1
    expected[[0, 1, 4]] += gain  # played in cycle 8, and there
    np.testing.assert_allclose(after.score, expected, 1e-5)
    nothing = co_learnability(state, entries, jnp.full(4, 8))
    np.testing.assert_array_equal(nothing.score, before + 1)
    assert "transition_error" in cycle(module, score="traced")


@pytest.mark.slow
def test_value_disagreement(tmp_path):
    """2006.09641: the spread of several values at a level's start; each has its own targets."""
    path = hack(DISAGREEMENT, tmp_path)
    module, train, state, levels, batch, last = played(path, "value_disagreement")
    value, reward, done = map(np.asarray, (batch.value, batch.reward, batch.done))
    assert value.shape == (16, 8, 3)
    advantages = np.asarray(module.gae_of_each(batch, last, 0.9, 0.8))
    for b, k in np.ndindex(8, 3):
        advantage, following = 0.0, float(last[b, k])
        for t in reversed(range(16)):
            keep = 0.0 if done[t, b] else 1.0
            delta = reward[t, b] + 0.9 * following * keep - value[t, b, k]
            advantage = delta + 0.9 * 0.8 * keep * advantage
            following = value[t, b, k]
            np.testing.assert_allclose(advantages[t, b, k], advantage, 1e-4, 1e-6)

    entries, _ = jax.jit(part(train, "score"))(state, levels, jnp.zeros(4, int), batch, last)
    for i in range(4):
        spread = [np.std([value[0, b, k] for k in range(3)]) for b in (2 * i, 2 * i + 1)]
        np.testing.assert_allclose(entries.score[i], np.mean(spread), 1e-5)
    for script in module, load(hack(DISAGREEMENT, tmp_path, "accel")):
        assert "entropy" in cycle(script, score="value_disagreement")


@pytest.mark.slow
def test_the_maze_alone():
    [code] = [x for x in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "picture" in x]
    found = {}
    exec(code.replace("1000", "20"), found)
    assert found["rewards"].shape == (20, 20)
    assert found["picture"].shape == (240, 240, 3)
