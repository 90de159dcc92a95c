"""Architectures that cannot be a base, and the reasons."""

EXPERTS = "it has experts; adapters and the planner expect one linear map in each place"
NESTED = "its text model is part of a larger one"
# Substring of the `model_type` -> reason; the first match counts.
REASONS = {
    "moe": EXPERTS,
    "mixtral": EXPERTS,
    "gemma": "it scales embeddings inside its transformer, and later versions cap their logits",
    "phi3": "q, k and v are one linear map",
    "gpt": "it learns positions, and its linear maps have other names",
    "vl": NESTED,
    "llama4": "it has experts, and its text model is part of a larger one",
    "mistral3": NESTED,
    "qwen3_5": "part of its attention is recurrent",
    "qwen3_next": "part of its attention is recurrent, and it has experts",
    "mamba": "it has no attention",
}
OTHER = "its blocks are not a Llama's"
