"""Functions from papers, to paste above `REMEMBERED` of plr.py or accel.py, all or some; each says
which lines of the script then use it."""

import jax
import jax.numpy as jnp

import amaze


def mna(advantage, max_return):
    """Maximised negative advantage (2601.14957): the loss summed over the rollout [T, N * E], its
    mean over E, of levels that were solved once, 0 of the others -> [N]. An entry of `scores`:

        "mna": mna(advantage, max_return),
    """
    loss = jnp.maximum(-advantage, 0).sum(0).reshape(len(max_return), -1).mean(1)
    return jnp.where(amaze.solved(max_return), loss, 0.0)


def best_quarter(batch, advantage, target):
    """Of a batch [T, B] the B / 4 trajectories with the largest sums of |advantage|. In `learn`,
    after the line of `target`:

        batch, advantage, target = best_quarter(batch, advantage, target)
    """
    best = jnp.argsort(-jnp.abs(advantage).sum(0))[: advantage.shape[1] // 4]
    return jax.tree.map(lambda x: x[:, best], (batch, advantage, target))


def rank_correlation(x, y):
    """Spearman's correlation of x and y [N] where both are known; NaN if one of them is constant.
    The sum of signs is 2 (rank - mean rank); equal values share their mean rank."""
    known = ~jnp.isnan(x + y)
    centre = lambda x: jnp.nansum(jnp.sign(x[:, None] - x), axis=1, where=known & known[:, None])
    x, y = centre(x), centre(y)
    return (x * y).sum() / jnp.sqrt((x**2).sum() * (y**2).sum())


ESTIMATES = "max_mc optimistic_max_mc positive_value_loss l1_value_loss learnability".split()


def regret_stats(entries):
    """How well each estimate ranks N levels by their true regret, and the share of that regret that
    is in levels never solved. In place of the lines that define these two names:

        REMEMBERED = ("mean_return", "oracle_regret", *ESTIMATES)
        remembered = {"mean_return": mean_return} | {x: scores[x] for x in REMEMBERED[1:]}

    and among the `metrics` of `cycle`:

        metrics |= regret_stats(entries)
    """
    regret = entries.remembered["oracle_regret"]
    correlation = lambda name: rank_correlation(entries.remembered[name], regret)
    stats = {f"rank_correlation_{name}": correlation(name) for name in ESTIMATES}
    unsolved = jnp.where(amaze.solved(entries.max_return), 0.0, regret)
    return stats | {"never_solved_regret_share": jnp.nansum(unsolved) / jnp.nansum(regret)}
