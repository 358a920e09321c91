"""What survives: broken bits, full disks, power cuts, kills, other writers and readers."""
