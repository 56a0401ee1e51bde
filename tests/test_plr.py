"""plr.py against a plain Python buffer and loops over episodes, from the papers' formulas."""

import sys
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parts import hacked, part

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import accel  # noqa: E402
import amaze  # noqa: E402
import evaluate  # noqa: E402
import plr  # noqa: E402

T = 17  # steps of a rollout: of no other size, so that what spans them can be told by its shape
SMALL = dict(
    rnn="none", hidden_size=16, height=5, width=5, n_walls=6, max_steps=8, num_envs=4, num_steps=T,
    update_epochs=2, num_updates=12, buffer_size=16, min_fill=0.5, replay_prob=0.5, lr=1e-2,
    eval_interval=0)  # fmt: skip
FLOATS = "lr replay_prob min_fill".split()  # what a compiled cycle takes as arguments
SCORES = """max_mc optimistic_max_mc positive_value_loss l1_value_loss learnability
    oracle_regret""".split()
K, N = 12, 5  # slots and levels of the buffers that are written directly


def equal(x, y):
    """Whether the leaves of two trees are equal, bit for bit."""
    leaves = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    same = lambda x, y: np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)
    return all(same(x, y) for x, y in leaves)


def close(x, y, tolerance=1e-4):
    return np.allclose(np.asarray(x), np.asarray(y), tolerance, tolerance, equal_nan=True)


# --- plain Python: a buffer is a dict of records by level, a batch a list of records


def names(level):
    """A name for each level of a batch; names are equal if the levels are."""
    fields = [np.asarray(x) for x in level]
    return [b"".join(x[i].tobytes() for x in fields) for i in range(len(fields[0]))]


def records(entries):
    """A batch of levels as a list of (name, finished, record)."""
    fields = entries._asdict()
    fields = (fields.pop("stats") | fields.pop("remembered") | fields).items()
    numbers = {k: np.asarray(v) for k, v in fields if k not in ("level", "code")}
    finished = numbers.pop("scored")
    rows = [{k: v[i].item() for k, v in numbers.items()} for i in range(len(finished))]
    return list(zip(names(entries.level), finished.tolist(), rows))


def contents(buffer):
    """The filled slots: level -> record. No two slots have the same level."""
    filled = [(name, record) for name, full, record in records(buffer) if full]
    assert len(dict(filled)) == len(filled)
    return dict(filled)


def probabilities(buffer, now, beta, rho):
    """P = (1 - rho) P_S + rho P_C, with h = 1 / rank and staleness c - C_i: level -> P. Levels of
    equal scores share their mean rank."""
    scores = np.array([float(x["score"]) for x in buffer.values()])
    ranks = [(x < scores).sum() + ((x == scores).sum() + 1) / 2 for x in scores]  # ties share one
    h = {level: (1 / rank) ** (1 / beta) for rank, level in zip(ranks, buffer)}
    c = {level: now - record["touched"] for level, record in buffer.items()}
    if not any(c.values()):
        c = dict.fromkeys(c, 1)
    total_h, total_c = sum(h.values()), sum(c.values())
    return {i: (1 - rho) * h[i] / total_h + rho * c[i] / total_c for i in buffer}


def write(buffer, size, batch, now, beta, rho):
    """Write a batch of records -> how many levels were updated, inserted, refused and so on."""
    count = dict(updated=0, copied=0, inserted=0, evicted=0, refused=0, unfinished=0)
    new = {}
    for level in {level: 0 for level, _, _ in batch}:
        played = [record for name, finished, record in batch if name == level and finished]
        count["copied"] += len(played) > 1
        count["unfinished"] += not played
        if level in buffer:
            slot = buffer[level]
            slot["touched"] = now
            if played:
                for name in ("score", "mean_return"):
                    slot[name] = sum(record[name] for record in played) / len(played)
                returns = [slot["max_return"]] + [record["max_return"] for record in played]
                slot["max_return"] = max(returns)
                count["updated"] += 1
        elif played:
            new[level] = dict(played[0])
    p = probabilities(buffer, now, beta, rho)
    weakest = [None] * (size - len(buffer)) + sorted(buffer, key=lambda level: p[level])
    for level, holder in zip(sorted(new, key=lambda level: -new[level]["score"]), weakest):
        if holder is None or new[level]["score"] >= buffer[holder]["score"]:
            buffer.pop(holder, None)
            buffer[level] = new[level]
            count["inserted" if holder is None else "evicted"] += 1
        else:
            count["refused"] += 1
    return count


def same_contents(buffer, reference):
    buffer = contents(buffer)
    assert buffer.keys() == reference.keys()
    for level, record in buffer.items():
        assert record == pytest.approx(reference[level], abs=1e-5, nan_ok=True)


def episodes(batch, advantage, columns):
    """For each of the columns of a batch [T, B] its ended episodes, lists of (r_t, V_t, A_t)."""
    found = []
    for b in columns:
        column, episode = [], []
        for t in range(len(batch.done)):
            numbers = (x[t, b].item() for x in (batch.reward, batch.value, advantage))
            episode.append(tuple(numbers))
            if batch.done[t, b]:
                column.append(episode)
                episode = []
        found.append(column)
    return found


def total(episode):
    return sum(r for r, _, _ in episode)


def mean(x):
    return sum(x) / len(x)


def outcomes(batch, advantage, levels, seen, best):
    """For each named level: number of episodes, R_max (shared by copies of a level), mean return
    and six scores. seen: the best return before; best: the optimal return."""
    number, found = batch.done.shape[1] // len(levels), []
    columns = [range(n * number, (n + 1) * number) for n in range(len(levels))]
    played = [episodes(batch, advantage, x) for x in columns]

    def best_return(name):
        copies = [i for i, other in enumerate(levels) if other == name]
        returns = [total(e) for i in copies for column in played[i] for e in column]
        return max([*returns, *(seen[i] for i in copies)])

    best_of_all = max(map(best_return, levels))
    for n, name in enumerate(levels):
        r_max = best_return(name)
        hoped = r_max if r_max > 0 else best_of_all
        ended = [episode for column in played[n] for episode in column]
        if not ended:
            found.append((0, r_max, None, None))
            continue
        first = [total(column[0]) for column in played[n] if column]
        solved = mean([float(x > 0) for x in first])
        scores = {
            "max_mc": mean([mean([r_max - v for _, v, _ in e]) for e in ended]),
            "optimistic_max_mc": mean([mean([hoped - v for _, v, _ in e]) for e in ended]),
            "positive_value_loss": mean([mean([max(a, 0.0) for _, _, a in e]) for e in ended]),
            "l1_value_loss": mean([mean([abs(a) for _, _, a in e]) for e in ended]),
            "learnability": solved * (1 - solved),
            "oracle_regret": best[n] - mean(first)}  # fmt: skip
        found.append((len(ended), r_max, mean(first), scores))
    return found


def plain_gae(reward, value, last_value, done, gamma, lam):
    """Sum over k of (gamma lambda)^k delta_{t+k}, up to the end of the episode, for one column."""
    value = [*value, last_value]
    keep = [0.0 if d else 1.0 for d in done]
    delta = [reward[t] + gamma * value[t + 1] * keep[t] - value[t] for t in range(len(reward))]
    advantage = []
    for t in range(len(reward)):
        total, weight = 0.0, 1.0
        for k in range(t, len(reward)):
            total += weight * delta[k]
            weight *= gamma * lam * keep[k]
        advantage.append(total)
    return advantage


# --- one cycle of a training, compiled


class Cycle(NamedTuple):
    before: NamedTuple  # RunnerState
    after: NamedTuple  # RunnerState
    metrics: dict
    entries: NamedTuple  # Buffer: what write_buffer was given after the rollout
    slot: np.ndarray
    batch: NamedTuple  # Transition
    advantage: np.ndarray
    best: np.ndarray  # optimal returns


