"""Graph in, graph out: the steps that rewrite a captured graph."""
