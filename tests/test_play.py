"""play.html: its JavaScript compared with amaze.py and flax; what evaluate.py --play writes and
refuses; the page in a browser."""

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
import paired  # noqa: E402

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
    """The JavaScript in the sections MAZE and NETWORK of the page."""
    return re.findall(r"<!-- (?:MAZE|NETWORK) -->\n<script>\n(.*?)</script>", html, re.DOTALL)


@pytest.fixture(scope="module")
def js():
    """js(expression, name=value, ...) -> the expression's value, computed by V8."""
    maze, network = scripts((ROOT / "play.html").read_text())
    racer = MiniRacer()
    racer.eval(maze + network)

    def js(expression, **given):
        names, values = ", ".join(given), ", ".join(map(json.dumps, given.values()))
        return json.loads(racer.eval(f"JSON.stringify((({names}) => {expression})({values}))"))

    return js


def texts(levels, max_steps=250, see_through_walls=True):
    """A batch of levels as text, as in the page's data."""
    maze = evaluate.Maze("x", levels, max_steps, see_through_walls)
    return data(evaluate.page([], [maze]))["mazes"]["x"]


def data(page):
    """The data in a page."""
    [text] = re.findall(r'id="data">\n(.*)\n</script>', page.decode())
    return json.loads(text)


def draw(number, height, width, seed=0):
    """Random levels; up to half of the cells are walls."""
    rng = np.random.default_rng(seed)
    walls = rng.random((number, height, width)) < rng.uniform(0, 0.5, (number, 1, 1))
    return jax.jit(jax.vmap(amaze.place))(jax.random.split(jax.random.key(seed), number), walls)


# --- the maze


@pytest.mark.parametrize("see", [True, False])
@pytest.mark.parametrize("height, width", [(13, 13), (4, 3), (23, 40)])
def test_observations_rewards_and_ends_are_amazes(height, width, see, js):
    """100 random actions on each of 200 levels; an episode that ends restarts its level."""
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
    assert (rewards > 0).any()
    assert dones.sum() > 400
    assert see == (expected[..., 0] > 0).all()


def test_no_two_observations_have_one_key(js):
    """Agents are everywhere in 100 levels, even in walls, which gives more observations."""
    observations, keys, most = js("""(mazes => {
        const seen = new Set(), keys = new Set();
        for (const {level} of mazes.map(maze_from_text)) {
            for (let k = 0; k < 4 * 81; k++) {
                const agent_pos = [(k >> 2) % 9, Math.floor((k >> 2) / 9)], agent_dir = k & 3;
                const [{image, direction, key}] = reset({...level, agent_pos, agent_dir}, 9, k % 5);
                seen.add([...image, direction].join("")), keys.add(key);
            }
        }
        return [seen.size, keys.size, Math.max(...keys)];
    })(mazes)""", mazes=texts(draw(100, 9, 9)))  # fmt: skip
    assert observations == keys > 20_000
    assert most < 2**52


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
        assert not np.asarray(levels.wall_map)[i][way[:, 1], way[:, 0]].any()
        assert max(moves) == 1
        assert [*way[0], *way[-1]] == [*levels.agent_pos[i], *levels.goal_pos[i]]
        assert len(way) == found[i]["n_actions"] + 1


def test_edits_and_random_levels_have_amazes_statistics(js):
    """Walls, agents and goals of 2,000 levels have equal means and deviations, up to chance."""
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
    mazes = [*texts(draw(20, 13, 13), 99, False), *texts(draw(5, 40, 23), 10**9)]
    assert js("mazes.map(text => maze_to_text(maze_from_text(text)))", mazes=mazes) == mazes
    level = jax.tree.map(lambda x: x[None], amaze.level_from_text(".#G\n#<."))
    [text] = texts(level, 30, False)
    assert js("maze_from_text(text)", text=text) == {
        "level": {"width": 3, "height": 2, "wall_map": {str(k): int(k in (1, 3)) for k in range(6)},
                  "agent_pos": [1, 1], "agent_dir": 2, "goal_pos": [2, 0]},
        "max_steps": 30, "see_through_walls": False}  # fmt: skip
    head, walls = text.rsplit(".", 1)
    changes = {"x": ".", ".30.": ".0.", "1.1.2.": "1.1.4.", "2.2.0.": "2.3.0.", "1.1.2": "0.1.2"}
    lies = [
        "",
        "#",
        text[1:],
        text + "AAAA",
        text + "!",
        head,
        f"{head}.____",
        f"999x{text}",
        text.replace("2.2.0.", "2.1.1."),
        *(text.replace(*x) for x in changes.items()),
    ]
    assert js("lies.map(maze_from_text)", lies=lies) == [None] * len(lies)


