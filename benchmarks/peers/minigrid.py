"""MiniGrid (PyPI: minigrid), its environment in a maze of random walls, stepped by a plain loop."""

import numpy as np
from minigrid.core.grid import Grid
from minigrid.core.mission import MissionSpace
from minigrid.core.world_object import Goal, Wall
from minigrid.minigrid_env import MiniGridEnv

STEPS = 16  # of a run: it is slow


class Maze(MiniGridEnv):
    def __init__(self):
        view = {"agent_view_size": 5, "see_through_walls": True}
        mission = MissionSpace(lambda: "get to the green goal square")
        super().__init__(mission, width=15, height=15, max_steps=250, **view)

    def _gen_grid(self, width, height):
        self.grid = Grid(width, height)
        self.grid.wall_rect(0, 0, width, height)
        for x, y in self.np_random.integers(1, 14, (60, 2)):
            self.grid.set(x, y, Wall())
        self.place_obj(Goal())
        self.place_agent()
        self.mission = "get to the green goal square"


def environment(mode, number):
    """run(actions [T, N]), where the last one ended; time limits are spread over the steps."""
    if number > 2048:  # no faster, and slow to make
        return None
    mazes = [Maze() for _ in range(number)]
    begin = lambda i: mazes[i].reset(seed=i if mode == "restart" else None)[0]
    for i, maze in enumerate(mazes):
        maze.reset(seed=i)
        maze.step_count = i * maze.max_steps // number

    def run(actions):
        images, total = np.empty((*actions.shape, 5, 5, 3), np.uint8), np.zeros(number)
        for t, chosen in enumerate(np.asarray(actions)):
            for i, action in enumerate(chosen):
                obs, reward, terminated, truncated, _ = mazes[i].step(action)
                obs = begin(i) if terminated or truncated else obs
                images[t, i], total[i] = obs["image"], total[i] + reward
        return images, total

    return run
