"""Starts runs on one or more machines."""
