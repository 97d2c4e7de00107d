"""Many chats at once with one model: each call costs the new tokens alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Chats:
    """Chats that grow, each in its row of one cache. A call may leave chats out; the first one names them all."""

    def __init__(self, model: Any, tokenizer: Any, seed: int) -> None:
        from transformers import DynamicCache

        self._model, self._tokenizer = model, tokenizer
        self._generator = torch.Generator().manual_seed(seed)
        self._cache = DynamicCache()
        self._rows: dict[int, int] = {}
        self._fed: list[list[int]] = []  # each chat's tokens that the cache holds
        self._columns: list[list[int]] = []  # and where
        self._mask = torch.zeros(0, 0, dtype=torch.long)

    @torch.no_grad()
    def reply(
        self, chats: Mapping[int, Sequence[Mapping[str, str]]], max_tokens: int, temperature: float
    ) -> dict[int, str]:
        """Return the reply to each chat, by the chat's name."""
        if not self._rows:
            self._rows = {name: row for row, name in enumerate(chats)}
            self._fed, self._columns = [[] for _ in chats], [[] for _ in chats]
            self._mask = torch.zeros(len(chats), 0, dtype=torch.long)
        new: list[list[int]] = [[] for _ in self._rows]
        for name, chat in chats.items():
            prompt = self._tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, return_dict=False)
            new[self._rows[name]] = self._beyond(self._rows[name], prompt)
        logits = self._feed(new)
        said: dict[int, list[int]] = {row: [] for row in (self._rows[name] for name in chats)}
        speaking = set(said)
        for _ in range(max_tokens):
            sampled = self._sample(logits, temperature)
            speaking = {row for row in speaking if sampled[row] != self._tokenizer.eos_token_id}
            for row in speaking:
                said[row].append(sampled[row])
            if not speaking:
                break
            logits = self._feed([[token] if row in speaking else [] for row, token in enumerate(sampled)])
        return {name: self._tokenizer.decode(said[self._rows[name]]) for name in chats}

    def _beyond(self, row: int, prompt: list[int]) -> list[int]:
        """Forget what the cache holds beside the prompt's beginning; return the rest of the prompt."""
        fed, same = self._fed[row], 0
        while same < min(len(fed), len(prompt) - 1) and fed[same] == prompt[same]:
            same += 1
        self._mask[row, self._columns[row][same:]] = 0
        self._fed[row], self._columns[row] = fed[:same], self._columns[row][:same]
        return prompt[same:]

    def _feed(self, new: Sequence[list[int]]) -> torch.Tensor:
        """Feed each chat's new tokens; return the logits after the last of them, [chats, vocabulary]."""
        width, start = max(len(tokens) for tokens in new), self._mask.shape[1]
        # Padding stands after the tokens and is masked, so every query has a key.
        ids = torch.tensor([[*tokens, *[self._tokenizer.pad_token_id] * (width - len(tokens))] for tokens in new])
        real = torch.tensor([[1] * len(tokens) + [0] * (width - len(tokens)) for tokens in new])
        positions = torch.tensor([[len(fed)] for fed in self._fed]) + torch.arange(width)
        self._mask = torch.cat([self._mask, real], dim=1)
        hidden = self._model.model(
            input_ids=ids, attention_mask=self._mask, position_ids=positions, past_key_values=self._cache
        ).last_hidden_state
        for row, tokens in enumerate(new):
            self._fed[row] += tokens
            self._columns[row] += range(start, start + len(tokens))
        last = (real.sum(dim=1) - 1).clamp(min=0)
        return self._model.lm_head(hidden[torch.arange(len(new)), last]).float()

    def _sample(self, logits: torch.Tensor, temperature: float) -> list[int]:
        if temperature == 0:
            return logits.argmax(dim=-1).tolist()
        chances = torch.softmax(logits / temperature, dim=-1)
        return torch.multinomial(chances, 1, generator=self._generator)[:, 0].tolist()
