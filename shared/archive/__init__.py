"""The log outside of its table: archives, backups, cut-overs, signed heads."""
