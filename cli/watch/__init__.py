"""``unicron watch``: watchers that report troubles of nodes which other systems know of."""
