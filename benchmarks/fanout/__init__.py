"""Fan-out: many branches on one document, answered by this package and by its peers."""
