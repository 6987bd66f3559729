"""From logits to token ids: greedy or drawn, with filters and penalties; each draw a function of (seed, position)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from kvcore.errors import NotFiniteError
from kvcore.worker.messages import NOTHING, Logprobs, SampleAsk


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) for token `position` of the sample seeded `seed`.

    A function of both, not a stream: batching, preemption and recomputation cannot change a draw.
    """
    return random.Random(f"kvcore:{seed}:{position}").random()


def adjusted(logits_V: torch.Tensor, ask: SampleAsk) -> torch.Tensor:
    """Logits in float64 after penalties, with minus infinity for tokens that may not come yet.

    Repetition as transformers has it; presence and frequency as in the OpenAI API reference:
    ``logit - presence * (count > 0) - frequency * count``, counted over the output alone.
    """
    scores_V = logits_V.double()
    if ask.repetition != 1.0:
        from transformers import RepetitionPenaltyLogitsProcessor

        seen = torch.tensor([[*ask.prompt, *ask.output]])
        scores_V = RepetitionPenaltyLogitsProcessor(ask.repetition)(seen, scores_V[None])[0]
    if ask.output and (ask.presence or ask.frequency):
        counts_V = torch.bincount(torch.tensor(ask.output), minlength=len(scores_V))
        scores_V = scores_V - ask.presence * (counts_V > 0) - ask.frequency * counts_V
    banned = [i for i in ask.banned if i < len(scores_V)]  # a tokenizer may know ids that the model cannot draw
    if banned:
        scores_V = scores_V.index_fill(0, torch.tensor(banned), -torch.inf)
    return scores_V


def filtered_probabilities(logits_V: torch.Tensor, ask: SampleAsk) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidate token ids, most probable first, and their renormalised float64 probabilities.

    Top-k keeps the k largest; top-p then keeps the smallest head of the rest whose mass reaches p; min-p those of at
    least that share of the largest probability. Equal logits keep the order of their ids, so that ties are settled the
    same way everywhere.
    """
    # Less the largest first: divided by a tiny temperature it would be infinite, and inf - inf is NaN.
    scaled_V = (logits_V.double() - logits_V.max()) / ask.temperature
    sorted_V, ids_V = torch.sort(scaled_V, descending=True, stable=True)
    if ask.top_k > 0:
        sorted_V, ids_V = sorted_V[: ask.top_k], ids_V[: ask.top_k]
    probabilities = torch.softmax(sorted_V, dim=0)
    if ask.top_p < 1.0:
        before = torch.cumsum(probabilities, dim=0) - probabilities
        keep = int((before < ask.top_p).sum())
        probabilities, ids_V = probabilities[: max(keep, 1)], ids_V[: max(keep, 1)]
    if ask.min_p > 0.0:
        keep = int((probabilities >= ask.min_p * probabilities[0]).sum())
        probabilities, ids_V = probabilities[:keep], ids_V[:keep]
    return ids_V, probabilities / probabilities.sum()


def draw(logits_V: torch.Tensor, ask: SampleAsk) -> int:
    """One token: inverse transform sampling over the filtered distribution."""
    ids, probabilities = filtered_probabilities(logits_V, ask)
    mass = torch.cumsum(probabilities, dim=0)
    point = uniform(ask.seed, ask.position)
    position = int(torch.searchsorted(mass, torch.tensor(point, dtype=mass.dtype), right=True))
    # Rounding may leave the whole mass below the point; a token without any mass is never drawn.
    return int(ids[min(position, int((probabilities > 0).sum()) - 1)])


class Sampler:
    """Draws all tokens of a step, and tells log-probabilities."""

    def __call__(self, logits_NV: torch.Tensor, asks: Sequence[Sequence[SampleAsk]]) -> tuple[tuple[int, ...], ...]:
        """For row n of the logits, one token for each of `asks[n]`.

        Args:
            logits_NV: float32 [N, V], on any device; minus infinity is a token that cannot be drawn.
            asks: N sequences.

        Returns:
            Token ids; `NOTHING` where every token that may come has minus infinity.

        Raises:
            NotFiniteError: A row holds NaN or infinity, or no token that can be drawn.
        """
        largest_N, best_N = logits_NV.max(dim=-1)
        rows = [n for n, largest in enumerate(largest_N.tolist()) if not math.isfinite(largest)]
        if rows:
            raise NotFiniteError(
                "no token can be drawn from logits that are not finite", field="logits", got=f"rows {rows}"
            )
        best = best_N.tolist()
        not_greedy = [n for n, row in enumerate(asks) if any(a.temperature > 0 or a.adjusts for a in row)]
        on_host = {n: logits_NV[n].cpu() for n in not_greedy}
        return tuple(
            tuple(_choose(on_host[n], a) if n in on_host else best[n] for a in row) for n, row in enumerate(asks)
        )

    def logprobs(self, logits_V: torch.Tensor, ask: SampleAsk, token: int) -> Logprobs:
        """Of the chosen token and of the `ask.logprobs` likeliest ones, under the model's own logits float32 [V]."""
        logprobs_V = torch.log_softmax(logits_V.double(), dim=-1)
        values, ids = logprobs_V.topk(min(ask.logprobs or 0, len(logprobs_V)))
        return ((token, float(logprobs_V[token])), *zip(ids.tolist(), values.tolist(), strict=True))


def _choose(logits_V: torch.Tensor, ask: SampleAsk) -> int:
    scores_V = adjusted(logits_V, ask) if ask.adjusts else logits_V
    if not torch.isfinite(scores_V.max()):
        return NOTHING
    return int(scores_V.argmax()) if ask.temperature == 0 else draw(scores_V, ask)
