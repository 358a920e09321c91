"""A key-value store for processes that are threads of the test."""

import threading


class MemoryKeyValueStore:
    def __init__(self):
        self.values = {}
        self._changed = threading.Condition()

    def set(self, key, value):
        with self._changed:
            self.values.setdefault(key, value)
            self._changed.notify_all()

    def get(self, key, timeout_secs):
        with self._changed:
            self._changed.wait_for(lambda: key in self.values, timeout_secs)
            return self.values.get(key)

    def get_prefix(self, prefix):
        with self._changed:
            start = f"{prefix}/"
            return {k[len(start) :]: v for k, v in self.values.items() if k.startswith(start)}

    def delete_prefix(self, prefix):
        with self._changed:
            for rest in self.get_prefix(prefix):
                del self.values[f"{prefix}/{rest}"]
