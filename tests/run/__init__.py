"""Tests of runs: background saves, the hosts' own disks, and the step to restore."""
