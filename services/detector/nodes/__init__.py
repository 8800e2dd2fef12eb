"""Nodes as the detector judges them: silence, links between them, isolation, drains."""