@cache
def program(module, **changes):
    """train, and cycle(state, **floats, fresh=0, edits=0) -> Cycle. The numbers fresh and edits
    change the randomness of fresh levels or of edits, and nothing else."""
    config = module.Config(**(SMALL | changes))
    defaults = {name: getattr(config, name) for name in FLOATS} | {"fresh": 0, "edits": 0}
    train = module.make_train(config)

    def step(state, fresh, edits, **floats):
        calls = {}

        def watch(name):
            function = getattr(module, name)

            def watched(*args):
                calls.setdefault(name, args)
                return function(*args)

            return patch.object(module, name, watched)

        def salt(name, number):
            function, data = getattr(amaze, name), jax.random.key_data
            salted = lambda rng: jax.random.wrap_key_data(data(rng) ^ number.astype(jnp.uint32))
            return patch.object(amaze, name, lambda rng, *a, **k: function(salted(rng), *a, **k))

        cycle = part(module.make_train(replace(config, **floats)), "cycle")
        with watch("write_buffer"), watch("level_outcomes"):
            with salt("sample_level", fresh), salt("edit_level", edits):
                after, metrics = cycle(state, None)
        _, entries, slot, *_ = calls["write_buffer"]
        batch, advantage, *_, best = calls["level_outcomes"]
        return Cycle(state, after, metrics, entries, slot, batch, advantage, best)

    step = jax.jit(step)

    def cycle(state, **changes):
        arguments = {name: jnp.asarray(x) for name, x in (defaults | changes).items()}
        cycle = step(state, **arguments)
        host = jax.tree.map(np.asarray, cycle[2:])
        return Cycle(state, cycle.after, *host)

    return train, cycle


@cache
def initial(module, seed=3, **changes):  # with which mazes are solved from the start
    return jax.jit(program(module, **changes)[0].init)(jax.random.key(seed))


def play(module, cycles, state=None, floats=(), **changes):
    """Run a number of cycles of a training, from its start or from a state."""
    state, history = state or initial(module, **changes), []
    for _ in range(cycles):
        history.append(program(module, **changes)[1](state, **dict(floats)))
        state = history[-1].after
    return history


@pytest.fixture(scope="module")
def serial():
    return play(plr, 40)


PARALLEL = dict(parallel=True, num_evals=2, gae_lambda=0.95, staleness_coef=0.5)


@pytest.fixture(scope="module")
def parallel():
    return play(plr, 12, **PARALLEL)


def replayed(cycle):
    """Whether the cycle's second (or only) block of N levels was in the buffer before."""
    filled, n = contents(cycle.before.buffer), SMALL["num_envs"]
    blocks = [names(cycle.entries.level)[i : i + n] for i in (0, n)]
    known = {level in filled for level in blocks[1] or blocks[0]}
    assert len(known) == 1
    return known.pop()


def learned(cycle):
    return not equal(cycle.before.student, cycle.after.student)


# --- the distribution P


@cache
def world():
    """60 levels and their codes."""
    sample = lambda rng: amaze.sample_level(rng, 6, 5, 5)
    levels = jax.jit(jax.vmap(sample))(jax.random.split(jax.random.key(1), 60))
    assert len(set(names(levels))) == 60
    return jax.tree.map(np.asarray, (levels, jax.jit(jax.vmap(amaze.level_code))(levels)))


def empty_buffer(module, size):
    levels, codes = world()
    zeros = lambda x: np.zeros((size, *x.shape[1:]), x.dtype)
    fields = dict.fromkeys(module.Buffer._fields, np.zeros(size, np.int32))
    fields |= {name: np.zeros(size, np.float32) for name in ("score", "max_return")}
    fields |= dict(level=jax.tree.map(zeros, levels), code=zeros(codes))
    fields["stats"] = {"optimal_return": np.zeros(size, np.float32)}
    fields["remembered"] = {"mean_return": np.zeros(size, np.float32)}
    return module.Buffer(**fields | dict(scored=np.zeros(size, bool)))


def random_entries(random, module, number, now):
    """Entries of random levels of the world, with repetition, and random numbers."""
    entries, (levels, codes) = empty_buffer(module, number), world()
    index = random.integers(0, len(codes), number)
    floats = lambda low: random.uniform(low, 1, number).astype(np.float32)
    filled = random.random(number) < 0.85
    return entries._replace(
        level=jax.tree.map(lambda x: x[index], levels), code=codes[index], scored=filled,
        score=floats(-0.5), remembered={"mean_return": floats(0)},
        max_return=np.where(filled, floats(0), 0), stats={"optimal_return": floats(0)},
        mutations=random.integers(0, 9, number), touched=np.full(number, now))  # fmt: skip


def random_buffer(random, number, now):
    """A buffer in which this many slots, at random places, are filled."""
    buffer, (levels, codes) = empty_buffer(plr, K), world()
    index = random.permutation(len(codes))[:K]
    return buffer._replace(
        level=jax.tree.map(lambda x: x[index], levels), code=codes[index],
        scored=random.permutation(K) < number, score=random.normal(size=K).astype(np.float32),
        touched=random.integers(0, now + 1, K))  # fmt: skip


replay_probabilities = jax.jit(plr.replay_probabilities)


@pytest.mark.parametrize("rho", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("beta", [0.1, 0.3, 1.0])
def test_replay_probabilities(beta, rho):
    random = np.random.default_rng(0)
    for number in [*range(1, K + 1)] * 2:
        buffer = random_buffer(random, number, 50)
        p = np.asarray(replay_probabilities(buffer, 50, beta, rho))
        expected = probabilities(contents(buffer), 50, beta, rho)
        assert (p[~buffer.scored] == 0).all()
        for level, value in zip(names(buffer.level), p):
            assert value == pytest.approx(expected.get(level, 0), rel=1e-4, abs=1e-7)


def test_replay_probabilities_of_many_equal_scores():
    """At a low temperature their power of the rank is too small for float32."""
    for number in (2, 1000, 4000):
        score = np.where(np.arange(4000) < number, 1, np.linspace(0.9, 0, 4000))
        score = score.astype(np.float32)
        zero = np.zeros(4000, np.int32)
        buffer = plr.Buffer(None, None, zero == 0, score, score, {}, {}, zero, zero)
        p = np.asarray(replay_probabilities(buffer, 0, 0.01, 0.3))
        assert np.allclose(p[:number], 0.7 / number + 0.3 / 4000, 1e-3, 0)
        assert abs(p.sum() - 1) < 1e-3


def test_staleness_is_uniform_if_all_ages_are_0():
    buffer = random_buffer(np.random.default_rng(0), 8, 50)
    buffer = buffer._replace(touched=np.where(buffer.scored, 50, 3))
    p = replay_probabilities(buffer, 50, 0.3, 1.0)
    assert close(p, buffer.scored / 8)


def test_ages_of_a_long_run_do_not_overflow():
    now, random, zero = 540_000, np.random.default_rng(0), np.zeros(4000, np.int32)
    touched = random.integers(0, 1000, 4000)
    touched[:10] = now - np.arange(10)
    score = random.normal(size=4000).astype(np.float32)
    stats = {"optimal_return": score}
    past = {"mean_return": score}
    buffer = plr.Buffer(None, None, zero == 0, score, score, past, stats, zero, touched)
    age = (now - touched).astype(float)
    assert age.sum() > 2**31
    rank = 1 + np.argsort(np.argsort(-score))
    for rho in (1.0, 0.3):
        expected = (1 - rho) * rank**-2.0 / (rank**-2.0).sum() + rho * age / age.sum()
        assert np.allclose(replay_probabilities(buffer, now, 0.5, rho), expected, 1e-4, 1e-9)
    stats = part(program(plr)[0], "buffer_stats")(buffer, jnp.asarray(now))
    assert stats["buffer_age"] == pytest.approx(age.mean(), rel=1e-5)


@pytest.mark.slow
def test_levels_are_drawn_with_replacement_from_p(serial):
    state = serial[-1].after
    sample = part(program(plr)[0], "sample_replay")
    rngs = jax.random.split(jax.random.key(3), 5000)
    drawn = jax.jit(jax.vmap(sample, (0, None)))(rngs, state)[0]
    drawn = names(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), drawn))
    config = plr.Config()
    buffer, prioritisation = contents(state.buffer), (config.temperature, config.staleness_coef)
    expected = probabilities(buffer, state.cycles, *prioritisation)
    shares = {level: number / len(drawn) for level, number in Counter(drawn).items()}
    assert set(drawn) <= set(buffer)
    for level, p in expected.items():
        error = (p * (1 - p) / len(drawn)) ** 0.5
        assert abs(shares.get(level, 0) - p) < 4.5 * error + 1e-4
    n = SMALL["num_envs"]  # of those drawn at once, two differ as often as independent draws do
    differ = np.mean([drawn[i] != drawn[i + 1] for i in range(0, len(drawn), n)])
    assert abs(differ - (1 - sum(p**2 for p in expected.values()))) < 0.03


