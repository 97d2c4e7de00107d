"""Hold agents to what is theirs: what they may post, how much, until when, and with what parameters they call."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from empo2.recipe.config import Gateway
from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.metrics import StepMetrics
from empo2.recipe.gateway.request import SERVED, Next, Request, refusal
from empo2.recipe.protocol import ERROR_EVENT, MODEL_EVENT

_OWN = "empo2_"  # how the types of the gateway's own events begin
_MIN_TOKENS = 1000  # of a reply that may not end before
# Their length is bounded by the request's own, and by the model's context.
_TEXTS = ("messages", "prompt", "tools", "documents")
# A template is a program without an end that vLLM runs (CVE-2026-115911, CVE-2026-115918); embeddings that do not fit
# end its engine (PYSEC-2026-2303), and so do negative token ids.
_OF_THE_OPERATOR = ("chat_template", "prompt_embeds", "prompt_token_ids", "mm_processor_kwargs", "media_io_kwargs")
# Arguments of transformers' ``apply_chat_template``, which vLLM hands on: padding to 10^8 tokens took a minute, 10 GB.
_OF_THE_TOKENIZER = (
    *("conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
# Ids beyond the model's own change what other requests sample (CVE-2026-93840, CVE-2026-93989).
_UNCHECKED = ("allowed_token_ids", "bad_words")


def unchecked(body: Mapping[str, Any]) -> set[str]:
    """Return the options of a request with token ids that vLLM 0.20 checks against no vocabulary.

    Until a reply may end, ids beyond the model's own in ``stop_token_ids`` end vLLM's engine.
    """
    found = {name for name in _UNCHECKED if body.get(name)}
    return found | ({"min_tokens"} if body.get("min_tokens") and body.get("stop_token_ids") else set())


def checked(request: Request) -> Request:
    """Return a request without these options, as `sampling.neutral` does for trained calls."""
    if not (left_out := unchecked(request.body)):
        return request
    return request.with_body({name: value for name, value in request.body.items() if name not in left_out})


class AgentLimits:
    """Refuse what an agent may not send; each refusal is counted as ``refused/REASON``.

    - 403 to an event that only the gateway writes, and to an agent's change of anything but its rollout's state; of the
      rollout of all agents that are served, to anything but calls;
    - 410 to a call or an event of a rollout that has ended;
    - 413 beyond ``gateway.max_rollout``, over all calls and events of a rollout that keeps them.
    """

    def __init__(self, max_bytes: float, metrics: StepMetrics) -> None:
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._sent = upstream.PerRollout(int)  # bytes

    async def __call__(self, request: Request, forward: Next) -> Response:
        if refused := self._refused(request):
            status, reason, problem = refused
            self._metrics.counts[f"refused/{reason}"] += 1
            return refusal(status, problem)
        return await forward(request)

    def _refused(self, request: Request) -> tuple[int, str, str] | None:
        """Return status, reason and message of a refusal; None for none."""
        is_event = request.kind == "attempt events" and request.method == "POST"
        if request.asker != "operator":
            if request.rollout_id == SERVED and (is_event or request.kind == "rollout"):
                return 403, "served", f"the rollout {SERVED} is of all agents that are served: it has only calls"
            set_by_agent = _status_in(request.body) if request.asker == "agent" and request.kind == "rollout" else {}
            if others := sorted({*set_by_agent} - {"state", "error_message"}):
                return 403, "status", f"status.{others[0]}: is the controller's to set, not an agent's"
            rollout = upstream.rollout_of(request.rollout_id)
            if (is_event or request.is_call) and rollout is not None and upstream.is_over(rollout):
                return 410, "after_end", f"the rollout {request.rollout_id} has ended"
            if is_event and _is_reserved(request.body):
                return 403, "event", "event_type: is the gateway's; agents post rewards and events of their own types"
        if (is_event or request.is_call) and request.rollout_id != SERVED:
            self._sent[request.rollout_id] += len(request.content or b"")
            if self._sent[request.rollout_id] > self._max_bytes:
                limit = f"gateway.max_rollout={self._max_bytes / 2**20:g} MiB"
                problem = f"all calls and events of this rollout have more than {limit}; raise that setting"
                return 413, "too_much", problem
        return None


async def call_limits(settings: Gateway, metrics: StepMetrics, request: Request, forward: Next) -> Response:
    """Answer 400 to a completion whose parameters would hold up the policy's servers, or let them fetch an address."""
    if problem := _problem(settings, request):
        metrics.counts["refused/parameters"] += 1
        return refusal(400, problem)
    return await forward(request)


def _problem(settings: Gateway, request: Request) -> str:
    """Return why a completion is refused; "" if it is not."""
    body, most = request.body, settings.max_choices
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) else []
    batch = len(prompts) if prompts and not isinstance(prompts[0], int) else 1
    wanted = max(1, _number(body.get("n")), _number(body.get("best_of")))
    if wanted * batch > most:
        return f"n={wanted:g} of {batch} prompts: a request may ask for gateway.max_choices={most} replies"
    if (least := _number(body.get("min_tokens"))) > _MIN_TOKENS:
        return f"min_tokens={least:g}: at most {_MIN_TOKENS}"
    ids = (each for part in prompts for each in (part if isinstance(part, list) else [part]))
    if any(isinstance(each, int | float) and each < 0 for each in ids):
        return "prompt: a token id is negative"
    size = sum(len(str(value)) for name, value in body.items() if name not in _TEXTS)
    if size > settings.max_parameters:
        limit = f"gateway.max_parameters={settings.max_parameters}"
        return f"the parameters but for messages and tools have {size} characters, more than {limit}"
    if not isinstance(kwargs := body.get("chat_template_kwargs") or {}, dict):
        return "chat_template_kwargs: must be an object"
    for name in (*body, *kwargs):
        if name in _OF_THE_OPERATOR:
            return f"{name}: is the operator's to set"
    if others := [name for name in kwargs if name in _OF_THE_TOKENIZER]:
        return f"chat_template_kwargs.{others[0]}: is no variable of a template; leave it out"
    if request.mode != "train" and (names := unchecked(body)):  # `checked` removes them from those in training
        return f"{min(names)}: vLLM 0.20 checks token ids of these options against no vocabulary"
    if name := _address_in(body.get("messages")):
        return f"messages: {name}: model servers fetch no addresses; send the content itself, as a data: URL"
    return ""


def _number(value: Any) -> float:
    """Return what vLLM reads as a number; 0 for none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0


def _status_in(body: Any) -> dict[str, Any]:
    status = body.get("status") if isinstance(body, dict) else None
    return status if isinstance(status, dict) else {}


def _is_reserved(body: Any) -> bool:
    kind = body.get("event_type") if isinstance(body, dict) else None
    return isinstance(kind, str) and (kind == MODEL_EVENT or (kind.startswith(_OWN) and kind != ERROR_EVENT))


def _address_in(messages: Any) -> str:
    """Return the name of a field of messages' parts with an address that a model server would fetch; "" for none."""
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            for name, value in part.items():
                url = value.get("url") if isinstance(value, dict) else value
                if (name.endswith("_url") or name == "source") and isinstance(url, str) and not url.startswith("data:"):
                    return name
    return ""
