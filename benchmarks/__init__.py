"""Measurements beside Orbax, in one run and with the same durability wherever that is possible."""
