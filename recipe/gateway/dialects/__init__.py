"""What agents speak beside plain chat completions: streams, OpenAI's ``/responses``, Anthropic's ``/messages``.

Each request becomes a chat completion, which takes the one path that all chat completions take: tips, limits and token
ids are the same. Its answer becomes an answer of the dialect.
"""
