"""Tasks and where they run: decided before each step from measured load, the cost of each task and where its data lie.

    members = Members(positions)                                    # (rack, host) of each rank
    tasks = [
        Task("prepare", "preprocessing", members.ones("L2"), prepare, nbytes=4e6, home=0),
        Task("reduce", "aggregation", members.everyone("flat", "levels"), lambda place: reducer.set_scheme(SCHEMES[place.name])),
    ]
    scheduler = TaskScheduler(tasks, members, rank=rank)

No torch here: what ranks tell each other goes through `laneway.core.Statistics`, once a step, with all else that they reduce.
"""

from __future__ import annotations

from laneway.cluster.tasks.choose import Decision, Rules
from laneway.cluster.tasks.members import Members, Place
from laneway.cluster.tasks.scheduler import TaskScheduler
from laneway.cluster.tasks.task import KINDS, Task, prefers

__all__ = ["KINDS", "Decision", "Members", "Place", "Rules", "Task", "TaskScheduler", "prefers"]