def test_levels_are_drawn_with_this_temperature_and_that_weight_of_age():
    """Which differ here: 1.5 and 0.2."""
    changes = dict(buffer_size=K, temperature=1.5, staleness_coef=0.2)
    train = plr.make_train(plr.Config(**SMALL | changes))
    buffer = jax.tree.map(jnp.asarray, random_buffer(np.random.default_rng(3), K, 50))
    state = jax.eval_shape(train.init, jax.random.key(0)).replace(buffer=buffer, cycles=50)
    drawn = jax.jit(jax.vmap(lambda rng: part(train, "sample_replay")(rng, state)[0]))(
        jax.random.split(jax.random.key(3), 5000))  # fmt: skip
    drawn = Counter(names(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), drawn)))
    for level, p in probabilities(contents(buffer), 50, 1.5, 0.2).items():
        assert abs(drawn[level] / 20_000 - p) < 4.5 * (p * (1 - p) / 20_000) ** 0.5 + 1e-4


# --- writing the buffer


@cache
def writer(module):
    def write(buffer, entries, now, beta, rho):
        slot = module.find(buffer, entries.code)
        return module.write_buffer(buffer, entries, slot, now, beta, rho)

    return jax.jit(write)


def follow_random_batches(module, cycles):
    """Write random batches to the module's buffer and to the plain one -> counts of events."""
    random, total = np.random.default_rng(0), {}
    buffer, reference = empty_buffer(module, K), {}
    for now in range(cycles):
        entries = random_entries(random, module, N, now)
        # scores rise, so that new levels go on getting in
        entries = entries._replace(score=entries.score + np.float32(now / cycles))
        prioritisation = random.choice([0.3, 0.5, 1.0]), random.choice([0.0, 0.3, 0.6])
        buffer = writer(module)(buffer, entries, now, *prioritisation)
        count = write(reference, K, records(entries), now, *prioritisation)
        same_contents(buffer, reference)
        total = {name: total.get(name, 0) + x for name, x in count.items()}
    return total


def test_insertion_and_eviction():
    total = follow_random_batches(plr, 400)
    assert total["inserted"] == K
    assert total["copied"] > 40
    assert min(total["updated"], total["evicted"], total["refused"], total["unfinished"]) > 100


def full_buffer(score):
    """A full buffer with the given scores; entries of other levels, none of which has finished."""
    buffer, (levels, codes) = empty_buffer(plr, K), world()
    take = lambda start, number: jax.tree.map(lambda x: x[start : start + number], (levels, codes))
    level, code = take(0, K)
    buffer = buffer._replace(level=level, code=code, scored=np.ones(K, bool))
    buffer = buffer._replace(score=np.float32(score))
    level, code = take(K, N)
    return buffer, empty_buffer(plr, N)._replace(level=level, code=code)


def test_ith_best_contests_ith_weakest():
    # 2.9 meets 1 and 2.8 meets 2; 2.5, 2.1 and 0.5 meet 3, 4 and 5
    buffer, entries = full_buffer(np.arange(K, 0, -1))
    score = np.array([2.1, 2.9, 0.5, 2.5, 2.8], np.float32)
    batch = entries._replace(scored=np.ones(N, bool), score=score)
    after = writer(plr)(buffer, batch, 0, 0.3, 0.0)
    assert close(np.sort(after.score), [2.8, 2.9, *range(3, 13)])
    # 9, 7, 6 and 5 win over 1, 2, 3 and 4; 3.5 meets 5
    batch = batch._replace(score=np.array([3.5, 9, 5, 7, 6], np.float32))
    after = writer(plr)(buffer, batch, 0, 0.3, 0.0)
    assert close(after.score, [12, 11, 10, 9, 8, 7, 6, 5, 5, 6, 7, 9])


def test_the_weakest_is_found_where_float32_loses_its_share_of_p_in_its_age():
    buffer, entries = full_buffer(np.arange(K, 0, -1))
    batch = entries._replace(scored=np.ones(N, bool), score=np.full(N, 20, np.float32))
    after = writer(plr)(buffer, batch, 1, 0.05, 0.3)
    assert close(np.sort(after.score), [*range(N + 1, K + 1), *[20] * N])


def test_an_equal_score_wins_a_lower_one_does_not():
    buffer, entries = full_buffer(np.full(K, 0.5))
    one = np.arange(N) == 2
    for score, wins in ((0.5, True), (np.nextafter(np.float32(0.5), np.float32(0)), False)):
        batch = entries._replace(scored=one, score=np.full(N, score, np.float32))
        after = writer(plr)(buffer, batch, 0, 0.3, 0.3)
        assert (names(entries.level)[2] in contents(after)) == wins


def test_stale_levels_are_kept_longer_than_weak_ones():
    # scores nearly alike: the slot of least P is that which was touched last
    buffer, entries = full_buffer(np.linspace(0.5, 0.51, K))
    buffer = buffer._replace(touched=np.where(np.arange(K) == 7, 30, np.arange(K)))
    batch = entries._replace(scored=np.arange(N) == 0, score=np.full(N, 2, np.float32))
    after = writer(plr)(buffer, batch, 31, 0.3, 1.0)
    assert set(contents(buffer)) - set(contents(after)) == {names(buffer.level)[7]}


def test_a_level_that_is_known_updates_its_slot():
    buffer, entries = full_buffer(np.arange(K))
    known = jax.tree.map(lambda x: np.repeat(x[3:4], N, axis=0), buffer)  # five copies of slot 3
    score = np.array([1, 2, 6, 99, 99], np.float32)
    returns = np.array([0.1, 0.7, 0.3, 0, 0], np.float32)
    filled = np.arange(N) < 3
    past = {"mean_return": returns}
    batch = known._replace(scored=filled, score=score, remembered=past, max_return=returns)
    after = writer(plr)(buffer, batch, 5, 0.3, 0.3)
    i, others = 3, np.arange(K) != 3
    row = after.score[i], after.remembered["mean_return"][i], after.max_return[i]
    assert close([*row, after.touched[i]], [3, 1.1 / 3, 0.7, 5])
    assert equal(*(jax.tree.map(lambda x: x[others], b) for b in (after, buffer)))
    # the best return stays though worse ones come
    again = batch._replace(max_return=returns / 2)
    assert close(writer(plr)(after, again, 6, 0.3, 0.3).max_return[i], 0.7)


def test_copies_of_a_new_level_are_dropped_after_the_first():
    buffer, entries = full_buffer(np.zeros(K))
    copies = jax.tree.map(lambda x: np.repeat(x[:1], N, axis=0), entries)
    score = np.array([9, 1, 2, 3, 4], np.float32)  # the first is not finished
    batch = copies._replace(scored=np.arange(N) > 0, score=score)
    after = contents(writer(plr)(buffer, batch, 0, 0.3, 0.3))
    assert len(after) == K
    assert after[names(entries.level)[0]]["score"] == 1


def test_a_level_without_a_finished_episode_changes_no_score():
    buffer, entries = full_buffer(np.arange(K))
    nan = np.full(N, np.nan, np.float32)
    entries = entries._replace(score=nan, remembered={"mean_return": nan})
    known = jax.tree.map(lambda x: x[:N], buffer)
    known = known._replace(scored=np.zeros(N, bool), score=nan, remembered={"mean_return": nan})
    for batch, touched in ((entries, 0), (known, 4)):
        after = writer(plr)(buffer, batch, 4, 0.3, 0.3)
        assert equal(after._replace(touched=buffer.touched), buffer)
        assert (after.touched[:N] == touched).all()
        assert (after.touched[N:] == 0).all()


def test_find():
    buffer, (_, codes) = empty_buffer(plr, K), world()
    buffer = buffer._replace(code=codes[:K], scored=np.arange(K) % 2 == 0)
    expected = [i if i % 2 == 0 else K for i in range(K)] + [K] * 3
    assert equal(jax.jit(plr.find)(buffer, codes[: K + 3]), np.array(expected))


# --- scores


