"""paired.py compared with plain loops: regret, the teacher's learning, what students are shown."""

import sys
from collections import defaultdict
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_amaze
from parts import cycle_rngs, part

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import amaze  # noqa: E402
import dr  # noqa: E402
import paired  # noqa: E402
from paired import Config, make_train  # noqa: E402

SMALL = Config(
    num_envs=8, num_evals=2, num_steps=24, max_steps=8, num_updates=3, update_epochs=2,
    height=3, width=4, n_walls=3, hidden_size=16, teacher_hidden_size=16, teacher_filters=4,
    teacher_gamma=0.9, teacher_gae_lambda=0.7, lr=1e-2, teacher_lr=1e-2, eval_interval=0,
    polyak_averaging=True,
)  # fmt: skip
DESIGN_STEPS = SMALL.n_walls + 2


def host(tree):
    return jax.tree.map(np.asarray, tree)


def row(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def next_designs(config, state):
    """The levels that the next cycle plays."""
    design = part(make_train(config), "design")
    draw = lambda state: design(cycle_rngs(state, 5)[0], state.teacher.params)[1]
    return jax.jit(draw)(state)


@cache
def compiled_init():
    return jax.jit(make_train(SMALL).init)


def initial_state(seed=3):
    return compiled_init()(jax.random.key(seed))


def one_cycle(state, floats):
    """A cycle whose floats of Config are arguments, so that one program serves all values."""
    return make_train(replace(SMALL, **floats)).update(state, 1)


@cache
def compiled_cycle():
    """one_cycle, compiled; it also records the inputs and the result of each paired.gae."""
    records = defaultdict(list)

    def gae(batch, last_value, gamma, gae_lambda):
        advantage = real(batch, last_value, gamma, gae_lambda)
        inputs = batch.reward, batch.value, last_value, batch.done, advantage
        who = "teacher" if len(batch.reward) == DESIGN_STEPS else "students"
        jax.debug.callback(lambda *x: records[who].append([np.array(a) for a in x]), *inputs)
        return advantage

    real, paired.gae = paired.gae, gae
    floats = {name: getattr(SMALL, name) for name in ("lr", "teacher_lr", "teacher_ent_coef")}
    program = jax.jit(one_cycle).lower(initial_state(), floats).compile()
    paired.gae = real
    return program, floats, records


@cache
def recorded():
    """The second of two cycles: its state before, designs, records, state after, metrics."""
    program, floats, records = compiled_cycle()
    before, _ = program(initial_state(), floats)
    levels = next_designs(SMALL, before)
    jax.effects_barrier()
    records.clear()
    after, metrics = jax.block_until_ready(program(before, floats))
    jax.effects_barrier()
    return before, host(levels), dict(records), after, host(row(metrics, 0))


def level_scores(reward, done, num_evals):
    """Plain loop: mean over a level's copies of the mean return of their finished episodes, and the
    best return of all; 0 where no episode finished."""
    means, bests = [], []
    for level in range(reward.shape[1] // num_evals):
        returns, copies = [], []
        for column in range(level * num_evals, (level + 1) * num_evals):
            total, before = 0.0, len(returns)
            for r, d in zip(reward[:, column], done[:, column]):
                total += r
                if d:
                    returns.append(total)
                    total = 0.0
            copies.append(np.mean(returns[before:]) if len(returns) > before else 0.0)
        means.append(np.mean(copies))
        bests.append(max(returns, default=0.0))
    return np.array(means), np.array(bests)


# --- regret


def test_regret_by_hand():
    """Ragged episodes of 3 students on 5 levels, 2 copies each; one level is never finished."""
    rng = np.random.default_rng(0)
    done = rng.random((3, 30, 10)) < 0.15
    done[:, :, 5:8] = False  # and one trajectory of another
    reward = np.where(rng.random(done.shape) < 0.2, rng.normal(size=done.shape), 0)
    reward[:, :, 8:] = -np.abs(reward[:, :, 8:])  # a level with negative returns only
    reward[0, :, :2] += 2 * done[0, :, :2]  # one where the protagonist is the better
    expected = [level_scores(reward[s], done[s], 2) for s in range(3)]
    mean, best = (np.stack(x) for x in zip(*expected))

    total = jax.vmap(paired.episode_sums)(jnp.array(reward), jnp.array(done))
    scores = jax.vmap(lambda *x: paired.level_returns(*x, 2))(total, jnp.array(done))
    np.testing.assert_allclose(scores, (mean, best), atol=1e-6)
    assert (best[:, 4] < 0).any()
    assert (mean[:, 4] < 0).all()
    assert (mean[:, 3] == 0).all()
    assert (best[:, 3] == 0).all()

    best_there_is = np.float32([0.9, 0.5, 0.0, 0.7, 0.0])
    oracle = paired.regret("oracle", *(x[:1] for x in scores), best_there_is)
    np.testing.assert_allclose(oracle, best_there_is - mean[0], atol=1e-6)
    pair, everyone, alone = (
        np.asarray(paired.regret(kind, *(x[:n] for x in scores), np.nan))
        for kind, n in [("paired", 2), ("population", 3), ("minimax", 1)]
    )
    clipped = 0
    for n in range(5):
        gap = best[1, n] - mean[0, n]
        clipped += gap < 0
        assert pair[n] == pytest.approx(max(gap, 0), abs=1e-6)
        assert everyone[n] == pytest.approx(max(best[:, n]) - sum(mean[:, n]) / 3, abs=1e-6)
        assert alone[n] == pytest.approx(-mean[0, n], abs=1e-6)
    assert 0 < clipped < 5


def simulate(rng, rate, length, levels, copies, steps):
    """Steps [T, B] of a student with this solve rate: `length` steps to solve, 250 to fail."""
    done, ends = np.zeros((steps, levels * copies), bool), np.zeros(levels * copies, int)
    reward = np.zeros(done.shape)
    while (ends < steps).any():
        solved = rng.random(ends.shape) < rate
        ends += np.where(solved, length, 250)
        [now] = np.nonzero(ends <= steps)
        done[ends[now] - 1, now] = True
        reward[ends[now] - 1, now] = solved[now] * (1 - 0.9 * length / 250)
    return reward, done


@pytest.mark.parametrize(("copies", "steps"), [(1, 256), (2, 256), (8, 256), (1, 128), (8, 128)])
def test_regret_is_that_of_a_student_of_known_solve_rate(copies, steps):
    """The antagonist always solves: regret = (1 - rate) * return of a solved episode. More copies
    reduce the noise, not the mean, also in fewer steps than a failure takes. Pooled episodes would
    change it, and prefer another design."""
    rng, levels, pooled = np.random.default_rng(copies), 2000, []
    scores = jax.jit(lambda reward, done: paired.level_returns(
        paired.episode_sums(reward, done), done, copies))  # fmt: skip
    for rate, length in ((0.35, 100), (0.5, 10), (0.9, 20)):
        played = [simulate(rng, x, length, levels, copies, steps) for x in (rate, 1.0)]
        mean, best = (jnp.stack(x) for x in zip(*(scores(*x) for x in played)))
        regrets, solved = np.array(paired.regret("paired", mean, best, 0.0)), 1 - 0.9 * length / 250
        error = 4 * (rate * (1 - rate) / levels / copies) ** 0.5
        assert abs(regrets.mean() - (1 - rate) * solved) < error, (rate, length)
        reward, done = (x.reshape(steps, levels, copies).sum((0, 2)) for x in played[0])
        pooled.append((solved - reward / np.maximum(done, 1)).mean())
    assert copies < 8 or pooled[0] > pooled[1]  # of true 0.42 and 0.48


@pytest.mark.slow
def test_students_learn_from_chunks_as_they_were_played():
    """With bptt_horizon too, the first step of learning sees the policies of the batch."""
    one_step = dict(update_epochs=1, num_minibatches=1, bptt_horizon=6)
    train = make_train(replace(SMALL, **one_step))
    metrics = jax.jit(train.update, static_argnums=1)(jax.jit(train.init)(jax.random.key(0)), 2)[1]
    kl = {name: np.abs(x).max() for name, x in metrics.items() if name.endswith("approx_kl")}
    assert len(kl) == 3
    assert max(kl.values()) < 1e-6


@pytest.mark.slow
def test_regret_of_a_cycle_rewards_the_last_step():
    """The teacher's last reward is the regret of the played students by hand; then it is done."""
    _, _, records, _, metrics = recorded()
    scores = [level_scores(reward, done, 2) for reward, _, _, done, _ in records["students"]]
    (mean, _), (_, best) = scores
    expected = np.maximum(best - mean, 0)
    [(reward, _, _, done, _)] = records["teacher"]
    assert (expected > 0).any()
    np.testing.assert_allclose(reward[-1], expected, atol=1e-6)
    assert (reward[:-1] == 0).all()
    assert done[-1].all()
    assert not done[:-1].any()
    assert metrics["regret"] == pytest.approx(expected.mean(), abs=1e-6)


@pytest.mark.slow
def test_the_oracle_pays_the_optimal_return_less_the_protagonists():
    """By networkx and plain loops, with one student; some of the designs cannot be solved."""
    config = replace(SMALL, regret="oracle", num_students=1, n_walls=6)
    seen, real = [], paired.gae

    def gae(batch, *args):
        jax.debug.callback(
            lambda *x: seen.append(jax.tree.map(np.array, x)), batch.reward, batch.done
        )
        return real(batch, *args)

    state = jax.jit(make_train(config).init)(jax.random.key(0))
    levels = host(next_designs(config, state))
    with patch.object(paired, "gae", gae):
        state, metrics = jax.jit(lambda state: make_train(config).update(state, 1))(state)
    jax.effects_barrier()
    [(reward, done)] = [x for x in seen if len(x[0]) == config.num_steps]
    [(paid, _)] = [x for x in seen if len(x[0]) == config.n_walls + 2]
    mean, _ = level_scores(reward, done, config.num_evals)
    paths = [test_amaze.oracle(amaze.Level(*level)) for level in zip(*levels)]
    lengths = [np.inf if path is None else len(path[1]) for path in paths]
    best = [1 - 0.9 * n / config.max_steps if n <= config.max_steps else 0 for n in lengths]
    assert 0 < np.count_nonzero(best) < config.num_envs
    assert mean.any()
    np.testing.assert_allclose(paid[-1], best - mean, atol=1e-6)
    assert (paid[:-1] == 0).all()
    assert metrics["regret"][0] == pytest.approx(np.mean(best - mean), abs=1e-6)
    assert {len(x) for x in jax.tree.leaves(state.students.params)} == {1}
    assert not {name for name in metrics if "antagonist" in name or "student" in name}


@pytest.mark.slow
def test_teacher_does_not_bootstrap():
    """Its advantages equal a plain loop's, with its own gamma and lambda and 0 after the end."""
    [(reward, value, _, _, advantage)] = recorded()[2]["teacher"]
    for n in range(SMALL.num_envs):
        expected, next_value = 0.0, 0.0
        for t in reversed(range(DESIGN_STEPS)):
            delta = reward[t, n] + 0.9 * next_value - value[t, n]
            expected = delta + 0.9 * 0.7 * expected
            next_value = value[t, n]
            assert advantage[t, n] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_statistics_of_a_cycle_are_of_first_episodes():
    """For each student, by a plain loop."""
    _, _, records, _, metrics = recorded()
    for who, (reward, _, _, done, _) in zip(("", "antagonist_"), records["students"], strict=True):
        lengths = [done[:, b].tolist().index(True) + 1 for b in range(reward.shape[1])]
        returns = [reward[:n, b].sum() for b, n in enumerate(lengths)]
        assert done.sum() > 2 * len(lengths)
        assert 0 < np.mean(np.array(returns) > 0) < 1
        found = [metrics[f"{who}train_{x}"] for x in ("return", "solve_rate", "episode_length")]
        expected = np.mean(returns), np.mean(np.array(returns) > 0), np.mean(lengths)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


# --- what the students are shown


@pytest.mark.slow
def test_students_play_the_same_designs_from_zero_state():
    """At the start of every episode V is that of a zero state at the design's first observation."""
    before, levels, records, _, metrics = recorded()
    train = make_train(SMALL)
    obs, _ = jax.vmap(lambda level: amaze.reset(level, SMALL.max_steps))(levels)
    no, noise = jnp.zeros(SMALL.num_envs, bool), jnp.zeros((SMALL.num_envs, amaze.NUM_ACTIONS))
    assert len(records["students"]) == 2
    for s, (_, value, _, done, _) in enumerate(records["students"]):
        carry = train.initial_carry(SMALL.num_envs)
        first = train.act(row(before.students.params, s), carry, obs, no, noise)[3]
        first = np.repeat(np.asarray(first), SMALL.num_evals)
        np.testing.assert_allclose(value[0], first, atol=1e-5)
        starts = np.argwhere(done[:-1])
        assert len(starts) > 2 * SMALL.num_envs
        for t, column in starts:
            assert value[t + 1, column] == pytest.approx(first[column], abs=1e-5)
    assert metrics["walls"] == levels.wall_map.sum() / SMALL.num_envs
    solvable = np.mean(jax.vmap(paired.amaze.solve)(levels).solvable)
    assert metrics["solvable"] == pytest.approx(solvable)
    assert len({level.tobytes() for level in levels.wall_map}) > 1


@pytest.mark.slow
def test_polyak_averaging_is_of_the_students():
    """After two cycles, weights t (t + 1) (t + 2) give 1/5 and 4/5."""
    before, _, _, after, _ = recorded()
    students = before.students.params, after.students.params, after.students.average_params
    for x, y, average in zip(*map(jax.tree.leaves, students)):
        np.testing.assert_allclose(average, x / 5 + 4 * y / 5, atol=1e-6)
    assert after.teacher.average_params is None


@pytest.mark.slow
def test_students_play_learn_and_are_tested_as_in_dr():
    """A cycle's students equal those that dr.py makes of the same designs with the same keys: its
    loss, minibatches and optimiser are compared with formulas in test_dr.py."""
    config = replace(
        SMALL, anneal_lr=True, num_minibatches=2, max_grad_norm=0.1, gamma=0.8, gae_lambda=0.6,
        ent_coef=0.03, eval_suite="MiniMaze,TrivialMaze", eval_episodes=8)  # fmt: skip
    known = {f.name: getattr(config, f.name) for f in fields(dr.Config) if hasattr(config, f.name)}
    rollout, learn, test = part(dr.make_train(dr.Config(**known)), "rollout", "learn", "evaluate")
    state = initial_state().replace(cycles=jnp.array(1))
    queue = jax.tree.map(lambda x: x[:, None], next_designs(config, state))
    keys = [jax.random.split(rng) for rng in cycle_rngs(state, 5)[1:3]]

    def by_dr(s, student):
        batch, last_value = rollout(keys[0][s], student.params, queue)
        learned, _ = learn(keys[1][s], student, config.lr * 2 / 3, batch, last_value)
        return learned, test(keys[0][0], averaged(student))

    def by_paired(state):
        train = make_train(config)
        tested = part(train, "evaluate")(keys[0][0], averaged(state.students))
        return train.update(state, 1)[0].students, tested

    averaged = lambda agent: agent._replace(
        average_params=jax.tree.map(lambda x: 5 * x, agent.params))  # fmt: skip
    expected = jax.jit(lambda x: [by_dr(s, row(x, s)) for s in range(2)])(state.students)
    found = jax.jit(by_paired)(state)
    for s in range(2):
        for x, y in zip(*map(jax.tree.leaves, (row(found, s), expected[s])), strict=True):
            np.testing.assert_allclose(x, y, 1e-4, 1e-5)
    assert moved(row(state.students, 0), row(found[0], 0)) > 1e-3


def test_students_differ():
    params = jax.tree.leaves(initial_state().students.params)
    assert any((leaf[0] != leaf[1]).any() for leaf in params)


@pytest.mark.parametrize("n_walls", [0, 10])
def test_designs_are_valid(n_walls):
    """On a small grid, with 0 or up to 10 walls: agent and goal are on different free cells."""
    config = replace(SMALL, num_envs=256, num_evals=1, height=3, width=4, n_walls=n_walls)
    train = make_train(config)
    params = jax.eval_shape(train.init, jax.random.key(0)).teacher.params
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), params)  # uniform over cells
    rng = jax.random.key(2)
    design = jax.jit(part(train, "design"))
    batch, levels = host(design(rng, params))
    assert batch.action.shape == (n_walls + 2, 256)
    assert batch.is_first[0].all()
    assert not batch.is_first[1:].any()
    for walls, agent, direction, goal in zip(*levels):
        assert (0 <= agent).all()
        assert (agent < (4, 3)).all()
        assert direction in range(4)
        assert (0 <= goal).all()
        assert (goal < (4, 3)).all()
        assert tuple(agent) != tuple(goal)
        assert not walls[agent[1], agent[0]]
        assert not walls[goal[1], goal[0]]
        assert walls.sum() <= n_walls
    assert set(batch.action.ravel()) == set(range(12))


