"""Arithmetic on a config, before anything is started: does it fit, what does it cost? (floor 1: no torch)."""

from cqwen_dist.plan.architecture import Architecture, read_architecture
from cqwen_dist.plan.make import Plan, plan
from cqwen_dist.plan.show import render

__all__ = ["Architecture", "Plan", "plan", "read_architecture", "render"]
