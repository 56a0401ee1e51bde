"""sfl.py compared with plain NumPy: learnability, when the buffer changes, what is counted."""

import itertools
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_amaze
import test_plr
from parts import cycle_rngs, hacked, part
from test_dr import SEED, close, numbers, path_length, plain_stats

import sfl

SMALL = sfl.Config(
    rnn="none", hidden_size=16, height=5, width=5, n_walls=10, max_steps=6, num_envs=8, num_evals=2,
    num_steps=test_plr.T, update_epochs=1, num_minibatches=2, num_updates=7, lr=1e-2,
    eval_interval=0, eval_suite="TrivialMaze", eval_episodes=2, score_interval=3,
    num_candidates=48, candidate_evals=5, candidates_at_once=16, buffer_size=12)  # fmt: skip
CANDIDATES, COPIES, K, T, N = 48, 5, 12, test_plr.T, 8


@cache
def program(cycles, config=SMALL):
    """Compiled `update` for a number of cycles; compiled `init` for 0."""
    train = sfl.make_train(config)
    return jax.jit(lambda state: train.update(state, cycles)) if cycles else jax.jit(train.init)


@cache
def history():
    """States before and after each of seven cycles, and the metrics."""
    states, metrics = [program(0)(SEED)], []
    for _ in range(7):
        state, row = program(1)(states[-1])
        states.append(state)
        metrics.append({name: x[0] for name, x in row.items()})
    return states, metrics


def names(levels):
    """A text for each level."""
    fields = [np.asarray(x).reshape(len(levels.agent_dir), -1) for x in levels]
    return ["".join(map(str, np.concatenate(row).astype(int))) for row in zip(*fields)]


# --- the buffer


@cache
def scored(score="learnability"):
    """Score candidates whose episodes follow a rule, with a return of 0.6 if solved -> the new
    state, metrics, and what the rule played: levels, numbers of solved episodes, steps."""
    seen = []

    def ruled(rng, params, queues):
        solved = (queues.agent_pos.sum(-1) + 2 * queues.goal_pos.sum(-1)) % (COPIES + 1)
        played, steps = queues.agent_pos[..., 0] > 0, 20 + queues.agent_pos[..., 0].sum(1)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (queues, solved * played))
        jax.debug.callback(lambda *x: seen.append(x), *flat, steps)
        return solved, 0.6 * solved, played, steps

    copy = hacked(sfl, {"steps = play_queues(": "steps = ruled("}, ruled=ruled)
    choose = part(copy.make_train(replace(SMALL, score=score)), "score_candidates")
    state = program(0)(SEED).replace(more_steps=jnp.array(5))
    after, metrics = jax.jit(choose)(jax.random.key(1), state)
    jax.effects_barrier()
    return after, metrics, *jax.tree.map(np.asarray, seen[0])


def test_the_buffer_is_the_most_learnable_of_all_candidates():
    after, _, levels, won, _ = scored()
    played = names(levels)
    assert len(played) == CANDIDATES
    assert len(set(played)) > CANDIDATES - 5
    order = sorted(range(CANDIDATES), key=lambda i: -won[i] * (COPIES - won[i]))[:K]
    assert names(after.buffer.level) == [played[i] for i in order]
    assert close(after.buffer.solve_rate, won[order] / COPIES)
    assert {0, COPIES} <= {*won}
    assert len({*won[order]}) > 1


