"""Ours, set up as well-known models, compute what transformers' classes compute from the same random weights."""

from __future__ import annotations

import pytest
import torch

from tests.models.parity import PAIRS, WORDS, Wide
from tests.nearness import relative_error


@pytest.mark.parametrize("name", PAIRS)
@torch.no_grad()
def test_logits_are_those_of_transformers(name: str) -> None:
    theirs, ours = PAIRS[name]()
    ids = torch.randint(WORDS, (2, 11), generator=torch.Generator().manual_seed(1))
    with Wide():
        told = theirs(ids)
    truth = told.logits if hasattr(told, "logits") else told.last_hidden_state
    assert relative_error(ours(ids), truth) < 1e-10


@torch.no_grad()
def test_padding_is_masked_as_in_transformers() -> None:
    theirs, ours = PAIRS["bert"]()
    ids = torch.randint(WORDS, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(11) < torch.tensor([[11], [6]])
    types = (torch.arange(11) > 4).long().expand(2, 11)
    truth = theirs(ids, attention_mask=mask.long(), token_type_ids=types).last_hidden_state
    assert relative_error(ours(ids, mask=mask, types=types)[mask], truth[mask]) < 1e-10
