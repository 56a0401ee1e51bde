"""Do JaxUED and minimax compute what this project does? One update of each from the same numbers.

    python benchmarks/peers/parity.py jaxued --source ../jaxued     # a checkout of the peer
    python benchmarks/peers/parity.py minimax --source ../minimax

Their student's parameters, after some updates of theirs, are carried over into ours (for JaxUED
into its network). Ours plays a rollout; then each computes from it the policy, one
PPO update, the scores of the levels and the probabilities of a buffer. Printed are the largest
differences, beside the size of what differs.
"""

import argparse
import importlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import learning

import jax
import jax.numpy as jnp
import numpy as np

GATES = "ifgo"
LR = 5e-3  # so high that the clipping of PPO acts


def lstm(cell, rows=lambda x: x):
    """Kernel [4H, I + H] and bias of ours from flax's cell."""
    each = lambda gate: jnp.hstack(
        [rows(cell["i" + gate]["kernel"]).T, cell["h" + gate]["kernel"].T]
    )
    bias = jnp.concatenate([cell["h" + gate]["bias"] for gate in GATES])
    return {"kernel": jnp.vstack([each(gate) for gate in GATES]), "bias": bias}


def from_jaxued(tree):
    p = tree["params"]
    conv = {"kernel": p["Conv_0"]["kernel"].reshape(27, 16), "bias": p["Conv_0"]["bias"]}
    dense = ["scalar_embed", "actor0", "actor1", "critic0", "critic1"]
    # flax numbers layers as they are made: a hidden layer after its head's last one
    names = {"scalar_embed": 0, "actor1": 1, "actor0": 2, "critic1": 3, "critic0": 4}
    heads = {f"Dense_{names[name]}": dict(p[name]) for name in dense}
    return {"params": {"conv": conv, "core": lstm(p["OptimizedLSTMCell_0"])} | heads}


def from_minimax(tree):
    p = jax.tree.map(lambda x: x[0], tree["params"])
    turn = lambda x: (
        x.reshape(3, 3, 16, -1).swapaxes(0, 1).reshape(144, -1)
    )  # of its transposed view
    rows = lambda x: jnp.concatenate([turn(x[:144]), x[144:]])
    kernel = p["cnn"]["kernel"].swapaxes(0, 1).reshape(27, 16)
    heads = {
        "Dense_0": p["fc_pi_final"],
        "Dense_1": p["fc_pi_1"],
        "Dense_2": p["v_head"]["fc_value_final"],
        "Dense_3": p["v_head"]["Dense_0"],
    }
    core = lstm(p["rnn"]["OptimizedLSTMCell_0"], rows)
    conv = {"kernel": kernel, "bias": p["cnn"]["bias"]}
    return {"params": {"conv": conv, "core": core, "Embed_0": p["fc_scalar"]} | heads}


def difference(x, y):
    return max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y)))


