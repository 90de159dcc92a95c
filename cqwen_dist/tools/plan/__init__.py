"""Arithmetic on a config, before anything is started: does it fit, what does it cost? No torch."""
