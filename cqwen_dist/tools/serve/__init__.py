"""A server of one process for a CausalQwen: OpenAI's completions and chats, with the numbers of the text."""