# --- the network


@cache
def random_agent(name, seed=0):
    """A random agent: config, train, network, and parameters which all have an effect."""
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
    """A Run of random agents, such as evaluate.py loads."""
    config, train, _, params = random_agent(name)
    config = json.loads(dr.to_json(config))
    agents = [{"seed": i, "agent": "student"} for i in range(seeds)]
    params = jax.tree.map(lambda x: np.stack([x] * seeds), params)
    return evaluate.Run("dr", folder, "dr", 2, agents, params, train, config=config)


@pytest.mark.parametrize("name", CORES)
def test_logits_and_values_are_flaxs(name, tmp_path, js):
    """150 steps on each of four levels; episodes have at most 60 steps, so carries are reset."""
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
    assert dones[:-1].sum() > 7
    assert expected.std((0, 1)).min() > 0.02  # else little was compared


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
    assert (np.abs(counts - 20000 * expected) < 4 * errors).all()
    assert greedy == 6


@pytest.mark.slow
def test_solve_rates_are_evaluates(tmp_path, js):
    """200 episodes on each of four mazes: rates and mean lengths differ only by chance."""
    levels = draw(40, 4, 4, seed=8)
    far = np.flatnonzero(jax.vmap(amaze.solve)(levels).n_actions > 3)[:4]
    chosen = [jax.tree.map(lambda x: x[i : i + 1], levels) for i in far]
    mazes = [evaluate.Maze(str(i), x, 80, i % 2 == 0) for i, x in enumerate(chosen)]
    run = as_run(tmp_path / "run", "lstm")
    agents = run.train, run.params, evaluate.agent_keys(run, 0)
    returns, lengths = evaluate.play(*agents, mazes, 200)
    filled = data(evaluate.page([run], mazes, "<f4"))
    found = js("""Object.values(filled.mazes).map(([text], k) => {
        const maze = maze_from_text(text), network = actor_critic(filled.agents[0]);
        let seen, pauses = 0;
        for (const record of tries(network, maze, 200, make_rng(k))) seen = record, pauses++;
        const {episodes, solved, steps, visits} = seen, entered = visits.reduce((x, y) => x + y);
        const ends = visits[cell(maze.level, maze.level.goal_pos)];
        return [episodes, solved, steps, entered, ends, pauses];
    })""", filled=filled)  # fmt: skip
    rates = (returns[0] > 0).mean(1)
    assert (rates > 0.1).sum() > 1, rates
    assert (rates < 0.9).sum() > 1, rates  # else little was compared
    for rate, length, record in zip(rates, lengths[0], found):
        episodes, solved, steps, entered, ends, pauses = record
        pooled = (rate + solved / 200) / 2
        assert episodes == 200
        assert ends == solved < entered < steps
        assert pauses == steps // 50
        assert abs(rate - solved / 200) < 4 * np.sqrt(2 * pooled * (1 - pooled) / 200) + 1e-9
        assert abs(length.mean() - steps / 200) < 4 * length.std() * np.sqrt(2 / 200)


# --- evaluate.py --play