def test_teacher_noise_is_redrawn():
    design = jax.jit(part(make_train(SMALL), "design"))
    params = initial_state().teacher.params
    noise = [design(jax.random.key(i), params)[0].obs.noise for i in range(2)]
    noise = np.stack(noise)  # [cycles, steps, levels, 50]
    assert noise.shape == (2, DESIGN_STEPS, SMALL.num_envs, 50)
    assert len(np.unique(noise)) > 0.999 * noise.size
    assert 0 <= noise.min() < 0.01
    assert 0.99 < noise.max() < 1
    assert noise.mean() == pytest.approx(0.5, abs=0.02)
    assert noise.std() == pytest.approx(12**-0.5, abs=0.02)


# --- the teacher's coefficients


def moved(before, after):
    pairs = zip(jax.tree.leaves(host(before.params)), jax.tree.leaves(host(after.params)))
    return max(np.abs(a - b).max() for a, b in pairs)


@pytest.mark.slow
def test_each_learns_with_its_own_lr():
    program, floats, _ = compiled_cycle()
    state = initial_state()
    state = state.replace(students=host(state.students), teacher=host(state.teacher))
    still, _ = program(state, floats | {"teacher_lr": 0.0})
    assert moved(state.teacher, still.teacher) == 0
    assert moved(state.students, still.students) > 1e-3
    still, _ = program(state, floats | {"lr": 0.0})
    assert moved(state.students, still.students) == 0
    assert moved(state.teacher, still.teacher) > 1e-3
    for i in range(2):  # both students learn
        after, _ = program(state, floats)
        assert moved(row(state.students, i), row(after.students, i)) > 1e-3


