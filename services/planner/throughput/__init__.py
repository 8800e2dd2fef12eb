"""How fast tasks train in each layout, measured and modelled."""