def call(capsys, monkeypatch, *arguments):
    """Run evaluate.py's command line with --play: (exit status, stdout, errors)."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments), "--play"])
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")  # as it is here
    with pytest.raises(SystemExit) as stop:
        evaluate.main()
    out, err = capsys.readouterr()
    return stop.value.code, out, [line for line in err.splitlines() if "error" in line]


def a_few_mazes(monkeypatch):
    """Use fewer test mazes, since compiling all of them takes the longest."""
    few = "StandardMaze", "FourRooms", "MiniMaze", "TrivialMaze"
    some = lambda names, *rest: draw_mazes([name for name in names if name in few], *rest)
    monkeypatch.setattr(evaluate, "draw_mazes", some)


draw_mazes = evaluate.draw_mazes


@pytest.fixture(scope="module")
def trained(tmp):
    """Runs of dr.py and paired.py with two seeds each, said to be trained for a cycle."""
    small = TINY | dict(hidden_size=8, num_updates=1, eval_interval=0)
    for script, more in {dr: {}, paired: {"rnn": "gru", "teacher_filters": 2}}.items():
        config = script.Config(**small | more)
        init = jax.jit(jax.vmap(script.make_train(config).init))
        state = init(jax.vmap(jax.random.key)(np.arange(2)))
        evaluate.save(tmp / script.__name__, config, state.replace(cycles=np.ones(2, int)))
    return tmp / "dr", tmp / "paired"


@pytest.mark.slow
def test_a_page_holds_all_agents_and_mazes(trained, tmp_path, capsys, monkeypatch, js):
    a_few_mazes(monkeypatch)
    status, out, errors = call(capsys, monkeypatch, *trained, "--agent", "all", "--out", tmp_path)
    assert (status, errors) == (0, [])
    assert out.endswith(f"open {tmp_path / 'play.html'} in a browser\n")
    assert [path.name for path in tmp_path.iterdir()] == ["play.html"]
    filled = data((tmp_path / "play.html").read_bytes())
    said = [(agent["name"], agent["seed"], agent["rnn"]) for agent in filled["agents"]]
    paired = [(f"paired @1{role}", seed, "gru") for role in ("", ", antagonist") for seed in (0, 1)]
    assert said == [("dr @1", 0, "lstm"), ("dr @1", 1, "lstm"), *paired]
    numbers = {name: len(texts) for name, texts in filled["mazes"].items()}
    assert numbers == {"StandardMaze": 1, "MiniMaze": 1, "TrivialMaze": 1, "FourRooms": 5}
    see = "Object.entries(mazes).filter(([, x]) => !maze_from_text(x[0]).see_through_walls)"
    assert [name for name, _ in js(see, mazes=filled["mazes"])] == ["FourRooms"]
    run = evaluate.load(trained[1], agent="antagonist")
    kernel = run.params["params"]["core"]["kernel"][1].astype(np.float16)
    found = js("[...decode(x)]", x=filled["agents"][-1]["params"]["core/kernel"])
    assert np.array_equal(found, kernel.ravel())
    call(capsys, monkeypatch, *trained, "--trainings", 1, "--out", tmp_path)
    assert [x["name"] for x in data((tmp_path / "play.html").read_bytes())["agents"]] == [
        "dr @1", "paired @1"]  # fmt: skip


def test_five_agents_take_less_than_a_megabyte(tmp_path):
    agents = evaluate.page([as_run(tmp_path / "run", "lstm", 5)], [])
    names = [name for name in amaze.TEST_MAZES if name != "Sampled"]
    cells = sum(10_000 if name.endswith("XL") else 2_500 for name in names)  # at most
    assert len(agents) + 5 * cells / 6 < 1e6


LIES = {
    "another core": {"core = make_core(": "core = Other(",
                     "class ActorCritic(": "class Other(nn.Module):\n    rnn: str\n    size: int\n"
                     "    layers: int\n    norm: str\n    initial_carry = lambda *_: ()\n\n"
                     "    @nn.compact\n    def __call__(self, carry, x, is_first):\n"
                     "        return carry, nn.Dense(self.size)(x)\n\n\nclass ActorCritic("},
    "another activation": {"hidden = lambda: jnp.tanh(": "hidden = lambda: -jnp.tanh("},
    "another step": {"amaze.step)(state, action)": "amaze.step)(state, 2 - action % 3)"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lie", [*LIES, "nothing"])
def test_a_copy_that_plays_otherwise_is_refused(lie, trained, tmp_path, capsys, monkeypatch):
    a_few_mazes(monkeypatch)
    text = (ROOT / "dr.py").read_text()
    for old, new in LIES.get(lie, {}).items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "my_dr.py").write_text(text)
    data = evaluate.read_checkpoint(trained[0] / "checkpoint.msgpack")
    config = json.loads(data["config"]) | {"script": "my_dr.py"}
    copy = evaluate.import_script(tmp_path / "my_dr.py")
    fields = {k: x for k, x in config.items() if k != "script" and not k.startswith("jax_")}
    init = jax.jit(copy.make_train(copy.Config(**fields)).init)
    state = jax.vmap(init)(jax.random.split(jax.random.key(0), 2))
    loud = jax.tree.map(lambda x: 3 * np.asarray(x), state.student.params)  # no chance of a tie
    lying = data | {"config": json.dumps(config), "state": {"student": {"params": loud}}}
    monkeypatch.setattr(evaluate, "read_checkpoint", lambda path: lying)
    out = tmp_path / "out"
    options = "--script", tmp_path / "my_dr.py", "--out", out
    status, _, errors = call(capsys, monkeypatch, trained[0], *options)
    assert (status, len(errors), out.exists()) == ((2, 1, False) if lie in LIES else (0, 0, True))
    assert lie not in LIES or "lstm, gru, s5, none" in errors[0]


@pytest.mark.parametrize("name", CORES)
def test_a_network_with_other_parts_is_refused(name, tmp_path):
    run = as_run(tmp_path / "run", name)
    evaluate.demand_playable(run, evaluate.Arguments())
    fewer = {k: x for k, x in run.config.items() if not k.startswith("s5_")}  # a copy's
    if not name.startswith("s5"):
        evaluate.demand_playable(run._replace(config=fewer), evaluate.Arguments())
    parts = run.params["params"]
    others = {"core": {"Attention_0": {"kernel": np.zeros((1, 2, 2))}}}, {"Dense_4": parts["conv"]}
    lies = [*(parts | other for other in others), {k: parts[k] for k in parts if k != "conv"}]
    for lie in lies:
        with pytest.raises(evaluate.BadConfig, match="rnn = lstm, gru, s5, none"):
            evaluate.demand_playable(run._replace(params={"params": lie}), evaluate.Arguments())


@pytest.mark.slow
def test_what_float16_cannot_hold_is_refused(trained, tmp_path, capsys, monkeypatch):
    stored = evaluate.read_checkpoint(trained[0] / "checkpoint.msgpack")
    core = stored["state"]["student"]["params"]["params"]["core"]
    core["bias"] = np.where(np.arange(len(core["bias"][0])) == 3, np.float32(7e4), core["bias"])
    monkeypatch.setattr(evaluate, "read_checkpoint", lambda path: stored)
    status, _, errors = call(capsys, monkeypatch, trained[0], "--out", tmp_path / "out")
    assert status == 2
    assert "must be finite in float16" in errors[0]
    assert not (tmp_path / "out").exists()


# --- in a browser

WHERE = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
CHROMIUM, DRIVER = next(filter(None, WHERE), None), shutil.which("chromedriver")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update""".split()


