"""Prompts after which several words are right: does each of them get its share?"""

from __future__ import annotations

import numpy as np
import torch

from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.generate.modes import prob_words
from cqwen_dist.model.causal_qwen import CausalQwenModel

PROMPTS = {
    "My favourite day of the week is": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "They will meet again next": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday week month year",
    "She was born in the month of": "January February March April May June July August September October November",
    "He painted the wall": "red blue green yellow white black pink brown grey orange purple",
    "The season that they like best is": "spring summer autumn winter",
    "The wind blows from the": "north south east west",
    "The boy has a pet": "dog cat bird fish rabbit mouse snake",
    "In the evening she plays the": "piano guitar violin flute drums cello trumpet",
    "The question has two answers, true or false. The answer is": "true false",
    "Anna and Tom are twins. The older one is": "Anna Tom",
    "A coin has two sides, heads and tails. This time it shows": "heads tails",
    "To eat, he would like an": "apple orange egg onion",
}


@torch.no_grad()
def asked_lists(model: CausalQwenModel, tokenizer: NumericalAwareTokenizer) -> dict[str, np.ndarray]:
    """A row for each right word that is one token, over all prompts: columns [R].

    prompt: its number. p, soft: of the word, one-vs-rest and softmax. rank_p, rank_soft: how many words have more.
    Prompts with fewer than two such words are left out.
    """
    rows = []
    used, device = int(model.config.used_rows), model.action.cls_weight.device
    for number, (prompt, words) in enumerate(PROMPTS.items()):
        encoded = [tokenizer.encode(f" {word}")[0] for word in words.split()]
        right = [ids[0] for ids in encoded if len(ids) == 1]
        ids, values = tokenizer.encode(prompt)
        if len(right) < 2:
            continue
        given = torch.tensor([ids]).to(device), torch.tensor([values], dtype=torch.float64).to(device)
        u = model.infer(*given, keep=torch.tensor([len(ids) - 1]).to(device))
        seen = model.action.word_part(model.action.add_noise(u))
        loc = seen.loc @ model.action.cls_weight[:used].T + model.action.cls_bias[:used]
        p, soft = prob_words(model.action, seen, used)[0], loc.softmax(1)[0]
        for word in right:
            ranks = [float((every > every[word]).sum()) for every in (p, soft)]
            rows.append([number, float(p[word]), float(soft[word]), *ranks])
    columns = np.array(rows, dtype=float).reshape(-1, 5).T
    return dict(zip(("prompt", "p", "soft", "rank_p", "rank_soft"), columns, strict=True))