def random_batch(random, steps, columns):
    """A batch [T, B] with ragged episodes; the last column has no end."""
    done = random.random((steps, columns)) < 0.25
    done[:, -1] = False
    reward = np.where(done & (random.random(done.shape) < 0.6), random.random(done.shape), 0)
    value, advantage = random.normal(size=(2, steps, columns))
    data = [x.astype(np.float32) for x in (value, reward, advantage)]
    return plr.Transition(None, None, None, None, *data[:2], done), data[2]


level_outcomes = jax.jit(plr.level_outcomes)


def same_levels(levels):
    """[N, N]: which of the named levels are the same."""
    return np.array([[x == y for y in levels] for x in levels])


@pytest.mark.parametrize("number", [1, 3])
def test_scores_of_ragged_episodes(number):
    random, unfinished = np.random.default_rng(number), 0
    for levels in [[0, 1, 2, 3], [0, 1, 0, 0], [0, 1, 1, 0]] * 7:
        batch, advantage = random_batch(random, 20, 4 * number)
        seen, best = random.random((2, 4)).astype(np.float32)
        count, r_max, past, scores = level_outcomes(
            batch, advantage, seen, {}, same_levels(levels), best)  # fmt: skip
        expected = outcomes(batch, advantage, levels, seen.tolist(), best.tolist())
        for n, (number_ended, plain_max, plain_mean, plain) in enumerate(expected):
            assert (count[n], r_max[n]) == (number_ended, pytest.approx(plain_max, abs=1e-5))
            if number_ended:
                assert past["mean_return"][n] == pytest.approx(plain_mean, abs=1e-5)
                assert {k: x[n] for k, x in scores.items()} == pytest.approx(plain, abs=1e-5)
            unfinished += not number_ended
    assert number > 1 or unfinished > 20


def column(*x):
    return np.array(x, np.float32)[:, None]


def test_scores_by_hand():
    batch = plr.Transition(
        None,
        None,
        None,
        None,
        value=column(0.5, 0.1, 0.2, 0.6, 9),
        reward=column(0, 0.8, 0, 0, 9),
        done=column(0, 1, 0, 1, 0) > 0,
    )  # episodes of 2, 2 and, unfinished, 1 step
    advantage = column(0.2, -0.4, -0.6, -0.2, 9)
    best, seen = np.float32([0.95]), np.float32([0.3])
    count, r_max, past, scores = plr.level_outcomes(
        batch, advantage, seen, {}, np.eye(1) > 0, best)  # fmt: skip
    assert (count, past["mean_return"], r_max) == (2, pytest.approx(0.8), pytest.approx(0.8))
    assert {name: x.item() for name, x in scores.items()} == pytest.approx({
        "max_mc": ((0.3 + 0.7) / 2 + (0.6 + 0.2) / 2) / 2,
        "optimistic_max_mc": ((0.3 + 0.7) / 2 + (0.6 + 0.2) / 2) / 2,
        "positive_value_loss": ((0.2 + 0) / 2 + 0) / 2,
        "l1_value_loss": ((0.2 + 0.4) / 2 + (0.6 + 0.2) / 2) / 2,
        "learnability": 0,
        "oracle_regret": 0.95 - 0.8})  # fmt: skip
    assert set(scores) == set(SCORES)


def failure_and_solve():
    """A batch of two trajectories, one episode each: a failure, and a return of 0.9; V = 0.3."""
    done = np.hstack([column(0, 0, 0, 1), column(0, 1, 0, 0)]) > 0
    reward = np.hstack([column(0, 0, 0, 0), column(0, 0.9, 0, 0)])
    return plr.Transition(None, None, None, None, np.full((4, 2), np.float32(0.3)), reward, done)


def test_copies_of_a_level_have_one_r_max():
    batch, zero = failure_and_solve(), np.zeros(2, np.float32)
    for same, score, best in ((np.ones((2, 2)), (0.6, 0.6), (0.9, 0.9)),
                              (np.eye(2), (-0.3, 0.6), (0, 0.9))):  # fmt: skip
        _, r_max, _, scores = level_outcomes(batch, batch.reward, zero, {}, same > 0, zero)
        assert close(scores["max_mc"], score)
        assert close(scores["optimistic_max_mc"], (0.6, 0.6))  # as if the failure were a copy
        assert close(r_max, best)
    batch.reward[3, 0] = -0.5  # a failure that costs: R_max is below 0
    scores = level_outcomes(batch, batch.reward, zero - 1, {}, np.eye(2) > 0, zero)[3]
    assert close(scores["max_mc"], (-0.8, 0.6))
    assert close(scores["optimistic_max_mc"], (0.6, 0.6))


def slot_of_a_level_drawn_twice(module):
    """The slot of a level that was drawn twice in a cycle, with a failure and a first solve."""
    train = module.make_train(module.Config(**SMALL | dict(num_envs=2)))
    level, code = jax.tree.map(lambda x: jnp.asarray(x[:1].repeat(2, 0)), world())
    state, at = initial(module), jnp.arange(SMALL["buffer_size"]) == 7
    held = jax.tree.map(lambda x: x[:1].repeat(len(at), 0), (level, code))
    state = state.replace(buffer=state.buffer._replace(level=held[0], code=held[1], scored=at))
    batch = jax.tree.map(jnp.asarray, failure_and_solve())

    def write():
        score = part(train, "score")
        entries, slot = score(state, level, jnp.zeros(2, int), batch, jnp.zeros(2))
        return module.write_buffer(state.buffer, entries, slot, 1, 0.3, 0.3)

    after = contents(jax.jit(write)())
    assert len(after) == 1
    return after[names(level)[0]]


def test_a_level_drawn_twice_is_scored_with_one_r_max():
    slot = slot_of_a_level_drawn_twice(plr)
    assert (slot["score"], slot["max_return"]) == pytest.approx((0.6, 0.9))
    assert slot["mean_return"] == pytest.approx(0.45)


def simulated_student(random, p, trajectories, steps, max_steps):
    """Trajectories of a student that solves its level in a few steps or else runs out of time,
    where the level restarts -> batch [T, B], whether first episodes were solved [B]."""
    done = np.zeros((steps, trajectories), bool)
    reward, first = np.zeros(done.shape, np.float32), np.zeros(trajectories, bool)
    for b in range(trajectories):
        t = 0
        while True:
            solved, length = random.random() < p, random.integers(10, 40)
            first[b] |= solved and t == 0
            t += length if solved else max_steps
            if t > steps:
                break
            done[t - 1, b], reward[t - 1, b] = True, solved * (1 - 0.9 * length / max_steps)
    return plr.Transition(None, None, None, None, reward, reward, done), first


def test_learnability_and_oracle_regret_are_of_first_episodes():
    p, copies, number = 0.75, 8, 500  # of all pooled, 0.08 would come out
    random = np.random.default_rng(0)
    batch, first = simulated_student(random, p, copies * number, 256, 250)
    one, same = np.ones(number, np.float32), np.eye(number) > 0
    _, _, past, scores = level_outcomes(batch, batch.reward, one, {}, same, one)
    share = first.reshape(number, copies).mean(1)
    assert close(scores["learnability"], share * (1 - share))
    expected = p * (1 - p) * (1 - 1 / copies)  # of p_hat (1 - p_hat)
    assert abs(scores["learnability"].mean() - expected) < 0.01
    expected = p * (1 - 0.9 * 24.5 / 250)
    assert abs(past["mean_return"].mean() - expected) < 0.02
    assert abs(scores["oracle_regret"].mean() - (1 - expected)) < 0.02
    stats = plr.episode_stats(*plr.first_episodes(batch.reward, batch.done))
    assert close(stats["solve_rate"], first.mean())
    assert abs(first.mean() - p) < 0.02


@pytest.mark.slow
def test_levels_are_written_with_the_score_that_was_chosen(parallel):
    cycle, config = parallel[-1], plr.Config(**SMALL | PARALLEL)
    batch, level, last = cycle.batch, cycle.entries.level, np.zeros(cycle.batch.done.shape[1])

    def score(name):
        train = plr.make_train(replace(config, score=name, solvable_only=True))
        arguments = cycle.before, level, cycle.entries.mutations, batch, last
        return part(train, "score")(*arguments)[0].score

    scores = jax.jit(lambda: {name: score(name) for name in SCORES})()
    advantage = np.asarray(plr.gae(batch, last, config.gamma, config.gae_lambda))
    seen = [contents(cycle.before.buffer).get(x, {"max_return": -np.inf})["max_return"]
            for x in names(level)]  # fmt: skip
    expected = outcomes(batch, advantage, names(level), seen, cycle.best.tolist())
    for name in SCORES:
        assert close(scores[name], [x[3][name] for x in expected]), name
    assert len({str(np.round(x, 4)) for x in scores.values()}) == len(SCORES)


