"""fxmem in the trainers of other libraries. Each file imports its library, which fxmem does not need otherwise."""
