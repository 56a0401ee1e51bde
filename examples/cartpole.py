"""CartPole with unknown physics, in place of amaze.py. The dynamics are gymnax's.

A level sets the gravity, the masses of cart and pole, the pole's half length, the force of a push,
and the start of the episode. The agent sees cart and pole, but not the physics. Each step gives
1 / max_steps. As in CartPole-v1, 475 of 500 steps count as solved: a return of at least 0.95.

    pip install "gymnax>=1.0"    # asks for jax<0.12
    cp examples/cartpole.py .
    patch -o cartpole_plr.py plr.py examples/cartpole.diff    # also dr.py, accel.py, sfl.py
    python cartpole_plr.py --rnn gru --hidden-size 32 --lr 2e-3 --anneal-lr --num-minibatches 2 \\
        --num-updates 600 --buffer-size 512 --out runs/cartpole       # a minute or two of one core
    python evaluate.py runs/cartpole --gif Mast
    python evaluate.py runs/cartpole --suite sampled     # the worst 10%

RESULTS.md has PLR and ACCEL after --num-updates 400 and DR after 200, all with --seeds 5.

PAIRED, with a teacher that sets one number of the physics per step:

    patch -o cartpole_paired.py paired.py examples/cartpole_paired.diff
    python cartpole_paired.py --rnn gru --hidden-size 32 --lr 2e-3 --anneal-lr \\
        --num-minibatches 2 --teacher-rnn gru --teacher-hidden-size 32 --teacher-lr 5e-4 \\
        --teacher-ent-coef 0.1 --num-updates 600 --out runs/cartpole_paired

With --fast add --no-solvable-only (all levels can be solved); with accel.py add --num-edits 3. The
score max_mc assumes that the only reward comes at the end, and so rates a level that is solved here
as half solved; positive_value_loss is an alternative. gymnax starts JAX when it is imported: on a
CPU, set the environment variable JAX_NUM_CPU_DEVICES=4 to use four cores as devices. Config still
has n_walls, height, width and see_through_walls, but nothing uses them.

`from_jaxued` makes reset, step and step_and_reset of an environment written for JaxUED
(DramaCow/jaxued, 2403.13091), as CartPole is below. For JaxUED's own maze:

    reset, step, step_and_reset = from_jaxued(jaxued.environments.Maze(), ndim=2)

The params must have `max_steps_in_episode`; jaxued 0.0.1 needs a JAX that still has jax.tree_map.
"""

from functools import partial
from typing import NamedTuple

import amaze
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

NUM_ACTIONS = 2
NAMES = "gravity", "masscart", "masspole", "length", "force_mag"  # as in gymnax's EnvParams
NOMINAL = np.array([9.8, 1.0, 0.1, 0.5, 10.0], np.float32)  # CartPole-v1
FACTOR = np.array([2.0, 4.0, 8.0, 4.0, 2.0], np.float32)  # divided or multiplied by at most this


class Level(NamedTuple):
    physics: jax.Array  # [5], in the order of NAMES
    start: jax.Array  # [4] position and speed of the cart, angle and angular speed of the pole


# --- an environment that is written for JaxUED, in amaze.py's interface


class EnvState(NamedTuple):
    inner: NamedTuple  # the environment's own state
    t: jax.Array  # [] int32
    max_steps: jax.Array  # [] int32
    seed: jax.Array  # [] uint32, computed from the level


def level_code(level):
    """The bits of a level [words] uint32; its leaves have 32 bits or are smaller integers."""
    word = lambda x: x if x.dtype.itemsize == 4 else x.astype(jnp.int32)
    leaves = [word(jnp.asarray(x)) for x in jax.tree.leaves(level)]
    return jnp.concatenate([jax.lax.bitcast_convert_type(x, jnp.uint32).ravel() for x in leaves])


