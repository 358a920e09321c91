"""Eight devices on the host, and hypothesis without deadlines: this machine may be busy."""

import os

from tests.processes import QUICKLY_COMPILED

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {QUICKLY_COMPILED}"

import hypothesis

hypothesis.settings.register_profile("flaxckpt", deadline=None, print_blob=True)
hypothesis.settings.load_profile("flaxckpt")
