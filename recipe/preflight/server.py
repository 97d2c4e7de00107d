"""Whether a server of models that runs already has the one that is asked for."""

import os

import httpx

from empo2.recipe.errors import ConfigError

SERVER_KEY = "OPENAI_API_KEY"


def check_server(url: str, model: str) -> None:
    """Refuse an OpenAI-compatible server that does not answer, refuses OPENAI_API_KEY, or has no such model."""
    key, name = os.environ.get(SERVER_KEY), f"model.server={url!r}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{url.rstrip('/')}/models", headers=headers, timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"{name}: no server answers ({error}); give the address that ends with /v1") from None
    if response.status_code in (401, 403):
        raise ConfigError(f"{name}: refuses the key; set {SERVER_KEY}")
    if response.status_code in (404, 405):
        return  # some servers have no list of models
    try:
        names = [entry["id"] for entry in response.raise_for_status().json()["data"]]
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
        said = f"answers {response.status_code} to /models, not a list of models"
        raise ConfigError(f"{name}: {said}; give the address that ends with /v1") from None
    if model not in names:
        raise ConfigError(f"{name}: has no model {model!r}; it has {', '.join(sorted(names)[:10])}")