@pytest.fixture(scope="module", params=[1280, 390], ids="{} pixels".format)
def browser(request, tmp_path_factory):
    """A browser of this width that shows a page with four random agents and two mazes."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("no Chromium with its driver (Debian: chromium, chromium-driver)")
    from selenium import webdriver

    folder = tmp_path_factory.mktemp("browser")
    names = ["StandardMaze", "FourRooms"]
    mazes = evaluate.draw_mazes(names, evaluate.Arguments(episodes=2), False)
    two, s5, gru = (
        (as_run(folder / name[:2], name, n)._replace(name=name[:2]))
        for name, n in (("lstm", 2), ("s5, norm after", 1), ("gru", 1))
    )
    (folder / "play.html").write_bytes(evaluate.page([two, s5, gru], mazes))
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={folder / 'profile'}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    size = dict(width=request.param, height=900, deviceScaleFactor=1, mobile=request.param < 500)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(f"file://{folder / 'play.html'}")
    yield SimpleNamespace(driver=driver, width=request.param, folder=folder)
    assert driver.get_log("browser") == []  # no error, no warning
    driver.quit()


def wait_for(driver, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 60).until(lambda driver: driver.execute_script(f"return {condition}"))


def drag(driver, *cells):
    """Drag the pointer over cells of the board."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    board = driver.find_element(By.ID, "board")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", board)
    unit = board.rect["width"] / 14  # 13 cells and half a wall on each side
    at = lambda cell: tuple(round((k - 6) * unit) for k in cell)  # from the board's middle
    chain = ActionChains(driver, 20).move_to_element_with_offset(board, *at(cells[0]))
    chain.click_and_hold()
    for cell in cells[1:]:
        chain.move_to_element_with_offset(board, *at(cell))
    chain.release().perform()


def click(driver, name):
    driver.execute_script("arguments[0].click()", driver.find_element("id", name))


