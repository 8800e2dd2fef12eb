"""Views as they were parsed, or written, last: most documents that a request reads are those that it read before."""

from __future__ import annotations

from typing import Any

from services.api.store.tables import Kind, V

_MOST = 16_384
"""Views that are kept, some kilobytes each. With 2,000 nodes the open time has 2,200 of them, map and lists have 2,100
others, and all are read again at each event."""


class ParsedViews:
    """The newest document of each view, with the view; safe to use from threads."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[str, Any]] = {}

    def add(self, kind: Kind[V], key: str, document: str, view: V) -> None:
        """Take note of a view and its document."""
        if len(self._known) >= _MOST:
            self._known = dict([*self._known.items()][-_MOST // 2 :])
        self._known[kind.noun, key] = document, view

    def view(self, kind: Kind[V], key: str, document: str) -> V:
        """Return the view that a document is of."""
        found = self._known.get((kind.noun, key))
        if found is not None and found[0] == document:
            view: V = found[1]
            return view
        view = kind.view.model_validate_json(document)
        self.add(kind, key, document, view)
        return view