def test_teacher_has_its_own_entropy_coefficient():
    program, floats, _ = compiled_cycle()
    for coef in (0.0, 0.5):
        _, metrics = program(initial_state(), floats | {"teacher_ent_coef": coef})
        m = host(row(metrics, 0))
        for who, c in {"teacher_": coef, "": SMALL.ent_coef, "antagonist_": SMALL.ent_coef}.items():
            total = m[who + "policy_loss"] + SMALL.vf_coef * m[who + "value_loss"]
            assert m[who + "total_loss"] == pytest.approx(total - c * m[who + "entropy"], abs=1e-5)


@pytest.mark.slow
def test_row_of_a_sweep_equals_solo():
    """Two seeds with swept floats at once, compared with each alone."""
    program, floats, _ = compiled_cycle()
    states = [initial_state(seed) for seed in (5, 6)]
    values = {
        "lr": jnp.array([1e-3, 1e-2]),
        "teacher_lr": jnp.array([1e-2, 1e-3]),
        "teacher_ent_coef": jnp.array([0.0, 0.1]),
    }
    batch = jax.tree.map(lambda *x: jnp.stack(x), *states)
    axes = jax.tree.map(lambda _: 0, batch).replace(cycles=None)
    batch = batch.replace(cycles=states[0].cycles)
    rows = jax.vmap(one_cycle, (axes, 0), (axes, 0))
    together, together_metrics = jax.jit(rows)(batch, values)
    together = together.replace(students=host(together.students), teacher=host(together.teacher))
    for i, state in enumerate(states):
        alone, metrics = program(state, row(values, i))
        for name in metrics:
            np.testing.assert_allclose(
                together_metrics[name][i], metrics[name], rtol=1e-3, atol=1e-4, err_msg=name
            )
        assert moved(row(together.students, i), alone.students) < 1e-4
        assert moved(row(together.teacher, i), alone.teacher) < 1e-4