def from_jaxued(env, ndim):
    """Make reset, step, step_and_reset as in amaze.py from the methods of an UnderspecifiedEnv.
    ndim: axes of a level's first array. The level determines all randomness of its episodes, so
    this is the same each time."""
    limited = lambda max_steps: env.default_params.replace(max_steps_in_episode=max_steps)

    def reset(level, max_steps, *_):  # scripts pass see_through_walls, too
        code = level_code(level)
        odd = np.arange(1, 2 * code.size, 2, dtype=np.uint32) * np.uint32(2654435761)
        seed = jnp.sum(code * odd, dtype=jnp.uint32)  # mod 2^32
        rng = jax.random.fold_in(jax.random.key(seed), 0)  # step t has the number t + 1
        obs, inner = env.reset_env_to_level(rng, level, limited(max_steps))
        state = EnvState(inner, jnp.zeros((), int), jnp.asarray(max_steps), seed)
        return jax.tree.map(jnp.asarray, (obs, state))

    def step(state, action):
        rng = jax.random.fold_in(jax.random.key(state.seed), state.t + 1)
        params = limited(state.max_steps)
        obs, inner, reward, done, _ = env.step_env(rng, state.inner, action, params)
        return obs, state._replace(inner=inner, t=state.t + 1), reward, done

    return amaze.over_queues(reset, step, ndim)


# --- CartPole


class CartPole:
    """gymnax's CartPole-v1 with the physics of a level, as a JaxUED environment."""

    env, default_params = gymnax.make("CartPole-v1")

    def action_space(self, params):
        return self.env.action_space(params)

    def reset_env_to_level(self, rng, level, params):
        start = self.env.reset_env(rng, params)[1]
        start = start.replace(**dict(zip(("x", "x_dot", "theta", "theta_dot"), level.start)))
        return self.env.get_obs(start), (start, level)

    def step_env(self, rng, state, action, params):
        state, level = state
        now = dict(zip(NAMES, level.physics))
        now["total_mass"] = now["masscart"] + now["masspole"]
        now["polemass_length"] = now["masspole"] * now["length"]
        now = params.replace(**now)
        obs, state, reward, done, info = self.env.step_env(rng, state, action, now)
        done |= self.env.is_truncated(state, now)
        return obs, (state, level), reward / params.max_steps_in_episode, done, info


reset, step, step_and_reset = from_jaxued(CartPole(), ndim=1)
solved = lambda total: total >= 0.95 - 1e-5
level_stats = lambda level, max_steps: dict(zip(NAMES, level.physics))


def place(rng, physics):
    """A level with the physics [5] and CartPole-v1's random start."""
    start = CartPole.env.reset_env(rng, CartPole.default_params)[0]
    return Level(jnp.asarray(physics, jnp.float32), start)


def sample_level(rng, spread=1.0):
    """A level: each number is CartPole-v1's times FACTOR^u, u uniform in [-spread, spread]."""
    rng_physics, rng_start = jax.random.split(rng)
    u = jax.random.uniform(rng_physics, NOMINAL.shape, minval=-1)
    return place(rng_start, NOMINAL * FACTOR ** (spread * u))


def edit_level(rng, level, n_edits):
    """n_edits times multiply a random number by FACTOR^u, u ~ N(0, 0.3^2); clip to the bounds."""
    rng_which, rng_change = jax.random.split(rng)
    which = jax.random.randint(rng_which, (n_edits,), 0, len(NOMINAL))
    change = 0.3 * jax.random.normal(rng_change, (n_edits,))
    power = jnp.zeros(len(NOMINAL)).at[which].add(change)
    physics = jnp.clip(level.physics * FACTOR**power, NOMINAL / FACTOR, NOMINAL * FACTOR)
    return level._replace(physics=physics)


# --- the teacher's MDP (PAIRED): it chooses the numbers in the order of NAMES, one per step

POWERS = 9  # actions per step: powers of FACTOR to choose from


class TeacherState(NamedTuple):
    level: Level  # numbers not chosen yet are CartPole-v1's; the start is random
    spread: jax.Array  # [] float32
    t: jax.Array  # [] int32, numbers chosen


class TeacherObservation(NamedTuple):
    powers: jax.Array  # [5] float32, powers of FACTOR chosen so far, 0 at first
    time: jax.Array  # [] int32
    noise: jax.Array  # [50] float32, uniform, redrawn at each step


