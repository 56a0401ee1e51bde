"""play.html: its JavaScript beside amaze.py and flax, what evaluate.py --play writes and refuses,
and the page in a browser."""

import base64
import json
import re
import shutil
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from py_mini_racer import MiniRacer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import amaze  # noqa: E402
import dr  # noqa: E402
import evaluate  # noqa: E402

TINY = dict(height=5, width=5, n_walls=5, num_envs=4, num_steps=8)
CORES = {
    "lstm": dict(rnn="lstm", hidden_size=64),
    "lstm, its inputs projected": dict(rnn="lstm", hidden_size=16),
    "gru": dict(rnn="gru", hidden_size=16),
    "none": dict(rnn="none"),
    "s5, norm after": dict(rnn="s5", hidden_size=18, s5_norm="after"),
    "s5, norm before": dict(rnn="s5", hidden_size=16, s5_norm="before", s5_layers=1),
    "s5, no norm": dict(rnn="s5", hidden_size=16, s5_norm="none"),
}


def scripts(html):
    """The JavaScript of the sections MAZE and NETWORK."""
    return re.findall(r"<!-- (?:MAZE|NETWORK) -->\n<script>\n(.*?)</script>", html, re.DOTALL)


@pytest.fixture(scope="module")
def js():
    """js(expression, name=value, ...) -> its value, by V8."""
    maze, network = scripts((ROOT / "play.html").read_text())
    racer = MiniRacer()
    racer.eval(maze + network)

    def js(expression, **given):
        names, values = ", ".join(given), ", ".join(map(json.dumps, given.values()))
        return json.loads(racer.eval(f"JSON.stringify((({names}) => {expression})({values}))"))

    return js


def texts(levels, max_steps=250, see_through_walls=True):
    """A batch of levels as the page writes them."""
    maze = evaluate.Maze("x", levels, max_steps, see_through_walls)
    return data(evaluate.page([], [maze]))["mazes"]["x"]


def data(page):
    """What a page was filled with."""
    [text] = re.findall(r'id="data">\n(.*)\n</script>', page.decode())
    return json.loads(text)


def draw(number, height, width, seed=0):
    """Random levels, up to half of them walls."""
    rng = np.random.default_rng(seed)
    walls = rng.random((number, height, width)) < rng.uniform(0, 0.5, (number, 1, 1))
    return jax.jit(jax.vmap(amaze.place))(jax.random.split(jax.random.key(seed), number), walls)


# --- the maze


@pytest.mark.parametrize("see", [True, False])
@pytest.mark.parametrize("height, width", [(13, 13), (4, 3), (23, 40)])
def test_observations_rewards_and_ends_are_amazes(height, width, see, js):
    """200 levels, 100 random actions on each; an episode that ends begins again."""
    levels = draw(200, height, width)
    chances = [0.15, 0.15, 0.6, 0.025, 0.025, 0.025, 0.025]
    actions = np.random.default_rng(1).choice(7, (100, 200), p=chances)

    @jax.jit
    def walk(levels, actions):
        obs, state = jax.vmap(partial(amaze.reset, max_steps=37, see_through_walls=see))(levels)

        def step(state, action):
            obs, state, *rest = jax.vmap(amaze.step_and_reset)(state, action)
            return state, (obs, *rest)

        return obs, jax.lax.scan(step, state, actions)[1]

    first, (later, rewards, dones) = jax.device_get(walk(levels, actions))
    found = js("""mazes.map(maze_from_text).map((maze, n) => {
        const begin = () => reset(maze.level, maze.max_steps, maze.see_through_walls);
        const show = ({image, direction}) => [[...image].join(""), direction];
        let [obs, state] = begin(), seen = [show(obs)], reward, done, gains = [], ends = [];
        for (const action of actions[n]) {
            [obs, state, reward, done] = step(state, action);
            if (done) [obs, state] = begin();
            seen.push(show(obs)); gains.push(reward); ends.push(+done);
        }
        return [seen, gains, ends];
    })""", mazes=texts(levels, 37, see), actions=actions.T.tolist())  # fmt: skip
    triples = np.array(js("TRIPLES"))
    images = np.array([[[*map(int, image)] for image, _ in seen] for seen, *_ in found])
    images = triples[images].reshape(200, 101, 5, 5, 3)
    directions = np.array([[direction for _, direction in seen] for seen, *_ in found])
    expected = np.concatenate([first.image[None], later.image]).swapaxes(0, 1)
    assert np.array_equal(images, expected)
    assert np.array_equal(directions, np.vstack([first.direction[None], later.direction]).T)
    np.testing.assert_allclose([gains for _, gains, _ in found], rewards.T, atol=1e-6)
    assert np.array_equal([ends for *_, ends in found], dones.T)
    assert (rewards > 0).any() and dones.sum() > 400 and see == (expected[..., 0] > 0).all()


