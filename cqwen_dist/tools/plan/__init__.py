"""Arithmetic on a config, before anything is started: does it fit, what does it cost? No torch."""

from cqwen_dist.tools.plan.make import Plan, plan
from cqwen_dist.tools.plan.show import render

__all__ = ["Plan", "plan", "render"]