# --- modes


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, students, prefixes, cores",
    [
        ("population", 3, ["", "student_1_", "student_2_"], ("none", "s5")),
        ("minimax", 1, [""], ("gru", "none")),
    ],
)
def test_modes_run(mode, students, prefixes, cores):
    config = replace(
        SMALL,
        regret=mode,
        num_students=students,
        num_evals=1,
        num_updates=2,
        rnn=cores[0],
        teacher_rnn=cores[1],
        s5_layers=1,
        eval_episodes=1,
        eval_interval=students - 1,
        eval_suite="MiniMaze",
    )
    state, metrics = jax.jit(make_train(config))(jax.random.key(0))
    metrics = {name: x[1:] for name, x in host(metrics).items()}
    assert all(x.shape == (1,) for x in metrics.values())
    for prefix in prefixes:
        assert students == 1 or metrics[prefix + "eval_solve_rate"][0] in (0, 1)
        assert metrics[prefix + "entropy"][0] == pytest.approx(np.log(7), abs=0.1)
    assert sum(name.endswith("train_return") for name in metrics) == students
    assert metrics["rollouts"][0] == 2 * students
    assert metrics["grad_updates"][0] == 2
    if mode == "minimax":
        assert metrics["regret"][0] <= 0
    else:
        assert metrics["regret"][0] >= 0
    leaves = jax.tree.leaves(state.students.params)
    assert {len(leaf) for leaf in leaves} == {students}
    assert all(jnp.isfinite(leaf).all() for leaf in leaves)