def with_scores(module, change):
    """A copy of a script in which max_mc, that of N levels, is changed, as a user's may be."""
    end = "    return done.sum((0, 2)), max_return, remembered, scores\n"
    return hacked(module, {end: f"    scores['max_mc'] = scores['max_mc']{change}\n{end}"})


@pytest.mark.parametrize("module", [plr, accel])
def test_a_score_of_another_shape_is_refused(module):
    copy = with_scores(module, "[:, None]")
    train = copy.make_train(copy.Config(**SMALL))
    state = jax.eval_shape(train.init, jax.random.key(0))
    with pytest.raises(copy.BadConfig) as error:
        jax.eval_shape(lambda state: train.update(state, 1), state)
    assert str(error.value) == "score = 'max_mc': must be one of the shape [N]"


def test_a_level_without_a_score_is_not_kept():
    """A level whose score is NaN; it does not hinder others."""
    history = play(with_scores(plr, ".at[0].set(jnp.nan)"), 8)
    for cycle in history:
        assert not cycle.entries.scored[0]
        buffer = cycle.after.buffer
        assert not np.isnan(buffer.score[buffer.scored]).any()
    assert sum(cycle.entries.scored[1:].any() for cycle in history) > 4
    assert buffer.scored.sum() > 4


def test_unsolvable_levels_have_no_oracle_regret():
    solution = amaze.Solution(None, jnp.array([-1, 5, 9]), jnp.array([False, True, True]))
    best = amaze.optimal_return(solution, 8)
    done = np.ones((1, 3), bool)
    zero = np.zeros((1, 3), np.float32)
    batch = plr.Transition(None, None, None, None, zero, zero, done)
    scores = plr.level_outcomes(batch, zero, zero[0], {}, np.eye(3) > 0, best)[3]
    assert close(scores["oracle_regret"], [0, 1 - 0.9 * 5 / 8, 0])  # the third: not within 8 steps


def test_gae_and_episode_sums():
    random = np.random.default_rng(0)
    batch, _ = random_batch(random, 20, 4)
    last = random.normal(size=4).astype(np.float32)
    args = batch.reward, batch.value, last, batch.done
    columns = [plain_gae(*(x[..., b] for x in args), 0.9, 0.8) for b in range(4)]
    assert close(jax.jit(plr.gae)(batch, last, 0.9, 0.8), np.array(columns).T)
    sums = np.zeros((20, 4))
    for t in range(20):
        sums[t] = batch.reward[t] + (np.where(batch.done[t - 1], 0, sums[t - 1]) if t else 0)
    assert close(jax.jit(plr.episode_sums)(batch.reward, batch.done), sums)


# --- a training


def follow(history, **mode):
    """Check a training's scores and buffer, cycle after cycle, against the plain ones."""
    config, reference, returns = plr.Config(**mode), {}, {}
    for now, cycle in enumerate(history):
        levels = names(cycle.entries.level)
        seen = [max(returns[level]) if level in reference else -np.inf for level in levels]
        expected = outcomes(cycle.batch, cycle.advantage, levels, seen, cycle.best.tolist())
        for (_, finished, record), (_, r_max, mean_return, scores) in zip(
                records(cycle.entries), expected):  # fmt: skip
            plain = dict(score=scores["max_mc"], mean_return=mean_return, max_return=r_max)
            plain["touched"] = now
            assert finished
            assert {k: record[k] for k in plain} == pytest.approx(plain, abs=1e-5)
        returns |= {level: [] for level in levels if level not in reference}
        for n, level in enumerate(levels):
            columns = range(n * config.num_evals, (n + 1) * config.num_evals)
            for column in episodes(cycle.batch, cycle.advantage, columns):
                returns[level] += map(total, column)
        prioritisation = config.temperature, config.staleness_coef
        write(reference, SMALL["buffer_size"], records(cycle.entries), now, *prioritisation)
        same_contents(cycle.after.buffer, reference)
        for level, record in reference.items():  # the true maximum of all it was ever played for
            assert record["max_return"] == pytest.approx(max(returns[level]), abs=1e-5)


def test_scores_and_buffer_of_a_training(serial):
    follow(serial)
    assert 10 < sum(replayed(cycle) for cycle in serial) < 30
    assert max(cycle.entries.max_return.max() for cycle in serial) > 0.5


@pytest.mark.slow
def test_scores_and_buffer_of_a_parallel_training(parallel):
    follow(parallel, **PARALLEL)


def test_the_buffer_is_logged(serial):
    for cycle in serial[:6]:
        buffer, step = contents(cycle.after.buffer), int(cycle.after.cycles)
        ages = [step - record["touched"] for record in buffer.values()]
        assert cycle.metrics["buffer_age"] == pytest.approx(np.mean(ages), rel=1e-5)
        assert cycle.metrics["buffer_fill"] == len(buffer) / SMALL["buffer_size"]
        level = jax.tree.map(lambda x: x[cycle.after.buffer.scored], cycle.after.buffer.level)
        actions = jax.jit(jax.vmap(amaze.solve))(level).n_actions.tolist()
        best = [1 - 0.9 * x / 8 if 0 <= x <= 8 else 0 for x in actions]  # within 8 steps
        regret = [x - record["mean_return"] for x, record in zip(best, buffer.values())]
        assert cycle.metrics["buffer_regret"] == pytest.approx(mean(regret), abs=1e-5)
        assert cycle.metrics["buffer_solvable"] == pytest.approx(mean([x >= 0 for x in actions]))


def test_robust_learns_on_replay_cycles_only(serial):
    for cycle in serial:
        assert learned(cycle) == replayed(cycle)
        assert np.isnan(cycle.metrics["total_loss"]) == (not replayed(cycle))
    assert serial[-1].metrics["grad_updates"] == sum(map(replayed, serial))
    assert serial[-1].metrics["rollouts"] == len(serial)


@pytest.mark.slow
def test_plain_plr_learns_on_every_cycle():
    history = play(plr, 6, robust=False)
    assert {replayed(cycle) for cycle in history} == {False, True}
    assert all(map(learned, history))
    assert history[-1].metrics["grad_updates"] == 6


def check_logged(cycle, name, block):
    """Metrics of a slice of the cycle's levels are means over first episodes; NaN if none ended."""
    number, (level, stats) = len(cycle.slot), (cycle.entries.level, cycle.entries.stats)
    columns = np.arange(cycle.batch.done.shape[1]).reshape(number, -1)[block].ravel()
    first = [x[0] for x in episodes(cycle.batch, cycle.advantage, columns) if x]
    of_first = {"return": total, "episode_length": len, "solve_rate": lambda x: total(x) > 0}
    expected = {k: mean([f(x) for x in first]) if first else np.nan for k, f in of_first.items()}
    if name != "train":
        expected["walls"] = mean(level.wall_map.sum((1, 2))[block]) if len(columns) else np.nan
        expected["solvable"] = mean(stats["solvable"][block]) if len(columns) else np.nan
    logged = {key: cycle.metrics[f"{name}_{key}"] for key in expected}
    assert logged == pytest.approx(expected, abs=1e-5, nan_ok=True)


@pytest.mark.slow
def test_fresh_and_replayed_levels_are_logged_apart(serial, parallel):
    assert len({x.metrics["train_solve_rate"].item() for x in parallel}) > 3
    n, nothing = SMALL["num_envs"], slice(0)
    for cycle in serial[:12]:
        this, other = ("replay", "fresh") if replayed(cycle) else ("fresh", "replay")
        check_logged(cycle, "train", slice(None))
        check_logged(cycle, this, slice(None))
        check_logged(cycle, other, nothing)
    for i, cycle in enumerate(parallel):
        check_logged(cycle, "train", slice(None))
        check_logged(cycle, "fresh", slice(n) if i else slice(None))
        check_logged(cycle, "replay", slice(n, None) if i else nothing)


