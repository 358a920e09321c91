"""`python -m flaxckpt` is the command `flaxckpt`."""

from flaxckpt.cli.main import command

if __name__ == "__main__":
    command()