def test_no_two_observations_have_one_key(js):
    levels = texts(draw(100, 9, 9), see_through_walls=False)
    pairs = js("""mazes.map(maze_from_text).flatMap(({level}) => [0, 1, 2, 3].flatMap(d => {
        const [{image, direction, key}] = reset({...level, agent_dir: d}, 250, false);
        return [[[...image, direction].join(""), key]];
    }))""", mazes=levels)  # fmt: skip
    assert len({obs for obs, _ in pairs}) == len({key for _, key in pairs}) > 200
    assert max(key for _, key in pairs) < 2**53


def test_the_solver_is_amazes_and_its_way_can_be_walked(js):
    levels = draw(300, 9, 7)
    solution = jax.device_get(jax.jit(jax.vmap(amaze.solve))(levels))
    found = js("mazes.map(text => solve(maze_from_text(text).level))", mazes=texts(levels))
    for name in ("path_length", "n_actions", "solvable"):
        assert np.array_equal([x[name] for x in found], getattr(solution, name)), name
    assert 50 < solution.solvable.sum() < 300
    for i in np.flatnonzero(solution.solvable):
        way = np.array(found[i]["way"])
        moves = np.abs(np.diff(way, axis=0)).sum(1)
        assert not np.asarray(levels.wall_map)[i][way[:, 1], way[:, 0]].any() and max(moves) == 1
        assert [*way[0], *way[-1]] == [*levels.agent_pos[i], *levels.goal_pos[i]]
        assert len(way) == found[i]["n_actions"] + 1


def test_edits_and_random_levels_have_amazes_statistics(js):
    """Walls, and how many goals and agents move, of 2,000 levels: equal but for chance."""
    level = amaze.sample_level(jax.random.key(3), height=8, width=6, n_walls=20)
    one = texts(jax.tree.map(lambda x: x[None], level))[0]
    rngs = jax.random.split(jax.random.key(0), 2000)
    edited = jax.jit(jax.vmap(lambda rng: amaze.edit_level(rng, level, 3)))(rngs)
    sampled = jax.jit(jax.vmap(lambda rng: amaze.sample_level(rng, 20, 8, 6)))(rngs)
    found = js("""((rng, {level}) => [
        () => edit_level(rng, level, 3), () => sample_level(rng, 20, 8, 6)].map(draw =>
        Array.from({length: 2000}, () => {
            const x = draw(), solid = is_wall(x, ...x.agent_pos) || is_wall(x, ...x.goal_pos);
            return [x.wall_map.reduce((sum, wall) => sum + wall), ...x.agent_pos, x.agent_dir,
                    ...x.goal_pos, +(solid || same(x.agent_pos, x.goal_pos))];
        })))(make_rng(1), maze_from_text(text))""", text=one)  # fmt: skip
    for levels, rows in zip((edited, sampled), np.array(found)):
        walls = np.asarray(levels.wall_map).sum((1, 2))
        expected = np.column_stack([walls, levels.agent_pos, levels.agent_dir, levels.goal_pos])
        assert not rows[:, -1].any()
        for x, y in zip(rows.T[:-1], expected.T):
            error = np.hypot(x.std(), y.std()) / 2000**0.5
            assert abs(x.mean() - y.mean()) <= 4 * error
            assert abs(x.std() - y.std()) <= 4 * error
    assert js("[...Array(20).keys()].every(k => solve(sample_solvable(make_rng(k))).solvable)")


