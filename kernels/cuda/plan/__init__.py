"""Plans to work items, in numpy."""