def check_levels_shown(module, history, **changes):
    """16 random levels, others in each cycle, and the buffer's levels by their plain P."""
    show, config = jax.jit(program(module, **changes)[0].show), module.Config(**SMALL | changes)
    seen = []
    for state in (cycle.after for cycle in history[-4:]):
        shown = show(state)
        fresh, _ = shown["drawn at random, not learned from"]
        best, captions = shown["replayed, the most probable first"]
        seen += names(fresh)
        filled = contents(state.buffer)
        p = probabilities(filled, state.cycles, config.temperature, config.staleness_coef)
        top = names(best)[: len(filled)]
        assert {*top} == {*filled}
        assert close(captions["P"][: len(top)], sorted(p.values(), reverse=True), 1e-5)
        assert close(captions["P"][: len(top)], [p[level] for level in top], 1e-5)
        assert close(captions["score"][: len(top)], [filled[level]["score"] for level in top])
    assert len(seen) == 4 * 16
    assert len({*seen}) > 60


def test_show_gives_random_levels_and_those_that_are_replayed_most(serial):
    check_levels_shown(plr, serial)


# --- a score that remembers: the change that papers make most

VISITED = {
    'REMEMBERED = ("mean_return",)': 'REMEMBERED = ("mean_return", "visits", "last")',
    '    remembered = {"mean_return": mean_return}\n':
        '    visits = before["visits"] + 1\n'
        '    scores["drift"] = jnp.abs(max_mc - before["last"]) / visits\n'
        '    remembered = {"mean_return": mean_return, "visits": visits, "last": max_mc}\n',
}  # fmt: skip


def test_a_score_of_visits_and_of_the_last_score():
    """score = |max_mc - max_mc of the last visit| / visits, by a plain loop over cycles: a level
    that leaves the buffer is forgotten; copies of one in a cycle count as one visit."""
    history, memory, copied, forgotten = play(hacked(plr, VISITED), 40, score="drift"), {}, 0, 0
    for cycle in history:
        levels = names(cycle.entries.level)
        best = contents(cycle.before.buffer)
        seen = [best.get(level, {"max_return": -np.inf})["max_return"] for level in levels]
        played = outcomes(cycle.batch, cycle.advantage, levels, seen, cycle.best.tolist())
        now = {}
        for i, (level, (_, _, _, scores)) in enumerate(zip(levels, played)):
            visits, last = memory.get(level, (0, 0.0))
            assert cycle.entries.score[i] == pytest.approx(
                abs(scores["max_mc"] - last) / (visits + 1), abs=1e-5)  # fmt: skip
            now.setdefault(level, []).append(scores["max_mc"])
        for level, values in now.items():
            known = level in memory
            copied += known and len(values) > 1
            memory[level] = memory.get(level, (0,))[0] + 1, mean(values) if known else values[0]
        held = contents(cycle.after.buffer)
        forgotten += len(memory.keys() - held.keys())
        memory = {level: memory[level] for level in held}
        for level, record in held.items():
            assert (record["visits"], record["last"]) == pytest.approx(memory[level], abs=1e-5)
    assert max(visits for visits, _ in memory.values()) > 3
    assert copied > 3
    assert forgotten > 10


# --- the replay schedule


def test_schedule_waits_for_the_buffer_and_then_replays_with_replay_prob():
    replays = part(program(plr)[0], "replays")
    schedule = np.asarray(jax.jit(jax.vmap(replays))(jnp.arange(10_002)))
    assert not schedule[:2].any()  # 4 levels a cycle: half of 16 slots are filled after two
    assert abs(schedule[2:].mean() - 0.5) < 4 * 0.005
    pairs = schedule[2:-1] & schedule[3:]
    assert abs(pairs.mean() - 0.25) < 0.025  # each cycle apart from the one before


def test_replay_prob_0_never_replays_and_1_always_once_warm():
    never = play(plr, 8, floats=dict(replay_prob=0.0))
    assert not any(map(replayed, never))
    assert not any(map(learned, never))
    always = play(plr, 8, floats=dict(replay_prob=1.0))
    assert list(map(replayed, always)) == [False] * 2 + [True] * 6
    assert list(map(learned, always)) == [False] * 2 + [True] * 6


@pytest.mark.parametrize("module", [plr, accel])
def test_every_point_of_a_sweep_must_learn(module, tmp_path):
    """A base that would not does not matter, also for evaluate.py."""
    config = module.Config(**SMALL | dict(num_updates=60, buffer_size=4000, min_fill=1.0))
    with pytest.raises(module.BadConfig, match="min_fill = 1.0: must be above "):
        module.make_rows(replace(config, sweep=("min_fill=0.005,1",)))
    config = replace(config, sweep=("min_fill=0.005,0.01",))
    rows = module.make_rows(config)
    assert [row["min_fill"] for row in rows] == [0.005, 0.01]
    init = jax.jit(module.make_train(replace(config, min_fill=0.01)).init)
    evaluate.save(tmp_path / "run", config, jax.vmap(init)(jax.vmap(jax.random.key)(np.arange(2))))
    assert len(evaluate.load(tmp_path / "run").agents) == 2


def test_a_seldom_replay_is_found_or_refused():
    """None in the next 1,000 cycles counts as never."""
    config = plr.Config(**SMALL | dict(num_updates=900, replay_prob=1e-9))
    with pytest.raises(plr.BadConfig, match="num_updates = 900"):
        plr.make_train(config)


def test_min_fill_delays_replay():
    late = play(plr, 7, floats=dict(replay_prob=1.0, min_fill=1.0))
    assert list(map(replayed, late)) == [False] * 4 + [True] * 3
    first = play(plr, 1, floats=dict(replay_prob=1.0, min_fill=0.0))[0]
    assert not replayed(first)
    assert not learned(first)


def first_replay_of(module, **mode):
    """The first cycle that replays, with N = 8 and half of the buffer being 200 levels."""
    config = module.Config(num_envs=8, buffer_size=400, min_fill=0.5, replay_prob=1.0, **mode)
    replays = part(module.make_train(config), "replays")
    return np.asarray(jax.vmap(replays)(jnp.arange(40))).argmax()


def test_min_fill_counts_all_levels_of_a_cycle():
    assert first_replay_of(plr) == 25  # 8 levels a cycle
    assert first_replay_of(plr, parallel=True) == 13  # 16


