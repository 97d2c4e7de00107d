"""The names in spans, all of them.

Those that begin with ``gen_ai.`` are of OpenTelemetry's conventions for generative AI, which are under development:
open-telemetry/semantic-conventions-genai, revision 002c8a6ea1c8a42b14a4527db83b3cabcded610a. docs/traces.md lists them.
"""

# Operations: the first word of a span's name.
AGENT, CHAT, COMPLETION, EMBEDDINGS = "invoke_agent", "chat", "text_completion", "embeddings"
SEARCH, CREATE = "search_memory", "create_memory"
UPDATE = "update"  # ours: what an update made of a rollout
OPERATIONS = {  # by API, of the calls that have a span
    "chat/completions": CHAT,
    "responses": CHAT,
    "messages": CHAT,
    "completions": COMPLETION,
    "embeddings": EMBEDDINGS,
}

OPERATION, PROVIDER = "gen_ai.operation.name", "gen_ai.provider.name"
CONVERSATION, AGENT_NAME = "gen_ai.conversation.id", "gen_ai.agent.name"
ERROR = "error.type"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST = {  # by the request's field
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
}
RESPONSE_ID, RESPONSE_MODEL = "gen_ai.response.id", "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
STORE, RECORD_ID = "gen_ai.memory.store.id", "gen_ai.memory.record.id"
RECORD_COUNT = "gen_ai.memory.record.count"

EVALUATION = "gen_ai.evaluation.result"  # an event
EVALUATION_NAME, EVALUATION_SCORE = "gen_ai.evaluation.name", "gen_ai.evaluation.score.value"

# Texts, where they are asked for.
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
INPUT_MESSAGES, OUTPUT_MESSAGES = "gen_ai.input.messages", "gen_ai.output.messages"
QUERY, RECORDS = "gen_ai.memory.query.text", "gen_ai.memory.records"

# Ours.
ROLLOUT_MODE, UPDATE_MODE, SCOPE = "empo2.rollout_mode", "empo2.update_mode", "empo2.scope"
RUN, STEP, PHASE, ATTEMPT, TASK = "empo2.run", "empo2.step", "empo2.phase", "empo2.attempt", "empo2.task"
POLICY_VERSION, TRAINED = "empo2.policy_version", "empo2.trained"
NOVELTY, VISITS = "empo2.novelty", "empo2.visits"
TIPS_SHOWN, TIP_IDS = "empo2.tips_shown", "empo2.tip_ids"
REFUSED = "empo2.refused"
RETURN, FAILURE, DROPPED = "empo2.return", "empo2.failure", "empo2.dropped"
ADVANTAGE, MASKED_TOKENS = "empo2.advantage", "empo2.masked_tokens"
