#!/usr/bin/env bash
# The first request of OpenAI's API reference.
set -euo pipefail
answer=$(curl --silent --fail https://api.openai.com/v1/chat/completions \
    -H "Content-Type: application/json" \
    -H "Authorization: Bearer $OPENAI_API_KEY" \
    -d '{"model": "gpt-4o", "messages": [{"role": "user", "content": "'"$1"'"}]}')
grep -o '"content": *"[^"]*"' <<<"$answer" | head -1 | cut -d '"' -f 4
