"""Search of the decisions page, as its address or a form carries it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feedback.erasure.withdrawals import WithdrawalSelection, selection_read
from feedback.explorer.decision_facts import reward_query
from feedback.explorer.listing import decision_ids_matching, rating_query
from feedback.explorer.search import DecisionFilter, narrowed_of
from feedback.storage.validation import Check, FeedbackRefused


@dataclass(frozen=True)
class DecisionSearch:
    """Search of the decisions page, as its address carries it."""

    filter: DecisionFilter
    q: str = ""
    rating_state: str = ""
    min_reward: float | None = None

    @property
    def beside(self) -> dict[str, str]:
        """Parts of the search beside the filter, by the name it has in an address."""
        floor = "" if self.min_reward is None else f"{self.min_reward:g}"
        named = {"q": self.q, "rated": self.rating_state, "min_reward": floor}
        return {name: value for name, value in named.items() if value}

    @property
    def parts(self) -> dict[str, str]:
        """All that is asked for; empty: everything."""
        return {**self.filter.parts, **self.beside}

    def ids(self) -> list[uuid.UUID]:
        """Ids of what it finds and can be withdrawn."""
        return decision_ids_matching(
            self.filter, q=self.q, rated=self.rating_state, min_reward=self.min_reward
        )


def search_read(given: Mapping[str, Any]) -> DecisionSearch:
    """The search that an address or a form names. Raises FeedbackRefused with a fault per field."""
    within = narrowed_of(given)
    rated = rating_query(given.get("rated", ""))
    check = Check()
    q = check.text("q", given.get("q", "").strip(), limit=200)
    check.raise_faults("search")
    return DecisionSearch(within, q, rated, reward_query(given.get("min_reward", "")))


def selection_chosen(search: DecisionSearch | None, ids: Sequence[str]) -> WithdrawalSelection:
    """Decisions to withdraw: all that a search finds, else those that were ticked.

    Raises FeedbackRefused where there are none, or where the search is everything.
    """
    if search is not None and not search.parts:
        raise FeedbackRefused("Narrow the list first: without a search every decision would be withdrawn")
    chosen = tuple(search.ids()) if search is not None else selection_read({"ids": ids}).ids
    if not chosen:
        raise FeedbackRefused("Nothing was chosen: tick decisions first, or withdraw all that a search finds")
    return WithdrawalSelection(ids=chosen)
