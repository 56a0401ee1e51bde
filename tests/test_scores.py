"""examples/scores.py, pasted into plr.py and accel.py as its docstrings say."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_plr
from parts import hacked, traced
from runs import ROOT
from scipy.stats import spearmanr
from test_examples import load_module

sys.path.insert(0, str(ROOT))
import accel
import plr

scores = load_module(ROOT / "examples/scores.py")
TEXT = (ROOT / "examples/scores.py").read_text()
FUNCTIONS = TEXT.partition("import amaze\n")[2].strip()
NEW = """"mna": mna(advantage, max_return),
batch, advantage, target = best_quarter(batch, advantage, target)
REMEMBERED = ("mean_return", "oracle_regret", *ESTIMATES)
remembered = {"mean_return": mean_return} | {x: scores[x] for x in REMEMBERED[1:]}
metrics |= regret_stats(entries)""".splitlines()
PLACES = {  # line of the script: what it becomes; a new line is the n-th of NEW
    "    scores = {\n": "    scores = {{\n        {0}\n",
    "target = advantage + batch.value\n": "target = advantage + batch.value\n        {1}\n",
    'REMEMBERED = ("mean_return",)': FUNCTIONS.replace("{", "{{").replace("}", "}}") + "\n\n\n{2}",
    '    remembered = {"mean_return": mean_return}\n': "    {3}\n",
    "        metrics |= buffer_stats(": "        {4}\n        metrics |= buffer_stats(",
}


def pasted(module):
    return hacked(module, {old: new.format(*NEW) for old, new in PLACES.items()})


@pytest.fixture(scope="module")
def hooked():
    """plr.py with all of it."""
    return pasted(plr)


def test_the_lines_to_paste_are_those_of_the_docstrings():
    shown = [x.strip() for x in FUNCTIONS.splitlines() if x.startswith(" " * 8)]
    assert [x for x in shown if x in NEW] == NEW


def test_mna_is_the_mean_loss_of_levels_solved_once():
    advantage = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    found = scores.mna(advantage, jnp.array([0.5, 0.0, 0.1]))  # two trajectories on each level
    lost = [sum(max(-a, 0) for a in advantage[:, b]) for b in range(6)]
    np.testing.assert_allclose(found, [(lost[0] + lost[1]) / 2, 0, (lost[4] + lost[5]) / 2], 1e-5)
    assert scores.mna(advantage, jnp.array([-jnp.inf] * 3)).tolist() == [0, 0, 0]


def test_the_best_quarter_has_the_largest_advantages():
    random = np.random.default_rng(1)
    advantage, value, seen = random.normal(size=(3, 7, 8)).astype(np.float32)
    batch, above, target = scores.best_quarter({"seen": seen}, advantage, advantage + value)
    best = sorted(range(8), key=lambda b: -sum(abs(a) for a in advantage[:, b]))[:2]
    np.testing.assert_array_equal(batch["seen"], seen[:, best])
    np.testing.assert_array_equal(above, advantage[:, best])
    np.testing.assert_array_equal(target, (advantage + value)[:, best])


@pytest.mark.parametrize("number", [3, 32, 1000])
def test_rank_correlation_is_scipys(number):
    """With ties; only over pairs where both are known; NaN if one of them is constant."""
    random, correlation = np.random.default_rng(number), jax.jit(scores.rank_correlation)
    found = []
    for _ in range(30):
        x, y = random.integers(-number, number, (2, number)) / 8  # exact in float32: ties stay
        x, y = np.where(random.random((2, number)) < 0.1, np.nan, [x, x + y])
        known = ~np.isnan(x + y)
        if len({*x[known]}) > 1 and len({*y[known]}) > 1:
            found.append((correlation(x, y), spearmanr(x[known], y[known]).statistic))
    assert len(found) > 15
    assert len({*np.transpose(found)[0]}) > 1
    np.testing.assert_allclose(*np.transpose(found), atol=1e-5)
    assert np.isnan(correlation(x, np.ones(number)))
    assert np.isnan(correlation(x, np.full(number, np.nan)))


@pytest.mark.slow
def test_a_training_with_all_of_them(hooked):
    """It scores levels by mna, and learns from two trajectories of eight. Its log is compared with
    plain scores of levels with an ended episode, ranked by scipy."""
    shares, learned = [], 0
    for cycle in test_plr.play(hooked, 12, score="mna", **test_plr.PARALLEL):
        filled, level = test_plr.contents(cycle.before.buffer), test_plr.names(cycle.entries.level)
        seen = [filled.get(x, {"max_return": -np.inf})["max_return"] for x in level]
        best = cycle.best.tolist()
        found = test_plr.outcomes(cycle.batch, cycle.advantage, level, seen, best)
        np.testing.assert_allclose(
            cycle.entries.score,
            scores.mna(cycle.advantage, jnp.array([r_max for _, r_max, *_ in found])),
            1e-4,
            1e-6,
        )
        found = [(r_max, x) for ended, r_max, _, x in found if ended]
        regret = [x["oracle_regret"] for _, x in found]
        for name in scores.ESTIMATES:
            x = np.round([x[name] for _, x in found], 6)  # what ties in float32
            expected = spearmanr(x, regret).statistic if len({*x}) > 1 else np.nan
            logged = cycle.metrics[f"rank_correlation_{name}"]
            assert logged == pytest.approx(expected, abs=1e-4, nan_ok=True), name
        unsolved = sum(x for (r_max, _), x in zip(found, regret) if r_max <= 0)
        shares.append(unsolved / sum(regret))
        assert cycle.metrics["never_solved_regret_share"] == pytest.approx(shares[-1], abs=1e-5)
        if cycle.after.grad_updates > cycle.before.grad_updates:
            advantage = cycle.advantage[:, 8:]  # of replayed levels
            best = np.argsort(-np.abs(advantage).sum(0))[:2]
            a, v = advantage[:, best], cycle.batch.value[:, 8:][:, best]
            explained = cycle.metrics["explained_variance"]
            np.testing.assert_allclose(explained, 1 - a.var() / (a + v).var(), 1e-3, 1e-4)
            learned += 1
    assert learned > 2
    assert len({*shares}) > 4


def test_accel_has_the_same_columns(hooked):
    columns = []
    for script in hooked, pasted(accel):
        config = script.Config(**test_plr.SMALL, score="mna")
        metrics = traced(script.make_train(config))[1]
        columns.append({x for x in metrics if "rank_corr" in x or "never_solved" in x})
    assert columns[0] == columns[1]
    assert len(columns[0]) == 6