@pytest.mark.parametrize("module", [plr, accel])
def test_a_buffer_stays_warm_beyond_two_billion_levels(module):
    config = module.Config(num_envs=8192, buffer_size=50_000, parallel=True)
    replays = part(module.make_train(config), "replays")
    assert replays(jnp.int32(2**31 // 8192))
    assert replays(jnp.int32(2**31 // 24576 + 1))
    assert not replays(jnp.int32(1))


def gradient_updates(module, flags):
    """The number of PPO updates in a training of default length, by its schedule."""
    config = module.parse(flags)
    replays = part(module.make_train(config), "replays")
    schedule = jax.jit(jax.vmap(replays))(jnp.arange(config.num_updates))
    return np.sum(schedule | (not config.robust))


MODES = [[], ["--no-robust"], ["--parallel"], ["--parallel", "--no-robust"]]


@pytest.mark.parametrize("flags", MODES)
def test_default_length_makes_30_000_gradient_updates(flags):
    assert gradient_updates(plr, flags) == pytest.approx(30_000, rel=0.01)


def check_an_empty_buffer(module, blocks, **changes):
    """A warm cycle with nothing to replay in its buffer plays the same as a cold one."""
    state, n = initial(module, **changes), SMALL["num_envs"]
    state = state.replace(cycles=jnp.int32(1 if blocks > 1 else 3))  # after 8 or 12 of 16 levels
    cycle = partial(program(module, **changes)[1], state, replay_prob=1.0)
    cold, warm = cycle(min_fill=1.0), cycle(min_fill=0.5)
    assert learned(warm)
    assert not learned(cold)  # the schedule knows nothing of a seed's buffer
    level, played = warm.entries.level, [names(x.entries.level) for x in (cold, warm)]
    assert played[0][: 2 * n] == played[1][: 2 * n]
    assert len(played[1]) == blocks * n
    assert (level.agent_pos != level.goal_pos).any(-1).all()  # unlike in a level of zeros
    assert not warm.entries.mutations[: 2 * n].any()
    check_logged(warm, "train", slice(None))
    check_logged(warm, "fresh", slice(2 * n))
    check_logged(warm, "replay", slice(0))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2])
def test_an_empty_buffer_is_not_replayed(blocks):
    check_an_empty_buffer(plr, blocks, **(PARALLEL if blocks > 1 else {}))


def check_a_free_slot_is_not_replayed(monkeypatch, module, state):
    """Sampling adds up floats, so rounding may pick a slot of probability 0."""
    train, n = program(module)[0], SMALL["num_envs"]
    sample, fresh = part(train, "sample_replay", "sample_fresh")
    scored, slot = np.array(state.buffer.scored), np.arange(n)
    scored[:n] = taken = slot % 2 == 0
    state = state.replace(buffer=state.buffer._replace(scored=scored))
    monkeypatch.setattr(jax.random, "choice", lambda *args, **options: slot)
    drawn, other = sample(jax.random.key(3), state)[0], fresh(jax.random.key(3), state)[0]
    kept = jax.tree.map(lambda x: x[:n], state.buffer.level)
    drawn, other, kept = names(drawn), names(other), names(kept)
    assert set(kept) & set(other) == set()
    assert drawn == [kept[i] if taken[i] else other[i] for i in range(n)]


@pytest.mark.slow
def test_a_free_slot_is_not_replayed(monkeypatch, serial):
    check_a_free_slot_is_not_replayed(monkeypatch, plr, serial[-1].after)


@pytest.mark.slow
def test_a_buffer_in_which_nothing_ever_ends_is_not_replayed():
    state = initial(plr, 0, num_steps=1)
    for cycle in play(plr, 6, state, dict(replay_prob=1.0), num_steps=1):
        level = cycle.entries.level
        assert not contents(cycle.before.buffer)
        assert not cycle.batch.done.any()
        assert (level.agent_pos != level.goal_pos).any(-1).all()
        assert np.isnan([x for k, x in cycle.metrics.items() if k.startswith("replay_")]).all()
        check_logged(cycle, "train", slice(None))
        check_logged(cycle, "fresh", slice(None))
        assert np.isnan(cycle.metrics["train_solve_rate"])
    assert cycle.metrics["buffer_fill"] == 0


# --- parallel mode


@pytest.mark.slow
def test_parallel_plays_fresh_and_replayed_levels_together(parallel):
    n = SMALL["num_envs"]
    for i, cycle in enumerate(parallel):
        known = cycle.slot < SMALL["buffer_size"]
        assert cycle.batch.reward.shape == (T, 2 * n * 2)
        assert not known[:n].any()
        assert known[n:].all() == known[n:].any() == (i >= 1)
        assert cycle.metrics["rollouts"] == 2 * (i + 1)
        opens = amaze.Observation(*(x[0] for x in cycle.batch.obs))
        assert equal(opens.direction, np.repeat(cycle.entries.level.agent_dir, 2))


@pytest.mark.slow
def test_parallel_robust_learns_nothing_while_cold(parallel):
    assert list(map(learned, parallel)) == [False] + [True] * 11
    assert parallel[-1].metrics["grad_updates"] == 11
    assert np.isnan(parallel[0].metrics["total_loss"])


def learned_from(cycle, columns):
    """Whether the cycle learned from these columns of the batch, by their explained variance."""
    advantage, value = cycle.advantage[:, columns], cycle.batch.value[:, columns]
    explained = 1 - advantage.var() / max((advantage + value).var(), 1e-8)
    return cycle.metrics["explained_variance"] == pytest.approx(explained, rel=1e-3)


def other_levels(state):
    """The state with each level of its buffer moved to another slot."""
    roll = lambda x: jnp.roll(x, 5, axis=0)
    buffer = state.buffer
    return state.replace(buffer=buffer._replace(level=jax.tree.map(roll, buffer.level)))


@pytest.mark.slow
def test_parallel_robust_learns_from_the_replayed_block_only(parallel):
    cycle = program(plr, **PARALLEL)[1]
    base, n = parallel[5], SMALL["num_envs"]
    fresh = cycle(base.before, fresh=1)
    blocks = [[names(x.entries.level)[i : i + n] for i in (0, n)] for x in (base, fresh)]
    assert blocks[0][0] != blocks[1][0]
    assert blocks[0][1] == blocks[1][1]
    assert equal(fresh.after.student, base.after.student)
    assert not equal(fresh.after.buffer.level, base.after.buffer.level)
    replay = cycle(other_levels(base.before))
    assert names(replay.entries.level)[:n] == blocks[0][0]
    assert not equal(replay.after.student, base.after.student)
    for x in parallel[1:]:
        assert learned_from(x, slice(2 * n, None))
        assert not learned_from(x, slice(None))


@pytest.mark.slow
def test_parallel_plain_learns_from_the_second_block_only_and_also_while_cold():
    changes, n = PARALLEL | dict(robust=False), SMALL["num_envs"]
    history = play(plr, 4, **changes)
    assert all(map(learned, history))
    assert history[-1].metrics["grad_updates"] == 4
    assert [(x.slot < SMALL["buffer_size"])[n:].any() for x in history] == [False] + [True] * 3
    for cycle in history:
        assert learned_from(cycle, slice(2 * n, None))
        assert not learned_from(cycle, slice(None))
    cycle, base = program(plr, **changes)[1], history[-1]
    assert equal(cycle(base.before, fresh=1).after.student, base.after.student)
    assert not equal(cycle(other_levels(base.before)).after.student, base.after.student)


def learning_columns(module, **changes):
    """Numbers of columns of the batches that a cycle computes advantages for, found by tracing."""
    shapes, function = [], module.gae

    def gae(batch, *args):
        shapes.append(batch.reward.shape[1])
        return function(batch, *args)

    train = module.make_train(module.Config(**(SMALL | changes)))
    state = jax.eval_shape(train.init, jax.random.key(0))
    with patch.object(module, "gae", gae):
        jax.eval_shape(partial(train.update, cycles=1), state)
    return set(shapes)


@pytest.mark.slow
def test_columns_that_are_scored_and_learned_from():
    assert learning_columns(plr) == {4}
    assert learning_columns(plr, num_envs=1, num_evals=2, buffer_size=4) == {2}
    assert learning_columns(plr, **PARALLEL) == {8, 16}
    assert learning_columns(plr, **PARALLEL, robust=False) == {8, 16}


# --- many seeds at once


def solo(module, seed, **changes):
    return play(module, SMALL["num_updates"], initial(module, seed, **changes), **changes)


@pytest.fixture(scope="module")
def vmapped():
    """Eight trainings at once, with the keys 0 to 7."""
    rngs = jax.vmap(jax.random.key)(jnp.arange(8))
    train = jax.vmap(plr.make_train(plr.Config(**SMALL)))
    return jax.jit(train)(rngs)


@pytest.mark.slow
def test_a_row_of_many_trainings_equals_the_training_alone(vmapped):
    state, metrics = vmapped
    for seed in (0, 5):
        alone = solo(plr, seed)
        row = jax.tree.map(lambda x: x[seed], state.replace(cycles=state.cycles[None].repeat(8)))
        assert names(row.buffer.level) == names(alone[-1].after.buffer.level)
        pairs = (row.student, row.buffer), (alone[-1].after.student, alone[-1].after.buffer)
        assert all(jax.tree.leaves(jax.tree.map(close, *pairs)))
        for name, x in metrics.items():
            assert close(x[seed], [cycle.metrics[name] for cycle in alone]), name


@pytest.mark.slow
def test_all_seeds_have_one_schedule(vmapped):
    counts = np.asarray(vmapped[1]["grad_updates"])
    assert 0 < counts[0, -1] < SMALL["num_updates"] - 2
    assert (counts == counts[0]).all()
    schedules = [play(plr, 8, initial(plr, seed))[-1].after.grad_updates for seed in (3, 4)]
    assert schedules == [counts[0, 7]] * 2
    for seed in (1, 2):  # nor does the first seed of a run change it
        train = plr.make_train(plr.Config(**(SMALL | dict(seed=seed))))
        replays = jax.vmap(part(train, "replays"))(jnp.arange(12))
        assert equal(np.cumsum(replays), counts[0])


def products(lowered):
    """Matrix products in a lowered program: {(spans all T steps, is inside a conditional)}."""
    module = lowered.compiler_ir("stablehlo")
    functions = {f.attributes["sym_name"].value: f for f in module.body.operations}
    found = []

    def walk(op, inside):
        for child in (child for region in op.regions for block in region for child in block):
            name = child.operation.name
            if name == "stablehlo.dot_general":
                found.append((any(T in x.type.shape for x in child.operands), inside))
            if name in ("func.call", "call"):
                walk(functions[child.attributes["callee"].value], inside)
            walk(child.operation, inside or name in ("stablehlo.case", "stablehlo.if"))

    walk(functions["main"], False)
    return set(found)


ACTS, LEARNS_IN_BRANCH, LEARNS_ALWAYS = (False, False), (True, True), (True, False)


def trainings(module, **changes):
    """make_train, vmapped over 8 seeds, lowered."""
    train = module.make_train(module.Config(**(SMALL | changes)))
    return jax.jit(jax.vmap(train)).lower(jax.random.split(jax.random.key(0), 8))


def command_line(module, at_once=None, **changes):
    """The lowered program of the command line for 8 seeds, which take turns as on a CPU, or run
    at_once as on other devices."""
    config, in_turn = module.Config(**(SMALL | changes), seeds=8), jax.lax.map
    rows = {"seed": np.arange(8)}
    with patch.object(jax.lax, "map", lambda f, xs, **_: in_turn(f, xs, batch_size=at_once)):
        init, update, *_ = module.make_programs(config, 8, jax.devices()[:1], "seeds")
        return update(2).lower(2, rows, jax.eval_shape(init, 0, rows, None)[0])


@pytest.mark.slow
@pytest.mark.parametrize("lower, changes", [
    (trainings, {}), (command_line, {}), (command_line, dict(at_once=4)),
    (trainings, dict(parallel=True))])  # fmt: skip
def test_fresh_cycles_of_many_seeds_skip_learning(lower, changes):
    assert products(lower(plr, **changes)) == {ACTS, LEARNS_IN_BRANCH}


def swept_replay_prob(rng, replay_prob):
    return plr.make_train(plr.Config(**SMALL | dict(replay_prob=replay_prob)))(rng)


@pytest.mark.slow
def test_a_predicate_that_differs_by_row_would_not_skip_learning():
    rngs = jax.random.split(jax.random.key(0), 8)
    lowered = jax.jit(jax.vmap(swept_replay_prob)).lower(rngs, jnp.linspace(0, 1, 8))
    assert products(lowered) == {ACTS, LEARNS_ALWAYS}


@pytest.mark.slow
def test_a_swept_replay_prob_gives_the_same_results():
    values = np.float32([0, 0.5, 1])
    rngs = jax.vmap(jax.random.key)(jnp.array([0, 0, 3]))
    train = jax.jit(jax.vmap(swept_replay_prob))
    metrics = train(rngs, values)[1]
    for i, (seed, value) in enumerate(zip([0, 0, 3], values)):
        floats = dict(replay_prob=value)
        alone = play(plr, SMALL["num_updates"], initial(plr, seed), floats)
        for name, x in metrics.items():
            assert close(x[i], [cycle.metrics[name] for cycle in alone]), name


def sweeps_and_batches(module, **changes):
    """Trace trainings that differ in every float, and cycles of states batched as a whole."""
    config = module.Config(**SMALL | changes | dict(eval_interval=2, eval_suite="MiniMaze"))
    rngs = jax.random.split(jax.random.key(0), 3)
    swept = {name: jnp.linspace(0.1, 0.9, 3) for name in module.FLOATS}
    train = lambda rng, floats: module.make_train(replace(config, **floats))(rng)
    jax.eval_shape(jax.vmap(train), rngs, swept)
    train = module.make_train(config)
    states = jax.eval_shape(jax.vmap(train.init), rngs)
    jax.eval_shape(jax.vmap(partial(train.update, cycles=2)), states)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, dict(parallel=True)])
