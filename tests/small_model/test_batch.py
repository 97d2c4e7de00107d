"""Chats that share one cache say what each would say alone."""

from typing import Any

import pytest

from empo2.small_model.batch import Chats

from ..recipe.model_server import MODEL, tokenizer

pytestmark = pytest.mark.slow


def test_replies_are_those_of_a_chat_alone():
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    def alone(chat: list[dict[str, str]], tokens: int) -> str:
        ids = torch.tensor([tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)])
        said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        return tokenizer().decode(said[0, ids.shape[1] :]).removesuffix("<|im_end|>")

    chats = {
        5: [{"role": "user", "content": "What is the capital of France?"}],
        9: [{"role": "user", "content": "Name three colours, please, and say why you like them."}],
    }
    together = Chats(model, tokenizer(), seed=0)
    for asked in ({5, 9}, {9}, {5}):  # a chat may be left out of a call and come back
        replies = together.reply({name: chats[name] for name in asked}, 6, temperature=0)
        for name, reply in replies.items():
            assert reply == alone(chats[name], 6)
            chats[name] += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And in Spain?"}]
    chats[5][1] = {"role": "assistant", "content": "It is Rome."}  # what was fed and is not said any more is forgotten
    assert together.reply({5: chats[5]}, 6, temperature=0)[5] == alone(chats[5], 6)
