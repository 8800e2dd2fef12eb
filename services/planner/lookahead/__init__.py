"""The look-ahead: answers for what may happen next, solved before it happens."""