def test_every_float_can_be_swept_and_every_state_batched(changes):
    sweeps_and_batches(plr, **changes)


# --- configuration


def defaults(module, table):
    """Config and PARALLEL have the published values of both modes; the command line starts from
    them, and flags override them."""
    assert module.parse([]) == module.Config()
    assert module.parse(["--parallel"]) == module.PARALLEL
    assert module.PARALLEL.parallel
    for name, (serial, parallel) in table.items():
        assert getattr(module.Config(), name) == serial, name
        assert getattr(module.PARALLEL, name) == parallel, name
        flag = f"--{name.replace('_', '-')}"
        for mode in ([], ["--parallel"]):
            for value in (serial, parallel, 1):
                assert getattr(module.parse([*mode, flag, str(value)]), name) == value


def length_without_robust(module):
    """If every cycle learns, there are 30,000 of them, unless a flag says otherwise."""
    assert module.parse(["--no-robust"]) == module.PLAIN
    assert not module.PLAIN.robust
    for flags in (["--no-robust"], ["--no-robust", "--parallel"]):
        assert module.parse(flags).num_updates == 30_000
        assert module.parse([*flags, "--num-updates", "7"]).num_updates == 7


def test_published_defaults():
    defaults(plr, dict(
        num_updates=(60_000, 30_000), lr=(3e-4, 3e-4), gamma=(0.999, 0.999),
        gae_lambda=(0.98, 0.95), ent_coef=(0, 0),
        n_walls=(60, 60), replay_prob=(0.5, 0.5), staleness_coef=(0.3, 0.5),
        temperature=(0.3, 0.3), buffer_size=(4000, 4000), min_fill=(0.5, 0.5)))  # fmt: skip
    assert plr.Config().robust
    assert not plr.Config().parallel
    assert plr.Config().score == "max_mc"
    length_without_robust(plr)


def refused(module, name, value, allowed, **changes):
    """make_train refuses a value in one line with the field, the value and what is allowed."""
    with pytest.raises(ValueError) as error:
        module.make_train(module.Config(**(SMALL | changes | {name: value})))
    message = str(error.value)
    assert "\n" not in message
    assert name in message
    assert repr(value) in message
    assert allowed in message


@pytest.mark.parametrize("name, value, allowed", [
    ("replay_prob", -0.1, "0 to 1"), ("replay_prob", 1.1, "0 to 1"),
    ("staleness_coef", 1.5, "0 to 1"), ("min_fill", 2.0, "0 to 1"), ("temperature", 0.0, "1e-06"),
    ("num_updates", 3_000_000_000, "from 1 to"),
    ("temperature", -1.0, "1e-06"), ("buffer_size", 3, "4"),
    ("buffer_size", 0, "1"), ("num_evals", 0, "1"), ("gamma", 1.5, "0 to 1"),
    ("num_minibatches", 3, "4")])  # fmt: skip
def test_bad_values(name, value, allowed):
    refused(plr, name, value, allowed)


@pytest.mark.parametrize("module", [plr, accel])
def test_a_score_that_is_not_known_is_refused_with_those_that_are(module):
    train = module.make_train(module.Config(**SMALL | dict(score="regret")))
    state = jax.eval_shape(train.init, jax.random.key(0))
    with pytest.raises(module.BadConfig) as error:
        jax.eval_shape(partial(train.update, cycles=1), state)
    assert str(error.value) == f"score = 'regret': must be one of {', '.join(SCORES)}"


def test_hope_is_refused_where_levels_may_be_unsolvable():
    for module in (plr, accel):
        score = dict(score="optimistic_max_mc")
        refused(module, "solvable_only", False, "must be True", **score)
        module.make_train(module.Config(**SMALL | score | dict(solvable_only=True)))


def test_learnability_is_refused_with_one_trajectory_on_a_level():
    refused(plr, "num_evals", 1, "at least 2", score="learnability")
    plr.make_train(plr.Config(**SMALL | dict(score="learnability", num_evals=2)))


@pytest.mark.parametrize("score", ["learnability", "oracle_regret"])
def test_means_of_episodes_are_no_score_if_no_failure_ends(score):
    for module in (plr, accel):
        settings = dict(score=score, num_evals=2)
        refused(module, "num_steps", 16, "at least 17", **settings, max_steps=17)
        module.make_train(module.Config(**SMALL | settings | dict(max_steps=16)))


def test_bad_values_of_parallel_mode():
    refused(plr, "buffer_size", 7, "8", parallel=True)
    plr.make_train(plr.Config(**(SMALL | dict(buffer_size=8, parallel=True))))