@pytest.mark.parametrize("changes, words", [
    (dict(num_students=1), "num_students = 1, regret = 'paired': must be 2"),
    (dict(num_students=3), "num_students = 3, regret = 'paired': must be 2"),
    (dict(regret="population", num_students=1),
     "num_students = 1, regret = 'population': must be 2 or more"),
    (dict(regret="oracle"), "num_students = 2, regret = 'oracle': must be 1"),
    (dict(regret="minimax", num_students=0), "num_students = 0: must be from 1 to"),
    (dict(num_minibatches=16), "num_minibatches = 16, num_envs = 8: must be a divisor"),
    (dict(n_walls=11), "n_walls = 11, height = 3, width = 4: must be at most 10"),
    (dict(teacher_gamma=1.5), "teacher_gamma = 1.5: must be from 0 to 1"),
    (dict(teacher_filters=0), "teacher_filters = 0: must be from 1 to"),
    (dict(teacher_lr=-1.0), "teacher_lr = -1.0: must be from 0 to"),
])  # fmt: skip
def test_bad_combinations(changes, words):
    with pytest.raises(paired.BadConfig) as error:
        make_train(replace(SMALL, **changes))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_an_oracle_needs_an_optimal_return(monkeypatch):
    known = amaze.level_stats
    unknown = lambda *x: {k: v for k, v in known(*x).items() if k != "optimal_return"}
    monkeypatch.setattr(amaze, "level_stats", unknown)
    train = make_train(replace(SMALL, regret="oracle", num_students=1))
    with pytest.raises(
        paired.BadConfig, match="^regret = 'oracle': must be another: .* no optimal return"
    ):
        jax.eval_shape(train.init, jax.random.key(0))
    jax.eval_shape(make_train(SMALL), jax.random.key(0))


def test_published_teacher():
    """22.5 million parameters: a VALID convolution with 128 filters, then an LSTM of 256 units."""
    state = jax.eval_shape(make_train(Config()).init, jax.random.key(0))
    count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    convolution, inputs = 27 * 128 + 128, 13 * 13 * 128 + 10 + 50
    lstm, heads = 1024 * (inputs + 256 + 1), 2 * (256 * 32 + 32) + 32 * 169 + 169 + 32 + 1
    assert count(state.teacher.params) == convolution + 62 * 10 + lstm + heads == 22_502_038
    assert count(state.students.params) == 2 * 432_924
