"""Values and arithmetic: no I/O, standard library only."""
