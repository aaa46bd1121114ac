"""Forward passes whose rows depend on nothing but their own sequence and the grid of chunks."""
