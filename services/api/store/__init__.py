"""The projections in their database: tables, the fold that writes them, what is settled, reads."""
