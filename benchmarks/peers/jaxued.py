"""JaxUED's maze (PyPI: jaxued), by its wrappers. Its training scripts are not in the package."""

import jax

jax.tree_map = jax.tree.map  # jaxued 0.0.1 still calls the name that JAX removed
from jaxued.environments.maze import Maze, make_level_generator  # noqa: E402
from jaxued.wrappers import AutoReplayWrapper, AutoResetWrapper  # noqa: E402


def environment(mode, number):
    sample = make_level_generator(13, 13, 60)
    env = AutoReplayWrapper(Maze()) if mode == "restart" else AutoResetWrapper(Maze(), sample)
    params = env.default_params
    rngs = jax.random.split(jax.random.PRNGKey(0), number)

    def begin(levels):
        rng = jax.random.PRNGKey(1)
        obs, state = jax.vmap(env.reset_to_level, (0, 0, None))(rngs, levels, params)
        return obs, (rng, state)

    def step(state, action):
        rng, state = state
        rng, rng_step = jax.random.split(rng)
        step_all = jax.vmap(env.step, (0, 0, 0, None))
        given = jax.random.split(rng_step, number), state, action, params
        obs, state, reward, _, _ = step_all(*given)
        return obs, (rng, state), reward

    return jax.jit(jax.vmap(sample))(rngs), begin, step
