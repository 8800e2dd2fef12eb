"""The rank process of a script that does not use the library: it runs it, ends it at a fault and starts it again."""