def test_a_maze_is_a_text_and_back(js):
    mazes = [*texts(draw(20, 13, 13), 99, False), *texts(draw(5, 40, 23))]
    assert js("mazes.map(text => maze_to_text(maze_from_text(text)))", mazes=mazes) == mazes
    level = jax.tree.map(lambda x: x[None], amaze.level_from_text(".#G\n#<."))
    [text] = texts(level, 30, False)
    assert js("maze_from_text(text)", text=text) == {
        "level": {"width": 3, "height": 2, "wall_map": {str(k): int(k in (1, 3)) for k in range(6)},
                  "agent_pos": [1, 1], "agent_dir": 2, "goal_pos": [2, 0]},
        "max_steps": 30, "see_through_walls": False}  # fmt: skip
    head, walls = text.rsplit(".", 1)
    changes = {"x": ".", ".30.": ".0.", "1.1.2.": "1.1.4.", "2.2.0.": "2.3.0.", "1.1.2": "0.1.2"}
    lies = ["", "#", text[1:], text + "AAAA", text + "!", head, f"{head}.____", f"999x{text}",
            text.replace("2.2.0.", "2.1.1."), *(text.replace(*x) for x in changes.items())]
    assert js("lies.map(maze_from_text)", lies=lies) == [None] * len(lies)


# --- the network


@cache
def random_agent(name, seed=0):
    """Its network, and parameters that all matter."""
    config = dr.Config(**TINY | CORES[name])
    shapes = config.rnn, config.hidden_size, config.s5_layers, config.s5_norm
    train, rng = dr.make_train(config), np.random.default_rng(seed)
    params = jax.jit(train.init)(jax.random.key(seed)).student.params
    # 0.2 moves all of them; S5's rates and steps by less, to stay stable
    small = lambda where: 0.02 if "Lambda" in jax.tree_util.keystr(where) else 0.2
    noisy = lambda where, x: x + small(where) * rng.normal(size=x.shape).astype(np.float32)
    params = jax.tree_util.tree_map_with_path(noisy, jax.device_get(params))
    return config, train, dr.ActorCritic(dr.make_core(*shapes)), params


def as_run(folder, name, seeds=1):
    """A Run of random agents, as evaluate.py reads them."""
    config, train, _, params = random_agent(name)
    folder.mkdir(exist_ok=True)
    settings = {"rnn": config.rnn, "s5_norm": config.s5_norm, "script": "dr.py"}
    (folder / "config.json").write_text(json.dumps(settings))
    agents = [{"seed": i, "agent": "student"} for i in range(seeds)]
    params = jax.tree.map(lambda x: np.stack([x] * seeds), params)
    return evaluate.Run("dr", folder, "dr", 2, agents, params, train)


@pytest.mark.parametrize("name", CORES)
def test_logits_and_values_are_flaxs(name, tmp_path, js):
    """150 steps on each of four levels, in episodes of at most 60: a carry is kept and reset."""
    _, train, network, params = random_agent(name)
    levels, T = draw(4, 7, 7, seed=4), 150
    actions = np.random.default_rng(0).choice(7, (T, 4), p=[0.2, 0.2, 0.4, 0.05, 0.05, 0.05, 0.05])

    @jax.jit
    def walk(levels, actions):
        obs, state = jax.vmap(partial(amaze.reset, max_steps=60))(levels)

        def step(carry, action):
            memory, obs, state, is_first = carry
            inputs = jax.tree.map(lambda x: x[None], (obs, is_first))
            out, kept = network.apply(params, memory, *inputs, capture_intermediates=True)
            logits = kept["intermediates"]["Dense_0"]["__call__"][0][0]
            obs, state, _, done = jax.vmap(amaze.step_and_reset)(state, action)
            return (out[0], obs, state, done), (logits, out[2][0], done)

        carry = network.core.initial_carry(4), obs, state, jnp.ones(4, bool)
        return jax.lax.scan(step, carry, actions)[1]

    logits, values, dones = jax.device_get(walk(levels, actions))
    [agent] = data(evaluate.page([as_run(tmp_path / "run", name)], [], "<f4"))["agents"]
    found = js("""(network => mazes.map((text, n) => {
        const {level} = maze_from_text(text);
        let [obs, state] = reset(level, 60), carry = null, is_first = true, said = [];
        for (const action of actions[n]) {
            const [next, logits, value] = network(carry, obs, is_first);
            said.push([...logits, value]);
            carry = next;
            [obs, state, , is_first] = step(state, action);
            if (is_first) [obs, state] = reset(level, 60);
        }
        return said;
    }))(actor_critic(agent))""", agent=agent, mazes=texts(levels),
               actions=actions.T.tolist())  # fmt: skip
    expected = np.concatenate([logits, values[..., None]], -1).swapaxes(0, 1)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert dones[:-1].sum() > 7 and expected.std((0, 1)).min() > 0.02  # else little was compared


