"""Parts of the views of incidents: what users have said of them."""

from __future__ import annotations

from datetime import datetime

from shared.model import Model


class Note(Model):
    """What a user has written about an incident. ``by``: ``uid/<uid>`` or ``token/<name>``."""

    text: str
    by: str
    at: datetime


class Acknowledgement(Model):
    """Who takes care of an incident, and since when."""

    by: str
    at: datetime
