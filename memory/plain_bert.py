"""all-MiniLM-L6-v2: a BERT whose embedding is the mean of its last layer, with torch alone.

Every run waits for its embedder: importing sentence_transformers takes 10 CPU seconds, torch 2. Other models are left
to the library, and the tests compare with it.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer


class PlainBert:
    """The model of a sentence-transformers folder; several threads may use it at once."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        config = json.loads((folder / "config.json").read_text())
        length = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        self.dimension: int = config["hidden_size"]
        self.dtype, self._device = dtype, device
        self._heads, self._epsilon = config["num_attention_heads"], config["layer_norm_eps"]
        self._layers = [f"encoder.layer.{number}" for number in range(config["num_hidden_layers"])]
        weights = load_file(folder / "model.safetensors")
        self._weights = {
            name: weight.to(device, dtype) for name, weight in weights.items() if weight.is_floating_point()
        }
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(length)
        self.tokenizer.enable_padding(pad_id=config["pad_token_id"])

    def encode(self, texts: list[str]) -> torch.Tensor:
        """Return [len(texts), dimension], each row of L2 norm 1."""
        encoded = self.tokenizer.encode_batch(texts)
        ids = torch.tensor([each.ids for each in encoded], device=self._device)
        mask = torch.tensor([each.attention_mask for each in encoded], device=self._device).bool()
        words, positions, kinds = (
            self._weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type")
        )
        hidden = self._normalized("embeddings.LayerNorm", words[ids] + kinds[0] + positions[: ids.shape[1]])
        for layer in self._layers:
            query, key, value = (
                self._linear(f"{layer}.attention.self.{part}", hidden).unflatten(-1, (self._heads, -1)).transpose(1, 2)
                for part in ("query", "key", "value")
            )
            seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
            seen = self._linear(f"{layer}.attention.output.dense", seen.transpose(1, 2).flatten(2))
            hidden = self._normalized(f"{layer}.attention.output.LayerNorm", seen + hidden)
            wide = F.gelu(self._linear(f"{layer}.intermediate.dense", hidden))
            wide = self._linear(f"{layer}.output.dense", wide)
            hidden = self._normalized(f"{layer}.output.LayerNorm", wide + hidden)
        kept = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * kept).sum(1) / kept.sum(1), dim=1)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _normalized(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(x, (self.dimension,), weight, bias, self._epsilon)