def teacher_size(spread=1.0):
    """The number of steps of a design, and of actions at each."""
    return len(NAMES), POWERS


def teacher_observe(rng, state):
    powers = jnp.log(state.level.physics / NOMINAL) / np.log(FACTOR)
    return TeacherObservation(powers, state.t, jax.random.uniform(rng, (50,)))


def teacher_reset(rng, spread=1.0):
    """Start a design at CartPole-v1: (TeacherObservation, TeacherState)."""
    rng_start, rng_noise = jax.random.split(rng)
    level = place(rng_start, NOMINAL)
    state = TeacherState(level, jnp.asarray(spread, jnp.float32), jnp.zeros((), int))
    return teacher_observe(rng_noise, state), state


def teacher_step(rng, state, action):
    """Set the next number to CartPole-v1's times FACTOR^u; the actions are equally spaced u, from
    -spread (action 0) to spread: (TeacherObservation, TeacherState, done)."""
    level, spread, t = state
    chosen = NOMINAL * FACTOR ** (spread * (2 * action / (POWERS - 1) - 1))
    physics = jnp.where(np.arange(len(NAMES)) == t, chosen, level.physics)
    state = TeacherState(level._replace(physics=physics), spread, t + 1)
    return teacher_observe(rng, state), state, state.t == len(NAMES)


# --- pictures and tests


def render(level_or_state, width=240):
    """Draw cart and pole on the track, to scale, and the numbers: [h, w, 3] uint8. A heavier cart
    is taller, a heavier pole thicker; the length of the bar below the cart shows the force."""
    is_state = isinstance(level_or_state, EnvState)
    state, level = level_or_state.inner if is_state else (None, level_or_state)
    at, _, angle, _ = map(float, CartPole.env.get_obs(state) if is_state else level.start)
    gravity, cart, pole, length, force = map(float, level.physics)
    scale, ground = width / 5, 0.86 * width  # pixels per metre; the track is 4.8 metres
    x, high, thick = width / 2 + scale * at, 12 * cart**0.5, round(3 + 8 * pole**0.5)
    end = x + 2 * length * scale * np.sin(angle), ground - high - 2 * length * scale * np.cos(angle)
    picture = Image.new("RGB", (width, width), "white")
    pen = ImageDraw.Draw(picture)
    pen.line((0.1 * scale, ground, width - 0.1 * scale, ground), "black")
    pen.rectangle((x - 14, ground - high, x + 14, ground), "black")
    pen.line((x, ground - high, *end), (200, 140, 90), thick)
    pen.rectangle((x - force, ground + 4, x + force, ground + 8), (220, 60, 60))
    numbers = dict(gravity=gravity, cart=cart, pole=pole, length=length, force=force)
    numbers |= dict(step=level_or_state.t) if is_state else {}
    text = "\n".join(f"{name} {float(x):.3g}" for name, x in numbers.items())
    pen.text((0.1 * scale, 4), text, "black", font_size=11)
    return np.asarray(picture)


# name -> powers of FACTOR, in the order of NAMES; Nominal is CartPole-v1
CORNERS = {
    "Nominal": (0, 0, 0, 0, 0),
    "Moon": (-1, 0, 0, 0, 0),
    "Twig": (1, 0, 0, -1, 0),
    "Mast": (0, 0, 1, 1, -1),
    "Kick": (0, -1, 0, -1, 1),
    "Freight": (1, 1, 1, 0, -1),
}  # fmt: skip
TEST_MAZES = {name: (partial(place, physics=NOMINAL * FACTOR ** np.array(powers, np.float32)), 500)
              for name, powers in CORNERS.items()}  # fmt: skip
TEST_MAZES["Random"] = sample_level, 500
SUITES = {"corners": [*CORNERS], "sampled": ["Random"]}
sample_mazes = partial(amaze.sample_mazes, mazes=TEST_MAZES, pad=list)
plot_levels = partial(amaze.plot_levels, render=render)
