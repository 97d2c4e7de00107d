"""The commands of coding agents, and the files and variables that lead each to the rollout's model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CONTEXT_TOKENS, REPLY_TOKENS = 32_768, 4_096  # unless variables of these names say otherwise
_LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it looks them up in the internet
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class CodingAgent:
    """How an agent is started. In all texts ``{NAME}`` stands for a variable; {INSTRUCTION} is the task's.

    Attributes:
        install: what gives the program, by ``npm i`` or ``pip install``.
        command: split as a shell splits it.
        home: files of a new HOME.
        kept: paths below HOME that the first episode makes and later ones begin with.
    """

    install: str
    command: str
    variables: Mapping[str, str] = field(default_factory=dict)
    home: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[str, ...] = ()


_CLAUDE = {"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
_OPENCODE = """\
{"$schema": "https://opencode.ai/config.json", "autoupdate": false, "share": "disabled", "provider": {"gateway": {
  "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "{OPENAI_BASE_URL}", "apiKey": "{OPENAI_API_KEY}"},
  "models": {"policy": {"limit": {"context": {CONTEXT_TOKENS}, "output": {REPLY_TOKENS}}}}}}}
"""

KNOWN = {
    "claude": CodingAgent(
        "npm i @anthropic-ai/claude-code",
        "claude -p {INSTRUCTION} --permission-mode bypassPermissions --model policy",
        _CLAUDE,
    ),
    "claude-sdk": CodingAgent(
        "pip install claude-agent-sdk", f"python {_HERE}/claude_sdk_agent.py {{INSTRUCTION}}", _CLAUDE
    ),
    "codex": CodingAgent(
        "npm i @openai/codex",
        "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox {INSTRUCTION}",
        home={
            ".codex/config.toml": 'model = "policy"\nmodel_provider = "gateway"\nweb_search = "disabled"\n'
            "features = { multi_agent = false }\n"
            '[model_providers.gateway]\nname = "gateway"\nbase_url = "{OPENAI_BASE_URL}"\n'
            'env_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
        },
    ),
    "opencode": CodingAgent(
        "npm i opencode-ai",
        "opencode run --model gateway/policy {INSTRUCTION}",
        home={".config/opencode/opencode.json": _OPENCODE},
        kept=(".cache/opencode", ".config/opencode/node_modules", ".local/share/opencode/bin"),
    ),
    "kilo": CodingAgent(
        "npm i --ignore-scripts @kilocode/cli @kilocode/cli-linux-x64",
        "kilo run --auto --model gateway/policy {INSTRUCTION}",
        home={".config/kilo/kilo.json": _OPENCODE.replace('"$schema": "https://opencode.ai/config.json", ', "")},
        kept=(".cache/kilo", ".config/kilo/node_modules"),
    ),
    "qwen": CodingAgent(
        "npm i @qwen-code/qwen-code", "qwen -p {INSTRUCTION} --yolo --auth-type openai -m policy --max-session-turns 50"
    ),
    "pi": CodingAgent(
        "npm i @earendil-works/pi-coding-agent",
        "pi -p {INSTRUCTION} --provider gateway --model policy",
        {"PI_OFFLINE": "1"},
        {
            ".pi/agent/models.json": '{"providers": {"gateway": {"baseUrl": "{OPENAI_BASE_URL}", '
            '"api": "openai-completions", "apiKey": "$OPENAI_API_KEY", "models": [{"id": "policy", '
            '"contextWindow": {CONTEXT_TOKENS}, "maxTokens": {REPLY_TOKENS}}]}}}'
        },
    ),
    "mini": CodingAgent(
        "pip install mini-swe-agent",
        "mini -m openai/policy -t {INSTRUCTION} -y --exit-immediately -o {HOME}/trajectory.json",
        {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", **_LITELLM},
    ),
    "openhands": CodingAgent(
        "pip install openhands-sdk openhands-tools", f"python {_HERE}/openhands_agent.py {{INSTRUCTION}}", _LITELLM
    ),
    "cline": CodingAgent(
        "npm i cline",
        'sh -c \'cline auth openai-compatible --apikey "$OPENAI_API_KEY" --modelid policy --baseurl "$OPENAI_BASE_URL"'
        ' && exec cline -P openai-compatible -m policy --auto-approve true "$@"\' cline {INSTRUCTION}',
    ),
    "aider": CodingAgent(
        "pip install aider-chat",
        "aider --model openai/policy --message {INSTRUCTION} --yes-always --no-show-release-notes --analytics-disable "
        "--no-check-update --no-show-model-warnings --no-auto-commits",  # whose message is another chat
        _LITELLM,
    ),
    "terminus": CodingAgent("pip install harbor", f"python {_HERE}/terminus_agent.py {{INSTRUCTION}}", _LITELLM),
    "command": CodingAgent("", ""),  # the words that follow
}
