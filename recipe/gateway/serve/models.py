"""``GET /models``: the served model, under whatever name an agent asks for, since every name reaches it."""

from fastapi import APIRouter

from empo2.recipe.gateway.dialects.dialect import Body


def model_routes(name: str) -> APIRouter:
    """Return the routes of a list of one model, in a form that is OpenAI's and Anthropic's at once."""
    router = APIRouter(prefix="/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}/openai/v1")

    @router.get("/models")
    async def models() -> Body:
        return {"object": "list", "data": [_model(name)], "has_more": False, "first_id": name, "last_id": name}

    @router.get("/models/{asked:path}")
    async def model(asked: str) -> Body:
        return _model(asked)

    return router


def _model(name: str) -> Body:
    openai = {"object": "model", "created": 0, "owned_by": "empo2"}
    anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    return {"id": name, **openai, **anthropic}