def report(name, theirs, ours, scale):
    """Print a comparison of two trees of one structure."""
    assert jax.tree.structure(theirs) == jax.tree.structure(ours), name
    print(f"{name}: differs by {difference(theirs, ours):.1e}, size {scale:.1e}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=["jaxued", "minimax"])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--ours", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--updates", type=int, default=10)
    options = parser.parse_args()
    sys.path[:0] = [str(options.ours), str(options.ours / "tests")]
    theirs = getattr(learning, options.library)("dr", options.source.resolve(), {"lr": LR})
    convert = {"jaxued": from_jaxued, "minimax": from_minimax}[options.library]
    settings = learning.SETTINGS[options.library, "dr"]
    plr = importlib.import_module("plr")
    if options.library == "jaxued":
        plr.ActorCritic = learning.JaxuedStudent
    config = plr.Config(hidden_size=learning.HIDDEN, eval_interval=0)
    train = plr.make_train(replace(config, **dict(lr=1e-4, gamma=0.995, ent_coef=1e-3) | settings))
    part = partial(importlib.import_module("parts").part, train)

    fresh = state = theirs.init(0)
    for _ in range(-(-options.updates // learning.CYCLES)):
        state = theirs.update(state)
    before = theirs.params(state)
    params = convert(before)
    rng = jax.random.key(0)
    levels = part("sample_levels")(rng, config.num_envs, 1)
    batch, last_value = jax.jit(part("rollout"))(rng, params, levels)

    # 1. the policy and the values of that rollout
    obs, first = theirs.adapt(batch.obs), batch.is_first
    number = first.shape[1]
    if options.library == "jaxued":
        inputs = (obs, first), theirs.carry(number)
        policy, value = fresh[1].apply_fn(before, *inputs)[1:]
        log_prob = policy.log_prob(batch.action)
    else:
        one = lambda tree: jax.tree.map(lambda x: x[None], tree)
        agent = theirs.parts.student_pop.agent
        carry = jax.tree.map(lambda x: x[0], theirs.carry(number))
        only = jax.tree.map(lambda x: x[0], before)
        value, log_prob, _, _ = agent.evaluate(only, batch.action, obs, carry, first)
    report("log-probabilities", log_prob, batch.log_prob, float(jnp.abs(batch.log_prob).max()))
    report("values", value, batch.value, float(jnp.abs(batch.value).max()))

    # 2. one PPO update: five epochs
    optimiser = part("optimiser")
    student = plr.Agent(params, optimiser(0.0).init(params))
    learn = jax.jit(part("learn"))
    ours = learn(rng, student, LR, batch, last_value)[0].params
    key = jax.random.PRNGKey(0)
    if options.library == "jaxued":
        script, train_state = theirs.parts, fresh[1]
        train_state = train_state.replace(params=before, opt_state=train_state.tx.init(before))
        advantage, target = script.compute_gae(
            0.995, 0.98, last_value, batch.value, batch.reward, batch.done
        )
        data = batch.action, batch.done, batch.log_prob, batch.value, target, advantage
        given = (obs, *data), 32, 256, 1, 5, 0.2, 1e-3, 0.5
        update = script.update_actor_critic_rnn(key, train_state, theirs.carry(number), *given)
        after = update[0][1].params
    else:
        train_state = fresh[1].replace(params=before)
        storage = dict(
            obs=obs, actions=batch.action.astype(jnp.uint32), rewards=batch.reward,
            dones=batch.done.astype(jnp.uint8), log_pis_old=batch.log_prob, values_old=batch.value,
            carry=jax.tree.map(lambda x: jnp.zeros((256, *x.shape[1:])), theirs.carry(number)),
            _t=jnp.zeros((), jnp.uint32))  # fmt: skip
        data = theirs.parts.student_rollout.get_batch(one(storage), last_value[None])
        after = theirs.parts.student_pop.update(key, train_state, data)[0].params
    change = difference(convert(after), params)
    report("parameters after an update", convert(after), dict(ours), change)

    # 3. scores of the levels, and probabilities of a buffer
    buffer = plr.Buffer(*[None] * len(plr.Buffer._fields))
    noise = np.random.default_rng(0)
    size, filled, now = 4000, 3000, 500
    score = jnp.array(np.where(np.arange(size) < filled, noise.normal(size=size), -np.inf))
    touched = jnp.array(noise.integers(0, now, size))
    scored = jnp.arange(size) < filled
    buffer = buffer._replace(score=score, touched=touched, scored=scored)
    mine = plr.replay_probabilities(buffer, now, 0.3, 0.3)
    advantage = plr.gae(batch, last_value, 0.995, 0.98)
    seen = jnp.full(number, -jnp.inf)
    outcomes = plr.level_outcomes(batch, advantage, seen, {}, jnp.eye(number) > 0, seen)
    mine_score = outcomes[3]["max_mc"]
    if options.library == "jaxued":
        from jaxued.level_sampler import LevelSampler
        from jaxued.utils import compute_max_returns, max_mc

        theirs_score = max_mc(
            batch.done, batch.value, compute_max_returns(batch.done, batch.reward)
        )
        given = {"temperature": 0.3}
        sampler = LevelSampler(size, staleness_coeff=0.3, prioritization_params=given)
        state = dict(scores=score, timestamps=touched, episode_count=now, size=filled)
        probability = sampler.level_weights(state)
    else:
        from minimax.util.rl.plr import PLRManager
        from minimax.util.rl.ued_scores import UEDScore, compute_ued_scores

        info = {"max_returns": jnp.full((1, number), -jnp.inf)}
        theirs_score = compute_ued_scores(
            UEDScore.MAX_MC, data, 1, info=info, ignore_val=-jnp.inf, per_agent=True
        )[0][0]
        level = dict(x=jnp.zeros(2))
        manager = PLRManager(level, UEDScore.MAX_MC, buffer_size=size, temp=0.3, staleness_coef=0.3)
        ages = jnp.where(scored, now - touched, 0).astype(jnp.uint32)
        probability = manager._get_replay_dist(score, ages, scored)
    report("max_mc", theirs_score, mine_score, float(jnp.abs(mine_score).max()))
    report("replay probabilities", probability, mine, float(mine.max()))


if __name__ == "__main__":
    main()
