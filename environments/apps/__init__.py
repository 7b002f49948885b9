"""Programs that use the library and that nothing in the library uses."""
