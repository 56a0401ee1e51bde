"""CartPole of unknown physics in place of amaze.py: the dynamics are gymnax's, a level its numbers.

A level is a gravity, the masses of cart and pole, the pole's half length, the force of a push, and
where the episode begins. The agent sees cart and pole, but not the physics. Each step gives 1 /
max_steps. Solved is what CartPole-v1 calls so, 475 of 500 steps: a return of at least 0.95.

    pip install "gymnax>=1.0"
    cp examples/cartpole.py .
    patch -o cartpole_plr.py plr.py examples/cartpole.diff    # also dr.py, accel.py, sfl.py
    python cartpole_plr.py --rnn gru --hidden-size 32 --lr 2e-3 --anneal-lr --num-minibatches 2 \\
        --num-updates 600 --buffer-size 512 --out runs/cartpole       # a minute or two of one core
    python evaluate.py runs/cartpole --gif Mast
    python evaluate.py runs/cartpole --suite sampled     # the worst 10%

PAIRED, whose teacher sets one number a step:

    patch -o cartpole_paired.py paired.py examples/cartpole_paired.diff
    python cartpole_paired.py --rnn gru --hidden-size 32 --lr 2e-3 --anneal-lr \\
        --num-minibatches 2 --teacher-rnn gru --teacher-hidden-size 32 --teacher-lr 5e-4 \\
        --teacher-ent-coef 0.1 --num-updates 600 --out runs/cartpole_paired

After these five minutes (one seed, 100 episodes a corner) the protagonist solves 0.73 of the
corners, and the designs are near random: an entropy of 2.18, of at most 2.20. With
--teacher-ent-coef 0.02 --teacher-lr 2e-3 the teacher settles on one heavy cart (entropy 0.09), all
else is forgotten: 0.17 are solved, and after 200 cycles it was 0.77.

With --fast also --no-solvable-only, as all levels can be solved, and with accel.py --num-edits 3.
The score max_mc is made for a reward at the end, and takes levels that are solved here for half
solved: positive_value_loss is another to try. gymnax starts JAX when it is imported: on a CPU, the
environment variable JAX_NUM_CPU_DEVICES=4 makes four cores devices. Config's n_walls stays, and is
not used.

`from_jaxued` makes what is asked of a module in place of amaze.py from an environment written for
JaxUED (DramaCow/jaxued, 2403.13091), as CartPole below is. JaxUED's own maze, say:

    reset, step, step_and_reset = from_jaxued(jaxued.environments.Maze(), ndim=2)

It needs params with `max_steps_in_episode`, and of jaxued 0.0.1 a JAX that still has jax.tree_map.
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
NAMES = "gravity", "masscart", "masspole", "length", "force_mag"  # gymnax's, of its EnvParams
NOMINAL = np.array([9.8, 1.0, 0.1, 0.5, 10.0], np.float32)  # CartPole-v1
FACTOR = np.array([2.0, 4.0, 8.0, 4.0, 2.0], np.float32)  # at most so many times more or less


class Level(NamedTuple):
    physics: jax.Array  # [5] what NAMES says
    start: jax.Array  # [4] position and speed of the cart, angle and angular speed of the pole


# --- an environment that is written for JaxUED, in amaze.py's interface


class EnvState(NamedTuple):
    inner: NamedTuple  # the environment's own
    t: jax.Array  # [] int32
    max_steps: jax.Array  # [] int32
    seed: jax.Array  # [] uint32, of the level


def level_code(level):
    """The level as bits [words] uint32; its leaves are of 32 bits, or smaller integers."""
    word = lambda x: x if x.dtype.itemsize == 4 else x.astype(jnp.int32)
    leaves = [word(jnp.asarray(x)) for x in jax.tree.leaves(level)]
    return jnp.concatenate([jax.lax.bitcast_convert_type(x, jnp.uint32).ravel() for x in leaves])


def from_jaxued(env, ndim):
    """reset, step, step_and_reset of amaze.py's interface, from an UnderspecifiedEnv's methods.
    ndim: axes of a level's first array. An episode's luck follows from its level and is the same
    each time."""
    limited = lambda max_steps: env.default_params.replace(max_steps_in_episode=max_steps)

    def reset(level, max_steps):
        code = level_code(level)
        odd = np.arange(1, 2 * code.size, 2, dtype=np.uint32) * np.uint32(2654435761)
        seed = jnp.sum(code * odd, dtype=jnp.uint32)  # mod 2^32
        obs, inner = env.reset_env_to_level(jax.random.key(seed), level, limited(max_steps))
        state = EnvState(inner, jnp.zeros((), int), jnp.asarray(max_steps), seed)
        return jax.tree.map(jnp.asarray, (obs, state))

    def step(state, action):
        rng = jax.random.fold_in(jax.random.key(state.seed), state.t)
        params = limited(state.max_steps)
        obs, inner, reward, done, _ = env.step_env(rng, state.inner, action, params)
        return obs, state._replace(inner=inner, t=state.t + 1), reward, done

    return amaze.over_queues(reset, step, ndim)


# --- CartPole


class CartPole:
    """gymnax's, of a level's physics."""

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
    """A level of given physics [5], with CartPole-v1's random start."""
    start = CartPole.env.reset_env(rng, CartPole.default_params)[0]
    return Level(jnp.asarray(physics, jnp.float32), start)


