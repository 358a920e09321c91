"""The steps of a run: which exist, which are kept, and how they are saved."""
