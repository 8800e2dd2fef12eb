"""Planning as mathematics: the objective, the exact solver, the stand-alone problem. The planner and the API use it."""
