"""Starts runs on one or several machines."""
