"""Text and numbers out of a model: the autoregressive loop and the seeds' ways to decide (seed S3 section 3)."""
