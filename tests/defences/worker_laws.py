"""A law for every defence that draws random numbers: training gives the same bits on any number of workers."""

import math

import torch

from gradveil.config import TrainSettings
from gradveil.engines.simulation import Simulation


def trains_alike_on_workers(defence):
    """Train for two rounds under the defence, in this process and on two workers; return whether all bits agree."""
    plan = TrainSettings(model="mlp:hidden=8", clients=3, rounds=2, partition="iid:images=40", lr=0.1, defence=defence)
    models = []
    for workers in (0, 2):
        with Simulation(plan, workers=workers) as simulation:
            rows = list(simulation.run())
            models.append(simulation.model)
    return math.isfinite(rows[-1]["accuracy"]) and all(
        torch.equal(models[0][name], models[1][name]) for name in models[0]
    )
