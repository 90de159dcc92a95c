"""Arithmetic on a config, before anything is started: does it fit? (floor 1: no torch)."""

from cqwen_dist.plan.architecture import Architecture, read_architecture
from cqwen_dist.plan.memory import Part, Plan, plan
from cqwen_dist.plan.show import render

__all__ = ["Architecture", "Part", "Plan", "plan", "read_architecture", "render"]
