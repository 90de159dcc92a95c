"""Arithmetic on a config, before anything is started: does it fit, how long is a step? No torch."""
