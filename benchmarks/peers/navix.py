"""NAVIX (PyPI: navix). It has no maze of random walls: its FourRooms, 19 x 19 cells, view 7 x 7.

Its `step` begins a new level by itself, and cannot restart the same one."""

import jax
import navix

STEPS = 32  # of a run: it is slow


def environment(mode, number):
    if mode == "restart":
        return None
    view = navix.observations.symbolic_first_person
    env = navix.make("Navix-FourRooms-v0", observation_fn=view, max_steps=250)

    def begin(rngs):
        now = jax.vmap(env.reset)(rngs)
        return now.observation, now

    def step(now, action):
        now = jax.vmap(env.step)(now, action)
        return now.observation, now, now.reward

    return jax.random.split(jax.random.PRNGKey(0), number), begin, step
