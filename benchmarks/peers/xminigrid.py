"""XLand-MiniGrid (PyPI: xminigrid). It has no maze of random walls: its FourRooms, 15 x 15."""

import jax
import jax.numpy as jnp
import xminigrid
from xminigrid.wrappers import GymAutoResetWrapper

STEPS = 64  # of a run: it is slow


def environment(mode, number):
    size = dict(height=15, width=15, view_size=5, max_steps=250)
    env, params = xminigrid.make("MiniGrid-FourRooms", **size)
    env = GymAutoResetWrapper(env) if mode == "new" else env

    def begin(rngs):
        first = jax.vmap(env.reset, (None, 0))(params, rngs)
        return first.observation, (first, first)

    def step(state, action):
        first, now = state
        action = action % env.num_actions(params)
        now = jax.vmap(env.step, (None, 0, 0))(params, now, action)
        reward = now.reward
        if mode == "restart":
            done = now.last()
            choose = lambda x, y: jnp.where(done.reshape(-1, *[1] * (x.ndim - 1)), x, y)
            now = jax.tree.map(choose, first, now)
        return now.observation, (first, now), reward

    return jax.random.split(jax.random.key(0), number), begin, step
