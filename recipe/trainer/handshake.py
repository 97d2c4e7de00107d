"""What trainer and gateway must agree on before anything starts."""

import httpx

from empo2.recipe.errors import Empo2Error


def check_gateway(url: str, key: str, model: str) -> None:
    """Raise unless an EMPO² gateway answers at ``url``, takes the key, and serves ``model``.

    Raises:
        Empo2Error: with what is wrong and what to do.
    """
    try:
        response = httpx.get(f"{url.rstrip('/')}/empo2/state", headers={"Authorization": f"Bearer {key}"}, timeout=30)
    except httpx.HTTPError as error:
        raise Empo2Error(f"no gateway answers at {url} ({error}); start one with `empo2 gateway`") from None
    if response.status_code == 401:
        raise Empo2Error(f"the gateway at {url} refuses the key; give both sides the same --key or EMPO2_KEY")
    if response.status_code != 200:
        raise Empo2Error(f"{url} is not an EMPO² gateway; start `empo2 gateway` in the place of agl-server")
    served = response.json()["model"]
    if served != model:
        raise Empo2Error(f"the gateway at {url} serves model.path={served!r}, not {model!r}; give both the same")
