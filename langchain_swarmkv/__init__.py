"""Many agents on one document from a single prefill. The public names are added at the end of the build."""
