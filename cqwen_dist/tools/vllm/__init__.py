"""A plugin of vLLM: a CausalQwen in vLLM's engine, with the values of its numbers. Only this folder imports vLLM."""
