"""Getting a run onto machines."""
