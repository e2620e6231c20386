"""Models of other libraries on the engine, one folder per library."""
