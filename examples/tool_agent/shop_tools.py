"""Tools of a shop's assistant: orders and the carrier, as small as they can be."""

from __future__ import annotations

from typing import Any

ORDERS = {
    "1043": {"state": "shipped", "tracking": "JD0002"},
    "1044": {"state": "being packed", "tracking": ""},
    "1045": {"state": "shipped", "tracking": "JD0099"},
}
PARCELS = {"JD0002": "out for delivery, tomorrow 09:00 to 12:00"}


def find_order(number: str) -> dict[str, Any]:
    """State and tracking number of an order."""
    if number not in ORDERS:
        raise LookupError(f"no order has the number {number!r}; there are {', '.join(ORDERS)}")
    return ORDERS[number]


def track_parcel(tracking: str) -> str:
    """Location of a parcel."""
    if tracking not in PARCELS:
        raise TimeoutError(f"the carrier did not answer about {tracking!r} within 1 s")
    return PARCELS[tracking]


TOOLS = {"find_order": find_order, "track_parcel": track_parcel}
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": tool.__doc__,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
            },
        },
    }
    for (name, tool), argument in zip(TOOLS.items(), ("number", "tracking"), strict=True)
]
"""The tools as OpenAI's protocol describes them."""
