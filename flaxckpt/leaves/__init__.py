"""What a leaf is on disk, and how it comes back."""
