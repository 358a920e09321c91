"""What a manager is made of: the steps of a run, and how they come and go."""
