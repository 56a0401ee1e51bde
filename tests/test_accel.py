"""accel.py against plain Python, and against plr.py where the two must agree."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_plr
from parts import part
from test_plr import (
    ACTS, LEARNS_IN_BRANCH, MODES, SMALL, K, T, check_a_free_slot_is_not_replayed,
    check_an_empty_buffer, check_levels_shown, check_logged, close,
    command_line, contents, defaults, equal, first_replay_of, follow_random_batches,
    gradient_updates, initial, learned, learned_from, learning_columns,
    length_without_robust, names, outcomes, play, products, program, records, refused, replayed,
    same_contents, slot_of_a_level_drawn_twice, sweeps_and_batches, trainings,
    write)  # fmt: skip

import accel
import amaze
import plr

# One edit a child, so that a child can be told by its parent; in the rest plr.py's defaults.
SERIAL = dict(num_edits=1, staleness_coef=0.3)
PARALLEL = dict(num_edits=1, parallel=True, num_evals=2, gae_lambda=0.95, ent_coef=0.0)
NO_EDITS = dict(num_edits=0)
N = SMALL["num_envs"]


@pytest.fixture(scope="module")
def serial():
    return play(accel, 40, **SERIAL)


@pytest.fixture(scope="module")
def parallel():
    return play(accel, 12, **PARALLEL)


def pairs(level):
    """The levels of a batch as (name, Level)."""
    rows = [jax.tree.map(lambda x: np.asarray(x[i]), level) for i in range(len(level.agent_dir))]
    return list(zip(names(level), rows))


def one_edit_apart(child, parent):
    """Whether the child is its parent, perhaps with one wall flipped or with the goal moved."""
    flipped, moved = child.wall_map != parent.wall_map, (child.goal_pos != parent.goal_pos).any()
    free = [child.wall_map[y, x] == 0 for x, y in (child.agent_pos, child.goal_pos)]
    same_agent = equal(child[1:3], parent[1:3])
    return same_agent and all(free) and flipped.sum() + moved <= 1


# --- children


def test_a_child_is_its_parent_after_the_edits():
    train = accel.make_train(accel.Config(**(SMALL | dict(num_edits=7))))
    edit = part(train, "edit")
    sample = jax.vmap(lambda rng: amaze.sample_level(rng, 6, 5, 5))
    parents = jax.jit(sample)(jax.random.split(jax.random.key(0), N))
    rng, mutations = jax.random.key(1), jnp.array([0, 3, 0, 9])
    replay = jnp.ones(N, bool)
    children, generation, again = jax.jit(edit)(rng, parents, mutations, replay)
    assert not again.any()
    assert generation.tolist() == [1, 4, 1, 10]
    single = jax.jit(amaze.edit_level, static_argnums=2)
    for i, (_, child) in enumerate(pairs(children)):
        parent = jax.tree.map(lambda x: x[i], parents)
        assert equal(child, single(jax.random.split(rng, N)[i], parent, 7))
        assert equal(child[1:3], parent[1:3])
    assert len({*names(parents), *names(children)}) > N + 1


def test_with_solvable_only_children_are_edits_that_can_be_solved():
    small = SMALL | dict(num_edits=30)
    rng, zero = jax.random.key(2), jnp.zeros(N, int)
    draw = lambda rng: amaze.sample_level(rng, 9, 5, 5)
    sample = jax.vmap(partial(amaze.sample_solvable, sample=draw))
    parents = jax.jit(sample)(jax.random.split(rng, N))
    bred = {}
    for only in (False, True):
        edit = part(accel.make_train(accel.Config(**small, solvable_only=only)), "edit")
        bred[only] = jax.jit(edit)(rng, parents, zero, zero > 0)[0]
    share = {only: np.asarray(jax.vmap(amaze.solve)(x).solvable) for only, x in bred.items()}
    assert not share[False].all()
    assert share[True].all()
    assert {*names(bred[True])} != {*names(parents)}


@pytest.mark.slow
def test_children_are_scored_and_written_as_fresh_levels_are(serial):
    breed = part(program(accel, **SERIAL)[0], "breed")
    before = [cycle for cycle in serial if replayed(cycle)][-1].before
    calls = {}

    def spied(rng, state, *parents):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("write_buffer", "level_outcomes"):
                function = getattr(accel, name)
                watched = lambda *args, f=function, n=name: calls.update({n: args}) or f(*args)
                patch.setattr(accel, name, watched)
            after, stats = breed(rng, state, *parents)
        batch, advantage, *_, best = calls["level_outcomes"]
        return after.buffer, stats, calls["write_buffer"][1], (batch, advantage, best)

    spied = jax.jit(spied)
    slot = jnp.array([0, 0, 5, 7])
    buffer = before.buffer
    parents = buffer.level, buffer.mutations, buffer.scored
    parents = jax.tree.map(lambda x: x[slot], parents)
    result = spied(jax.random.key(0), before, *parents)
    after, stats, entries, (batch, advantage, best) = jax.tree.map(np.asarray, result)
    reference, known = contents(buffer), contents(buffer)
    seen = [known.get(x, {"max_return": -np.inf})["max_return"] for x in names(entries.level)]
    expected = outcomes(batch, advantage, names(entries.level), seen, best)
    for (_, finished, record), (_, r_max, mean, scores) in zip(records(entries), expected):
        plain = dict(score=scores["max_mc"], mean_return=mean, max_return=r_max)
        assert finished
        assert {k: record[k] for k in plain} == pytest.approx(plain, abs=1e-5)
    now = int(before.cycles)
    write(reference, SMALL["buffer_size"], records(entries), now, 0.3, 0.3)
    same_contents(after, reference)
    assert stats["child_walls"] == pytest.approx(entries.level.wall_map.sum((1, 2)).mean())


@pytest.mark.slow
def test_children_of_a_training(serial):
    """New levels of the buffer: base levels in fresh cycles, else children of replayed levels."""
    born, generations = 0, set()
    for cycle in serial:
        before, after = contents(cycle.before.buffer), contents(cycle.after.buffer)
        played, levels = pairs(cycle.entries.level), dict(pairs(cycle.after.buffer.level))
        for level in after.keys() - before.keys():
            new = after[level]
            if replayed(cycle):
                parents = [before[name] for name, parent in played
                           if one_edit_apart(levels[level], parent)]  # fmt: skip
                assert new["mutations"] in [parent["mutations"] + 1 for parent in parents]
                born += 1
                generations.add(new["mutations"])
            else:
                assert new["mutations"] == 0
        for level in after.keys() & before.keys():
            assert after[level]["mutations"] == before[level]["mutations"]
    assert born > 10
    assert {1, 2} <= generations


@pytest.mark.slow
def test_mutation_counts_through_insertions_and_evictions():
    total = follow_random_batches(accel, 100)
    assert total["inserted"] == K
    assert min(total["updated"], total["evicted"]) > 30


@pytest.mark.slow
def test_mutations_are_logged_weighted_by_p(serial):
    state, metrics = serial[-1].after, serial[-1].metrics
    p = accel.replay_probabilities(state.buffer, state.cycles, 0.3, 0.3)
    assert close(metrics["buffer_mutations_weighted"], p @ state.buffer.mutations)
    assert close(metrics["buffer_walls_weighted"], p @ state.buffer.level.wall_map.sum((1, 2)))
    solution = jax.jit(jax.vmap(amaze.solve))(state.buffer.level)
    p = p * solution.solvable
    assert close(metrics["buffer_path_length_weighted"], p @ solution.path_length / p.sum())
    assert metrics["buffer_mutations_weighted"] > 0


@pytest.mark.slow
def test_children_are_played_after_replay_only(serial):
    for i, cycle in enumerate(serial):
        assert np.isnan(cycle.metrics["child_walls"]) == (not replayed(cycle))
        assert learned(cycle) == replayed(cycle)
        assert cycle.batch.reward.shape == (T, N)
        replays = sum(map(replayed, serial[: i + 1]))
        assert cycle.metrics["grad_updates"] == replays
        assert cycle.metrics["rollouts"] == i + 1 + replays


def first_replay(history):
    return next(cycle for cycle in history if replayed(cycle))


@pytest.mark.slow
def test_children_are_played_by_the_student_that_has_learned(serial):
    cycle, before = program(accel, **SERIAL)[1], first_replay(serial).before
    slow, fast = cycle(before, lr=0.0), cycle(before, lr=0.05)
    assert equal(slow.entries, fast.entries)
    slow, fast = contents(slow.after.buffer), contents(fast.after.buffer)
    children = (slow.keys() & fast.keys()) - contents(before.buffer).keys()
    assert children
    assert all(slow[level]["score"] != fast[level]["score"] for level in children)


@pytest.mark.slow
def test_a_student_learns_nothing_from_children(serial):
    childless = play(accel, 4, **SERIAL | NO_EDITS)
    pair = first_replay(serial), first_replay(childless)
    assert pair[0].before.cycles == pair[1].before.cycles
    assert learned(pair[0])
    assert equal(pair[0].after.student, pair[1].after.student)
    assert not equal(pair[0].after.buffer.level, pair[1].after.buffer.level)
    other = program(accel, **SERIAL)[1](pair[0].before, edits=1)  # other edits
    assert equal(other.after.student, pair[0].after.student)
    assert not equal(other.after.buffer.level, pair[0].after.buffer.level)


# --- score and schedule


@pytest.mark.slow
def test_a_level_drawn_twice_is_scored_with_one_r_max():
    slot = slot_of_a_level_drawn_twice(accel)
    assert (slot["score"], slot["max_return"]) == pytest.approx((0.6, 0.9))


def test_min_fill_counts_all_levels_of_a_cycle():
    assert first_replay_of(accel) == 25  # 8 levels a cycle
    assert first_replay_of(accel, parallel=True, **NO_EDITS) == 13  # 16
    assert first_replay_of(accel, parallel=True) == 9  # 24


@pytest.mark.parametrize("flags", MODES)
def test_default_length_makes_30_000_gradient_updates(flags):
    assert gradient_updates(accel, flags) == pytest.approx(30_000, rel=0.01)


# --- parallel mode


def test_parallel_plays_fresh_replayed_and_children_together(parallel):
    edited = 0
    for i, cycle in enumerate(parallel):
        assert cycle.batch.reward.shape == (T, 3 * N * 2)
        assert cycle.metrics["rollouts"] == 3 * (i + 1)
        assert cycle.metrics["grad_updates"] == i == int(cycle.after.grad_updates)
        opens = amaze.Observation(*(x[0] for x in cycle.batch.obs))
        assert equal(opens.direction, np.repeat(cycle.entries.level.agent_dir, 2))
    for cycle in parallel[1:]:
        filled, batch = contents(cycle.before.buffer), records(cycle.entries)
        known, levels = cycle.slot < SMALL["buffer_size"], pairs(cycle.entries.level)
        assert known[N : 2 * N].all()
        assert not known[:N].any()
        assert all(x["mutations"] == 0 for _, _, x in batch[:N])
        for (name, _, parent), (_, _, child) in zip(batch[N : 2 * N], batch[2 * N :]):
            assert child["mutations"] == parent["mutations"] + 1
            assert filled[name]["mutations"] == parent["mutations"]
        for (_, parent), (_, child) in zip(levels[N : 2 * N], levels[2 * N :]):
            assert one_edit_apart(child, parent)
            edited += not equal(child, parent)
        walls = cycle.entries.level.wall_map.sum((1, 2))
        assert cycle.metrics["child_walls"] == pytest.approx(walls[2 * N :].mean())
        check_logged(cycle, "fresh", slice(N))
        check_logged(cycle, "replay", slice(N, 2 * N))
    assert edited > 5 * N  # of 11 N; one edit in three is none


def test_cold_parallel_accel_plays_fresh_levels_instead_of_children():
    for i, cycle in enumerate(play(accel, 2, floats=dict(min_fill=1.0), **PARALLEL)):
        assert len(contents(cycle.before.buffer)) == 12 * i
        assert not learned(cycle)
        levels = pairs(cycle.entries.level)
        assert len({*names(cycle.entries.level)} - contents(cycle.before.buffer).keys()) == 3 * N
        near = [one_edit_apart(x[1], y[1]) for x in levels[2 * N :] for y in levels[: 2 * N]]
        assert not any(near)
        assert not cycle.entries.mutations.any()
        assert np.isnan([x for k, x in cycle.metrics.items() if k.startswith("child_")]).all()
        check_logged(cycle, "fresh", slice(None))
        check_logged(cycle, "replay", slice(0))


@pytest.mark.slow
@pytest.mark.parametrize("blocks, changes", [(1, SERIAL), (3, PARALLEL)])
def test_an_empty_buffer_is_not_replayed(blocks, changes):
    check_an_empty_buffer(accel, blocks, **changes)


@pytest.mark.slow
def test_a_free_slot_is_not_replayed(monkeypatch, serial):
    check_a_free_slot_is_not_replayed(monkeypatch, accel, serial[-1].after)


def test_parallel_buffer_is_written_once_with_all_blocks(parallel):
    reference = {}
    for now, cycle in enumerate(parallel):
        write(reference, SMALL["buffer_size"], records(cycle.entries), now, 0.3, 0.5)
        same_contents(cycle.after.buffer, reference)


def test_parallel_learns_from_the_replayed_block_only(parallel):
    cycle, base = program(accel, **PARALLEL)[1], parallel[5]
    assert list(map(learned, parallel)) == [False] + [True] * 11
    for x in parallel[1:]:
        assert learned_from(x, slice(2 * N, 4 * N))
        assert not learned_from(x, slice(None))
    fresh, edits = cycle(base.before, fresh=1), cycle(base.before, edits=1)
    for block, other in ((0, fresh), (2, edits)):
        mine, theirs = names(base.entries.level), names(other.entries.level)
        differ = [mine[i : i + N] != theirs[i : i + N] for i in (0, N, 2 * N)]
        assert differ == [i == block for i in range(3)]
        assert equal(other.after.student, base.after.student)
    for robust in (True, False):
        assert learning_columns(accel, **PARALLEL, robust=robust) == {2 * N, 3 * N * 2}
    assert learning_columns(accel, **SERIAL) == {N}


@pytest.mark.slow
def test_show_gives_random_levels_and_those_that_are_replayed_most(serial):
    check_levels_shown(accel, serial, **SERIAL)


# --- against plr.py


@pytest.mark.slow
@pytest.mark.parametrize("mine, theirs", [(SERIAL, {}), (PARALLEL, test_plr.PARALLEL)])
def test_without_edits_accel_is_plr(mine, theirs):
    histories = play(plr, 12, **theirs), play(accel, 12, **mine | NO_EDITS)
    assert {replayed(cycle) for cycle in histories[0]} == {False, True}
    for a, b in zip(*histories):
        assert equal(a.after.student, b.after.student)
        for name in plr.Buffer._fields:
            assert equal(getattr(a.after.buffer, name), getattr(b.after.buffer, name)), name
        assert a.metrics.keys() <= b.metrics.keys()
        for name, x in a.metrics.items():
            assert equal(x, b.metrics[name]), name


# --- many seeds at once


@pytest.mark.slow
@pytest.mark.parametrize("lower", [trainings, command_line])
def test_fresh_cycles_of_many_seeds_skip_learning_and_children(lower):
    acts_in_branch = (False, True)  # the children's rollout
    found = products(lower(accel, **SERIAL))
    assert found == {ACTS, acts_in_branch, LEARNS_IN_BRANCH}


@pytest.mark.slow
def test_cold_cycles_of_many_seeds_in_parallel_mode_skip_learning():
    assert products(trainings(accel, **PARALLEL)) == {ACTS, LEARNS_IN_BRANCH}


@pytest.mark.slow
def test_every_float_can_be_swept_and_every_state_batched():
    sweeps_and_batches(accel, **SERIAL)


@pytest.mark.slow
def test_all_seeds_have_one_schedule(serial):
    counts = [cycle.metrics["grad_updates"] for cycle in serial[:10]]
    other = play(accel, 10, initial(accel, 1, **SERIAL), **SERIAL)
    assert [cycle.metrics["grad_updates"] for cycle in other] == counts
    assert counts[-1] > 0


# --- configuration


def test_published_defaults():
    length_without_robust(accel)
    defaults(accel, dict(
        num_updates=(37_500, 30_000),
        lr=(3e-4, 1e-4), gamma=(0.999, 0.999), gae_lambda=(0.98, 0.98), ent_coef=(0, 1e-3),
        n_walls=(0, 0), replay_prob=(0.8, 0.8), staleness_coef=(0.5, 0.5), num_edits=(20, 20),
        temperature=(0.3, 0.3), buffer_size=(4000, 4000), min_fill=(0.5, 0.5)))  # fmt: skip
    assert accel.Config().robust
    assert not accel.Config().parallel


def test_bad_values():
    refused(accel, "num_edits", -1, "0")
    refused(accel, "replay_prob", 1.1, "0 to 1")
    refused(accel, "buffer_size", 3, "4")


def test_a_buffer_too_small_for_a_parallel_cycle_is_refused():
    refused(accel, "buffer_size", 11, "12", parallel=True)
    accel.make_train(accel.Config(**(SMALL | dict(buffer_size=12, parallel=True))))
    accel.make_train(accel.Config(**(SMALL | dict(buffer_size=8, parallel=True, num_edits=0))))
