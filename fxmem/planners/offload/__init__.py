"""Values that wait for the backward in host memory: what that means to the judge, what it costs, which are chosen."""