def sample_level(rng, spread=1.0):
    """Each number is CartPole-v1's times FACTOR^u, u uniform from -spread to spread."""
    rng_physics, rng_start = jax.random.split(rng)
    u = jax.random.uniform(rng_physics, NOMINAL.shape, minval=-1)
    return place(rng_start, NOMINAL * FACTOR ** (spread * u))


def edit_level(rng, level, n_edits):
    """n_edits times: one number, times FACTOR^u, u normal of scale 0.3, within the bounds."""
    rng_which, rng_change = jax.random.split(rng)
    which = jax.random.randint(rng_which, (n_edits,), 0, len(NOMINAL))
    change = 0.3 * jax.random.normal(rng_change, (n_edits,))
    power = jnp.zeros(len(NOMINAL)).at[which].add(change)
    physics = jnp.clip(level.physics * FACTOR**power, NOMINAL / FACTOR, NOMINAL * FACTOR)
    return level._replace(physics=physics)


# --- the teacher's MDP (PAIRED): one number after the other, in the order of NAMES

POWERS = 9  # actions: powers of FACTOR that a number can have


class TeacherState(NamedTuple):
    level: Level  # CartPole-v1's numbers where nothing is chosen yet; the start is drawn
    spread: jax.Array  # [] float32
    t: jax.Array  # [] int32, numbers chosen


class TeacherObservation(NamedTuple):
    powers: jax.Array  # [5] float32, of FACTOR, as chosen so far
    time: jax.Array  # [] int32
    noise: jax.Array  # [50] float32, uniform, redrawn at each step


def teacher_size(spread=1.0):
    """Steps of a design, and actions at each."""
    return len(NAMES), POWERS


def teacher_observe(rng, state):
    powers = jnp.log(state.level.physics / NOMINAL) / np.log(FACTOR)
    return TeacherObservation(powers, state.t, jax.random.uniform(rng, (50,)))


def teacher_reset(rng, spread=1.0):
    """CartPole-v1 to change: (TeacherObservation, TeacherState)."""
    rng_start, rng_noise = jax.random.split(rng)
    level = place(rng_start, NOMINAL)
    state = TeacherState(level, jnp.asarray(spread, jnp.float32), jnp.zeros((), int))
    return teacher_observe(rng_noise, state), state


def teacher_step(rng, state, action):
    """The number that is due is CartPole-v1's times FACTOR^u, u from -spread (action 0) to spread
    in equal steps: (TeacherObservation, TeacherState, done)."""
    level, spread, t = state
    chosen = NOMINAL * FACTOR ** (spread * (2 * action / (POWERS - 1) - 1))
    physics = jnp.where(np.arange(len(NAMES)) == t, chosen, level.physics)
    state = TeacherState(level._replace(physics=physics), spread, t + 1)
    return teacher_observe(rng, state), state, state.t == len(NAMES)


# --- pictures and tests


def render(level_or_state, width=240):
    """Cart and pole to scale, on the track, and the numbers, [h, w, 3] uint8. The heavier, the
    higher is the cart and the thicker the pole; the bar below the cart is the force."""
    is_state = isinstance(level_or_state, EnvState)
    state, level = level_or_state.inner if is_state else (None, level_or_state)
    at, _, angle, _ = map(float, CartPole.env.get_obs(state) if is_state else level.start)
    gravity, cart, pole, length, force = map(float, level.physics)
    scale, ground = width / 5, 0.86 * width  # pixels of a metre; the track is 4.8 metres
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
