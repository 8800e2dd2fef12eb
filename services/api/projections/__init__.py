"""The fold from the log to the views (``services/api/views/documents.py``): pure, one function for each type of event.

``evolve(views, recorded)`` changes the documents of ``views``; it reads no clock and no table. Times come from the
events: ``occurred_at`` of the fault and of each milestone, ``recorded_at`` of plans.

``documents`` changes one document; ``tasks``, ``plans``, ``milestones``, ``incidents`` and ``nodes`` fold the events of
their names; ``fold`` passes each event on to them.
"""