def test_the_buffer_is_of_the_most_regret_of_all_candidates():
    """Regret is the best return, by networkx, minus the mean; 0 if unreachable or not played."""
    after, metrics, levels, won, _ = scored("oracle_regret")
    regrets, texts = [], names(levels)
    for level, times, played in zip(zip(*levels), won, levels.agent_pos[:, 0] > 0):
        path = test_amaze.oracle(sfl.amaze.Level(*level))
        solvable = path is not None and len(path[1]) <= SMALL.max_steps
        best = 1 - 0.9 * len(path[1]) / SMALL.max_steps if solvable else 0
        regrets.append((best - 0.6 * times / COPIES) * played)
    order = np.argsort(-np.array(regrets), kind="stable")[:K]
    assert np.allclose(after.buffer.score, np.array(regrets)[order], atol=1e-6)
    assert sorted(names(after.buffer.level)) == sorted(texts[i] for i in order)
    assert close(metrics["learnable_share"], np.mean(np.array(regrets)[
        levels.agent_pos[:, 0] > 0] > 1e-6))  # fmt: skip
    assert {*np.asarray(after.buffer.solve_rate)} != {*np.asarray(scored()[0].buffer.solve_rate)}
    assert (won[order] == 0).any()


def test_what_is_logged_of_the_candidates():
    _, metrics, levels, won, _ = scored()
    found = []
    for wall_map, agent, _, goal, times in zip(*levels, won):
        if 0 < times < COPIES:
            found.append((wall_map.sum(), path_length(wall_map, tuple(agent), tuple(goal))))
    walls, paths = zip(*found)
    solvable = [path for path in paths if path is not None]
    played = (levels.agent_pos[:, 0] > 0).sum()
    assert played < CANDIDATES
    expected = dict(share=len(found) / played, walls=np.mean(walls),
                    path_length=np.mean(solvable))  # fmt: skip
    assert close({f"learnable_{name}": x for name, x in expected.items()}, {
        name: x for name, x in metrics.items() if name[10:] in expected})  # fmt: skip
    assert metrics["learnable_solvable"] == np.mean([path is not None for path in paths])


def test_scoring_counts_as_steps_of_the_environment():
    after, _, _, _, steps = scored()
    batch = N * 2 * T
    assert int(after.rollouts) * batch + int(after.more_steps) == 5 + steps.sum()
    assert 0 <= after.more_steps < batch < steps.sum()


def test_one_level_cannot_take_all_steps():
    least = COPIES * SMALL.max_steps
    sfl.make_train(replace(SMALL, candidate_steps=least))
    with pytest.raises(sfl.BadConfig, match=f"candidate_steps = {least - 1}, .* at least {least}"):
        sfl.make_train(replace(SMALL, candidate_steps=least - 1))


@pytest.mark.parametrize("most", [0, COPIES * SMALL.max_steps])
def test_each_level_of_a_queue_is_played_in_turn_from_a_fresh_memory(most):
    """Compared with a plain loop over the episodes of each queue, with the same noise."""
    B, Q = 6, 3
    act = lambda h, noise: jnp.where(h % 3 == 0, sfl.amaze.FORWARD, jnp.argmax(noise))

    def scripted(params, h, obs, is_first, noise):  # of h's first unit, which counts the steps
        h = jnp.where(is_first[:, None], 0.0, h) + 1
        return h, jax.vmap(act)(h[:, 0], noise), None, None

    acts = "[lanes]\n            memory, action, _, _ = {}("
    copy = hacked(sfl, {acts.format("act"): acts.format("scripted")}, scripted=scripted)
    train = copy.make_train(replace(SMALL, rnn="gru", candidate_steps=most))
    play_queues = part(train, "play_queues")
    sample = jax.vmap(jax.vmap(lambda rng: sfl.amaze.sample_level(rng, 6, 5, 5)))
    queues = sample(jax.random.split(SEED, (B, Q)))
    found = map(np.asarray, jax.jit(play_queues)(SEED, None, queues))
    solved, earned, played, steps = found
    draw = jax.jit(lambda t: jax.random.gumbel(jax.random.fold_in(SEED, t), (B, 7)))
    noise = [draw(t) for t in range(steps.max())]
    reset, step = jax.jit(train.reset), jax.jit(train.step)
    wins, ends, length = np.zeros((B, Q), int), np.zeros((B, Q), int), np.zeros(B, int)
    total = np.zeros((B, Q))
    for b, i in itertools.product(range(B), np.repeat(range(Q), COPIES)):
        state, done, h = reset(jax.tree.map(lambda x: x[b, i], queues))[1], False, 0
        while not done and (not most or length[b] < most):
            h += 1
            _, state, reward, done = step(state, act(h, noise[length[b]][b]))
            length[b] += 1
        wins[b, i] += done and reward > 0
        total[b, i] += done and reward
        ends[b, i] += bool(done)
    assert (steps == length).all()
    assert (solved == wins).all()
    assert close(earned, total)
    assert (played == (ends == COPIES)).all()
    assert len({*solved.flat}) > 1
    assert played.any()
    assert played.all() == (not most)


