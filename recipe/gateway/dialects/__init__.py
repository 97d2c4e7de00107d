"""What agents speak beside plain chat completions: streams, OpenAI's ``/responses``, Anthropic's ``/messages``.

Each request becomes a chat completion, which takes the one path that all chat completions take: tips, limits and token
ids are the same. Its answer becomes an answer of the dialect.

An instance of a dialect's class is one request of an agent: it has the ``body`` of the translated one, the ``path``
below ``/v1`` that this goes to, and ``answer``. That returns what the agent gets for the whole answer to it, and raises
LookupError, TypeError or AttributeError if that is no completion. Of a stream that takes long, ``waiting`` is sent from
time to time, and ``failed`` is an error as the stream tells it.
"""
