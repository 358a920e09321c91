"""The command `flaxckpt`: checkpoints from the shell. See docs/cli.md."""