@pytest.mark.slow
def test_a_visitor(browser):
    """A visitor draws, moves things, plays, watches walks, shares, and starts 100 episodes."""
    driver, run = browser.driver, browser.driver.execute_script
    assert run("return [walkers.length, name, playing]") == [3, "StandardMaze", False]
    assert run("return document.documentElement.scrollWidth") <= browser.width
    start = run("return maze_to_text(maze)")
    click(driver, "clear")
    drag(driver, (2, 4), (8, 4), (8, 7))  # a wall, its corner skipped by a fast pointer or not
    walls = "return [...maze.level.wall_map.keys()].filter(k => maze.level.wall_map[k])"
    wall = [*range(4 * 13 + 2, 4 * 13 + 9), *(13 * y + 8 for y in (5, 6, 7))]
    assert run(walls) == wall
    for other in ({"isPrimary": False}, {"isPrimary": True, "button": 2}):
        run(
            """const {left, top} = board.getBoundingClientRect();
            const at = {clientX: left + 90, clientY: top + 90, pointerId: 1, ...arguments[0]};
            for (const what of ["pointerdown", "pointermove", "pointerup"])
                board.dispatchEvent(new PointerEvent(what, at));""",
            other,
        )
        assert run(walls) == wall  # a second finger, the right button
    drag(driver, (8, 4))  # one cell erased again
    assert run(walls) == [k for k in wall if k != 4 * 13 + 8]
    drag(driver, run("return maze.level.goal_pos"), (12, 12))
    drag(driver, run("return maze.level.agent_pos"), (1, 6))
    facing = run("return maze.level.agent_dir")
    drag(driver, (1, 6))  # a click turns it
    places = run("return [maze.level.agent_pos, maze.level.agent_dir, maze.level.goal_pos]")
    assert places == [[1, 6], (facing + 1) % 4, [12, 12]]
    address = run("return location.hash.slice(1)")
    assert address == run("return maze_to_text(maze)") != start
    assert "Shortest" in run("return document.getElementById('said').textContent")

    click(driver, "play")
    wait_for(driver, "walkers.every(walker => walker.episode.state.t > 3)")
    click(driver, "play")
    t = run("return walkers.map(walker => walker.episode.state.t)")
    click(driver, "step")
    assert run("return walkers.map(walker => walker.episode.state.t)") == [n + 1 for n in t]
    assert all("%" in card for card in run("return walkers.map(({card}) => card.card.innerText)"))
    for key in ("ArrowLeft", "ArrowRight", "ArrowUp"):
        run("dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0]}))", key)
    assert run("return walkers.map(({agent, episode}) => [!agent, episode.state.t])") == [
        [False, 3], [False, 3], [False, 3], [True, 3]]  # fmt: skip
    click(driver, "walk")
    assert run("return walkers.length") == 3

    click(driver, "tries")
    wait_for(driver, "walkers.every(({record}) => record?.episodes === 100)")
    said = run("return walkers.map(({record, card}) => [record.solved, card.card.innerText])")
    assert all(f"{solved}%" in text and "of 100 tries" in text for solved, text in said)

    run("location.hash = arguments[0]", start)  # somebody's link
    wait_for(driver, "name === 'StandardMaze' && maze_to_text(maze) === arguments[0]".replace(
        "arguments[0]", json.dumps(start)))  # fmt: skip
    run("location.hash = '#no-maze'")
    run("""const list = document.getElementById('maze'); list.value = 'FourRooms';
        list.dispatchEvent(new Event('change'))""")
    assert run("return [maze.see_through_walls, maze.level.width]") == [False, 17]
    click(driver, "clear")
    for cells in (((0, 11), (1, 11)), ((1, 12), (1, 12))):
        drag(driver, *cells)
    drag(driver, run("return maze.level.agent_pos"), (5, 5))
    drag(driver, run("return maze.level.goal_pos"), (0, 12))
    assert "cannot be solved" in run("return document.getElementById('said').textContent")
    chips = "document.querySelectorAll('.chip')"
    run(f"[...{chips}].find(chip => chip.textContent.includes('all seeds')).click()")
    assert run("return walkers.map(({agent}) => agent.seed)") == [0, 1]
    driver.save_screenshot(str(browser.folder / f"{browser.width}.png"))
    with evaluate.Image.open(browser.folder / f"{browser.width}.png") as picture:
        assert picture.size == (browser.width, 900)
        assert len(picture.convert("RGB").resize((99, 99)).getcolors(9801)) > 50  # not blank
