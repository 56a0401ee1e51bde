"""Recipes of README and examples: each diff changes a copy of its script, and the copy trains."""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parts import part
from runs import table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
README = (ROOT / "README.md").read_text()
read = lambda name: (ROOT / "examples" / name).read_text()
TARGETS = {  # diff: the scripts that it is meant for
    "attention": "dr plr accel paired sfl", "rows": "dr plr accel sfl", "ncc": "plr",
    "best_quarter": "plr accel", "mna": "plr accel",
    "cartpole": "dr plr accel sfl", "craftax": "dr plr accel sfl", "navix": "dr plr accel sfl",
    "memory": "dr plr accel sfl",
    "cartpole_paired": "paired", "traced": "plr", "value_disagreement": "plr accel",
    "rank_correlation": "plr accel"}  # fmt: skip
SCORE, STUDENT, LEVELS, REPLAY, QUARTER, TRACED, DISAGREEMENT = (
    "mna", "attention", "rows", "ncc", "best_quarter", "traced",
    "value_disagreement")  # fmt: skip
TINY = """--height 5 --width 5 --n-walls 6 --max-steps 12 --num-envs 8 --num-steps 16 --lr 1e-2
    --hidden-size 16 --update-epochs 2 --eval-suite TrivialMaze --eval-episodes 2 --num-updates 6
    --log-interval 2 --devices 1""".split()


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
    assert lower(after) == lower(before)
    compile(after, f"{recipe}_{name}", "exec")


def test_every_diff_is_known():
    assert {path.stem for path in (ROOT / "examples").glob("*.diff")} == TARGETS.keys()


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(train):
    """The log's rows of a short run of a copy, which is alone in its folder."""

    def run(path, *args):
        said = train(*TINY, *args, "--out", "run", script=path, cwd=path.parent)
        assert "python evaluate.py run" in said
        rows = table(path.parent / "run")
        assert [row["update"] for row in rows] == ["2", "4", "6"]
        return rows

    return run


@pytest.mark.slow
def test_a_new_score(tmp_path, run):
    path = hack(SCORE, tmp_path)
    module = load(path)
    done = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]], bool)
    reward = np.zeros((5, 3), np.float32)
    reward[1, 0] = reward[4, 2] = 0.5  # solved: the first of two episodes, none, the only one
    advantage = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    batch = module.Transition(None, None, None, None, np.zeros((5, 3)), reward, done)
    none = np.zeros(3, np.float32)
    scores = module.level_outcomes(batch, advantage, none, {}, np.eye(3) > 0, none)[3]
    loss = np.maximum(-advantage, 0).sum(0)
    np.testing.assert_allclose(scores["mna"], [loss[0], 0, loss[2]], 1e-5)
    solved_before = np.full(3, 0.5, np.float32)
    scores = module.level_outcomes(batch, advantage, solved_before, {}, np.eye(3) > 0, none)[3]
    np.testing.assert_allclose(scores["mna"], loss, 1e-5)
    buffer = "--score mna --buffer-size 8 --min-fill 0.5 --rnn none".split()
    rows = run(path, *buffer)
    assert int(rows[-1]["grad_updates"]) > 0
    assert float(rows[-1]["buffer_fill"]) > 0


@pytest.mark.slow
def test_another_student(tmp_path, run):
    path = hack(STUDENT, tmp_path)
    module = load(path)
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
    run(path)


@pytest.mark.slow
def test_a_new_level_generator(tmp_path, run):
    path = hack(LEVELS, tmp_path)
    rows = run(path, "--rnn", "none")
    assert {float(row["walls"]) for row in rows} == {8.0}  # agent and goal take no wall away
    assert {float(row["solvable"]) for row in rows} == {1.0}


SMALL = dict(height=5, width=5, n_walls=6, max_steps=12, num_envs=8, num_steps=16, rnn="none",
    update_epochs=1, buffer_size=16, min_fill=0.5, eval_interval=0, hidden_size=8)  # fmt: skip


@pytest.mark.slow
def test_a_learned_distribution_over_the_buffer(tmp_path, run):
    """Replay probabilities and updates of the logits, cycle by cycle, compared with NumPy."""
    path = hack(REPLAY, tmp_path)
    module = load(path)
    train = module.make_train(module.Config(**SMALL))
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
    rows = run(path, *"--buffer-size 8 --min-fill 0.5 --rnn none".split())
    assert int(rows[-1]["grad_updates"]) > 0


@pytest.mark.slow
def test_learning_from_the_best_quarter(tmp_path, run):
    """Only advantages of the best quarter are learned from, as a metric shows, by NumPy."""
    path, seen = hack(QUARTER, tmp_path), []
    module = load(path)
    plain = module.gae

    def gae(batch, *args):
        advantage = plain(batch, *args)
        jax.debug.callback(lambda *x: seen.append(x), advantage, batch.value, ordered=True)
        return advantage

    module.gae = gae
    train = module.make_train(module.Config(**SMALL | {"robust": False}))
    metrics = jax.jit(train.update, static_argnums=1)(train.init(jax.random.key(0)), 3)[1]
    for (advantage, value), explained in zip(seen[1::2], metrics["explained_variance"]):
        best = np.argsort(-np.abs(advantage).sum(0))[:2]  # of eight
        a, v = np.asarray(advantage)[:, best], np.asarray(value)[:, best]
        np.testing.assert_allclose(explained, 1 - a.var() / (a + v).var(), 1e-3, 1e-4)
    assert len(seen) == 6
    rows = run(path, *"--buffer-size 8 --min-fill 0.5 --rnn none".split())
    assert int(rows[-1]["grad_updates"]) > 0


SMALL = dict(
    height=5, width=5, n_walls=6, max_steps=12, num_envs=4, num_steps=16, num_evals=2,
    hidden_size=16, buffer_size=8, eval_interval=0, solvable_only=False)  # fmt: skip


def played(path, score):
    """The script, make_train's training, a state, levels, and a rollout on them [T, B]."""
    module = load(path)
    config = module.Config(**SMALL, score=score)
    train = module.make_train(config)
    sample_levels, rollout = part(train, "sample_levels", "rollout")
    state = jax.jit(train.init)(jax.random.key(0))
    levels = sample_levels(jax.random.key(1), 4)
    queue = jax.tree.map(lambda x: x[:, None], levels)
    batch, last = jax.jit(rollout)(jax.random.key(2), state.student.params, queue)
    assert batch.done.any()
    return module, train, state, levels, batch, last


@pytest.mark.slow
def test_traced(tmp_path, run):
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

    rows = run(path, *"--score traced --buffer-size 8 --min-fill 0.5 --rnn none".split())
    assert int(rows[-1]["grad_updates"]) > 0
    assert float(rows[-1]["transition_error"]) > 0


@pytest.mark.slow
def test_value_disagreement(tmp_path, run):
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

    args = "--score value_disagreement --buffer-size 8 --min-fill 0.5 --rnn none".split()
    for name in ("plr", "accel"):
        (tmp_path / name).mkdir()
        rows = run(hack(DISAGREEMENT, tmp_path / name, name), *args)
        assert int(rows[-1]["grad_updates"]) > 0


@pytest.mark.slow
def test_the_maze_alone():
    [code] = [x for x in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "picture" in x]
    found = {}
    exec(code.replace("1000", "20"), found)
    assert found["rewards"].shape == (20, 20)
    assert found["picture"].shape == (240, 240, 3)
