"""The fold from the log to the views (``shared/views/documents.py``): pure.

``evolve(views, recorded)`` changes the documents of ``views``; it reads no clock and no table. Times come from the
events: ``occurred_at`` of the fault and of each milestone, ``recorded_at`` of plans.

``documents`` changes one document; ``tasks``, ``plans``, ``milestones``, ``incidents`` and ``nodes`` fold the events of
their names; ``evolve`` passes each event on to them.
"""