def test_the_buffer_changes_every_score_interval_before_the_levels_are_chosen():
    states, metrics = history()
    for i, (before, after, row) in enumerate(zip(states, states[1:], metrics)):
        changed = names(before.buffer.level) != names(after.buffer.level)
        assert changed == (i % 3 == 0) == np.isfinite(row["learnable_share"])
        p = np.asarray(after.buffer.solve_rate)
        assert (np.diff(p * (1 - p)) <= 1e-6).all()
        assert close(row["buffer_learnability"], (p * (1 - p)).mean())
        assert close(row["buffer_learnability_min"], (p * (1 - p)).min())
        assert close(row["buffer_score"], (p * (1 - p)).mean())
        assert close(row["buffer_learnable_share"], np.mean((p > 0.1) & (p < 0.9)))
        steps = int(after.rollouts - before.rollouts) * N * 2 * T
        steps += int(after.more_steps - before.more_steps)
        played = steps - N * 2 * T
        assert played == 0 if i % 3 else CANDIDATES * COPIES <= played <= CANDIDATES * COPIES * 6
        assert row["rollouts"] == after.rollouts
        assert row["grad_updates"] == i + 1


# --- the levels that are learned from


def drawn(solve_rate, times=200):
    """Choose levels many times from a buffer with these solve rates -> names of its levels; names
    of the chosen levels [times, N]; which of those come from the buffer [times, N]."""
    score = sfl.learnability(jnp.asarray(solve_rate), COPIES)
    buffer = history()[0][1].buffer._replace(score=score, solve_rate=jnp.asarray(solve_rate))
    choose = part(sfl.make_train(SMALL), "choose_levels")
    draws = jax.jit(jax.vmap(choose, in_axes=(0, None)))(jax.random.split(SEED, times), buffer)
    levels = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), draws[0])
    return names(buffer.level), np.array(names(levels)).reshape(times, N), np.asarray(draws[1])


