"""Win probabilities of the samples of a prompt, and which of them are learnt."""

from __future__ import annotations

import torch
from torch import Tensor


def win_rates(
    scores: Tensor, group: Tensor, counted: Tensor, *, preference: str = "bradley_terry", temperature: float = 1.0
) -> Tensor:
    """P(y_i > pi_t) of every sample, (rows,), from the K samples of its prompt, itself among them:

        P_i = 1/K sum_k P(y_i > y_k)        bradley_terry   P(y_i > y_k) = sigmoid((s_i - s_k) / temperature)
                                            order           1 if s_i > s_k, 1/2 if they are equal, else 0
        P_i = s_i                           win_rate

    `scores` s, `group` (the prompt's number) and `counted` are (rows,). A row that is not counted is no sample of its
    prompt and has P = 1/2; so has one alone, but for win_rate. Wu et al. 2024 (arXiv:2405.00675), section 4.
    """
    if preference == "win_rate":
        return torch.where(counted, scores, 0.5)
    rates = torch.full_like(scores, 0.5)
    for number in group[counted].unique():
        rows = ((group == number) & counted).nonzero()[:, 0]
        over = (scores[rows, None] - scores[rows]) / temperature
        wins = over.sigmoid() if preference == "bradley_terry" else (over.sign() + 1) / 2
        rates[rows] = wins.mean(dim=1)
    return rates


def best_and_worst(scores: Tensor, group: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the best and of the worst counted sample of each prompt, each (prompts,).

    Of equal ones the first is the best and the last the worst, so that a prompt whose samples are all equal gives two.
    A prompt without counted samples gives its first and its last row.
    """
    pairs = []
    for number in group.unique():
        own = group == number
        rows = (own & counted if (own & counted).any() else own).nonzero()[:, 0]
        found = scores[rows] if counted[rows].any() else torch.zeros(len(rows))
        pairs.append((rows[found == found.max()][0], rows[found == found.min()][-1]))
    best, worst = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).unbind(dim=1)
    return best, worst