def test_float16_is_numpys(js):
    x = np.r_[np.arange(0, 2**16, 7), 1, 0x3FF, 0x7BFF, 0xFBFF, 0x8000].astype(np.uint16)
    x = x.view(np.float16)[np.isfinite(x.view(np.float16))]
    encode = lambda x: base64.urlsafe_b64encode(x.tobytes()).decode().rstrip("=")
    for numbers in (x, np.float32(x) * 1.001):
        found = js("[...decode(x)]", x=[numbers.shape, encode(numbers)])
        assert np.array_equal(found, numbers)


def test_actions_are_drawn_by_their_probabilities(js):
    logits = [0.3, -1.0, 1.2, 0.0, -3.0, 0.5, 2.0]
    policy, counts, greedy = js("""((policy, rng) => {
        const counts = new Array(7).fill(0);
        for (let k = 0; k < 20000; k++) counts[choose(policy, rng)]++;
        return [policy, counts, choose(policy, rng, true)];
    })(probabilities(logits), make_rng(7))""", logits=logits)  # fmt: skip
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(policy, expected, atol=1e-12)
    errors = np.sqrt(20000 * expected * (1 - expected))
    assert (np.abs(counts - 20000 * expected) < 4 * errors).all() and greedy == 6


def test_solve_rates_are_evaluates(tmp_path, js):
    """400 episodes on each of six mazes: rates and mean lengths equal but for chance."""
    levels = draw(40, 4, 4, seed=8)
    far = np.flatnonzero(jax.vmap(amaze.solve)(levels).n_actions > 3)[:6]
    chosen = [jax.tree.map(lambda x: x[i : i + 1], levels) for i in far]
    mazes = [evaluate.Maze(str(i), x, 80, i % 2 == 0) for i, x in enumerate(chosen)]
    run = as_run(tmp_path / "run", "lstm")
    agents = run.train, run.params, evaluate.agent_keys(run, 0)
    returns, lengths = evaluate.play(*agents, mazes, 400)
    filled = data(evaluate.page([run], mazes, "<f4"))
    found = js("""Object.values(filled.mazes).map(([text], k) => {
        const maze = maze_from_text(text), network = actor_critic(filled.agents[0]);
        let seen;
        for (const record of tries(network, maze, 400, make_rng(k))) seen = record;
        const {episodes, solved, steps, visits} = seen, entered = visits.reduce((x, y) => x + y);
        return [episodes, solved, steps, entered, visits[cell(maze.level, maze.level.goal_pos)]];
    })""", filled=filled)  # fmt: skip
    rates = (returns[0] > 0).mean(1)
    assert (rates > 0.1).sum() > 3 and (rates < 0.9).sum() > 3, rates  # else little was compared
    for rate, length, (episodes, solved, steps, entered, ends) in zip(rates, lengths[0], found):
        pooled = (rate + solved / 400) / 2
        assert episodes == 400 and ends == solved < entered < steps
        assert abs(rate - solved / 400) < 4 * np.sqrt(2 * pooled * (1 - pooled) / 400) + 1e-9
        assert abs(length.mean() - steps / 400) < 4 * length.std() * np.sqrt(2 / 400)