def test_half_of_the_levels_are_drawn_uniformly_from_the_learnable_of_the_buffer():
    """Seven slots of twelve are learnable; levels that were never or always solved are not."""
    learnable, times = 7, 400
    known, chosen, of_buffer = drawn([0.4, 0.6, 0.4, 0.2, 0.8, 0.2, 0.8, 1, 0, 1, 0, 0], times)
    assert len({*known}) == K
    assert (of_buffer == (np.arange(N) < N // 2)).all()
    counts = np.array([(chosen[of_buffer] == name).sum() for name in known])
    mean = N // 2 * times / learnable
    assert counts[:learnable].sum() == mean * learnable
    assert not counts[learnable:].any()
    assert (abs(counts[:learnable] - mean) < 5 * mean**0.5).all()
    fresh = chosen[~of_buffer]
    assert len({*fresh}) > 0.9 * len(fresh)
    assert not {*fresh} & {*known}


def test_a_buffer_without_a_learnable_level_is_not_drawn_from():
    known, chosen, of_buffer = drawn([1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0])
    assert not of_buffer.any()
    assert not {*chosen.flat} & {*known}


@pytest.mark.parametrize("evals", [2, 5, 10, 41, 49, 128])
def test_learnability_tells_always_from_nearly_always(evals):
    """In float32, with rates from mean(1), where 49 * (1 / 49) is not 1."""
    won = np.arange(evals + 1)
    rate = jax.jit(lambda x: (x < 1).mean(1))(won[:, None] <= np.arange(evals)).astype(float)
    found = np.asarray(sfl.learnability(1 - rate, evals))
    np.testing.assert_allclose(found, won * (evals - won) / evals**2, 1e-6)
    assert (found == found[::-1]).all()
    assert (found[[0, -1]] == 0).all()


def test_solve_rates_of_random_and_buffer_levels_are_logged_apart():
    (_, before, *_), (_, row, *_) = history()
    train = sfl.make_train(SMALL)
    choose_levels, rollout = part(train, "choose_levels", "rollout")

    @jax.jit
    def play(state):
        _, rng_levels, rng_rollout, *_ = cycle_rngs(state, 5)
        levels = choose_levels(rng_levels, state.buffer)[0]
        queue = jax.tree.map(lambda x: x[:, None], levels)
        return rollout(rng_rollout, state.student.params, queue)[0], levels

    batch, levels = play(before)
    reward, done = np.asarray(batch.reward), np.asarray(batch.done)
    in_buffer = np.arange(N * 2) < N
    shares = {"train": in_buffer | True, "replay": in_buffer, "fresh": ~in_buffer}
    for name, where in shares.items():
        for key, x in plain_stats(reward, done, where).items():
            assert close(row[f"{name}_{key}"], x), (name, key)
    walls = np.asarray(levels.wall_map).sum((1, 2))
    assert close(row["replay_walls"], walls[: N // 2].mean())
    assert close(row["fresh_walls"], walls[N // 2 :].mean())
    levels = zip(*map(np.asarray, levels))
    solvable = [path_length(w, tuple(x), tuple(y)) is not None for w, x, _, y in levels]
    assert close(row["replay_solvable"], np.mean(solvable[: N // 2]))
    assert close(row["fresh_solvable"], np.mean(solvable[N // 2 :]))


def test_a_level_that_has_ended_is_restarted():
    """Each episode of a trajectory starts as the first one does."""
    rollout = "        batch, last_value = rollout(rng_rollout, state.student.params, queue)\n"
    spy = "        jax.debug.callback(note, batch.obs, batch.is_first)\n"
    opened = []
    note = lambda *x: opened.append(x)
    train = hacked(sfl, {rollout: rollout + spy}, note=note).make_train(SMALL)
    kind = jax.tree.structure(jax.eval_shape(train.init, SEED))  # of the copy's own classes
    state = jax.tree.unflatten(kind, jax.tree.leaves(history()[0][1]))
    jax.jit(part(train, "cycle"))(state, None)
    jax.effects_barrier()
    obs, is_first = jax.tree.map(np.asarray, opened[0])
    assert is_first.sum() > 2 * N * 2
    for image, direction, first in zip(*(x.swapaxes(0, 1) for x in (*obs, is_first))):
        assert (image[first] == image[0]).all()
        assert (direction[first] == direction[0]).all()


@pytest.mark.slow
def test_show_gives_random_levels_and_the_buffer():
    before, show = history()[0][1], jax.jit(sfl.make_train(SMALL).show)
    shown = show(before)
    best, captions = shown["replayed, the highest score first"]
    assert names(best) == names(before.buffer.level)
    assert captions["p"].tolist() == before.buffer.solve_rate.tolist()
    assert captions["score"].tolist() == before.buffer.score.tolist()
    fresh, later = (names(show(x)["drawn at random"][0]) for x in history()[0][1:3])
    assert len({*fresh, *later}) > 30


# --- many seeds at once, configuration


@pytest.mark.slow
def test_cycles_of_many_seeds_skip_the_scoring():
    train = jax.vmap(sfl.make_train(SMALL))
    lowered = jax.jit(train).lower(jax.random.split(SEED, 8))
    acts, acts_in_branch, learns = (False, False), (False, True), (True, False)
    assert test_plr.products(lowered) == {acts, acts_in_branch, learns}


@pytest.mark.slow
def test_a_row_of_many_trainings_equals_the_training_alone():
    rngs = jax.random.split(SEED, 3)
    states, metrics = jax.jit(jax.vmap(sfl.make_train(SMALL)))(rngs)
    state, alone = program(7)(program(0)(rngs[1]))
    row = jax.tree.map(lambda x: x[1], numbers((states.student, states.buffer)))
    assert close(row, numbers((state.student, state.buffer)), 1e-3)
    for name, x in alone.items():
        assert close(metrics[name][1], x, 1e-3), name


@pytest.mark.slow
def test_every_float_can_be_swept():
    swept = {name: jnp.linspace(0.1, 0.9, 3) for name in sfl.FLOATS}
    train = lambda rng, floats: sfl.make_train(replace(SMALL, **floats))(rng)
    jax.eval_shape(jax.vmap(train), jax.random.split(SEED, 3), swept)


@pytest.mark.parametrize("changes, words", [
    (dict(num_envs=6, num_minibatches=5),
     "num_minibatches = 5, num_envs = 6, num_evals = 2: must be a divisor of 12"),
    (dict(num_envs=7), "num_envs = 7: must be even"),
    (dict(num_candidates=8), "buffer_size = 12, num_candidates = 8: must be at most 8"),
    (dict(num_candidates=10**8), "num_candidates = 100000000: must be with these "),
    (dict(max_steps=10**8), "with these candidate_evals, max_steps and num_steps at most 4"),
    (dict(num_steps=10**9), "with these candidate_evals, max_steps and num_steps at most 0"),
    (dict(candidates_at_once=15),
     "candidates_at_once = 15, num_candidates = 48: must be a divisor of 48"),
    (dict(candidate_evals=1), "candidate_evals = 1: must be from 2 to 128"),
    (dict(score_interval=0), "score_interval = 0: must be from 1 to"),
])  # fmt: skip
def test_bad_values(changes, words):
    with pytest.raises(sfl.BadConfig, match=words):
        sfl.make_train(replace(SMALL, **changes))


def test_regret_needs_an_optimal_return(monkeypatch):
    known = sfl.amaze.level_stats
    unknown = lambda *x: {k: v for k, v in known(*x).items() if k != "optimal_return"}
    monkeypatch.setattr(sfl.amaze, "level_stats", unknown)
    train = sfl.make_train(replace(SMALL, score="oracle_regret"))
    words = "^score = 'oracle_regret': must be another: .* no optimal return"
    with pytest.raises(sfl.BadConfig, match=words):
        jax.eval_shape(train.init, SEED)
    jax.eval_shape(sfl.make_train(SMALL), SEED)


def test_fewer_candidates_than_are_played_at_once():
    config = replace(SMALL, num_candidates=12, candidates_at_once=500)
    jax.eval_shape(sfl.make_train(config), SEED)


def test_the_steps_of_most_candidates_fit_an_int32():
    """This includes steps left over from the previous scoring, fewer than those of a batch."""
    config = replace(SMALL, max_steps=4, candidate_evals=2, num_candidates=10**9)
    with pytest.raises(sfl.BadConfig, match="num_candidates") as refused:
        sfl.make_train(config)
    batch = config.num_envs * config.num_evals * config.num_steps
    most = int(str(refused.value).split()[-1])
    assert most * 2 * 4 + batch - 1 < 2**31 <= (most + 1) * 2 * 4 + batch


def test_published_defaults():
    """The values of 2408.15099 for the maze."""
    config = sfl.Config()
    steps = config.num_updates * config.num_envs * config.num_steps
    assert abs(steps - 3e8) < config.num_envs * config.num_steps
    published = dict(lr=2.5e-4, anneal_lr=True, gamma=0.99, gae_lambda=0.95, clip_eps=0.04,
                     update_epochs=4, num_minibatches=4, ent_coef=0, num_candidates=25_000,
                     buffer_size=1000, candidate_evals=10, n_walls=60, num_envs=256)  # fmt: skip
    assert {name: getattr(config, name) for name in published} == published
